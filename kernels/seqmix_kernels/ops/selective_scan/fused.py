"""Launches the fused selective scan: one kernel forward, one backward (and small ones that add partial sums).

There are two implementations of one design, with the same saved tensors, so either backward can follow either forward:
  triton_kernels   plain Triton, general, testable by Triton's interpreter
  gluon_*.py       explicit layouts, tuned on Hopper, for nearly all cases; `gluon_why_not` says when it is not used,
                   `padded_group` which channels are padded for it

Saved for the backward, besides the inputs, are the states before every `chunk`-th step: 16-bit fixed point with one
exponent per channel for 16-bit inputs (1.06 bytes per (b, t, d) at N = 16 and chunk 32), float32 for float32 inputs. The output
before the gate is recomputed. The kernels write partial sums over channels (dB, dC) for one piece of L at a time, which
keeps them small; every sum has a fixed order, so gradients are bitwise reproducible.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import launch
from . import triton_kernels as tk

GROUP = 2  # steps whose states and decays the plain Triton backward holds in registers
BLOCK, NARROW = 64, 32  # channels per Gluon CTA, 16 per warp
TILE_FWD, TILE_BWD = 32, 16  # steps per Gluon tile
STATES = 16  # most states per channel in one Gluon call
CARRY_REGS = 128  # register limit of the carry pass
PARTIALS = 1 << 24  # bytes that the partial sums of a backward may take in any case
SMS = 132  # of an H200, where the rules below were measured
OPTIONAL = Tensor | None


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The next power of 2. Triton's own cdiv and next_power_of_2 take 8 us per call."""
    return 1 << (n - 1).bit_length()


class Plan(NamedTuple):
    """How a call is launched. gluon: by the Gluon kernels. segments: the number of pieces of L that run in parallel. block:
    channels per CTA, BLOCK or NARROW. backward, backward_block: the same for the backward. ahead: whether the backward
    prefetches the next tile; None: if the CTAs leave registers for that."""

    gluon: bool
    segments: int = 1
    backward: int = 1
    block: int = BLOCK
    backward_block: int = BLOCK
    ahead: bool | None = None


def gluon_why_not(x: Tensor, groups: int) -> str | None:
    """Why a call uses the plain Triton kernels; None if it uses the Gluon ones."""
    if x.device.type != "cuda" or not _nvidia(x.device.index):
        return "no NVIDIA GPU of compute capability 8.0 or newer"
    if x.shape[0] > 65535:
        return f"{x.shape[0]} rows, more than the grid's second axis allows"
    if groups > 1 and x.shape[2] // groups < BLOCK // 2:
        return f"a group's {x.shape[2] // groups} channels would fill less than half of a CTA's {BLOCK}"
    return None


@functools.cache
def _nvidia(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (8, 0)


def padded_group(x: Tensor, groups: int) -> int:
    """Channels per group after padding for the Gluon kernels: whole CTAs if there are several groups, an even number if two
    channels share a word."""
    channels = x.shape[2] // groups
    if groups > 1:
        return cdiv(channels, BLOCK) * BLOCK
    return channels if x.element_size() == 4 else cdiv(channels, 2) * 2


def plan(x: Tensor, groups: int, discretization: str) -> Plan:
    if gluon_why_not(x, groups) is not None:
        return Plan(False)
    batch, length, width = x.shape[0], x.shape[1], groups * padded_group(x, groups)
    segments, backward = segments_for(batch, length, width), segments_for(batch, length, width, True)
    if backward == 1:
        backward = even_segments(batch, length, width, discretization == "zoh")
    block, backward_block = (block_for(batch, width) if n == 1 else BLOCK for n in (segments, backward))
    return Plan(True, segments, backward, block, backward_block)


def segments_for(batch: int, length: int, width: int, backward: bool = False) -> int:
    """Number of segments into which L is split, which costs a carry pass. It is 1 for L < 2048, and if the batch and the
    channels alone give more CTAs than 3/4 of the SMs in the forward, or more than all SMs in the backward."""
    ctas = batch * cdiv(width, BLOCK)
    if ctas > SMS * (1 if backward else 3 / 4) or length < 2048:
        return 1
    if ctas > SMS * 3 / 4:
        return 2 * (3 * SMS // ctas)  # two full waves of three CTAs per SM
    # enough for several waves: a short tail matters more than the carry pass, whose cost does not depend on the number
    want = cdiv(12 * SMS, ctas)
    return max(1, min(power_of_2(want), length // 512))


def even_segments(batch: int, length: int, width: int, zoh: bool) -> int:
    """Segments of a backward with CTAs for every SM, chosen so that SMs have about equally many. With Euler's rule CTAs of one
    SM take turns, so the time is that of the busiest SM, and a carry pass costs a quarter of what one CTA per SM takes. With
    zero-order hold two CTAs fill an SM, so the time is that of whole waves of two, and a carry pass costs a tenth."""
    if length < 2048:
        return 1
    ctas = batch * cdiv(width, BLOCK)

    def cost(n: int) -> float:
        if zoh:
            return cdiv(ctas * n, 2 * SMS) / n * (1.0 if n == 1 else 1.1)
        return cdiv(ctas * n, SMS) / n + (0.0 if n == 1 else 0.25)

    return min(range(1, 5), key=cost)


def block_for(batch: int, width: int) -> int:
    """Channels per CTA: NARROW if all CTAs run at once and the busiest SM then has fewer warps, since warps take turns issuing
    instructions."""
    ctas, narrow = batch * cdiv(width, BLOCK), batch * cdiv(width, NARROW)
    fits = ctas <= 3 * SMS
    return NARROW if fits and cdiv(narrow, SMS) * (NARROW // 16) < cdiv(ctas, SMS) * (BLOCK // 16) else BLOCK


def chunk_for(n: int, chunk: int | None) -> int:
    """Steps between saved states: a power of two, at least 16; at most 32 if N <= 16, otherwise at most 1024."""
    if chunk is None:
        return 32 if n <= 16 else 64
    return min(32 if n <= 16 else 1024, max(16, power_of_2(chunk)))


def saved_specs(
    x: Tensor, A: Tensor, B: Tensor, z: OPTIONAL, discretization: str, chunk: int | None, save: bool, how: Plan | None = None
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what `forward` saves for the backward, (0,) for nothing.

    boundary states  the state before every chunk: (B, chunks, D N) float32, or (B, chunks, D (N + 1)) int16. Nothing if
                     the Gluon kernels process more than 16 states: the backward recomputes them, 16 at a time
    gate             for the gradient of z: (B, ceil(L / 16), CTAs of D) int8, marks of the tiles where the value before the
                     gate cannot be computed from y; (B, L, D), that value, for more than 16 states; otherwise nothing
    D is the padded width that the Gluon kernels see: `padded_group`.
    """
    batch, length, width = x.shape
    n = A.shape[1]
    nothing = (0,), x.dtype
    if not save:
        return nothing, nothing
    how = how or plan(x, B.shape[2], discretization)
    gluon = how.gluon
    if gluon:
        width = B.shape[2] * padded_group(x, B.shape[2])
    if gluon and n > STATES:
        return nothing, nothing if z is None else ((batch, length, width), x.dtype)
    chunks = cdiv(length, chunk_for(n, chunk))
    states = ((batch, chunks, width * n), torch.float32)
    if x.dtype != torch.float32:
        states = ((batch, chunks, width * (n + 1)), torch.int16)
    if not gluon or z is None or x.dtype != torch.bfloat16:
        return states, nothing
    return states, ((batch, cdiv(length, TILE_BWD), cdiv(width, how.block)), torch.int8)


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: OPTIONAL,
    z: OPTIONAL,
    dt_bias: OPTIONAL,
    initial_state: OPTIONAL,
    seq_idx: OPTIONAL,
    dt_softplus: bool,
    discretization: str,
    chunk: int | None,
    save: bool = True,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (B, L, D), final state (B, D, N), boundary states and gate (`saved_specs`)."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    how = how or plan(x, groups, discretization)
    if how.gluon and padded_group(x, groups) != width // groups:
        pad = _Pad(groups, width // groups, padded_group(x, groups))
        y, final, states, gate = forward(
            pad(x), pad(dt), pad(A, -2), B, C, pad(D), pad(z, value=1.0), pad(dt_bias), pad(initial_state, -2), seq_idx,
            dt_softplus, discretization, chunk, save, how,
        )  # fmt: skip
        return pad.cut(y), pad.cut(final, -2), states, gate
    y = x.new_empty(batch, length, width)
    states, gate = (
        x.new_empty(shape, dtype=dtype) for shape, dtype in saved_specs(x, A, B, z, discretization, chunk, save, how)
    )
    if y.numel() == 0:
        final = A.new_zeros(batch, width, n) if initial_state is None else initial_state.clone()
        return y, final, states, gate
    B, C, A, D, dt_bias = _rows(B), _rows(C), _dense(A), _dense(D), _dense(dt_bias)
    if not how.gluon:
        K = chunk_for(n, chunk)
        final = A.new_empty(batch, width, n)
        block, warps, np2 = _block(n, width // groups, discretization == "zoh")
        blocks = cdiv(width // groups, block)
        initial_state = _dense(initial_state)
        launch(
            tk.fwd_kernel, (batch * groups * blocks,),
            (x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), _or(initial_state, A), _or(seq_idx, A), y, final, states,
            1, length, width, width // groups, blocks, *x.stride(), *dt.stride(), *_or(z, x).stride(),
            *B.stride()[:3], *C.stride()[:3], *A.stride(), *_strides(seq_idx)),
            dict(N=n, NP=np2, BD=block, S=4, K=K, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None,
                 HAS_H0=initial_state is not None, HAS_SEQ=seq_idx is not None, SOFTPLUS=dt_softplus,
                 ZOH=discretization == "zoh", SAVE=save, BFP=states.dtype == torch.int16, G=groups),
            {"num_warps": warps},
        )  # fmt: skip
        return y, final, states, gate
    call = _Gluon(x, dt, z, dt_bias, seq_idx, dt_softplus, discretization == "zoh", chunk_for(STATES, chunk),
                  how.segments, how.block)  # fmt: skip
    if n <= STATES:
        final = call.forward(A, B, C, D, z, initial_state, states, y, gate)
        return y, final, states, gate
    finals, total = [], A.new_empty(batch, length, width)
    for part in _parts(n):
        some = _some(part, A, B, C, initial_state)
        if part.stop < n:
            finals.append(call.forward(*some[:3], None, None, some[3], None, total, None, total if part.start else None))
        else:
            finals.append(call.forward(*some[:3], D, z, some[3], None, y, gate, total))
    return y, torch.cat(finals, dim=2), states, gate


def backward(
    dy: Tensor,
    dfinal: OPTIONAL,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: OPTIONAL,
    z: OPTIONAL,
    dt_bias: OPTIONAL,
    initial_state: OPTIONAL,
    seq_idx: OPTIONAL,
    y: Tensor,
    states: Tensor,
    gate: Tensor,
    dt_softplus: bool,
    discretization: str,
    chunk: int | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial; shape (0,) for what was not given. y is read if gate holds marks."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    how = how or plan(x, groups, discretization)
    if how.gluon and padded_group(x, groups) != width // groups:
        pad = _Pad(groups, width // groups, padded_group(x, groups))
        if y.shape == x.shape:  # otherwise y is the gate, which has the padded width already
            y = pad(y)
        dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial = backward(
            pad(dy), pad(dfinal, -2), pad(x), pad(dt), pad(A, -2), B, C, pad(D), pad(z, value=1.0), pad(dt_bias),
            pad(initial_state, -2), seq_idx, y, states, gate, dt_softplus, discretization, chunk, how,
        )  # fmt: skip
        dx, ddt, dD, dz, ddt_bias = (pad.cut(t) for t in (dx, ddt, dD, dz, ddt_bias))
        return dx, ddt, pad.cut(dA, -2), dB, dC, dD, dz, ddt_bias, pad.cut(dinitial, -2)
    dx, ddt = (x.new_empty(batch, length, width) for _ in range(2))
    dz = x.new_empty(batch, length, width) if z is not None else x.new_empty(0)
    dB, dC = (x.new_empty(batch, length, groups, n) for _ in range(2))
    if dx.numel() == 0:
        adjoint = _state_in(A.new_zeros(batch, width, n) if dfinal is None else dfinal, A, batch, 1, 0)
        return _gradients(dx, ddt, A.new_zeros(batch, n + 2, width), dB.zero_(), dC.zero_(), D, dz, dt_bias,
                          initial_state, adjoint)  # fmt: skip
    B, C, A, D, dt_bias = _rows(B), _rows(C), _dense(A), _dense(D), _dense(dt_bias)
    if how.gluon:
        call = _Gluon(x, dt, z, dt_bias, seq_idx, dt_softplus, discretization == "zoh", chunk_for(STATES, chunk),
                      how.backward, how.backward_block, how.ahead)  # fmt: skip
        dy = _words(dy)
        if n <= STATES:
            sums, adjoint = call.backward(
                dy, dfinal, A, B, C, D, z, states, y, gate, dx, ddt, dz, dB, dC, (dx, ddt)
            )
            return _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint)
        made, wide_x, wide_dt = [], A.new_empty(dx.shape), A.new_empty(dx.shape)
        for part in _parts(n):
            first, last = part.start == 0, part.stop == n
            Ap, Bp, Cp, ini, dout = _some(part, A, B, C, initial_state, dfinal)
            shape, dtype = saved_specs(x, Ap, B, None, discretization, chunk, True, how)[0]
            again = x.new_empty(shape, dtype=dtype)
            call.forward(Ap, Bp, Cp, None, None, ini, again, None, None)
            outs = (dx, ddt) if last else (wide_x, wide_dt)
            sums, adjoint = call.backward(
                dy, dout, Ap, Bp, Cp, D if last else None, z, again, gate, gate, *outs, dz if last else None,
                dB[..., part], dC[..., part], (dx, ddt), None if first else (wide_x, wide_dt),
            )  # fmt: skip
            made.append(_gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint))
        dA, dD, ddt_bias, dinitial = (torch.cat([m[2] for m in made], dim=1), made[-1][5], sum(m[7] for m in made),
                                      torch.cat([m[8] for m in made], dim=-1))  # fmt: skip
        return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial
    given = dict(HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
                 BFP=states.dtype == torch.int16)  # fmt: skip
    # the adjoint, carried from piece to piece; at the end it is the gradient of the initial state
    adjoint = _state_in(dfinal, A, batch, 1, 0)
    if dfinal is None:
        adjoint.zero_()
    sums = A.new_zeros(batch, n + 2, width)
    K = chunk_for(n, chunk)
    block, warps, np2 = _block(n, width // groups, discretization == "zoh")
    blocks = cdiv(width // groups, block)
    step_bytes = groups * blocks * 2 * n * 4
    piece = min(length, max(1, _own_bytes(x) // (batch * step_bytes)))
    piece = cdiv(piece, K) * K
    partial = A.new_empty(batch, piece, groups, blocks, 2 * n)
    scratch = A.new_empty(batch * groups * blocks, K // GROUP, np2 * block)
    for t0 in reversed(range(0, length, piece)):
        launch(
            tk.bwd_kernel, (batch * groups * blocks,),
            (dy, x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), _or(seq_idx, A), states, adjoint,
            scratch, dx, ddt, dz, partial, sums,
            1, length, t0, min(length, t0 + piece), piece, width, width // groups, blocks, *x.stride(), *dt.stride(),
            *_or(z, x).stride(), *dy.stride(), *B.stride()[:3], *C.stride()[:3], *A.stride(), *_strides(seq_idx)),
            dict(N=n, NP=np2, BD=block, S=GROUP, K=K, HAS_SEQ=seq_idx is not None, ZOH=discretization == "zoh", G=groups,
                 **given),
            {"num_warps": warps},
        )  # fmt: skip
        _reduce_bc(partial, partial[..., n:], dB, dC, piece, blocks, t0, length, 1, partial.stride(0), 0, 2 * n)
    return _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint)


class _Gluon:
    """Launches the Gluon kernels for up to 16 states; holds what all such calls of one forward or backward share."""

    def __init__(self, x, dt, z, dt_bias, seq_idx, softplus, zoh, chunk, segments, block, ahead=None):
        self.x, self.dt, self.z, self.bias = _words(x), _words(dt), _words(z), dt_bias
        self.shape, self.chunk, self.softplus, self.zoh = x.shape, chunk, softplus, zoh
        self.block, self.blocks, self.ahead = block, cdiv(x.shape[2], block), ahead
        self.segments, self.steps = _segments(x.shape[1], segments)
        self.keep = self.alive = None
        if seq_idx is not None:
            keep = torch.ones(seq_idx.shape, dtype=torch.float32, device=x.device)
            keep[:, 1:] = seq_idx[:, 1:] == seq_idx[:, :-1]
            self.keep = keep
            if self.segments > 1:
                ends = keep.new_ones(x.shape[0], self.segments * self.steps)
                ends[:, : x.shape[1]] = keep
                self.alive = ends.view(x.shape[0], self.segments, self.steps).amin(2)

    def forward(self, A, B, C, D, z, initial_state, states, y, gate, total=None) -> Tensor:
        """Fills y, the saved states and the gate, unless they are None. total: y of other states, to be added. Returns the
        final state."""
        from . import gluon_forward as gk

        batch, length, width = self.shape
        x, z = self.x, self.z if z is not None else None
        n = A.shape[1]
        ini = _state_in(initial_state, A, batch, self.segments, 0)
        final = A.new_empty(batch, width, n)
        if self.segments > 1:
            self._carry(x, A, B, None, ini, initial_state is not None, False)
        save = states is not None and states.numel() > 0
        gating = 0 if gate is None or not gate.numel() else 1 if gate.dtype == torch.int8 else 2
        launch(
            gk.fwd_kernel, (self.blocks, batch, self.segments),
            (x, self.dt, A, B, C, _or(D, A), _or(z, x), _or(self.bias, A), _or(self.keep, A), ini, _or(total, A), _or(y, x),
            gate if gating else x, final, states if save else A,
            length, width, width // B.shape[2], self.steps, self.segments, *x.stride()[:2], *self.dt.stride()[:2],
            *_or(z, x).stride()[:2], *B.stride()[:3], *C.stride()[:3]),
            dict(N=n, K=self.chunk, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=self.bias is not None,
                 HAS_INI=self.segments > 1 or initial_state is not None, HAS_SEQ=self.keep is not None, SOFTPLUS=self.softplus,
                 SAVE=save, BFP=save and states.dtype == torch.int16, OUT=y is not None, ACC=total is not None, GATE=gating,
                 EVEN_L=length % TILE_FWD == 0, EVEN_D=width % self.block == 0, ZOH=self.zoh, BD=self.block),
            {"num_warps": self.block // 16, **({} if self.block == NARROW and self._few() else _three_ctas(x))},
        )  # fmt: skip
        return final

    def _few(self) -> bool:
        """Whether CTAs are so few that a thread may have 255 registers: two CTAs of 64 channels per SM or four of 32."""
        return self.shape[0] * self.blocks * self.segments * self.block <= 2 * SMS * BLOCK

    def backward(self, dy, dfinal, A, B, C, D, z, states, y, gate, dx, ddt, dz, dB, dC, free, totals=None):
        """Fills dx, ddt, dB, dC and, if it is not None, dz. free: two tensors like x whose memory serves as scratch until
        dx and ddt are written there. totals: dx and ddt of other states, to be added. Returns the sums that `_gradients`
        finishes and the adjoint of the initial state."""
        from . import gluon_backward as gk

        batch, length, width = self.shape
        x, n, groups = self.x, A.shape[1], B.shape[2]
        blocks = self.blocks
        adjoint = _state_in(dfinal, A, batch, self.segments, self.segments - 1)
        sums = A.new_empty(batch * self.segments, n + 2, width)
        if self.segments > 1:
            self._carry(dy, A, C, z, adjoint, dfinal is not None, True)
        if z is None or dz is None or not dz.numel():
            how_dz = 0
        elif gate.dtype == torch.int8:
            how_dz = 1
        else:
            how_dz = 3 if gate.numel() else 2
        # the forward wrote the marks, and its CTAs may have another width
        marked = BLOCK if how_dz != 1 or gate.shape[2] == cdiv(width, BLOCK) else NARROW
        few = self._few()
        ahead = few and not self.zoh if self.ahead is None else self.ahead  # zero-order hold would spill
        pieces = self._pieces(blocks * n * 4, free, dx is free[0])
        for i, (p0, piece, pB, pC, spb, sps) in enumerate(pieces):
            launch(
                gk.bwd_kernel, (blocks, batch, self.segments),
                (dy, x, self.dt, A, B, C, _or(D, A), _or(self.z, x), _or(self.bias, A), _or(self.keep, A), states,
                y if how_dz % 2 else x, gate if how_dz == 1 else x, *(totals or (A, A)),
                adjoint, dx, ddt, dz if how_dz else x, pB, pC, sums,
                length, p0, piece, width, width // groups, blocks, self.steps, self.segments,
                int(i > 0 or dfinal is not None or self.segments > 1), int(i > 0), spb, sps,
                *dy.stride()[:2], *x.stride()[:2], *self.dt.stride()[:2], *_or(self.z, x).stride()[:2], *B.stride()[:3],
                *C.stride()[:3]),
                dict(N=n, NT=self.chunk // TILE_BWD, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=self.bias is not None,
                     HAS_SEQ=self.keep is not None, SOFTPLUS=self.softplus, BFP=states.dtype == torch.int16, DZ=how_dz,
                     ACC=totals is not None, EVEN_L=length % self.chunk == 0, EVEN_D=width % self.block == 0, ZOH=self.zoh,
                     PRE=ahead, BD=self.block, MD=marked),
                {"num_warps": self.block // 16, **({} if few or ahead or self.zoh else _three_ctas(x))},
            )  # fmt: skip
            _reduce_bc(pB, pC, dB, dC, piece, blocks // groups, p0, self.steps, self.segments, spb, sps, n)
        return sums, adjoint

    def _carry(self, x, A, B, z, ini, has_ini, reverse) -> None:
        """Fills ini (B, segments, N, D) with the state (reverse: the adjoint) that enters each segment."""
        from . import gluon_forward as gk

        batch, length, width = self.shape
        dt, n, segments = self.dt, A.shape[1], self.segments
        z = self.z if z is not None else None
        end, total = torch.empty_like(ini), ini.new_empty(batch, segments, width)
        launch(
            gk.carry_kernel, (self.blocks, batch, segments),
            (x, dt, A, B, _or(z, x), _or(self.bias, A), _or(self.keep, A), end, total,
            length, width, width // B.shape[2], self.steps, segments, *x.stride()[:2], *dt.stride()[:2],
            *_or(z, x).stride()[:2], *B.stride()[:3]),
            dict(N=n, REV=reverse, HAS_Z=reverse and z is not None,
                 HAS_BIAS=self.bias is not None, HAS_SEQ=self.keep is not None, SOFTPLUS=self.softplus,
                 EVEN_L=length % TILE_FWD == 0, EVEN_D=width % self.block == 0, ZOH=self.zoh and not reverse, BD=self.block),
            {"num_warps": self.block // 16, **({} if x.dtype == torch.float32 else {"maxnreg": CARRY_REGS})},
        )  # fmt: skip
        launch(
            tk.combine_kernel, (cdiv(width, 32), n, batch),
            (end, total, A, _or(self.alive, A), ini, segments, width),
            dict(N=n, BD=32, REV=reverse, HAS_INI=has_ini, HAS_SEQ=self.alive is not None),
            {"num_warps": 1},
        )  # fmt: skip

    def _pieces(self, step_bytes, free, written):
        """The pieces of L in a backward, last to first, each with the memory for its partial sums of dB and dC and
        the strides there (floats) of a batch row and of a segment. step_bytes: of either sum, per step.

        The memory of `free` is scratch that costs nothing. If dx and ddt are finally `written` there, only the steps
        before a piece are still free: so one piece uses what fits there, and extra memory holds the others."""
        batch, length, width = self.shape
        steps, segments, K = self.steps, self.segments, self.chunk
        rows, row_bytes = batch * segments, width * free[0].element_size()
        total = cdiv(min(steps, length), K) * K
        pieces, end = [], total
        if rows * total * step_bytes * 2 > PARTIALS:
            if written:
                start = cdiv(cdiv(total * step_bytes, row_bytes + step_bytes), K) * K
            else:
                start = 0 if step_bytes <= row_bytes else total
            if start < total:
                scratch = [t.view(torch.float32) for t in free]
                pieces.append((start, total - start, *scratch, length * row_bytes // 4, steps * row_bytes // 4))
                end = start
        if end:
            own_bytes = _own_bytes(self.x, 3 if self.block == BLOCK else 1)  # NARROW: twice the sums, still two pieces
            piece = cdiv(min(end, max(1, own_bytes // (2 * rows * step_bytes))), K) * K
            own = [free[0].new_empty(rows * piece * step_bytes // 4, dtype=torch.float32) for _ in range(2)]
            stride = piece * step_bytes // 4
            for p0 in reversed(range(0, end, piece)):
                pieces.append((p0, min(piece, end - p0), *own, segments * stride, stride))
        return pieces


class _Pad(NamedTuple):
    """Pads each group from `channels` to `wide` channels that affect nothing. They are zero except in z, because for a closed
    gate the backward does extra work."""

    groups: int
    channels: int
    wide: int

    def __call__(self, t: OPTIONAL, dim: int = -1, value: float = 0.0) -> OPTIONAL:
        if t is None:
            return None
        behind = (0, 0) * (-1 - dim)
        out = F.pad(t.unflatten(dim, (self.groups, self.channels)), (*behind, 0, self.wide - self.channels), value=value)
        return out.flatten(dim - 1, dim)

    def cut(self, t: Tensor, dim: int = -1) -> Tensor:
        if t.shape == (0,):  # the input was not given
            return t
        t = t.unflatten(dim, (self.groups, self.wide)).narrow(dim, 0, self.channels)
        return t.flatten(dim - 1, dim).contiguous()


def _parts(n: int) -> list[slice]:
    """Slices of the states, each as large as a Gluon call supports."""
    return [slice(i, min(i + STATES, n)) for i in range(0, n, STATES)]


def _some(part: slice, A: Tensor, B: Tensor, C: Tensor, *states: OPTIONAL) -> list[OPTIONAL]:
    """A, B, C and states (B, D, N) with a part of the states."""
    return [A[:, part].contiguous(), B[..., part], C[..., part], *(s if s is None else s[..., part] for s in states)]


def _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint):
    rows, n, width = sums.shape[0], sums.shape[1] - 2, sums.shape[2]
    made = sums.new_empty if dx.numel() else sums.new_zeros
    dA, dD, dbias = made((width, n)), made((width,)), made((width,))
    if dx.numel():
        launch(
            tk.finish_kernel, (cdiv(width, 128), n + 2),
            (sums, dA, dD, dbias, rows, width),
            dict(N=n, BD=128, RB=min(16, power_of_2(rows))),
            {"num_warps": 4},
        )
    none = sums.new_empty(0)
    return (
        dx, ddt, dA, dB, dC, none if D is None else dD, dz, none if dt_bias is None else dbias,
        none if initial_state is None else adjoint[:, 0].transpose(1, 2).contiguous(),
    )  # fmt: skip


def _reduce_bc(pB, pC, dB, dC, piece, blocks, p0, steps, segments, spb, sps, sk) -> None:
    batch, length, groups, n = dB.shape
    np2 = power_of_2(n)
    # tiles of 2048: enough loads in flight and enough programs; if possible, a width that leaves no lane idle
    wide = blocks & -blocks if 8 <= (blocks & -blocks) <= 32 else min(32, power_of_2(blocks))
    step, count = max(1, 2048 // (np2 * wide)), batch * segments * piece * groups
    launch(
        tk.reduce_bc_kernel, (cdiv(count, step),),
        (pB, pC, dB, dC, count, piece, blocks, p0, steps, segments, length, spb, sps, sk, dB.stride(2)),
        dict(C=groups, N=n, NP=np2, R=step, KB=wide, U=min(3, cdiv(blocks, wide))),
        {"num_warps": 4},
    )  # fmt: skip


def _three_ctas(x: Tensor) -> dict:
    """The register limit for three CTAs per SM; with 32-bit inputs it would spill."""
    return {} if x.dtype == torch.float32 else {"maxnreg": 168}


def _segments(length: int, segments: int) -> tuple[int, int]:
    """Number and length of the segments, a multiple of the largest chunk of the Gluon kernels."""
    if segments == 1:
        return 1, length
    steps = cdiv(cdiv(length, segments), TILE_FWD) * TILE_FWD
    return cdiv(length, steps), steps


def _state_in(state: OPTIONAL, A: Tensor, batch: int, segments: int, at: int) -> Tensor:
    """(B, segments, N, D) with the given (B, D, N) in one segment; the others are uninitialised."""
    width, n = A.shape
    out = A.new_empty(batch, segments, n, width)
    if state is not None:  # always a copy, because the kernels write here
        out[:, at].copy_(state.transpose(1, 2))
    return out


def _block(n: int, per_group: int, zoh: bool) -> tuple[int, int, int]:
    """Channels per program, its warps, N padded: 8 states per lane (4 with the longer formulas of zoh; more would spill),
    and at least 8 channels, so that a program sums over several channels."""
    np2, lane = power_of_2(n), 128 if zoh else 256
    block = min(32, max(8, lane // np2), power_of_2(per_group))
    return block, max(1, np2 * block // lane), np2


def _own_bytes(x: Tensor, part: int = 3) -> int:
    """Bytes that partial sums of a backward may take besides the gradients: a third of x keeps the peak of forward and
    backward below that of the original CUDA kernel. Each further piece costs two more launches, 15 to 20 us."""
    return max(PARTIALS, x.numel() * x.element_size() // part)


def _dense(t: OPTIONAL) -> OPTIONAL:
    return None if t is None else t.contiguous()


def _rows(t: OPTIONAL) -> OPTIONAL:
    """t, copied unless its last dimension is contiguous."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _words(t: OPTIONAL) -> OPTIONAL:
    """t, copied unless its last dimension can be read as 32-bit words."""
    if t is None or t.element_size() == 4:
        return _rows(t)
    ok = t.stride(-1) == 1 and t.stride(0) % 2 == 0 and t.stride(1) % 2 == 0 and t.data_ptr() % 4 == 0
    return t if ok else t.clone(memory_format=torch.contiguous_format)


def _or(t: OPTIONAL, other: Tensor) -> Tensor:
    """t, or a placeholder pointer that the kernel does not read."""
    return other if t is None else t


def _strides(seq_idx: OPTIONAL) -> tuple[int, int]:
    return (0, 0) if seq_idx is None else seq_idx.stride()

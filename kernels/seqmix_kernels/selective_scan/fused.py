"""Launches the fused selective scan: one kernel forward, one backward (and small ones that add up partial sums).

Two forms of one design, with the same saved tensors, so either backward can follow either forward:
  triton_kernels   plain Triton, general, testable by Triton's interpreter
  gluon_kernels    explicit layouts, for the shapes that matter on Hopper; `gluon_why_not` says when it is passed over

Saved for the backward, beyond the inputs: the states before every `chunk`-th step, 16-bit fixed point with one exponent
a channel for 16-bit inputs (1.06 bytes per (b, t, d) at N = 16 and chunk 32), float32 for float32 inputs. The output
before the gate is recomputed. Sums over channels (dB, dC) leave the kernels as partials of a piece of L at a time, which
keeps them small; every sum has a fixed order, so gradients are bitwise the same twice.
"""

import functools
import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import triton_kernels as tk

GROUP = 2  # steps whose states and decays the plain backward holds in registers
BLOCK, WARPS = 64, 4  # channels and warps of a Gluon CTA
TILE_FWD, TILE_BWD = 32, 16  # steps of a Gluon tile
CARRY_REGS = 128
PARTIALS = 1 << 24  # bytes that the partial sums of a backward may always take
SMS = 132  # of an H200, where the rules below were measured
OPTIONAL = Tensor | None


class Plan(NamedTuple):
    """How a call is launched. gluon: the explicit layouts; segments: pieces of L that run side by side."""

    gluon: bool
    segments: int = 1


def why_not(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    """Why these tensors cannot go through the kernels; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if x.device.type == "cpu" else "Triton's interpreter is on and x is not on the CPU"
    if x.device.type != "cuda":
        return f"it needs a CUDA device, x is on {x.device.type}"
    if torch.version.cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {x.dtype}"
    if A.shape[1] > 256:
        return f"it takes up to 256 states a channel, not {A.shape[1]}"
    return None


def gluon_why_not(x: Tensor, n: int, groups: int, seq_idx: OPTIONAL, discretization: str) -> str | None:
    """Why a call takes the plain kernels; None if it takes the Gluon ones."""
    if x.device.type != "cuda" or not _hopper(x.device.index):
        return "not compute capability 9.0"
    if n > 16:
        return f"N = {n}, more than 16"
    if x.shape[2] % 2:
        return f"D = {x.shape[2]} is odd"
    if groups > 1 and x.shape[2] // groups % BLOCK:
        return f"a group's {x.shape[2] // groups} channels are no multiple of {BLOCK}"
    if seq_idx is not None:
        return "seq_idx"
    if discretization != "euler":
        return discretization
    return None


@functools.cache
def _hopper(index: int | None) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) == (9, 0)


def plan(x: Tensor, n: int, groups: int, seq_idx: OPTIONAL, discretization: str) -> Plan:
    if gluon_why_not(x, n, groups, seq_idx, discretization) is not None:
        return Plan(False)
    return Plan(True, segments_for(*x.shape))


def segments_for(batch: int, length: int, width: int) -> int:
    """Into how many segments L is split: none where the batch and the channels give every SM a CTA."""
    ctas = batch * triton.cdiv(width, BLOCK)
    if ctas >= SMS * 3 // 4 or length < 2048:
        return 1
    # enough for several waves: a short tail matters more than the carry pass, which costs the same for any number
    want = triton.cdiv(12 * SMS, ctas)
    return max(1, min(triton.next_power_of_2(want), length // 512))


def chunk_for(n: int, chunk: int | None) -> int:
    """Steps between saved states: a power of two from 16; at most 32 where N <= 16, at most 1024 else."""
    if chunk is None:
        return 32 if n <= 16 else 64
    return min(32 if n <= 16 else 1024, max(16, triton.next_power_of_2(chunk)))


def boundary_spec(x: Tensor, n: int, chunk: int | None) -> tuple[tuple[int, int, int], torch.dtype]:
    """Shape and dtype of `boundary_states` of `forward`: (B, chunks, D N) float32, or (B, chunks, D (N + 1)) int16."""
    batch, length, width = x.shape
    chunks = triton.cdiv(length, chunk_for(n, chunk))
    if x.dtype == torch.float32:
        return (batch, chunks, width * n), torch.float32
    return (batch, chunks, width * (n + 1)), torch.int16


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
    """y (B, L, D), final state (B, D, N), boundary states (`boundary_spec`; shape (0,) without `save`), and (0,)."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    K = chunk_for(n, chunk)
    y = x.new_empty(batch, length, width)
    final = A.new_empty(batch, width, n)
    shape, dtype = boundary_spec(x, n, K) if save else ((0,), torch.float32)
    states = torch.empty(shape, dtype=dtype, device=x.device)
    if y.numel() == 0:
        final = A.new_zeros(batch, width, n) if initial_state is None else initial_state.clone()
        return y, final, states, x.new_empty(0)
    B, C, A, D, dt_bias = _rows(B), _rows(C), _dense(A), _dense(D), _dense(dt_bias)
    how = how or plan(x, n, groups, seq_idx, discretization)
    if how.gluon:
        from . import gluon_kernels as gk

        x, dt, z = _words(x), _words(dt), _words(z)
        segments, steps = _segments(length, how.segments)
        ini = _state_in(initial_state, A, batch, segments, 0)
        if segments > 1:
            _carry(x, dt, A, B, z, dt_bias, dt_softplus, ini, initial_state is not None, segments, steps, False)
        blocks = triton.cdiv(width, BLOCK)
        gk.fwd_kernel[(blocks, batch, segments)](
            x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), ini, y, final, states,
            length, width, width // groups, steps, segments, *x.stride()[:2], *dt.stride()[:2], *_or(z, x).stride()[:2],
            *B.stride()[:3], *C.stride()[:3],
            N=n, K=K, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None,
            HAS_INI=segments > 1 or initial_state is not None, SOFTPLUS=dt_softplus, SAVE=save,
            BFP=dtype == torch.int16,
            EVEN_L=length % TILE_FWD == 0, EVEN_D=width % BLOCK == 0,
            num_warps=WARPS, **_three_ctas(x),
        )  # fmt: skip
        return y, final, states, x.new_empty(0)
    block, warps, np2 = _block(n, width // groups, discretization == "zoh")
    blocks = triton.cdiv(width // groups, block)
    initial_state = _dense(initial_state)
    tk.fwd_kernel[(batch * groups * blocks,)](
        x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), _or(initial_state, A), _or(seq_idx, A), y, final, states,
        1, length, width, width // groups, blocks, *x.stride(), *dt.stride(), *_or(z, x).stride(),
        *B.stride()[:3], *C.stride()[:3], *A.stride(), *_strides(seq_idx),
        N=n, NP=np2, BD=block, S=4, K=K, HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None,
        HAS_H0=initial_state is not None, HAS_SEQ=seq_idx is not None, SOFTPLUS=dt_softplus,
        ZOH=discretization == "zoh", SAVE=save, BFP=dtype == torch.int16, G=groups, num_warps=warps,
    )  # fmt: skip
    return y, final, states, x.new_empty(0)


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
    boundary_states: Tensor,
    y_ungated: Tensor,
    dt_softplus: bool,
    discretization: str,
    chunk: int | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial; shape (0,) for what was not given. y_ungated is not needed."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    K = chunk_for(n, chunk)
    dx, ddt = (x.new_empty(batch, length, width) for _ in range(2))
    dz = x.new_empty(batch, length, width) if z is not None else x.new_empty(0)
    dB, dC = (x.new_empty(batch, length, groups, n) for _ in range(2))
    how = how or plan(x, n, groups, seq_idx, discretization)
    segments, steps = _segments(length, how.segments)
    # what later steps hand to the state, carried from piece to piece; at the end the gradient of the initial state
    adjoint = _state_in(dfinal, A, batch, segments, segments - 1)
    if dx.numel() == 0:
        return _gradients(dx, ddt, A.new_zeros(batch, n + 2, width), dB.zero_(), dC.zero_(), D, dz, dt_bias,
                          initial_state, adjoint)  # fmt: skip
    B, C, A, D, dt_bias = _rows(B), _rows(C), _dense(A), _dense(D), _dense(dt_bias)
    given = dict(HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
                 BFP=boundary_states.dtype == torch.int16)  # fmt: skip
    sums = A.new_zeros(batch * segments, n + 2, width)
    if how.gluon:
        from . import gluon_kernels as gk

        dy, x, dt, z = _words(dy), _words(x), _words(dt), _words(z)
        blocks = triton.cdiv(width, BLOCK)
        if segments > 1:
            _carry(dy, dt, A, C, z, dt_bias, dt_softplus, adjoint, dfinal is not None, segments, steps, True)
        # in float16 a small output has too few digits left for y / silu(z)
        few = batch * blocks * segments <= 2 * SMS
        per_group = blocks // groups
        piece = _piece(batch * segments, steps, blocks * 2 * n * 4, x.element_size() * width, K)
        partial = A.new_empty(batch * segments, piece, groups, per_group, 2 * n)
        for p0 in reversed(range(0, steps, piece)):
            gk.bwd_kernel[(blocks, batch, segments)](
                dy, x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), boundary_states,
                adjoint,
                dx, ddt, dz, partial, sums,
                length, p0, piece, width, width // groups, blocks, steps, segments, *dy.stride()[:2], *x.stride()[:2],
                *dt.stride()[:2], *_or(z, x).stride()[:2], *B.stride()[:3], *C.stride()[:3],
                N=n, NT=K // TILE_BWD, EVEN_L=length % K == 0, EVEN_D=width % BLOCK == 0,
                 PRE=few, **given, num_warps=WARPS, **({} if few else _three_ctas(x)),
            )  # fmt: skip
            _reduce_bc(partial, dB, dC, p0, steps, segments)
        return _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint)
    block, warps, np2 = _block(n, width // groups, discretization == "zoh")
    blocks = triton.cdiv(width // groups, block)
    piece = _piece(batch, steps, groups * blocks * 2 * n * 4, x.element_size() * width, K)
    partial = A.new_empty(batch, piece, groups, blocks, 2 * n)
    scratch = A.new_empty(batch * groups * blocks, K // GROUP, np2 * block)
    for t0 in reversed(range(0, length, piece)):
        tk.bwd_kernel[(batch * groups * blocks,)](
            dy, x, dt, A, B, C, _or(D, A), _or(z, x), _or(dt_bias, A), _or(seq_idx, A), boundary_states, adjoint,
            scratch, dx, ddt, dz, partial, sums,
            1, length, t0, min(length, t0 + piece), piece, width, width // groups, blocks, *x.stride(), *dt.stride(),
            *_or(z, x).stride(), *dy.stride(), *B.stride()[:3], *C.stride()[:3], *A.stride(), *_strides(seq_idx),
            N=n, NP=np2, BD=block, S=GROUP, K=K, HAS_SEQ=seq_idx is not None, ZOH=discretization == "zoh", G=groups,
            **given, num_warps=warps,
        )  # fmt: skip
        _reduce_bc(partial, dB, dC, t0, steps, 1)
    return _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint)


def _gradients(dx, ddt, sums, dB, dC, D, dz, dt_bias, initial_state, adjoint):
    rows, n, width = sums.shape[0], sums.shape[1] - 2, sums.shape[2]
    dA, dD, dbias = sums.new_zeros(width, n), sums.new_zeros(width), sums.new_zeros(width)
    if rows and width and dx.numel():
        np2 = triton.next_power_of_2(n + 2)
        tk.finish_kernel[(triton.cdiv(width, 8),)](
            sums, dA, dD, dbias, rows, width, N=n, N2P=np2, BD=8, RB=max(1, 512 // np2), num_warps=4
        )
    none = sums.new_empty(0)
    return (
        dx, ddt, dA, dB, dC, none if D is None else dD, dz, none if dt_bias is None else dbias,
        none if initial_state is None else adjoint[:, 0].transpose(1, 2).contiguous(),
    )  # fmt: skip


def _reduce_bc(partial: Tensor, dB: Tensor, dC: Tensor, p0: int, steps: int, segments: int) -> None:
    rows, piece, groups, blocks, n2 = partial.shape
    np2 = triton.next_power_of_2(n2)
    # a tile of 4096: enough loads in flight, enough programs
    wide = min(32, triton.next_power_of_2(blocks))
    step, count = max(1, 4096 // (np2 * wide)), rows * piece * groups
    tk.reduce_bc_kernel[(triton.cdiv(count, step),)](
        partial, dB, dC, count, piece, blocks, p0, steps, segments, dB.shape[1],
        C=groups, N=n2 // 2, N2P=np2, R=step, KB=wide, num_warps=4,
    )  # fmt: skip


def _carry(x, dt, A, B, z, dt_bias, softplus, ini, has_ini, segments, steps, reverse) -> None:
    """Fills ini (B, segments, N, D) with the state (reverse: the adjoint) that comes into each segment."""
    from . import gluon_kernels as gk

    batch, length, width = x.shape
    n = A.shape[1]
    end, total = torch.empty_like(ini), ini.new_empty(batch, segments, width)
    gk.carry_kernel[(triton.cdiv(width, BLOCK), batch, segments)](
        x, dt, A, B, _or(z, x), _or(dt_bias, A), end, total,
        length, width, width // B.shape[2], steps, segments, *x.stride()[:2], *dt.stride()[:2], *_or(z, x).stride()[:2],
        *B.stride()[:3], N=n, REV=reverse, HAS_Z=reverse and z is not None,
        HAS_BIAS=dt_bias is not None, SOFTPLUS=softplus, EVEN_L=length % TILE_FWD == 0, EVEN_D=width % BLOCK == 0,
        num_warps=WARPS, **({} if x.dtype == torch.float32 else {"maxnreg": CARRY_REGS}),
    )  # fmt: skip
    tk.combine_kernel[(triton.cdiv(width, 16), batch)](
        end, total, A, ini, segments, width, N=n, NP=triton.next_power_of_2(n), BD=16, REV=reverse, HAS_INI=has_ini,
        num_warps=1,
    )  # fmt: skip


def _three_ctas(x: Tensor) -> dict:
    """The limit that puts three CTAs on an SM; with 32-bit inputs it would spill."""
    return {} if x.dtype == torch.float32 else {"maxnreg": 168}


def _segments(length: int, segments: int) -> tuple[int, int]:
    """Number and length of the segments, a multiple of the largest chunk of the Gluon kernels."""
    if segments == 1:
        return 1, length
    steps = triton.cdiv(triton.cdiv(length, segments), TILE_FWD) * TILE_FWD
    return triton.cdiv(length, steps), steps


def _state_in(state: OPTIONAL, A: Tensor, batch: int, segments: int, at: int) -> Tensor:
    """(B, segments, N, D) with the given (B, D, N) in one segment, else zeros."""
    width, n = A.shape
    out = A.new_empty(batch, segments, n, width)
    if state is None or segments > 1:
        out.zero_()
    if state is not None:  # a copy always: the kernels write here
        out[:, at].copy_(state.transpose(1, 2))
    return out


def _block(n: int, per_group: int, zoh: bool) -> tuple[int, int, int]:
    """Channels a program, its warps, N padded: 8 states a lane (4 with the longer formulas of zoh; more would spill),
    and at least 8 channels to share the sums over channels."""
    np2, lane = triton.next_power_of_2(n), 128 if zoh else 256
    block = min(32, max(8, lane // np2), triton.next_power_of_2(per_group))
    return block, max(1, np2 * block // lane), np2


def _piece(rows: int, length: int, partial_bytes: int, x_bytes: int, K: int) -> int:
    """Steps a backward launch takes: its partials take about a third of x, or PARTIALS bytes if that is more. A launch
    more costs 10 to 20 us; a third keeps the peak of forward and backward under the CUDA original's."""
    pieces = triton.cdiv(rows * length * partial_bytes, max(PARTIALS, rows * length * x_bytes // 3))
    return triton.cdiv(triton.cdiv(length, pieces), K) * K


def _dense(t: OPTIONAL) -> OPTIONAL:
    return None if t is None else t.contiguous()


def _rows(t: OPTIONAL) -> OPTIONAL:
    """With the last dimension contiguous in memory."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _words(t: OPTIONAL) -> OPTIONAL:
    """With a last dimension that can be read as 32-bit words."""
    if t is None or t.element_size() == 4:
        return _rows(t)
    ok = t.stride(-1) == 1 and t.stride(0) % 2 == 0 and t.stride(1) % 2 == 0 and t.data_ptr() % 4 == 0
    return t if ok else t.clone(memory_format=torch.contiguous_format)


def _or(t: OPTIONAL, other: Tensor) -> Tensor:
    """A pointer that a kernel will not read, where t is absent."""
    return other if t is None else t


def _strides(seq_idx: OPTIONAL) -> tuple[int, int]:
    return (0, 0) if seq_idx is None else seq_idx.stride()

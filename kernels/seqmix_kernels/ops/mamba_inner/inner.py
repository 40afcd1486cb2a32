"""The Mamba block and its hand-written gradients, built on the operators of the convolution and the scan.

The convolution and the scan compute their own gradients (see their READMEs). Between them are only matrix products,
out = y Wᵀ with ∂y = ∂out W and ∂W = ∂outᵀ y, each over the (B L) rows. What `forward` saves for `backward`:

    level   u   xz   δBC   y   states of the scan   conv(x)   Δ
    0       x   x    x     x   x                    x         x
    1       x   x    x     x   x                    -         -           - is recomputed
    2       x   -    -     -   -                    -         -           the whole forward is recomputed

Weights are saved as they are given and cast to u's dtype where they are used, so that no 16-bit copy outlives its use.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...product import linear, product


class Given(NamedTuple):
    """The tensors of a call, in the order of the registered op."""

    u: Tensor  # (B, L, M)
    in_proj: Tensor  # (2E, M), the rows of x, then those of z
    in_bias: Tensor | None  # (2E,)
    conv: Tensor  # (E, W)
    conv_bias: Tensor | None  # (E,)
    x_proj: Tensor  # (R + 2N, E), the rows of δ, B, C
    dt_proj: Tensor  # (E, R)
    dt_bias: Tensor  # (E,)
    A_log: Tensor  # (E, N)
    D: Tensor  # (E,)
    out_proj: Tensor  # (M, E)
    out_bias: Tensor | None  # (M,)
    conv_state: Tensor | None  # (B, W-1, E)
    ssm_state: Tensor | None  # (B, E, N)
    seq_idx: Tensor | None  # (B, L)


class Saved(NamedTuple):
    """What the forward saves; tensors that the backward recomputes have shape (0,)."""

    xz: Tensor  # (B, L, 2E)
    x: Tensor  # (B, L, E) after the convolution
    dt: Tensor  # (B, L, E) before its bias and softplus
    dbc: Tensor  # (B, L, R + 2N)
    y: Tensor  # (B, L, E) gated
    boundary: Tensor  # saved by the scan, in its own format
    gate: Tensor  # the same


class Operators(NamedTuple):
    """The convolution with SiLU and the scan with softplus, each forward and backward, as the registered ops take them."""

    conv_forward: Callable  # x, weight, bias, initial_state, seq_idx -> y, final
    conv_backward: Callable  # dy, dfinal, x, weight, bias, initial_state, seq_idx -> dx, dweight, dbias, dinitial
    scan_forward: Callable  # x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, save -> y, final, boundary, gate
    scan_backward: Callable  # dy, dfinal, the ten tensors, y, boundary, gate -> their nine gradients


def operators(backend: str, discretization: str) -> Operators:
    """The operators of a compiled backend: "cpu" or "fused"."""
    ops = torch.ops.seqmix
    settings = (True, discretization, None)  # softplus; the scan chooses its chunk
    return Operators(
        lambda *tensors: ops.causal_conv1d_fwd(*tensors, True, backend),
        lambda *tensors: ops.causal_conv1d_bwd(*tensors, True, backend),
        lambda *tensors, save: ops.selective_scan_fwd(*tensors, *settings, save, backend),
        lambda *tensors: ops.selective_scan_bwd(*tensors, *settings, backend),
    )


def forward(g: Given, level: int, save: bool, run: Operators) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """out (B, L, M), the two final states, and the tensors saved for the backward (empty without `save`)."""
    xz = linear(g.u, g.in_proj, g.in_bias)
    x, conv_final = _conv(g, xz, run)
    dbc = linear(x, g.x_proj)
    dt = _delta(g, dbc)
    y, final, boundary, gate = run.scan_forward(*_scanned(g, xz, x, dt, dbc), save=save and level < 2)
    out = linear(y, g.out_proj, g.out_bias)
    saved = Saved(xz, x, dt, dbc, y, boundary, gate)
    dropped = Saved._fields if level >= 2 or not save else ("x", "dt") if level >= 1 else ()
    return out, conv_final, final, saved._replace(**{name: out.new_empty(0) for name in dropped})


def backward(
    dout: Tensor, dconv_final: Tensor | None, dfinal: Tensor | None, g: Given, saved: Saved, level: int, run: Operators
) -> tuple[Tensor | None, ...]:
    """The gradients of `g`, without seq_idx; None for what was not given."""
    xz, x, dt, dbc, y, boundary, gate = saved
    width, rank = g.dt_proj.shape
    if level >= 2:
        xz = linear(g.u, g.in_proj, g.in_bias)
    if level >= 1:
        x, _ = _conv(g, xz, run)
        dbc = linear(x, g.x_proj) if level >= 2 else dbc
        dt = _delta(g, dbc)
    inputs = _scanned(g, xz, x, dt, dbc)
    if level >= 2:
        y, _, boundary, gate = run.scan_forward(*inputs, save=True)
    dout_proj, dout_bias = _weights(dout, y, g.out_proj, g.out_bias)
    dy = dout @ g.out_proj.to(dout.dtype)
    dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dssm = run.scan_backward(dy, dfinal, *inputs, y, boundary, gate)
    A = inputs[2]
    del y, dy, dt, inputs, boundary, gate, saved  # no longer needed: at level 2 they would dominate the peak
    ddt_proj, _ = _weights(ddt, dbc[..., :rank], g.dt_proj, None)
    ddbc = torch.cat((ddt @ g.dt_proj.to(ddt.dtype), dB.squeeze(2), dC.squeeze(2)), dim=-1)
    del ddt, dbc, dB, dC
    dx_proj, _ = _weights(ddbc, x, g.x_proj, None)
    dx = _rows(dx).addmm_(_rows(ddbc), g.x_proj.to(ddbc.dtype)).view_as(x)
    del x, ddbc
    dx, dconv, dconv_bias, dconv_state = run.conv_backward(
        dx, dconv_final, xz[..., :width], g.conv, g.conv_bias, g.conv_state, g.seq_idx
    )
    del xz
    # x and z share a projection: each half has its own product, so ∂x and ∂z are not concatenated
    halves = g.in_proj.to(g.u.dtype)
    du = (_rows(dx) @ halves[:width]).addmm_(_rows(dz), halves[width:]).view_as(g.u)
    din_proj = torch.empty_like(g.in_proj, memory_format=torch.contiguous_format)
    din_bias = None if g.in_bias is None else torch.empty_like(g.in_bias)
    for half, d in ((slice(width), dx), (slice(width, None), dz)):
        product(_rows(d).t(), _rows(g.u), din_proj[half])
        if din_bias is not None:
            din_bias[half] = _sum(d, din_bias)
    return (
        du, din_proj, din_bias, dconv, None if g.conv_bias is None else dconv_bias, dx_proj, ddt_proj, ddt_bias, dA * A,
        dD, dout_proj, dout_bias, None if g.conv_state is None else dconv_state, None if g.ssm_state is None else dssm,
    )  # fmt: skip


def _conv(g: Given, xz: Tensor, run: Operators) -> tuple[Tensor, Tensor]:
    return run.conv_forward(xz[..., : g.conv.shape[0]], g.conv, g.conv_bias, g.conv_state, g.seq_idx)


def _delta(g: Given, dbc: Tensor) -> Tensor:
    return linear(dbc[..., : g.dt_proj.shape[1]], g.dt_proj)


def _scanned(g: Given, xz: Tensor, x: Tensor, dt: Tensor, dbc: Tensor) -> tuple[Tensor | None, ...]:
    """The scan's inputs, in its order. B and C (B, L, 1, N) and z are views."""
    rank, n, width = g.dt_proj.shape[1], g.A_log.shape[1], g.A_log.shape[0]
    B, C = (dbc[..., at : at + n].unsqueeze(2) for at in (rank, rank + n))
    return x, dt, -g.A_log.exp(), B, C, g.D, xz[..., width:], g.dt_bias, g.ssm_state, g.seq_idx


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _weights(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """∂W and ∂b of y = x Wᵀ + b, in their dtypes."""
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    product(_rows(dy).t(), _rows(x), dweight)
    return dweight, None if bias is None else _sum(dy, bias)


def _sum(dy: Tensor, bias: Tensor) -> Tensor:
    return _rows(dy).sum(0, dtype=bias.dtype)

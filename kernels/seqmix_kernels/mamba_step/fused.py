"""One decoding step on the GPU: two launches, in plain Triton.

    conv_kernel   the convolution, SiLU, the new state of the convolution, and this block of channels' share of W_x x
    scan_kernel   adds up the shares, W_Δ, softplus, the recurrence, the skip, the gate, the new state

A program owns a block of channels of one batch row; the one thing all channels of a row meet in is W_x x, which is where the
two launches part. As one launch each program would need all of W_x (245 kB at E = 1536, more than a microsecond's worth of
what one SM can load), or a barrier between programs. Weights are read in their own dtype and rounded to x's, sums are in
float32, in a fixed order. Nothing is read back to the host and no workspace outlives a call: safe in a CUDA graph.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..selective_scan.triton_kernels import LOG2E, sigmoid, softplus, zoh

MAX_TAPS = 8
BLOCK, WARPS = 64, 4  # channels of a program


@triton.jit(do_not_specialize=["batch"])
def conv_kernel(
    x_ptr, state_ptr, w_ptr, b_ptr, proj_ptr, xc_ptr, new_ptr, part_ptr, batch, E, sxb, ssb, ssl, sse, swe, sww,
    W: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, BD: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """xc (B, E): the convolution's output. part (blocks, B, P): the shares of W_x xc."""
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    p = tl.arange(0, PP)
    dm = d < E
    low = x_ptr.dtype.element_ty
    at = p.to(tl.int64)[:, None] * E + d[None, :]
    proj = tl.load(proj_ptr + at, mask=(p < P)[:, None] & dm[None, :], other=0.0).to(low).to(tl.float32)
    x = tl.load(x_ptr + b * sxb + d, mask=dm, other=0.0)
    acc = x.to(tl.float32) * tl.load(w_ptr + d * swe + (W - 1) * sww, mask=dm, other=0.0).to(tl.float32)
    if HAS_B:
        acc += tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)
    new = new_ptr + b * (W - 1) * E + d
    for w in tl.static_range(W - 1):
        v = tl.load(state_ptr + b * ssb + w * ssl + d * sse, mask=dm, other=0.0).to(low)
        acc += v.to(tl.float32) * tl.load(w_ptr + d * swe + w * sww, mask=dm, other=0.0).to(tl.float32)
        if w > 0:
            tl.store(new + (w - 1) * E, v, mask=dm)
    if W > 1:
        tl.store(new + (W - 2) * E, x, mask=dm)
    xc = (acc * sigmoid(acc)).to(low)
    tl.store(xc_ptr + b * E + d, xc, mask=dm)
    share = tl.sum(proj * xc.to(tl.float32)[None, :], axis=1)
    tl.store(part_ptr + (tl.program_id(0) * batch.to(tl.int64) + b) * P + p, share, mask=p < P)


@triton.jit(do_not_specialize=["batch"])
def scan_kernel(
    xc_ptr, z_ptr, part_ptr, h_ptr, dt_ptr, bias_ptr, A_ptr, D_ptr, y_ptr, new_ptr, batch, E, szb, shb, shd, shn,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BD: tl.constexpr, ZOH: tl.constexpr,
):  # fmt: skip
    """part (K, B, R + 2N): the shares of δ, B, C, added up by every program of a row."""
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    k = tl.arange(0, KP)
    r = tl.arange(0, RP)
    n = tl.arange(0, NP)
    dm = d < E
    nm = n < N
    m = dm[:, None] & nm[None, :]
    low = xc_ptr.dtype.element_ty
    dn = d.to(tl.int64)[:, None] * N + n[None, :]
    h = tl.load(h_ptr + b * shb + d.to(tl.int64)[:, None] * shd + n[None, :] * shn, mask=m, other=0.0)
    A = -tl.exp2(tl.load(A_ptr + dn, mask=m, other=0.0) * LOG2E)
    at = d.to(tl.int64)[:, None] * R + r[None, :]
    proj = tl.load(dt_ptr + at, mask=dm[:, None] & (r < R)[None, :], other=0.0).to(low).to(tl.float32)
    dt = tl.load(bias_ptr + d, mask=dm, other=0.0)
    x = tl.load(xc_ptr + b * E + d, mask=dm, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + b * szb + d, mask=dm, other=0.0).to(tl.float32)
    skip = tl.load(D_ptr + d, mask=dm, other=0.0) * x
    P = R + 2 * N
    row = part_ptr + (k.to(tl.int64)[:, None] * batch + b) * P
    km = (k < K)[:, None]
    delta = tl.sum(tl.load(row + r[None, :], mask=km & (r < R)[None, :], other=0.0), axis=0)
    B = tl.sum(tl.load(row + R + n[None, :], mask=km & nm[None, :], other=0.0), axis=0)
    C = tl.sum(tl.load(row + R + N + n[None, :], mask=km & nm[None, :], other=0.0), axis=0)
    dt = softplus(dt + tl.sum(proj * delta[None, :], axis=1))
    q = dt[:, None] * A
    step = dt[:, None]
    if ZOH:
        g, _ = zoh(q)
        step = step * g
    h = tl.exp2(q * LOG2E) * h + step * B[None, :] * x[:, None]
    tl.store(new_ptr + b * E * N + dn, h, mask=m)
    y = (tl.sum(h * C[None, :], axis=1) + skip) * (z * sigmoid(z))
    tl.store(y_ptr + b * E + d, y.to(y_ptr.dtype.element_ty), mask=dm)


def why_not(x: Tensor, conv: Tensor) -> str | None:
    """Why these tensors cannot go through the kernels; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        if x.device.type != "cpu":
            return "Triton's interpreter is on and x is not on the CPU"
    elif x.device.type != "cuda":
        return f"it needs a CUDA device, x is on {x.device.type}"
    elif torch.version.cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {x.dtype}"
    if conv.shape[1] > MAX_TAPS:
        return f"it takes up to {MAX_TAPS} taps, conv has {conv.shape[1]}"
    return None


def step(
    x, z, conv_state, ssm_state, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, discretization: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, E) and the new states; see `mamba_step`."""
    batch, width = x.shape
    taps, n, rank = conv.shape[1], A_log.shape[1], dt_proj.shape[1]
    new_conv, new_ssm = x.new_empty(batch, taps - 1, width), ssm_state.new_empty(batch, width, n)
    y = x.new_empty(batch, width)
    if batch == 0:
        return y, new_conv, new_ssm
    x, z = (t if t.stride(1) == 1 else t.contiguous() for t in (x, z))
    blocks = triton.cdiv(width, BLOCK)
    mixed, shares = torch.empty_like(y), ssm_state.new_empty(blocks, batch, rank + 2 * n)
    conv_kernel[(blocks, batch)](
        x, conv_state, conv, x if conv_bias is None else conv_bias, x_proj.contiguous(), mixed, new_conv, shares,
        batch, width, x.stride(0), *conv_state.stride(), *conv.stride(), W=taps, P=rank + 2 * n,
        PP=triton.next_power_of_2(rank + 2 * n), BD=BLOCK, HAS_B=conv_bias is not None, num_warps=WARPS,
    )  # fmt: skip
    scan_kernel[(blocks, batch)](
        mixed, z, shares, ssm_state, dt_proj.contiguous(), dt_bias, A_log.contiguous(), D, y, new_ssm,
        batch, width, z.stride(0), *ssm_state.stride(), N=n, NP=triton.next_power_of_2(n), R=rank,
        RP=triton.next_power_of_2(rank), K=blocks, KP=triton.next_power_of_2(blocks), BD=BLOCK,
        ZOH=discretization == "zoh", num_warps=WARPS,
    )  # fmt: skip
    return y, new_conv, new_ssm

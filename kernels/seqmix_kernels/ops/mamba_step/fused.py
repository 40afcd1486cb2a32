"""One decoding step on the GPU, in plain Triton.

    conv_kernel   W_in u (few rows), the convolution, SiLU, the convolution's new state, and this block's partial sum of W_x x
    scan_kernel   adds the partial sums; W_Δ, softplus, the recurrence, the skip, the gate, the new state
    out_kernel    W_out y (few rows)

A program of the first two owns a block of channels of one row. README.md explains where the launches are split. With more
rows than FEW cuBLAS computes the outer products, whose kernels read a weight once for all rows. Weights are read in their
own dtype and rounded to that of the step; sums are in float32, in a fixed order. Nothing is read back to the host and no
workspace outlives a call, so the step is safe in a CUDA graph.

PDL: from compute capability 9.0 a kernel starts while the previous one finishes (programmatic dependent launch). Before
gdc_wait it reads only weights; every other load, and every store, comes after.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...launch import launch, programmatic
from ...product import linear
from ...triton_math import LOG2E, sigmoid, softplus, zoh

FEW = 2  # most rows for which each program reads its part of W_in, or of W_out, for a single row
ROWS = 16  # from this many rows on a program processes as many at once: it reads weights once and uses tensor cores
BLOCK, FEW_BLOCK, OUT_BLOCK = 64, 16, 8  # channels per program; with W_in; outputs per program with W_out
ROWS_BLOCKS = 64, 32  # channels per program of ROWS rows: with W_x; with the states
WARPS = 4
AT_ONCE = tl.constexpr(6)  # partial sums loaded together
COLUMNS = 1024  # columns of W_in loaded at once; twice as many of W_out


@triton.jit(do_not_specialize=["batch"])
def conv_kernel(
    u_ptr, in_ptr, ib_ptr, x_ptr, z_ptr, state_ptr, w_ptr, b_ptr, proj_ptr, xc_ptr, new_ptr, part_ptr, batch, E, sub, sxb,
    ssb, ssl, sse, swe, sww, M: tl.constexpr, W: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, RB: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, FROM_U: tl.constexpr, HAS_IB: tl.constexpr, HAS_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FROM_U (RB = 1): x and z are made from u, and z (B, E) is written; else x is read. xc (B, E): the convolution's output.
    part (blocks, B, P): the shares of W_x xc."""
    b = tl.program_id(1).to(tl.int64) * RB + tl.arange(0, RB)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    p = tl.arange(0, PP)
    bm = b < batch
    dm = d < E
    m = bm[:, None] & dm[None, :]
    low = xc_ptr.dtype.element_ty
    at = p.to(tl.int64)[:, None] * E + d[None, :]
    proj = tl.load(proj_ptr + at, mask=(p < P)[:, None] & dm[None, :], other=0.0)
    bias = tl.zeros([BD], tl.float32)
    if HAS_B:
        bias = tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(w_ptr + d * swe + w * sww, mask=dm, other=0.0).to(tl.float32),)  # noqa: RUF005
    if FROM_U:
        b0 = tl.program_id(1).to(tl.int64)
        c = tl.arange(0, BM)
        cm = dm[:, None] & (c < M)[None, :]
        rows = d.to(tl.int64)[:, None]
        wx = tl.load(in_ptr + rows * M + c[None, :], mask=cm, other=0.0)
        wz = tl.load(in_ptr + (rows + E) * M + c[None, :], mask=cm, other=0.0)
        x = tl.zeros([BD], tl.float32)
        z = tl.zeros([BD], tl.float32)
        if HAS_IB:
            x = tl.load(ib_ptr + d, mask=dm, other=0.0).to(low).to(tl.float32)
            z = tl.load(ib_ptr + E + d, mask=dm, other=0.0).to(low).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = bias[None, :]
    past = ()
    for w in tl.static_range(W - 1):
        v = tl.load(state_ptr + b[:, None] * ssb + w * ssl + d[None, :] * sse, mask=m, other=0.0).to(low)
        acc += v.to(tl.float32) * taps[w][None, :]
        past = past + (v,)  # noqa: RUF005 (the front end does not support unpacking)
    if FROM_U:
        u = tl.load(u_ptr + b0 * sub + c, mask=c < M, other=0.0).to(low).to(tl.float32)[None, :]
        x += tl.sum(wx.to(low).to(tl.float32) * u, axis=1)
        z += tl.sum(wz.to(low).to(tl.float32) * u, axis=1)
        for c0 in range(BM, M, BM):
            c = c0 + tl.arange(0, BM)
            cm = dm[:, None] & (c < M)[None, :]
            wx = tl.load(in_ptr + rows * M + c[None, :], mask=cm, other=0.0)
            wz = tl.load(in_ptr + (rows + E) * M + c[None, :], mask=cm, other=0.0)
            u = tl.load(u_ptr + b0 * sub + c, mask=c < M, other=0.0).to(low).to(tl.float32)[None, :]
            x += tl.sum(wx.to(low).to(tl.float32) * u, axis=1)
            z += tl.sum(wz.to(low).to(tl.float32) * u, axis=1)
        x = x.to(low)[None, :]
        tl.store(z_ptr + b0 * E + d, z.to(low), mask=dm)
    else:
        x = tl.load(x_ptr + b[:, None] * sxb + d[None, :], mask=m, other=0.0)
    new = new_ptr + b[:, None] * (W - 1) * E + d[None, :]
    tl.debug_barrier()  # the new state may overwrite the old one, all of which has been read
    for w in tl.static_range(1, W - 1):
        tl.store(new + (w - 1) * E, past[w].to(new_ptr.dtype.element_ty), mask=m)
    if W > 1:
        tl.store(new + (W - 2) * E, x.to(new_ptr.dtype.element_ty), mask=m)
    acc += x.to(tl.float32) * taps[W - 1][None, :]
    xc = (acc * sigmoid(acc)).to(low)
    tl.store(xc_ptr + b[:, None] * E + d[None, :], xc, mask=m)
    part = part_ptr + tl.program_id(0) * batch.to(tl.int64) * P
    if RB == 1:
        share = tl.sum(proj.to(low).to(tl.float32) * xc.to(tl.float32), axis=1)[None, :]
    else:
        share = tl.dot(xc, tl.trans(proj.to(low)), input_precision="ieee")
    tl.store(part + b[:, None] * P + p[None, :], share, mask=bm[:, None] & (p < P)[None, :])


@triton.jit(do_not_specialize=["batch"])
def scan_kernel(
    xc_ptr, z_ptr, part_ptr, h_ptr, dt_ptr, bias_ptr, A_ptr, D_ptr, y_ptr, new_ptr, batch, E, szb, shb, shd, shn,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    RB: tl.constexpr, BD: tl.constexpr, ZOH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """part (K, B, R + 2N): the shares of δ, B, C, added up by every program of a row."""
    b = tl.program_id(1).to(tl.int64) * RB + tl.arange(0, RB)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    r = tl.arange(0, RP)
    n = tl.arange(0, NP)
    bm = b < batch
    dm = d < E
    nm = n < N
    m = bm[:, None] & dm[None, :]
    m3 = m[:, :, None] & nm[None, None, :]
    low = xc_ptr.dtype.element_ty
    dn = d.to(tl.int64)[:, None] * N + n[None, :]
    A = -tl.exp2(tl.load(A_ptr + dn, mask=dm[:, None] & nm[None, :], other=0.0) * LOG2E)
    at = d.to(tl.int64)[:, None] * R + r[None, :]
    proj = tl.load(dt_ptr + at, mask=dm[:, None] & (r < R)[None, :], other=0.0).to(low)
    bias = tl.load(bias_ptr + d, mask=dm, other=0.0)
    skip = tl.load(D_ptr + d, mask=dm, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    h = tl.load(h_ptr + b[:, None, None] * shb + d.to(tl.int64)[None, :, None] * shd + n[None, None, :] * shn, mask=m3,
                other=0.0)  # fmt: skip
    x = tl.load(xc_ptr + b[:, None] * E + d[None, :], mask=m, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + b[:, None] * szb + d[None, :], mask=m, other=0.0).to(tl.float32)
    P = R + 2 * N
    if RB == 1:  # all partial sums at once
        k = tl.arange(0, KP)
        row = part_ptr + (k.to(tl.int64)[:, None] * batch + tl.program_id(1)) * P
        km = (k < K)[:, None]
        delta = tl.sum(tl.load(row + r[None, :], mask=km & (r < R)[None, :], other=0.0), axis=0)
        B = tl.sum(tl.load(row + R + n[None, :], mask=km & nm[None, :], other=0.0), axis=0)[None, :]
        C = tl.sum(tl.load(row + R + N + n[None, :], mask=km & nm[None, :], other=0.0), axis=0)[None, :]
        dt = tl.sum(proj.to(tl.float32) * delta[None, :], axis=1)[None, :]
    else:
        delta = tl.zeros([RB, RP], tl.float32)
        B = tl.zeros([RB, NP], tl.float32)
        C = tl.zeros([RB, NP], tl.float32)
        for k0 in range(0, K, AT_ONCE):
            for j in tl.static_range(AT_ONCE):
                row = part_ptr + ((k0 + j) * batch.to(tl.int64) + b[:, None]) * P
                km = bm[:, None] & (k0 + j < K)
                delta += tl.load(row + r[None, :], mask=km & (r < R)[None, :], other=0.0)
                B += tl.load(row + R + n[None, :], mask=km & nm[None, :], other=0.0)
                C += tl.load(row + R + N + n[None, :], mask=km & nm[None, :], other=0.0)
        dt = tl.dot(delta.to(low), tl.trans(proj), input_precision="ieee")
    dt = softplus(dt + bias[None, :])[:, :, None]  # [RB, BD, 1]
    q = dt * A[None, :, :]
    step = dt
    if ZOH:
        g, _ = zoh(q)
        step = step * g
    h = tl.exp2(q * LOG2E) * h + step * B[:, None, :] * x[:, :, None]
    tl.store(new_ptr + b[:, None, None] * E * N + dn[None, :, :], h, mask=m3)
    y = (tl.sum(h * C[:, None, :], axis=2) + skip[None, :] * x) * (z * sigmoid(z))
    tl.store(y_ptr + b[:, None] * E + d[None, :], y.to(y_ptr.dtype.element_ty), mask=m)


@triton.jit
def out_kernel(
    y_ptr, w_ptr, b_ptr, out_ptr, M, E: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr, HAS_B: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    om = o < M
    low = out_ptr.dtype.element_ty
    rows = o.to(tl.int64)[:, None]
    c = tl.arange(0, BE)
    w = tl.load(w_ptr + rows * E + c[None, :], mask=om[:, None] & (c < E)[None, :], other=0.0)
    out = tl.zeros([BO], tl.float32)
    if HAS_B:
        out = tl.load(b_ptr + o, mask=om, other=0.0).to(low).to(tl.float32)
    if PDL:
        gdc_wait()
    y = tl.load(y_ptr + b * E + c, mask=c < E, other=0.0).to(tl.float32)
    out += tl.sum(w.to(low).to(tl.float32) * y[None, :], axis=1)
    for c0 in range(BE, E, BE):
        c = c0 + tl.arange(0, BE)
        w = tl.load(w_ptr + rows * E + c[None, :], mask=om[:, None] & (c < E)[None, :], other=0.0)
        y = tl.load(y_ptr + b * E + c, mask=c < E, other=0.0).to(tl.float32)
        out += tl.sum(w.to(low).to(tl.float32) * y[None, :], axis=1)
    tl.store(out_ptr + b * M + o, out.to(low), mask=om)


def step(
    u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state, ssm_state,
    discretization: str, dtype: torch.dtype, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out (B, M) and the new states; see `mamba_step`. dtype: of the products and of out, whatever u's. in_place: the new
    states overwrite the old ones, if these are contiguous."""
    (batch, d_model), (width, n), rank, taps = u.shape, A_log.shape, dt_proj.shape[1], conv.shape[1]
    if in_place and conv_state.is_contiguous() and ssm_state.is_contiguous():
        new_conv, new_ssm = conv_state, ssm_state
    else:
        new_conv, new_ssm = conv_state.new_empty(batch, taps - 1, width), ssm_state.new_empty(batch, width, n)
    mixed, y = (u.new_empty(batch, width, dtype=dtype) for _ in range(2))
    if batch == 0:
        return u.new_empty(batch, d_model, dtype=dtype), new_conv, new_ssm
    # a tile of ROWS rows holds all partial sums or states of a channel, so their number is limited
    small = n <= 32 and rank + 2 * n <= 256
    few, rows = batch <= FEW, ROWS if batch >= ROWS and small else 1
    conv_block, scan_block = (FEW_BLOCK, BLOCK) if few else (BLOCK, BLOCK) if rows == 1 else ROWS_BLOCKS
    least = 1 if rows == 1 else 16  # smallest side of a tensor core's operand
    early = programmatic(u.device)
    options = {"num_warps": WARPS if rows == 1 and not few else 8} | ({"launch_pdl": True} if early else {})
    if few:
        u, in_proj, z = _rows(u), in_proj.contiguous(), torch.empty_like(y)
        x = u  # not read
    else:
        x, z = linear(u.to(dtype), in_proj, in_bias).chunk(2, dim=1)
    blocks = triton.cdiv(width, conv_block)
    shares = ssm_state.new_empty(blocks, batch, rank + 2 * n)
    launch(
        conv_kernel, (blocks, triton.cdiv(batch, rows)),
        (
            u, in_proj, _or(in_bias, u), x, z, conv_state, conv, _or(conv_bias, u), x_proj.contiguous(), mixed, new_conv,
            shares, batch, width, u.stride(0), x.stride(0), *conv_state.stride(), *conv.stride(),
        ),
        dict(M=d_model, W=taps, P=rank + 2 * n, PP=max(least, triton.next_power_of_2(rank + 2 * n)), RB=rows, BD=conv_block,
             BM=min(COLUMNS, triton.next_power_of_2(d_model)), FROM_U=few, HAS_IB=in_bias is not None,
             HAS_B=conv_bias is not None, PDL=early),
        options,
    )  # fmt: skip
    launch(
        scan_kernel, (triton.cdiv(width, scan_block), triton.cdiv(batch, rows)),
        (
            mixed, z, shares, ssm_state, dt_proj.contiguous(), dt_bias, A_log.contiguous(), D, y, new_ssm, batch, width,
            z.stride(0), *ssm_state.stride(),
        ),
        dict(N=n, NP=triton.next_power_of_2(n), R=rank, RP=max(least, triton.next_power_of_2(rank)), K=blocks,
             KP=triton.next_power_of_2(blocks), RB=rows, BD=scan_block, ZOH=discretization == "zoh", PDL=early),
        options,
    )  # fmt: skip
    if not few:
        return linear(y, out_proj, out_bias), new_conv, new_ssm
    out = u.new_empty(batch, d_model, dtype=dtype)
    launch(
        out_kernel, (triton.cdiv(d_model, OUT_BLOCK), batch),
        (y, out_proj.contiguous(), _or(out_bias, u), out, d_model),
        dict(E=width, BO=OUT_BLOCK, BE=min(2 * COLUMNS, triton.next_power_of_2(width)), HAS_B=out_bias is not None, PDL=early),
        options,
    )  # fmt: skip
    return out, new_conv, new_ssm


def _rows(t: Tensor) -> Tensor:
    """t, copied unless its last dimension is contiguous."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """t, or a placeholder pointer that the kernel does not read."""
    return other if t is None else t

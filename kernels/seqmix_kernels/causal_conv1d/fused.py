"""The short convolution on the GPU, in plain Triton: one kernel forward, one backward.

    pre_t = bias + sum_w weight_w x_{t-W+1+w},   y = silu(pre) or pre
    g = dy silu'(pre),   dx_s = sum_j weight_{W-1-j} g_{s+j},   dweight_w = sum_t g_t x_{t-W+1+w}

A program owns a tile of steps and channels; neighbouring rows come from the cache, not from memory, so each tensor is read
once. The backward runs pre again for the W steps that see x_s. Positions -(W-1) to -1 are the initial state's. dweight and
dbias leave as a partial sum a program, added up in a fixed order.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..selective_scan.triton_kernels import sigmoid

MAX_TAPS = 8
ROWS, BLOCK = 16, 128  # steps and channels of a tile
BWD_ROWS = 8  # and 8 warps: more elements a thread would spill
TILES = 16  # tiles of a backward program, one after the other: fewer partial sums


@triton.jit
def window(x_ptr, ini_ptr, doc_ptr, s, doc, d, dm, L, D, sxl, sxd, W: tl.constexpr, HAS_INI: tl.constexpr,
           HAS_SEQ: tl.constexpr):  # fmt: skip
    """Inputs at steps s (negative: of the initial state), 0 outside and in other documents than doc. [R, BD] float32."""
    m = (s >= 0) & (s < L)
    v = tl.load(x_ptr + s[:, None] * sxl + d[None, :] * sxd, mask=m[:, None] & dm[None, :], other=0.0).to(tl.float32)
    if HAS_INI:
        i = s + W - 1
        mi = (s < 0) & (i >= 0)
        v += tl.load(ini_ptr + i[:, None] * D + d[None, :], mask=mi[:, None] & dm[None, :], other=0.0).to(tl.float32)
    if HAS_SEQ:
        same = tl.load(doc_ptr + s, mask=m, other=0) == doc
        v = tl.where(same[:, None], v, 0.0)
    return v


@triton.jit(do_not_specialize=["L", "ND", "NT"])
def fwd_kernel(
    x_ptr, w_ptr, b_ptr, ini_ptr, doc_ptr, y_ptr, L, D, ND, NT, sxb, sxl, sxd, W: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, HAS_B: tl.constexpr, HAS_INI: tl.constexpr, HAS_SEQ: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b = (pid // ND // NT).to(tl.int64)
    d = (pid % ND) * BD + tl.arange(0, BD)
    t = ((pid // ND) % NT).to(tl.int64) * R + tl.arange(0, R)
    dm = d < D
    m = (t < L)[:, None] & dm[None, :]
    docs = doc_ptr + b * L
    doc = t * 0
    if HAS_SEQ:
        doc = tl.load(docs + t, mask=t < L, other=0)
    acc = tl.zeros([R, BD], tl.float32)
    if HAS_B:
        acc += tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        v = window(x_ptr + b * sxb, ini_ptr + b * (W - 1) * D, docs, t - (W - 1) + w, doc, d, dm, L, D, sxl, sxd, W,
                   HAS_INI, HAS_SEQ)  # fmt: skip
        acc += v * tl.load(w_ptr + d * W + w, mask=dm, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc *= sigmoid(acc)
    tl.store(y_ptr + (b * L + t[:, None]) * D + d[None, :], acc.to(y_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["L", "ND", "NT"])
def bwd_kernel(
    dy_ptr, df_ptr, x_ptr, w_ptr, b_ptr, ini_ptr, doc_ptr, dx_ptr, di_ptr, p_ptr, L, D, ND, NT,
    sgb, sgl, sgd, sxb, sxl, sxd, W: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr,
    HAS_B: tl.constexpr, HAS_INI: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_DF: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Positions from -(W-1) with an initial state, else from 0. p (programs along B and L, W + 1, D): dweight, dbias."""
    pid = tl.program_id(0)
    b = (pid // ND // NT).to(tl.int64)
    d = (pid % ND) * BD + tl.arange(0, BD)
    dm = d < D
    xp = x_ptr + b * sxb
    gp = dy_ptr + b * sgb
    ip = ini_ptr + b * (W - 1) * D
    docs = doc_ptr + b * L
    first = 0
    if HAS_INI:
        first = W - 1
    bias = tl.zeros([BD], tl.float32)
    if HAS_B:
        bias = tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)
    last = 0
    if HAS_SEQ:
        last = tl.load(docs + L - 1)
    sums = ()
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros([BD], tl.float32),)  # noqa: RUF005 (the front end knows no unpacking)
    for tile in range(0, TILES):
        s = (((pid // ND) % NT).to(tl.int64) * TILES + tile) * R + tl.arange(0, R) - first
        here = (s >= 0) & (s < L)
        doc_s = s * 0
        if HAS_SEQ:
            doc_s = tl.load(docs + s, mask=here, other=0)
        dx = tl.zeros([R, BD], tl.float32)
        for j in tl.static_range(W):
            t = s + j
            mt = (t >= 0) & (t < L)
            doc = t * 0
            if HAS_SEQ:
                doc = tl.load(docs + t, mask=mt, other=-1)
            g = tl.load(gp + t[:, None] * sgl + d[None, :] * sgd, mask=mt[:, None] & dm[None, :], other=0.0).to(tl.float32)
            if SILU or j == 0:
                pre = tl.zeros([R, BD], tl.float32) + bias[None, :]
                taps = ()
                for w in tl.static_range(W):
                    v = window(xp, ip, docs, t - (W - 1) + w, doc, d, dm, L, D, sxl, sxd, W, HAS_INI, HAS_SEQ)
                    pre += v * tl.load(w_ptr + d * W + w, mask=dm, other=0.0).to(tl.float32)[None, :]
                    taps = taps + (v,)  # noqa: RUF005
            if SILU:
                sg = sigmoid(pre)
                g *= sg * (1.0 + pre * (1.0 - sg))
            if j == 0:
                new = ()
                for w in tl.static_range(W):
                    new = new + (sums[w] + tl.sum(g * taps[w], axis=0),)  # noqa: RUF005
                sums = new + (sums[W] + tl.sum(g, axis=0),)  # noqa: RUF005
            if HAS_SEQ:
                g = tl.where((doc == doc_s)[:, None], g, 0.0)
            dx += g * tl.load(w_ptr + d * W + W - 1 - j, mask=dm, other=0.0).to(tl.float32)[None, :]
        if HAS_DF:  # the final state holds the last W - 1 inputs
            i = s - (L - (W - 1))
            mi = (i >= 0) & (i < W - 1)
            if HAS_SEQ:
                mi &= doc_s == last
            at = df_ptr + b * (W - 1) * D + i[:, None] * D + d[None, :]
            dx += tl.load(at, mask=mi[:, None] & dm[None, :], other=0.0).to(tl.float32)
        at = dx_ptr + (b * L + s[:, None]) * D + d[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=here[:, None] & dm[None, :])
        if HAS_INI:
            i = s + W - 1
            mi = ((s < 0) & (i >= 0))[:, None] & dm[None, :]
            tl.store(di_ptr + (b * (W - 1) + i[:, None]) * D + d[None, :], dx.to(di_ptr.dtype.element_ty), mask=mi)
    pp = p_ptr + (pid // ND).to(tl.int64) * (W + 1) * D + d
    for w in tl.static_range(W + 1):
        tl.store(pp + w * D, sums[w], mask=dm)


def why_not(x: Tensor, weight: Tensor) -> str | None:
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
    if weight.shape[1] > MAX_TAPS:
        return f"it takes up to {MAX_TAPS} taps, weight has {weight.shape[1]}"
    return None


def forward(x, weight, bias, initial_state, seq_idx, silu: bool) -> tuple[Tensor, Tensor]:
    """y (B, L, D) and the final state (B, W-1, D); see `causal_conv1d`."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    y = x.new_empty(batch, length, width)
    document = _documents(seq_idx)
    final = _final(x, taps - 1, initial_state, document)
    if y.numel() == 0:
        return y, final
    blocks, rows = triton.cdiv(width, BLOCK), triton.cdiv(length, ROWS)
    has_state = initial_state is not None and taps > 1
    fwd_kernel[(batch * rows * blocks,)](
        x, weight.contiguous(), x if bias is None else bias.contiguous(),
        initial_state.contiguous() if has_state else x, x if document is None else document, y,
        length, width, blocks, rows, *x.stride(), W=taps, R=ROWS, BD=BLOCK, HAS_B=bias is not None, HAS_INI=has_state,
        HAS_SEQ=document is not None, SILU=silu, num_warps=4,
    )  # fmt: skip
    return y, final


def backward(dy, dfinal, x, weight, bias, initial_state, seq_idx, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias, dinitial; shape (0,) for what was not given."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    dx = x.new_empty(batch, length, width)
    none = x.new_empty(0, dtype=torch.float32)
    dinitial = none if initial_state is None else initial_state.new_zeros(initial_state.shape)
    if dx.numel() == 0:
        if initial_state is not None and dfinal is not None and length == 0:
            dinitial.copy_(dfinal)
        return dx, torch.zeros_like(weight), none if bias is None else torch.zeros_like(bias), dinitial
    document = _documents(seq_idx)
    has_state, has_final = initial_state is not None and taps > 1, dfinal is not None and taps > 1
    blocks = triton.cdiv(width, BLOCK)
    rows = triton.cdiv(length + (taps - 1 if has_state else 0), BWD_ROWS * TILES)
    partial = x.new_empty(batch * rows, taps + 1, width, dtype=torch.float32)
    bwd_kernel[(batch * rows * blocks,)](
        dy, dfinal.contiguous() if has_final else x, x, weight.contiguous(), x if bias is None else bias.contiguous(),
        initial_state.contiguous() if has_state else x, x if document is None else document, dx,
        dinitial if has_state else x, partial, length, width, blocks, rows, *dy.stride(), *x.stride(),
        W=taps, R=BWD_ROWS, BD=BLOCK, TILES=TILES, HAS_B=bias is not None, HAS_INI=has_state,
        HAS_SEQ=document is not None, HAS_DF=has_final, SILU=silu, num_warps=8,
    )  # fmt: skip
    sums = partial.sum(0)
    dbias = none if bias is None else sums[taps].to(bias.dtype)
    return dx, sums[:taps].t().to(weight.dtype).contiguous(), dbias, dinitial


def _documents(seq_idx) -> Tensor | None:
    """Documents numbered from 0 at each border, (B, L) int32; the initial state belongs to document 0."""
    if seq_idx is None:
        return None
    new = torch.zeros(seq_idx.shape, dtype=torch.int32, device=seq_idx.device)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return new.cumsum(1, dtype=torch.int32)


def _final(x, back: int, initial_state, document) -> Tensor:
    """The last W - 1 inputs of the last document, padded on the left with the old state."""
    batch, length, width = x.shape
    final = x.new_zeros(batch, back, width)
    kept = min(back, length)
    final[:, back - kept :] = x[:, length - kept :]
    if initial_state is not None and length < back:
        final[:, : back - length] = initial_state[:, length:]
    if document is not None and length:
        where = document.new_zeros(batch, back)
        where[:, back - kept :] = document[:, length - kept :]
        final = final.masked_fill((where != document[:, -1:]).unsqueeze(2), 0)
    return final

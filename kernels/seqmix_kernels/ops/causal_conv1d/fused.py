"""The short convolution on the GPU, in plain Triton: one kernel forward, one backward.

    pre_t = bias + sum_w weight_w x_{t-W+1+w},   y = silu(pre) or pre
    g = dy silu'(pre),   dx_s = sum_j weight_{W-1-j} g_{s+j},   dweight_w = sum_t g_t x_{t-W+1+w}

A program walks a span of steps for a block of channels, a few channels per thread. The last W - 1 inputs (in the backward
also the last W - 1 values of g) stay in registers: each element is loaded once, and threads share nothing. Neighbouring spans
overlap by W - 1 steps. Positions -(W-1) to -1 are the initial state. Each program writes a partial sum of dweight and dbias;
these are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import launch
from ...triton_math import sigmoid

BLOCK, LANE = 256, 2  # most channels per program, and channels per thread
GROUP = 8  # rows loaded together, because no load is moved ahead of the stores of earlier rows
SPAN, BWD_SPAN = 64, 128  # steps per program


@triton.jit
def input_row(x_ptr, ini_ptr, t, d, dm, L, D, sxl, sxd, W: tl.constexpr, HAS_INI: tl.constexpr):
    """The inputs at step t (negative: of the initial state), 0 outside. [BD] float32."""
    v = tl.load(x_ptr + t * sxl + d * sxd, mask=dm & (t >= 0) & (t < L), other=0.0).to(tl.float32)
    if HAS_INI:
        i = t + W - 1
        v += tl.load(ini_ptr + i * D + d, mask=dm & (t < 0) & (i >= 0), other=0.0).to(tl.float32)
    return v


@triton.jit
def document(doc_ptr, t, L, HAS_SEQ: tl.constexpr):
    """Of step t; those before the sequence belong to the first, 0, those after it to none."""
    doc = t * 0
    if HAS_SEQ:
        doc = tl.load(doc_ptr + t, mask=(t >= 0) & (t < L), other=0).to(tl.int64)
        doc = tl.where(t < L, doc, -1)
    return doc


@triton.jit
def kept(v, a, b, HAS_SEQ: tl.constexpr):
    """v where documents a and b are one, else 0."""
    if HAS_SEQ:
        v = tl.where(a == b, v, 0.0)
    return v


@triton.jit(do_not_specialize=["L", "ND", "NT"])
def fwd_kernel(
    x_ptr, w_ptr, b_ptr, ini_ptr, doc_ptr, y_ptr, L, D, ND, NT, sxb, sxl, sxd, W: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, BD: tl.constexpr, HAS_B: tl.constexpr, HAS_INI: tl.constexpr, HAS_SEQ: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b = (pid // ND // NT).to(tl.int64)
    d = ((pid % ND) * BD + tl.arange(0, BD)).to(tl.int64)
    dm = d < D
    t0 = ((pid // ND) % NT).to(tl.int64) * SPAN
    xp = x_ptr + b * sxb
    ip = ini_ptr + b * (W - 1) * D
    docs = doc_ptr + b * L
    yp = y_ptr + b * L * D + d
    bias = tl.zeros([BD], tl.float32)
    if HAS_B:
        bias = tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(w_ptr + d * W + w, mask=dm, other=0.0).to(tl.float32),)  # noqa: RUF005
    past = ()  # the inputs at t - (W-1) .. t - 1, and their documents
    for w in tl.static_range(W - 1):
        t = t0 - (W - 1) + w
        past = past + ((input_row(xp, ip, t, d, dm, L, D, sxl, sxd, W, HAS_INI), document(docs, t, L, HAS_SEQ)),)  # noqa: RUF005
    for i in range(0, tl.minimum(SPAN, L - t0), GROUP):
        seen = past  # then the inputs of this group
        for u in tl.static_range(GROUP):
            t = t0 + i + u
            seen = seen + ((input_row(xp, ip, t, d, dm, L, D, sxl, sxd, W, False), document(docs, t, L, HAS_SEQ)),)  # noqa: RUF005
        for u in tl.static_range(GROUP):
            t = t0 + i + u
            acc = bias + seen[u + W - 1][0] * taps[W - 1]
            for w in tl.static_range(W - 1):
                acc += kept(seen[u + w][0], seen[u + w][1], seen[u + W - 1][1], HAS_SEQ) * taps[w]
            if SILU:
                acc *= sigmoid(acc)
            tl.store(yp + t * D, acc.to(y_ptr.dtype.element_ty), mask=dm & (t < L))
        past = ()
        for w in tl.static_range(W - 1):
            past = past + (seen[GROUP + w],)  # noqa: RUF005


@triton.jit(do_not_specialize=["L", "ND", "NT"])
def bwd_kernel(
    dy_ptr, df_ptr, x_ptr, w_ptr, b_ptr, ini_ptr, doc_ptr, dx_ptr, di_ptr, p_ptr, L, D, ND, NT,
    sgb, sgl, sgd, sxb, sxl, sxd, W: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, BD: tl.constexpr,
    HAS_B: tl.constexpr, HAS_INI: tl.constexpr, HAS_SEQ: tl.constexpr, HAS_DF: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """At step t: g_t, and with it dx of step s = t - (W-1). Spans start at -(W-1) with an initial state, else at 0; the first
    W-1 steps of a span only fill the registers, so it gives dx and the sums for its first SPAN - (W-1) positions.
    p (programs along B and L, W + 1, D): dweight, dbias."""
    pid = tl.program_id(0)
    b = (pid // ND // NT).to(tl.int64)
    d = ((pid % ND) * BD + tl.arange(0, BD)).to(tl.int64)
    dm = d < D
    xp = x_ptr + b * sxb
    gp = dy_ptr + b * sgb
    ip = ini_ptr + b * (W - 1) * D
    docs = doc_ptr + b * L
    s0 = ((pid // ND) % NT).to(tl.int64) * (SPAN - (W - 1))
    if HAS_INI:
        s0 -= W - 1
    bias = tl.zeros([BD], tl.float32)
    if HAS_B:
        bias = tl.load(b_ptr + d, mask=dm, other=0.0).to(tl.float32)
    last = s0 * 0
    if HAS_SEQ:
        last = tl.load(docs + L - 1).to(tl.int64)
    taps = ()
    sums = (tl.zeros([BD], tl.float32),)
    for w in tl.static_range(W):
        taps = taps + (tl.load(w_ptr + d * W + w, mask=dm, other=0.0).to(tl.float32),)  # noqa: RUF005
        sums = sums + (tl.zeros([BD], tl.float32),)  # noqa: RUF005
    past = ()  # inputs, documents and g at t - (W-1) .. t - 1
    for w in tl.static_range(W - 1):
        t = s0 - (W - 1) + w
        x = input_row(xp, ip, t, d, dm, L, D, sxl, sxd, W, HAS_INI)
        past = past + ((x, document(docs, t, L, HAS_SEQ), tl.zeros([BD], tl.float32)),)  # noqa: RUF005
    for i in range(0, tl.minimum(SPAN, L + (W - 1) - s0), GROUP):
        new = ()
        for u in tl.static_range(GROUP):
            t = s0 + i + u
            x = input_row(xp, ip, t, d, dm, L, D, sxl, sxd, W, HAS_INI)
            dy = tl.load(gp + t * sgl + d * sgd, mask=dm & (t >= 0) & (t < L), other=0.0).to(tl.float32)
            new = new + ((x, document(docs, t, L, HAS_SEQ), dy),)  # noqa: RUF005
        for u in tl.static_range(GROUP):
            t = s0 + i + u
            x, doc, g = new[u]
            seen = ()  # inputs at t - (W-1) .. t, 0 in other documents
            for w in tl.static_range(W - 1):
                seen = seen + (kept(past[w][0], past[w][1], doc, HAS_SEQ),)  # noqa: RUF005
            seen = seen + (x,)  # noqa: RUF005
            if SILU:
                pre = bias
                for w in tl.static_range(W):
                    pre += seen[w] * taps[w]
                sg = sigmoid(pre)
                g *= sg * (1.0 + pre * (1.0 - sg))
            own = tl.where(i + u < SPAN - (W - 1), g, 0.0)  # later steps belong to the next program
            added = (sums[0] + own,)
            for w in tl.static_range(W):
                added = added + (sums[w + 1] + own * seen[w],)  # noqa: RUF005
            sums = added
            past = past + ((x, doc, g),)  # noqa: RUF005
            s = t - (W - 1)
            dx = past[0][2] * taps[W - 1]
            for j in tl.static_range(1, W):
                dx += kept(past[j][2], past[j][1], past[0][1], HAS_SEQ) * taps[W - 1 - j]
            if HAS_DF:  # the final state holds the last W - 1 inputs
                k = s - (L - (W - 1))
                mk = (k >= 0) & (k < W - 1)
                if HAS_SEQ:
                    mk &= past[0][1] == last
                dx += tl.load(df_ptr + (b * (W - 1) + k) * D + d, mask=dm & mk, other=0.0).to(tl.float32)
            out = dm & (i + u >= W - 1)
            tl.store(dx_ptr + (b * L + s) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=out & (s >= 0) & (s < L))
            if HAS_INI:
                at = di_ptr + (b * (W - 1) + s + W - 1) * D + d
                tl.store(at, dx.to(di_ptr.dtype.element_ty), mask=out & (s < 0))
            rest = ()
            for w in tl.static_range(W - 1):
                rest = rest + (past[w + 1],)  # noqa: RUF005
            past = rest
    pp = p_ptr + (pid // ND).to(tl.int64) * (W + 1) * D + d
    for w in tl.static_range(W):
        tl.store(pp + w * D, sums[w + 1], mask=dm)
    tl.store(pp + W * D, sums[0], mask=dm)


def forward(x, weight, bias, initial_state, seq_idx, silu: bool) -> tuple[Tensor, Tensor]:
    """y (B, L, D) and the final state (B, W-1, D); see `causal_conv1d`."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    y = x.new_empty(batch, length, width)
    document = _documents(seq_idx)
    final = _final(x, taps - 1, initial_state, document)
    if y.numel() == 0:
        return y, final
    block = _block(width)
    blocks, spans = triton.cdiv(width, block), triton.cdiv(length, SPAN)
    has_state = initial_state is not None and taps > 1
    launch(
        fwd_kernel, (batch * spans * blocks,),
        (
            x, weight.contiguous(), x if bias is None else bias.contiguous(),
            initial_state.contiguous() if has_state else x, x if document is None else document, y,
            length, width, blocks, spans, *x.stride(),
        ),
        dict(W=taps, SPAN=SPAN, GROUP=GROUP, BD=block, HAS_B=bias is not None, HAS_INI=has_state,
             HAS_SEQ=document is not None, SILU=silu),
        dict(num_warps=_warps(block)),
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
    block = _block(width)
    blocks = triton.cdiv(width, block)
    spans = triton.cdiv(length + (taps - 1 if has_state else 0), BWD_SPAN - (taps - 1))
    partial = x.new_empty(batch * spans, taps + 1, width, dtype=torch.float32)
    launch(
        bwd_kernel, (batch * spans * blocks,),
        (
            dy, dfinal.contiguous() if has_final else x, x, weight.contiguous(), x if bias is None else bias.contiguous(),
            initial_state.contiguous() if has_state else x, x if document is None else document, dx,
            dinitial if has_state else x, partial, length, width, blocks, spans, *dy.stride(), *x.stride(),
        ),
        dict(W=taps, SPAN=BWD_SPAN, GROUP=GROUP, BD=block, HAS_B=bias is not None, HAS_INI=has_state,
             HAS_SEQ=document is not None, HAS_DF=has_final, SILU=silu),
        dict(num_warps=_warps(block)),
    )  # fmt: skip
    sums = partial.sum(0)
    dbias = none if bias is None else sums[taps].to(bias.dtype)
    return dx, sums[:taps].t().to(weight.dtype).contiguous(), dbias, dinitial


def _block(width: int) -> int:
    return min(BLOCK, max(32, triton.next_power_of_2(width)))


def _warps(block: int) -> int:
    return max(1, block // (32 * LANE))


def _documents(seq_idx) -> Tensor | None:
    """The number of each step's document, from 0, (B, L) int32; the initial state belongs to document 0."""
    if seq_idx is None:
        return None
    new = torch.zeros(seq_idx.shape, dtype=torch.int32, device=seq_idx.device)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return new.cumsum(1, dtype=torch.int32)


def _final(x, back: int, initial_state, document) -> Tensor:
    """The last W - 1 inputs of the last document, padded on the left with the old state."""
    batch, length, width = x.shape
    if document is None and length >= back:
        return x[:, length - back :].clone(memory_format=torch.contiguous_format)
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

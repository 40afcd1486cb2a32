"""Rotation of queries and keys in one Triton kernel: eager torch makes about ten passes over them in float32."""

import torch
import triton
import triton.language as tl


@triton.jit
def turn(
    q_in, k_in, q_out, k_out, positions, frequency, L, tokens, shrink,
    qi_t, qi_h, ki_t, ki_h, qo_t, qo_h, ko_t, ko_h, pos_b, pos_l,
    H: tl.constexpr, H_KV: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """BT tokens, all heads: phases are computed once. Token t of (B, L) stands at t · stride in each tensor."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = t < tokens
    at = tl.load(positions + t // L * pos_b + t % L * pos_l, mask=there, other=0).to(tl.float32) / shrink
    i = tl.arange(0, BH)
    phase = at[:, None] * tl.load(frequency + i, mask=i < HALF, other=0.0)[None, :]  # [BT, BH]
    cos, sin = tl.cos(phase), tl.sin(phase)
    if BACK:
        sin = -sin
    pairs = there[:, None] & (i < HALF)[None, :]
    r = tl.arange(0, BR)
    rest = there[:, None] & (2 * HALF + r < P)[None, :]
    for h in range(H + H_KV):
        if h < H:
            source = q_in + t[:, None] * qi_t + h * qi_h
            target = q_out + t[:, None] * qo_t + h * qo_h
        else:
            source = k_in + t[:, None] * ki_t + (h - H) * ki_h
            target = k_out + t[:, None] * ko_t + (h - H) * ko_h
        a = tl.load(source + i[None, :], mask=pairs, other=0.0).to(tl.float32)
        b = tl.load(source + (HALF + i)[None, :], mask=pairs, other=0.0).to(tl.float32)
        kind = target.dtype.element_ty
        tl.store(target + i[None, :], (a * cos - b * sin).to(kind), mask=pairs)
        tl.store(target + (HALF + i)[None, :], (a * sin + b * cos).to(kind), mask=pairs)
        if 2 * HALF < P:
            untouched = tl.load(source + (2 * HALF + r)[None, :], mask=rest, other=0.0)
            tl.store(target + (2 * HALF + r)[None, :], untouched, mask=rest)


def launch(q_in, k_in, q_out, k_out, positions, frequency, L, shrink, back):
    """All tensors are (B L, h, P) with P contiguous."""
    tokens, H, P = q_in.shape
    if q_in.numel() == 0:
        return
    half = len(frequency)
    turn[(triton.cdiv(tokens, 8),)](
        q_in, k_in, q_out, k_out, positions, frequency, L, tokens, shrink,
        *(s for t in (q_in, k_in, q_out, k_out) for s in t.stride()[:2]),
        positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1),
        H=H, H_KV=k_in.shape[1], P=P, HALF=half, BACK=back, BT=8, BH=triton.next_power_of_2(half),
        BR=triton.next_power_of_2(max(1, P - 2 * half)), num_warps=4,
    )  # fmt: skip


def _flat(t):
    """(B, L, h, P) as (B L, h, P) with P contiguous, copied if necessary. The stride of an axis of length 1 is arbitrary, so B
    and L are flattened and not just assumed to be one axis."""
    t = t.flatten(0, 1)
    return t if t.stride(-1) == 1 else t.contiguous()


def forward(qk, positions, frequency, shrink, n_heads):
    B, L, heads, P = qk.shape
    qk = _flat(qk)
    q, k = (torch.empty(B, L, n, P, dtype=qk.dtype, device=qk.device) for n in (n_heads, heads - n_heads))
    launch(qk[:, :n_heads], qk[:, n_heads:], _flat(q), _flat(k), positions, frequency, L, shrink, back=False)
    return q, k


def backward(dq, dk, positions, frequency, shrink):
    B, L, H, P = dq.shape
    dqk = torch.empty(B, L, H + dk.shape[2], P, dtype=dq.dtype, device=dq.device)
    flat = _flat(dqk)
    launch(_flat(dq), _flat(dk), flat[:, :H], flat[:, H:], positions, frequency, L, shrink, back=True)
    return dqk

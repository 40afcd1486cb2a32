"""The step in Triton: a row's keys are split among programs (Dao et al. 2023, "Flash-Decoding"); a second kernel combines them.

A program holds one key head of one row with all the query heads that share it, and a span of its keys. The number of programs
depends on the batch, the heads and the GPU; which keys each one reads follows from `length`, on the device.
"""

import functools

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turn(x, half: tl.constexpr, base, frequency, position, p, mask):
    """x [.., BP] at `base` pointers, turned by its phases; numbers from 2 half on stay."""
    first = p < half
    inside = p < 2 * half
    i = tl.where(first, p, p - half)
    phase = position * tl.load(frequency + i, mask=inside, other=0.0)
    other = tl.load(base + tl.where(first, half, -half), mask=mask & inside, other=0.0).to(tl.float32)
    return tl.where(inside, x * tl.cos(phase) + tl.where(first, -other, other) * tl.sin(phase), x)


@triton.jit
def attend(
    q, k, v, k_cache, v_cache, length, frequency, windows, slopes, parts, stats, y, after,
    q_b, q_h, k_b, k_h, v_b, v_h, kc_b, kc_h, kc_s, vc_b, vc_h, vc_s, H_kv, C, scale, shrink,
    G: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, WINDOWED: tl.constexpr, SLOPED: tl.constexpr,
    SPLITS: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    b, h = (row // H_kv).to(tl.int64), row % H_kv
    g, p = tl.arange(0, BG), tl.arange(0, BP)
    mine = (g < G)[:, None] & (p < P)[None, :]
    now = tl.load(length + b)
    position = now.to(tl.float32) / shrink
    k_cache += b * kc_b + h * kc_h
    v_cache += b * vc_b + h * vc_h

    q_at = q + b * q_b + (h * G + g)[:, None] * q_h + p[None, :]
    query = tl.load(q_at, mask=mine, other=0.0).to(tl.float32)
    if HALF > 0:
        query = _turn(query, HALF, q_at, frequency, position, p[None, :], mine)
    low = query.to(k_cache.dtype.element_ty)
    start = 0
    reach = tl.full([BG], 2147483647, tl.int32)
    if WINDOWED:
        reach = tl.load(windows + h * G + g, mask=g < G, other=1)
        start = tl.maximum(now - tl.max(reach, 0) + 1, 0)
    steep = tl.zeros([BG], tl.float32)
    if SLOPED:
        steep = tl.load(slopes + h * G + g, mask=g < G, other=0.0)

    most = tl.full([BG], float("-inf"), tl.float32)
    total = tl.zeros([BG], tl.float32)
    sums = tl.zeros([BG, BP], tl.float32)
    if split == 0:  # the token itself: only this program writes it, and no program reads it from the cache
        k_at = k + b * k_b + h * k_h + p
        key = tl.load(k_at, mask=p < P, other=0.0).to(tl.float32)
        if HALF > 0:
            key = _turn(key, HALF, k_at, frequency, position, p, p < P)
        key = key.to(k_cache.dtype.element_ty)
        value = tl.load(v + b * v_b + h * v_h + p, mask=p < P, other=0.0).to(v_cache.dtype.element_ty)
        if h == 0:
            tl.store(after + b, now + 1)
        room = now < C  # past the capacity nothing is written, and y is NaN
        tl.store(k_cache + now.to(tl.int64) * kc_s + p, key, mask=(p < P) & room)
        tl.store(v_cache + now.to(tl.int64) * vc_s + p, value, mask=(p < P) & room)
        most = tl.sum(low.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (scale * LOG2E)
        total += tl.where(room, 1.0, float("nan"))
        sums += value.to(tl.float32)[None, :]

    share = tl.cdiv(tl.cdiv(now - start, SPLITS), BN) * BN
    first = start + split * share
    end = tl.minimum(first + share, tl.minimum(now, C))
    for s0 in range(first, end, BN):
        s = s0 + tl.arange(0, BN)
        there = (s < end)[:, None] & (p < P)[None, :]
        keys = tl.load(k_cache + s.to(tl.int64)[:, None] * kc_s + p[None, :], mask=there, other=0.0)  # [BN, BP]
        scores = tl.dot(low, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)  # [BG, BN]
        if SLOPED:
            scores -= steep[:, None] * LOG2E * (now - s).to(tl.float32)[None, :]
        seen = (s < end)[None, :]
        if WINDOWED:
            seen = seen & ((now - s)[None, :] < reach[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)  # a head that has not seen a key of this span yet
        weights = tl.exp2(scores - safe[:, None])
        shrunk = tl.exp2(most - safe)
        values = tl.load(v_cache + s.to(tl.int64)[:, None] * vc_s + p[None, :], mask=there, other=0.0)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        most = peak

    heads = row * G + g
    if SPLITS == 1:
        tl.store(y + heads[:, None] * P + p[None, :], (sums / total[:, None]).to(y.dtype.element_ty), mask=mine)
    else:
        at = heads.to(tl.int64) * SPLITS + split
        tl.store(parts + at[:, None] * P + p[None, :], sums, mask=mine)
        tl.store(stats + at * 2, most, mask=g < G)
        tl.store(stats + at * 2 + 1, total, mask=g < G)


@triton.jit
def add_up(parts, stats, y, P: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, p = tl.arange(0, BS), tl.arange(0, BP)
    at = head * SPLITS + i
    most = tl.load(stats + at * 2, mask=i < SPLITS, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=i < SPLITS, other=0.0)
    weight = tl.exp2(most - tl.max(most, 0))  # split 0 holds the token itself, so its peak is finite
    sums = tl.load(parts + at[:, None] * P + p[None, :], mask=(i < SPLITS)[:, None] & (p < P)[None, :], other=0.0)
    out = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(y + head * P + p, out.to(y.dtype.element_ty), mask=p < P)


BLOCK = 64  # keys per iteration
PROGRAMS = 3  # target number per multiprocessor


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def splits(rows: int, capacity: int, device: torch.device) -> int:
    """Number of programs that split the keys of a row and head, a power of two. A capture fixes it, so it ignores the
    length."""
    wanted = max(1, PROGRAMS * _multiprocessors(device) // max(rows, 1))
    return min(triton.next_power_of_2(wanted), triton.next_power_of_2(max(1, capacity // (2 * BLOCK))), 128)


def step(q, k, v, k_cache, v_cache, length, frequency, windows, slopes, shrink, n_splits=None):
    (B, H, P), (_, H_kv, C, _) = q.shape, k_cache.shape
    G = H // H_kv
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1 and length.dtype == torch.int32 and length.is_contiguous()
    n = splits(B * H_kv, C, q.device) if n_splits is None else n_splits
    y = torch.empty(B, H, P, dtype=q.dtype, device=q.device)
    after = torch.empty_like(length)
    if B == 0:
        return y, after
    parts = torch.empty((B * H, n, P) if n > 1 else (1,), dtype=torch.float32, device=q.device)
    stats = torch.empty((B * H, n, 2) if n > 1 else (1,), dtype=torch.float32, device=q.device)
    wide = max(16, triton.next_power_of_2(P))
    attend[(B * H_kv, n)](
        q, k, v, k_cache, v_cache, length, frequency, windows, slopes, parts, stats, y, after,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        H_kv, C, P**-0.5, shrink, G=G, P=P, HALF=0 if frequency is None else len(frequency),
        WINDOWED=windows is not None, SLOPED=slopes is not None, SPLITS=n, BG=max(16, triton.next_power_of_2(G)),
        BP=wide, BN=BLOCK if wide <= 128 else BLOCK // 2, num_warps=4, num_stages=3,
    )  # fmt: skip
    if n > 1:
        add_up[(B * H,)](parts, stats, y, P=P, SPLITS=n, BS=triton.next_power_of_2(n), BP=wide, num_warps=2)
    return y, after

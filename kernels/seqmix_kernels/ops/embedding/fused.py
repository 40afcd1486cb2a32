"""The rows of tokens and the gradient of the table, in plain Triton; README.md describes the algorithm.

    forward_kernel   gathers rows, and writes the tokens as keys, which the backward reads
    one_hot_kernel   V <= ONE_HOT: each program adds its tokens' rows to V sums that it holds in registers
    rank_kernel      sorts up to RANKED keys, by counting for each one how many come before it
    runs_kernel      sums the runs of equal keys that lie inside a chunk of the sorted keys; zeros the rows without a key
    borders_kernel   sums the runs that lie in several chunks

A key is a token, or V in place of an invalid token; it is stored minus `shift`, to fit into 16 bits where V allows that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import fused_rowwise as rowwise
from ...fused_rowwise import start
from ...launch import launch

TILE = 2048  # elements that a program of the forward gathers: 16 per thread
ONE_HOT = 32  # the largest V whose sums fit into registers, 4 columns per thread
RANKED = 8192  # most keys that are compared pairwise; with more that takes longer than torch's sort (an estimate)
CHUNK = 16  # sorted keys per program, whose rows it holds in registers
ZEROED = 16  # rows of the gradient that a program checks, and zeros if they have no key
SHARES = 8192  # elements of partial sums that a program adds at a time


@triton.jit(do_not_specialize=["T", "V", "st", "sw"])
def forward_kernel(
    token_ptr, w_ptr, y_ptr, key_ptr, T, V, st, sw,
    UNIT: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    t = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    token = tl.load(token_ptr + t * st, mask=t < T, other=-1).to(tl.int64)
    known = (token >= 0) & (token < V)
    y = tl.load(w_ptr + start(token, sw, UNIT) + d, mask=known[:, None] & (d < D), other=float("nan"))
    tl.store(y_ptr + t[:, None] * D + d, y, mask=(t < T)[:, None] & (d < D))
    if KEYS:
        if tl.program_id(0) % across == 0:
            tl.store(key_ptr + t, (tl.where(known, token, V) - SHIFT).to(key_ptr.dtype.element_ty), mask=t < T)


@triton.jit
def keys_at(key_ptr, at, T, SHIFT: tl.constexpr):
    """The keys at these positions; -1 at those outside 0 .. T-1."""
    here = (at >= 0) & (at < T)
    return tl.where(here, tl.load(key_ptr + at, mask=here, other=0).to(tl.int32) + SHIFT, -1)


@triton.jit(do_not_specialize=["T", "V", "sdy"])
def one_hot_kernel(
    dy_ptr, key_ptr, share_ptr, T, V, sdy,
    UNIT: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    v = tl.arange(0, SUMS)[:, None, None]
    total = tl.zeros([SUMS, ROWS, COLUMNS], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(T, ROWS * AT_ONCE), tl.num_programs(0)):
        for j in tl.static_range(AT_ONCE):
            t = (i * AT_ONCE + j) * ROWS + tl.arange(0, ROWS).to(tl.int64)[None, :, None]
            key = keys_at(key_ptr, t, T, SHIFT)
            dy = tl.load(dy_ptr + t * sdy * UNIT + d, mask=(t < T) & (d < D), other=0.0).to(tl.float32)
            total = tl.where(key == v, total + dy, total)  # one predicated addition; dy times 0 or 1 would spread NaN
    row = tl.program_id(0) * V + tl.arange(0, SUMS)[:, None]
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    here = (tl.arange(0, SUMS)[:, None] < V) & (d < D)
    tl.store(share_ptr + row * D + d, tl.sum(total, axis=1), mask=here)


@triton.jit
def numbered(key_ptr, at, T, SHIFT: tl.constexpr):
    """Keys that sort as (key, position); the largest integer past the last one."""
    return tl.where(at < T, keys_at(key_ptr, at, T, SHIFT) * T + at, 0x7FFFFFFF)


@triton.jit(do_not_specialize=["T"])
def rank_kernel(key_ptr, sorted_ptr, position_ptr, T, SHIFT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = numbered(key_ptr, at, T, SHIFT)
    before = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(0, T, COLUMNS):
        other = numbered(key_ptr, first + tl.arange(0, COLUMNS), T, SHIFT)
        before += (other[None, :] < own[:, None]).to(tl.int32)
    rank = tl.sum(before, axis=1)
    tl.store(sorted_ptr + rank, tl.load(key_ptr + at, mask=at < T), mask=at < T)
    tl.store(position_ptr + rank, at, mask=at < T)


@triton.jit
def columns_where(d, D: tl.constexpr, here):
    """Which of the columns d exist, where `here`, one number, is true; else none."""
    return d < tl.where(here, D, 0)


@triton.jit(do_not_specialize=["T", "V", "chunks", "steps", "sdy"])
def runs_kernel(
    dy_ptr, key_ptr, position_ptr, dw_ptr, share_ptr, T, V, chunks, steps, sdy,
    UNIT: tl.constexpr, D: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, ZEROED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    d = tl.arange(0, COLUMNS)
    if program < chunks * across:
        chunk = program // across
        d += program % across * COLUMNS
        first = chunk * CHUNK
        keys = (keys_at(key_ptr, first - 1, T, SHIFT),)
        rows = ()
        for i in tl.static_range(CHUNK):  # all loads are issued before the first is needed
            key = keys_at(key_ptr, first + i, T, SHIFT)
            t = tl.load(position_ptr + first + i, mask=first + i < T, other=0)
            dy = tl.load(dy_ptr + t * sdy * UNIT + d, mask=columns_where(d, D, key >= 0), other=0.0)
            keys = keys + (key,)  # noqa: RUF005 (the front end does not support unpacking)
            rows = rows + (dy,)  # noqa: RUF005
        keys = keys + (keys_at(key_ptr, first + CHUNK, T, SHIFT),)  # noqa: RUF005
        total = tl.zeros([COLUMNS], tl.float32)
        began = keys[0] < -1  # whether the run began in this chunk; initially false
        for i in tl.static_range(CHUNK):
            key = keys[i + 1]
            new = key != keys[i]
            ends = key != keys[i + 2]
            began = began | new
            total = tl.where(new, 0.0, total) + rows[i].to(tl.float32)
            known = (key >= 0) & (key < V)
            row = dw_ptr + key.to(tl.int64) * D + d
            tl.store(row, total.to(dw_ptr.dtype.element_ty), mask=columns_where(d, D, known & ends & began))
            # the partial sum of a run across chunks, which began before this chunk or in it
            share = share_ptr + (2 * chunk + began.to(tl.int32)).to(tl.int64) * D + d
            partial = (ends & began) == 0 if i + 1 == CHUNK else ends & (began == 0)
            tl.store(share, total, mask=columns_where(d, D, known & partial))
    else:
        v = (program - chunks * across) * ZEROED + tl.arange(0, ZEROED)
        below = tl.zeros([ZEROED], tl.int32)  # how many keys are less than v, by binary search with the largest step first
        for i in range(steps):
            more = below + (1 << (steps - 1 - i))
            below = tl.where((more <= T) & (keys_at(key_ptr, more - 1, T, SHIFT) < v), more, below)
        absent = ((v < V) & (keys_at(key_ptr, below, T, SHIFT) != v))[:, None]
        at = v.to(tl.int64)[:, None] * D + d[None, :]
        for first in range(0, D, COLUMNS):
            zeros = tl.zeros([ZEROED, COLUMNS], dw_ptr.dtype.element_ty)
            tl.store(dw_ptr + at + first, zeros, mask=absent & (first + d < D)[None, :])


@triton.jit(do_not_specialize=["T", "V", "chunks"])
def borders_kernel(
    key_ptr, share_ptr, dw_ptr, T, V, chunks,
    D: tl.constexpr, SHIFT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    chunk = tl.program_id(0) // across
    at = (chunk + 1) * CHUNK
    key = keys_at(key_ptr, at, T, SHIFT)
    # a run that began in this chunk and crosses its end
    ours = (key == keys_at(key_ptr, at - 1, T, SHIFT)) & (key != keys_at(key_ptr, chunk * CHUNK - 1, T, SHIFT)) & (key < V)
    if ours:
        d = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        after = chunk + 1
        while keys_at(key_ptr, after * CHUNK, T, SHIFT) == key:
            j = after + tl.arange(0, ROWS)
            same = keys_at(key_ptr, j * CHUNK, T, SHIFT) == key
            share = share_ptr + (2 * j).to(tl.int64)[:, None] * D + d[None, :]
            total += tl.load(share, mask=same[:, None] & (d < D)[None, :], other=0.0)
            after += ROWS
        share = share_ptr + (2 * chunk + 1).to(tl.int64) * D + d
        dw = tl.load(share, mask=d < D, other=0.0) + tl.sum(total, axis=0)
        tl.store(dw_ptr + key.to(tl.int64) * D + d, dw.to(dw_ptr.dtype.element_ty), mask=d < D)


def key_type(rows: int) -> tuple[torch.dtype, int]:
    """The dtype of keys 0 .. rows, and what is subtracted from them: torch sorts 16 bits in half as many passes as 32."""
    return (torch.int16, 2**15) if rows < 2**16 else (torch.int32, 0)


def forward(tokens: Tensor, weight: Tensor, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The rows (..., D), and the keys (T,) if the gradient is needed."""
    V, D = weight.shape
    dtype, shift = key_type(V)
    y = weight.new_empty(*tokens.shape, D)
    keys = weight.new_empty(tokens.numel(), dtype=dtype) if needs_gradient else None
    if y.numel():
        flat, table = tokens.reshape(-1), rowwise.rows(weight)
        unit, (stride,) = rowwise.strides(table)
        columns = min(128, triton.next_power_of_2(D))
        rows = TILE // columns
        launch(
            forward_kernel, (triton.cdiv(len(flat), rows) * triton.cdiv(D, columns),),
            (flat, table, y, flat if keys is None else keys, len(flat), V, flat.stride(0), stride),
            dict(UNIT=unit, D=D, KEYS=needs_gradient, SHIFT=shift, ROWS=rows, COLUMNS=columns), dict(num_warps=4),
        )  # fmt: skip
    return y, keys


def backward(dy: Tensor, keys: Tensor, rows: int) -> Tensor:
    """The gradient (V, D) of the table, V = rows, in the dtype of dy (..., D)."""
    T, D = len(keys), dy.shape[-1]
    if dy.numel() == 0 or rows == 0:
        return dy.new_zeros(rows, D)
    _, shift = key_type(rows)
    dweight, flat = dy.new_empty(rows, D), rowwise.rows(dy)
    unit, (stride,) = rowwise.strides(flat)
    if rows <= ONE_HOT:
        columns = min(128, triton.next_power_of_2(D))
        tile, across = 512 // columns, triton.cdiv(D, columns)
        each = 4 if rows <= 16 else 2  # programs whose registers fit on a multiprocessor
        count = rowwise.programs(triton.cdiv(T, tile * 8), max(1, each // across), dy.device)
        shares = dy.new_empty(count, rows * D, dtype=torch.float32)
        launch(
            one_hot_kernel, (count, across), (flat, keys, shares, T, rows, stride),
            dict(UNIT=unit, D=D, SHIFT=shift, SUMS=triton.next_power_of_2(rows), ROWS=tile, COLUMNS=columns, AT_ONCE=8),
            dict(num_warps=4),
        )  # fmt: skip
        rowwise.add_up(shares, dweight)
        return dweight
    ordered, positions = in_order(keys, rows)
    chunks = triton.cdiv(T, CHUNK)
    shares = dy.new_empty(chunks, 2, D, dtype=torch.float32)
    columns = min(512 // dy.element_size(), triton.next_power_of_2(D))  # a warp loads 16 bytes per thread
    launch(
        runs_kernel, (chunks * triton.cdiv(D, columns) + triton.cdiv(rows, ZEROED),),
        (flat, ordered, positions, dweight, shares, T, rows, chunks, T.bit_length(), stride),
        dict(UNIT=unit, D=D, SHIFT=shift, CHUNK=CHUNK, ZEROED=ZEROED, COLUMNS=columns), dict(num_warps=1),
    )  # fmt: skip
    if chunks > 1:
        columns = min(128, triton.next_power_of_2(D))
        launch(
            borders_kernel, ((chunks - 1) * triton.cdiv(D, columns),), (ordered, shares, dweight, T, rows, chunks),
            dict(D=D, SHIFT=shift, CHUNK=CHUNK, ROWS=SHARES // columns, COLUMNS=columns), dict(num_warps=8),
        )  # fmt: skip
    return dweight


def in_order(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The keys (T,) in order, and the position of each among `keys`, int64; equal keys stay in their order."""
    T = len(keys)
    if T > RANKED or (rows + 1) * T >= 2**31:
        return torch.sort(keys, stable=True)
    _, shift = key_type(rows)
    ordered, positions = torch.empty_like(keys), keys.new_empty(T, dtype=torch.int64)
    launch(
        rank_kernel, (triton.cdiv(T, 16),), (keys, ordered, positions, T),
        dict(SHIFT=shift, ROWS=16, COLUMNS=512), dict(num_warps=8),
    )  # fmt: skip
    return ordered, positions

"""Shared by the row-wise operators: a tensor as rows, the tile of a program, and sums over rows."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


class Tile(NamedTuple):
    """The tile of a program of `warps` warps: `rows` rows of `columns` elements, both powers of 2."""

    rows: int
    columns: int
    warps: int


def tile(columns: int) -> Tile:
    """The tile for rows of `columns` elements: 8 elements per thread, several rows if they are short."""
    columns = triton.next_power_of_2(columns)
    elements = max(1024, columns)
    return Tile(elements // columns, columns, min(16, elements // 256))


def rows(t: Tensor) -> Tensor:
    """t (..., D) as (N, D) with D contiguous: a view where the strides allow it."""
    flat = t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def strides(*flat: Tensor) -> tuple[int, list[int]]:
    """The largest power of 2, at most 8, that divides the row stride of each of these (N, D), and the strides divided by it.
    `start` shows the compiler this common factor, so that it can load several elements at once."""
    unit = math.gcd(8, *(t.stride(0) for t in flat))
    return unit, [t.stride(0) // unit for t in flat]


@triton.jit
def start(row, stride, UNIT: tl.constexpr):
    """The offsets of the first elements of rows, [ROWS, 1]."""
    return row[:, None] * stride * UNIT


@triton.jit(do_not_specialize=["SHARES"])
def sum_kernel(share_ptr, sum_ptr, SHARES, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, SHARES, ROWS):
        share = first + tl.arange(0, ROWS)
        here = (share < SHARES)[:, None] & (d < D)[None, :]
        total += tl.load(share_ptr + share[:, None] * D + d[None, :], mask=here, other=0.0)
    tl.store(sum_ptr + d, tl.sum(total, axis=0).to(sum_ptr.dtype.element_ty), mask=d < D)


def add_up(shares: Tensor, out: Tensor) -> None:
    """Sums the rows of shares (N, D), contiguous and float32, into `out` of D elements, always in the same order."""
    count, D = shares.shape
    launch(sum_kernel, (triton.cdiv(D, 8),), (shares, out, count), dict(D=D, ROWS=1024, COLUMNS=8), dict(num_warps=8))


def programs(tiles: int, each: int, device: torch.device) -> int:
    """Number of programs for `tiles` tiles: `each` per multiprocessor, or one per tile if that is fewer."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(tiles, multiprocessors * each)

"""The gate of SwiGLU in plain Triton; op.py has the equations. A program computes one tile of the result, or of both
gradients."""

import triton
import triton.language as tl
from torch import Tensor

from ... import fused_rowwise as rowwise
from ...fused_rowwise import start
from ...launch import launch

COLUMNS = 128  # per tile: H is seldom a power of 2, and the part of a tile beyond H is idle


@triton.jit
def tile_of(N, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns of this program, and which of them exist. Neighbouring programs share rows."""
    across: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column[None, :], (row < N)[:, None] & (column < H)[None, :]


@triton.jit(do_not_specialize=["N", "sh"])
def forward_kernel(h_ptr, a_ptr, N, sh, UNIT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, here = tile_of(N, H, ROWS, COLUMNS)
    at = h_ptr + start(row, sh, UNIT) + column
    gate = tl.load(at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(at + H, mask=here, other=0.0).to(tl.float32)
    a = gate * tl.sigmoid(gate) * value
    tl.store(a_ptr + row[:, None] * H + column, a.to(a_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "sda", "sh"])
def backward_kernel(
    da_ptr, h_ptr, dh_ptr, N, sda, sh, UNIT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, here = tile_of(N, H, ROWS, COLUMNS)
    da = tl.load(da_ptr + start(row, sda, UNIT) + column, mask=here, other=0.0).to(tl.float32)
    at = h_ptr + start(row, sh, UNIT) + column
    gate = tl.load(at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(at + H, mask=here, other=0.0).to(tl.float32)
    p = tl.sigmoid(gate)
    dgate = da * value * p * (1 + gate * (1 - p))
    dvalue = da * gate * p
    at = dh_ptr + row[:, None] * (2 * H) + column
    tl.store(at, dgate.to(dh_ptr.dtype.element_ty), mask=here)
    tl.store(at + H, dvalue.to(dh_ptr.dtype.element_ty), mask=here)


def forward(h: Tensor) -> Tensor:
    a = h.new_empty(*h.shape[:-1], h.shape[-1] // 2)
    if a.numel():
        _launch(forward_kernel, rowwise.rows(h), a)
    return a


def backward(da: Tensor, h: Tensor) -> Tensor:
    """The gradient of h, (..., 2H) in its dtype."""
    dh = h.new_empty(h.shape)
    if dh.numel():
        _launch(backward_kernel, rowwise.rows(da), rowwise.rows(h), dh)
    return dh


def _launch(kernel, *tensors: Tensor) -> None:
    """tensors: inputs as rows, h the last of them, then the output."""
    *inputs, h, _ = tensors
    N, H = len(h), h.shape[1] // 2
    tile = rowwise.tile(min(COLUMNS, H))
    unit, strides = rowwise.strides(*inputs, h)
    launch(
        kernel, (triton.cdiv(N, tile.rows) * triton.cdiv(H, tile.columns),),
        (*tensors, N, *strides),
        dict(UNIT=unit, H=H, ROWS=tile.rows, COLUMNS=tile.columns), dict(num_warps=tile.warps),
    )  # fmt: skip

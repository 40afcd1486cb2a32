"""The residual addition and its RMSNorm in plain Triton; op.py has the equations.

A program of the forward holds one tile of rows. The backward has a fixed number of programs, each of which processes
many tiles and keeps its partial sum of the weight's gradient in registers; a second kernel adds the partial sums in a fixed
order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import fused_rowwise as rowwise
from ...fused_rowwise import start
from ...launch import launch

WARPS = 32  # warps of the backward per multiprocessor: as many as its registers hold for rows of up to 4096


@triton.jit(do_not_specialize=["N", "sx", "sy"])
def forward_kernel(
    x_ptr, y_ptr, w_ptr, s_ptr, n_ptr, r_ptr, N, sx, sy,
    UNIT: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    here = (row < N)[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    s = tl.load(x_ptr + start(row, sx, UNIT) + d[None, :], mask=here, other=0.0).to(tl.float32)
    if ADD:
        s += tl.load(y_ptr + start(row, sy, UNIT) + d[None, :], mask=here, other=0.0).to(tl.float32)
        kept = s.to(s_ptr.dtype.element_ty)
        tl.store(s_ptr + at, kept, mask=here)
        s = kept.to(tl.float32)  # the norm is computed from s as it is returned
    r = tl.rsqrt(tl.sum(s * s, axis=1) / D + EPS)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(n_ptr + at, (s * r[:, None] * w[None, :]).to(n_ptr.dtype.element_ty), mask=here)
    tl.store(r_ptr + row, r, mask=row < N)


@triton.jit(do_not_specialize=["N", "sds", "sdn", "ss"])
def backward_kernel(
    ds_ptr, dn_ptr, s_ptr, w_ptr, r_ptr, dx_ptr, dy_ptr, share_ptr, N, sds, sdn, ss,
    UNIT: tl.constexpr, D: tl.constexpr, HAS_DS: tl.constexpr, HAS_DY: tl.constexpr, HAS_DW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, COLUMNS)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row = i * ROWS + tl.arange(0, ROWS).to(tl.int64)
        here = (row < N)[:, None] & (d < D)[None, :]
        s = tl.load(s_ptr + start(row, ss, UNIT) + d[None, :], mask=here, other=0.0).to(tl.float32)
        dn = tl.load(dn_ptr + start(row, sdn, UNIT) + d[None, :], mask=here, other=0.0).to(tl.float32)
        dx = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_DS:
            dx = tl.load(ds_ptr + start(row, sds, UNIT) + d[None, :], mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < N, other=0.0)[:, None]
        unit = s * r
        if HAS_DW:
            dw += dn * unit
        g = dn * w[None, :]
        dx += r * (g - unit * (tl.sum(g * unit, axis=1) / D)[:, None])
        at = row[:, None] * D + d[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
        if HAS_DY:
            tl.store(dy_ptr + at, dx.to(dy_ptr.dtype.element_ty), mask=here)
    if HAS_DW:
        tl.store(share_ptr + tl.program_id(0) * D + d, tl.sum(dw, axis=0), mask=d < D)


def forward(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """s and n of the shape of x, n in `dtype`; r (rows,) float32."""
    s = x if y is None else x.new_empty(x.shape)
    n = x.new_empty(x.shape, dtype=dtype)
    D = len(weight)
    r = x.new_empty(x.numel() // max(1, D), dtype=torch.float32)
    if x.numel():
        flat, tile = rowwise.rows(x), rowwise.tile(D)
        added = flat if y is None else rowwise.rows(y)
        unit, strides = rowwise.strides(flat, added)
        launch(
            forward_kernel, (triton.cdiv(len(r), tile.rows),),
            (flat, added, weight.contiguous(), s, n, r, len(r), *strides),
            dict(UNIT=unit, D=D, EPS=eps, ADD=y is not None, ROWS=tile.rows, COLUMNS=tile.columns),
            dict(num_warps=tile.warps),
        )  # fmt: skip
    return s, n, r


def backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, weight: Tensor, r: Tensor, y_dtype: torch.dtype | None, needs_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, in the dtype of s; of y, in y_dtype (None without one); of the weight, None unless it is needed."""
    dx = s.new_empty(s.shape)
    dy = None if y_dtype is None else s.new_empty(s.shape, dtype=y_dtype)
    dweight = weight.new_empty(weight.shape) if needs_weight else None
    if not s.numel():
        return dx, dy, dweight.zero_() if needs_weight else None
    D, tile, flat = len(weight), rowwise.tile(len(weight)), rowwise.rows(s)
    into_s, into_n = flat if ds is None else rowwise.rows(ds), rowwise.rows(dn)
    unit, strides = rowwise.strides(into_s, into_n, flat)
    count = rowwise.programs(triton.cdiv(len(r), tile.rows), WARPS // tile.warps, s.device)
    shares = r.new_empty(count, D) if needs_weight else r
    launch(
        backward_kernel, (count,),
        (into_s, into_n, flat, weight.contiguous(), r, dx, dx if dy is None else dy, shares, len(r), *strides),
        dict(UNIT=unit, D=D, HAS_DS=ds is not None, HAS_DY=dy is not None, HAS_DW=needs_weight,
             ROWS=tile.rows, COLUMNS=tile.columns),
        dict(num_warps=tile.warps),
    )  # fmt: skip
    if needs_weight:
        rowwise.add_up(shares, dweight)
    return dx, dy, dweight

"""The loss per token and the gradient of its logits, in plain Triton; op.py has the equations.

A program processes a tile of ROWS tokens by BLOCK logits: many tokens if the vocabulary is small, one if it is large. In the
forward it reads the logits of its tokens once, keeping the largest so far and Σ exp(l - largest). In the backward it computes
the gradient of one tile. Logits of tokens that are not scored are never read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import launch

BLOCK = 8192  # logits of one token that a program processes at a time
TILE = 2048  # the same for several tokens
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def targets_of(t_ptr, t, T, st, IGNORE: tl.constexpr):
    """The targets of tokens t, and which of them are scored."""
    target = tl.load(t_ptr + t * st, mask=t < T, other=0).to(tl.int64)
    return target, (t < T) & (target != IGNORE)


@triton.jit
def logits_of(row, v, scored, width, sxv):
    """(ROWS, BLOCK) in float32; undefined for tokens that are not scored and for columns v >= width. The mask compares with
    width, not V: where it is a multiple of 16 the loads are of 16 bytes."""
    return tl.load(row[:, None] + v.to(tl.int64) * sxv, mask=scored[:, None] & (v < width)).to(tl.float32)


@triton.jit(do_not_specialize=["T", "V"])
def loss_kernel(
    x_ptr, t_ptr, loss_ptr, sum_ptr, right_ptr, T, V, width, sxt, sxv, st,
    IGNORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCK)[None, :]
    target, scored = targets_of(t_ptr, t, T, st, IGNORE)
    row = x_ptr + t * sxt
    # a target that is not a class gives NaN without a read
    valid = scored & (target >= 0) & (target < V)
    here = tl.load(row + target * sxv, mask=valid, other=float("nan")).to(tl.float32)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    for v0 in range(0, tl.where(tl.max(scored.to(tl.int32), axis=0) > 0, V, 0), BLOCK):
        x = logits_of(row, v0 + block, scored, width, sxv)
        if v0 + BLOCK > V:
            x = tl.where(v0 + block < V, x, -float("inf"))  # exp(-inf) adds nothing
        new = tl.maximum(largest, tl.max(x, axis=1))
        known = tl.where(new == -float("inf"), 0.0, new)  # all -inf so far: avoids inf - inf
        total = total * tl.exp2((largest - known) * LOG2E) + tl.sum(tl.exp2((x - known[:, None]) * LOG2E), axis=1)
        largest = new
    log_sum = largest + tl.log2(total) * LN2
    loss = log_sum - here
    # the first of several equal largest logits counts: if the target has the largest, those before it are read again
    before = tl.where(here == largest, target, 0).to(tl.int32)
    tied = tl.zeros([ROWS], tl.int32)
    for v0 in range(0, tl.max(before, axis=0), BLOCK):
        x = logits_of(row, v0 + block, scored, width, sxv)
        tied = tl.maximum(tied, tl.max(((x == largest[:, None]) & (v0 + block < before[:, None])).to(tl.int32), axis=1))
    tl.store(loss_ptr + t, tl.where(scored, loss, 0.0), mask=t < T)
    tl.store(sum_ptr + t, tl.where(loss == loss, log_sum, loss), mask=t < T)  # a NaN loss has NaN gradients
    tl.store(right_ptr + t, (here == largest) & (tied == 0) & (loss == loss), mask=t < T)


@triton.jit(do_not_specialize=["T", "V"])
def gradient_kernel(
    d_ptr, x_ptr, t_ptr, sum_ptr, dx_ptr, T, V, width, sd, sxt, sxv, st, sdx,
    IGNORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    target, scored = targets_of(t_ptr, t, T, st, IGNORE)
    d = tl.load(d_ptr + t * sd, mask=scored, other=0.0)[:, None]  # 0 for tokens that are not scored, whatever their d
    log_sum = tl.load(sum_ptr + t, mask=scored, other=0.0)[:, None]
    x = logits_of(x_ptr + t * sxt, v, scored, width, sxv)
    p = tl.where(scored[:, None] & (v < V), tl.exp2((x - log_sum) * LOG2E), 0.0)
    dx = d * (p - tl.where(v == target[:, None], 1.0, 0.0))
    # dx may be x, because every logit of the tile has been read
    tl.store(dx_ptr + (t * sdx)[:, None] + v, dx.to(dx_ptr.dtype.element_ty), mask=(t < T)[:, None] & (v < width))


def padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight (V, D) in `dtype`, followed by rows of zeros, so that rows of logits start at multiples of 32 bytes; where they do
    not start at multiples of 16, cuBLAS uses its slowest kernels. A small V stays small; a large one is rounded up to whole
    tiles of a product."""
    V, D = weight.shape
    pad = -V % (16 if V < 1024 else 64)
    if pad == 0 and weight.dtype == dtype:
        return weight
    wide = weight.new_empty(V + pad, D, dtype=dtype)
    wide[:V].copy_(weight)
    wide[V:].zero_()
    return wide


def forward(logits: Tensor, targets: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss per token and its log Σ exp, (T,) float32, and whether the target is the top prediction, (T,) bool, from the
    first `classes` columns of the logits."""
    tokens, width = logits.shape
    losses, log_sums = (logits.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    right = logits.new_empty(tokens, dtype=torch.bool)
    if tokens:
        tile, options = _tile(width)
        launch(
            loss_kernel, (triton.cdiv(tokens, tile["ROWS"]),),
            (logits, targets, losses, log_sums, right, tokens, classes, width, *logits.stride(), targets.stride(0)),
            dict(IGNORE=ignore_index) | tile, options,
        )  # fmt: skip
    return losses, log_sums, right


def backward(
    dlosses: Tensor, logits: Tensor, targets: Tensor, log_sums: Tensor, ignore_index: int, classes: int, out: Tensor
) -> None:
    """Writes the gradient of the logits into `out`, contiguous and of their shape; it may be the logits themselves. It is zero
    where the target is ignored and in columns past `classes`."""
    tokens, width = logits.shape
    if logits.numel():
        tile, options = _tile(width)
        launch(
            gradient_kernel, (triton.cdiv(tokens, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"])),
            (dlosses, logits, targets, log_sums, out, tokens, classes, width,
             dlosses.stride(0), *logits.stride(), targets.stride(0), width),
            dict(IGNORE=ignore_index) | tile, options,
        )  # fmt: skip


def _tile(width: int) -> tuple[dict, dict]:
    block = min(BLOCK, max(16, triton.next_power_of_2(width)))
    rows = max(1, TILE // block)
    return dict(ROWS=rows, BLOCK=block), dict(num_warps=8 if rows * block > TILE else 4)

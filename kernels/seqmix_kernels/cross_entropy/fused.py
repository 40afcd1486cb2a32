"""The loss of each token and the gradient of its logits, in plain Triton; op.py has the equations.

A program of the forward walks one token's logits once, keeping the largest so far and Σ exp(l - largest). A program of the
backward makes one block of one token's gradient.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

BLOCK, WARPS = 8192, 8  # logits of a program at a time
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["V"])
def loss_kernel(x_ptr, t_ptr, loss_ptr, sum_ptr, V, sxt, sxv, st, IGNORE: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = x_ptr + t * sxt
    largest = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for v0 in range(0, V, BLOCK):
        v = v0 + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(row + v * sxv, mask=v < V, other=-float("inf")).to(tl.float32)  # exp(-inf) adds nothing
        new = tl.maximum(largest, tl.max(x, axis=0))
        known = tl.where(new == -float("inf"), 0.0, new)  # all -inf so far: no inf - inf
        total = total * tl.exp2((largest - known) * LOG2E) + tl.sum(tl.exp2((x - known) * LOG2E), axis=0)
        largest = new
    log_sum = largest + tl.log2(total) * LN2
    target = tl.load(t_ptr + t * st).to(tl.int64)
    scored = target != IGNORE
    # a target that is no class is read nowhere and gives NaN
    here = tl.load(row + target * sxv, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    tl.store(sum_ptr + t, log_sum)
    tl.store(loss_ptr + t, tl.where(scored, log_sum - here, 0.0))


@triton.jit(do_not_specialize=["V"])
def gradient_kernel(
    d_ptr, x_ptr, t_ptr, sum_ptr, dx_ptr, V, sd, sxt, sxv, st, IGNORE: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(t_ptr + t * st).to(tl.int64)
    d = tl.load(d_ptr + t * sd)
    x = tl.load(x_ptr + t * sxt + v * sxv, mask=v < V, other=0.0).to(tl.float32)
    p = tl.exp2((x - tl.load(sum_ptr + t)) * LOG2E)
    dx = tl.where(target != IGNORE, d * (p - tl.where(v == target, 1.0, 0.0)), 0.0)
    tl.store(dx_ptr + t * V + v, dx.to(dx_ptr.dtype.element_ty), mask=v < V)


def why_not(logits: Tensor) -> str | None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        if logits.device.type != "cpu":
            return "Triton's interpreter is on and the logits are not on the CPU"
    elif logits.device.type != "cuda":
        return f"it needs a CUDA device, the logits are on {logits.device.type}"
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {logits.dtype}"
    return None


def forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss and log Σ exp of each token, (T,) float32."""
    losses, log_sums = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    if logits.numel():
        launch(
            loss_kernel, (len(logits),),
            (logits, targets, losses, log_sums, logits.shape[1], *logits.stride(), targets.stride(0)),
            dict(IGNORE=ignore_index, BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1]))), dict(num_warps=WARPS),
        )  # fmt: skip
    return losses, log_sums


def backward(dlosses: Tensor, logits: Tensor, targets: Tensor, log_sums: Tensor, ignore_index: int) -> Tensor:
    """The gradient of the logits (T, V), in their dtype."""
    tokens, size = logits.shape
    dlogits = logits.new_empty(tokens, size)
    if logits.numel():
        block = min(BLOCK, triton.next_power_of_2(size))
        launch(
            gradient_kernel, (tokens, triton.cdiv(size, block)),
            (dlosses, logits, targets, log_sums, dlogits, size, dlosses.stride(0), *logits.stride(), targets.stride(0)),
            dict(IGNORE=ignore_index, BLOCK=block), dict(num_warps=WARPS),
        )  # fmt: skip
    return dlogits

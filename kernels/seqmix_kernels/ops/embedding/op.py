"""The public operator: its contract and the choice of an implementation.

    y_t = W[token_t]          ∂W[v] = Σ of ∂y_t over the t with token_t = v

In plain torch on a GPU the gradient takes about ten kernels, and for a small V one of them adds with atomics, so that the
result is not reproducible. Here the sums are in float32 and in a fixed order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...frame import FUSES, Impl, Operator, refuse_twice

MOST_ROWS = 2**31 - 2  # the kernels count them in 32 bits


def _limit(weight: Tensor) -> str | None:
    return f"it takes at most {MOST_ROWS} rows, not {len(weight)}" if len(weight) > MOST_ROWS else None


OPERATOR = Operator(
    __package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", limit=_limit, plain_tensors=True), compiled=FUSES
)
IMPLS, which_impl = OPERATOR.names, OPERATOR.which_impl  # what decides the choice: weight


def embedding(tokens: Tensor, weight: Tensor, impl: str = "auto") -> Tensor:
    """The row of `weight` for each token.

    Args:
        tokens: (...), int64 or int32, any strides, in 0 .. V-1.
        weight: (V, D), any strides, any float dtype.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        (..., D) in weight's dtype. Differentiable in weight, with "fused" only once: create_graph=True raises a
        NotImplementedError. The gradient is bitwise reproducible on one model of GPU, and zero in the rows of tokens that do
        not occur.

    A token outside 0 .. V-1 raises an IndexError on the CPU. "fused" neither reads nor writes outside the table and does not
    synchronize with the device to report it: the row of such a token is NaN and has no gradient, whereas torch triggers a
    device assert.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be (V, D) and real; got shape {tuple(weight.shape)}, {weight.dtype}")
    if tokens.dtype not in (torch.int64, torch.int32) or tokens.device != weight.device:
        raise ValueError(f"tokens must be int64 or int32 on {weight.device} like weight; got {tokens.dtype} on {tokens.device}")
    if OPERATOR.choose(impl, weight) == "reference":
        return F.embedding(tokens, weight)
    if torch.is_grad_enabled() and weight.requires_grad:
        return _Embedding.apply(tokens, weight)
    from . import fused

    return fused.forward(tokens, weight, needs_gradient=False)[0]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        from . import fused

        y, keys = fused.forward(tokens, weight, needs_gradient=True)
        ctx.save_for_backward(keys)
        ctx.rows = len(weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        from . import fused

        refuse_twice("embedding")
        return None, fused.backward(dy, *ctx.saved_tensors, ctx.rows)

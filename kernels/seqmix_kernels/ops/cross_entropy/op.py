"""The public operators: their contracts and the choice of an implementation.

    l_tv   = Σ_d x_td W_vd                                         (linear_cross_entropy)
    loss_t = log Σ_v exp(l_tv) - l_{t, target_t}                   ∂l_tv = ∂loss_t (exp(l_tv - log Σ) - [v = target_t])

With V = 50,000 the logits are the largest tensor of a small language model. In plain torch the loss allocates three more
of that size in float32 (the log-softmax and two gradients): 12 bytes per element at the peak, besides the 2 of bfloat16
logits. The kernels read the logits twice, forward and backward, and write their gradient: this takes 2 more bytes per
element, or none where the operator computed the logits itself and may overwrite them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...frame import FUSES, Impl, Operator, autocast_dtype, autocast_off, refuse_twice
from ...product import product

OPERATOR = Operator(
    __package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", plain_tensors=True), compiled=FUSES
)
IMPLS, which_impl = OPERATOR.names, OPERATOR.which_impl  # what decides the choice: hidden states or logits


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """-log softmax(x weightᵀ)[target] per token, and whether the target is the model's top prediction.

    Args:
        x: (T, D), any strides: hidden states.
        weight: (V, D), any strides: the output embedding.
        targets: (T,) integers in 0 .. V-1, or ignore_index.
        impl: one of IMPLS; "auto" selects what `which_impl` returns for x.

    Returns:
        losses (T,) float32 (float64 if x is): 0 where the target is ignore_index. Differentiable in x and weight. "fused"
        overwrites its logits with their gradient: a second backward through the same graph raises a RuntimeError, and
        create_graph=True a NotImplementedError.
        right (T,) bool: True where the target has the largest logit and no class before it has an equal one; False where the
        target is ignore_index or the loss is NaN.

    Under autocast x and weight are cast to the autocast dtype, unless one of them is float64. Gradients have the dtypes of x
    and weight.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    if not (x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]):
        raise ValueError(f"x must be (T, D) and weight (V, D); got shapes {tuple(x.shape)} and {tuple(weight.shape)}")
    if not (x.is_floating_point() and weight.is_floating_point()) or x.device != weight.device:
        raise ValueError(
            f"x and weight must be real and on one device; got {x.dtype} on {x.device} and {weight.dtype} on {weight.device}"
        )
    _check_targets(targets, "x", x)
    dtype = x.dtype
    if weight.dtype != torch.float64 and (cast := autocast_dtype(x)):
        dtype = cast
    elif weight.dtype != dtype:
        raise ValueError(f"x and weight must share a dtype, where autocast casts neither; got {dtype} and {weight.dtype}")
    impl = OPERATOR.choose(impl, x)
    with autocast_off(x.device.type):
        if impl == "fused":
            return _LinearCrossEntropy.apply(x.to(dtype), weight, targets, ignore_index)
        logits = F.linear(x.to(dtype), weight.to(dtype))
        losses = reference(logits, targets, ignore_index)
        right = (logits.argmax(-1) == targets) & (targets != ignore_index) & ~losses.isnan()
        return losses, right


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100, impl: str = "auto") -> Tensor:
    """-log softmax(logits)[target] per token, for given logits.

    Args:
        logits: (T, V), any strides, any float dtype; the sums are in float32 (float64 if the logits are).
        targets: (T,) integers in 0 .. V-1, or ignore_index.
        impl: one of IMPLS; "auto" selects what `which_impl` returns for the logits.

    Returns:
        (T,) float32 (float64): 0 where the target is ignore_index. Differentiable in the logits, with "fused" only once.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be (T, V) and real; got shape {tuple(logits.shape)}, {logits.dtype}")
    _check_targets(targets, "logits", logits)
    if OPERATOR.choose(impl, logits) == "fused":
        return _CrossEntropy.apply(logits, targets, ignore_index)
    return reference(logits, targets, ignore_index)


def reference(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets.long(), ignore_index=ignore_index, reduction="none")


def _check_targets(targets: Tensor, name: str, x: Tensor) -> None:
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if targets.shape != x.shape[:1] or not whole or targets.device != x.device:
        raise ValueError(
            f"targets must be ({len(x)},) integers on {x.device} like {name}; got shape {tuple(targets.shape)}, "
            f"{targets.dtype} on {targets.device}"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index):
        from . import fused

        rows = fused.padded(weight, x.dtype)
        logits = F.linear(x, rows)
        losses, log_sums, right = fused.forward(logits, targets, ignore_index, len(weight))
        ctx.save_for_backward(x, rows, targets, log_sums, logits)
        ctx.ignore_index, ctx.size, ctx.dtype, ctx.overwritten = ignore_index, weight.shape, weight.dtype, False
        return losses, right

    @staticmethod
    def backward(ctx, dlosses, _):
        from . import fused

        refuse_twice("linear_cross_entropy")
        x, rows, targets, log_sums, logits = ctx.saved_tensors
        if ctx.overwritten:
            raise RuntimeError(
                "linear_cross_entropy can run backward once: its saved logits were overwritten by their gradient. "
                "Compute all gradients in one backward, or call it again."
            )
        ctx.overwritten = True
        fused.backward(dlosses, logits, targets, log_sums, ctx.ignore_index, ctx.size[0], out=logits)
        dx = dweight = None
        with autocast_off(x.device.type):
            if ctx.needs_input_grad[0]:
                dx = logits @ rows
            if ctx.needs_input_grad[1]:
                # with the padding rows, which cuBLAS needs here, too: without them this took 2.4 ms on an H200 instead of 1.7
                whole = x.new_empty(rows.shape, dtype=ctx.dtype)
                product(logits.t(), x, whole)
                dweight = whole[: ctx.size[0]]
        return dx, dweight, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        from . import fused

        losses, log_sums, _ = fused.forward(logits, targets, ignore_index, logits.shape[1])
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    def backward(ctx, dlosses):
        from . import fused

        refuse_twice("cross_entropy")
        logits, targets, log_sums = ctx.saved_tensors
        dlogits = logits.new_empty(logits.shape)
        fused.backward(dlosses, logits, targets, log_sums, ctx.ignore_index, logits.shape[1], out=dlogits)
        return dlogits, None, None

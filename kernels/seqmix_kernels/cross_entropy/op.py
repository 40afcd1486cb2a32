"""The public operator: its contract, the choice of an implementation.

    loss_t = log Σ_v exp(l_tv) - l_{t, target_t}          ∂l_tv = ∂loss_t (exp(l_tv - log Σ) - [v = target_t])

With V = 50,000 the logits are the largest tensor of a small language model. In plain torch the loss makes three more of them
in float32 (the logits, their log-softmax, its gradient): 14 bytes an element at the peak beside the 2 of bfloat16 logits.
The kernels read the logits twice, forward and backward, and write their gradient: 2 bytes an element more. Kept for the
backward: the logits, which the caller has, and log Σ, one float32 a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IMPLS = ("auto", "reference", "fused")


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100, impl: str = "auto") -> Tensor:
    """-log softmax(logits)[target], a token.

    Args:
        logits: (T, V), any strides, any float dtype; the sums are in float32 (float64 where the logits are).
        targets: (T,) integers in 0 .. V-1, or ignore_index.
        impl: one of IMPLS; "auto" is what `which_impl` answers.

    Returns:
        (T,) float32 (float64): 0 where the target is ignore_index. Differentiable in the logits, once.

    Raises:
        ValueError: a shape, dtype, device or name that does not fit, or an implementation that cannot run here.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be (T, V) and real; got shape {tuple(logits.shape)}, {logits.dtype}")
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    if targets.shape != logits.shape[:1] or not whole or targets.device != logits.device:
        raise ValueError(
            f"targets must be ({len(logits)},) integers on {logits.device} like logits; got shape {tuple(targets.shape)}, "
            f"{targets.dtype} on {targets.device}"
        )
    if impl == "auto":
        impl, _ = which_impl(logits)
    elif impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    elif impl == "fused" and (reason := why_not(logits)):
        raise ValueError(f"impl='fused' cannot run here: {reason}")
    if impl == "fused":
        return _CrossEntropy.apply(logits, targets, ignore_index)
    return reference(logits, targets, ignore_index)


def reference(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets.long(), ignore_index=ignore_index, reduction="none")


def which_impl(logits: Tensor) -> tuple[str, str]:
    """What "auto" takes for logits like these, and why: ("fused", "fused GPU kernels")."""
    if torch.compiler.is_compiling():
        return "reference", "torch.compile fuses it by itself"
    reason = why_not(logits)
    return ("fused", "fused GPU kernels") if reason is None else ("reference", f"fused cannot run: {reason}")


def why_not(logits: Tensor) -> str | None:
    """Why the kernels cannot run on logits like these; None if they can."""
    try:
        from . import fused  # imports Triton, which a machine without a GPU may lack
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused.why_not(logits)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, ignore_index):
        from . import fused

        losses, log_sums = fused.forward(logits, targets, ignore_index)
        ctx.save_for_backward(logits, targets, log_sums)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlosses):
        from . import fused

        return fused.backward(dlosses, *ctx.saved_tensors, ctx.ignore_index), None, None

"""The public operator: its contract and the choice of an implementation.

    s = x + y          r = 1 / sqrt(mean(s²) + eps)          n = s r weight

(RMSNorm: Zhang & Sennrich 2019, eq. 4.) A pre-norm block computes this between consecutive sublayers. The gradients, with
g = ∂n weight, are

    ∂x = ∂y = ∂s + r (g - s r² mean(g s))          ∂weight = Σ over rows of ∂n s r

The kernels read x and y once and write s and n once; the backward reads s, ∂s and ∂n once and writes ∂x and ∂y once. Saved for
the backward are s, as in plain torch, and r, one float32 per row, but not n.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...frame import FUSES, Impl, Operator, autocast_dtype, refuse_twice

LARGEST = 8192  # most elements of a row, which a program of the kernels holds in registers


def _limit(x: Tensor, *_) -> str | None:
    return f"it takes rows of at most {LARGEST} elements, not {x.shape[-1]}" if x.shape[-1] > LARGEST else None


OPERATOR = Operator(
    __package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", limit=_limit, plain_tensors=True), compiled=FUSES
)
IMPLS, which_impl = OPERATOR.names, OPERATOR.which_impl  # what decides the choice: x, y, weight


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float = 1e-5, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """The sum s = x + y and its RMSNorm n = s / sqrt(mean(s²) + eps) * weight, over the last dimension.

    Args:
        x: (..., D), the residual stream; any strides, any float dtype.
        y: (..., D) like x, the tensor added to it; any float dtype. None adds nothing.
        weight: (D,), any float dtype.
        eps: at least 0.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        s (..., D) in x's dtype; without y it shares memory with x and must not be modified in place.
        n (..., D), computed from s in float32 (float64 if x is): in the autocast dtype if autocast is enabled for x's device
        and x is not float64, otherwise in weight's dtype.
        Both are differentiable once with respect to x, y and weight.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be (..., D) and real; got shape {tuple(x.shape)}, {x.dtype}")
    for name, t, shape in (("y", y, x.shape), ("weight", weight, x.shape[-1:])):
        if t is not None and (t.shape != shape or not t.is_floating_point() or t.device != x.device):
            raise ValueError(
                f"{name} must be {tuple(shape)} and real, on {x.device} like x; got shape {tuple(t.shape)}, {t.dtype} "
                f"on {t.device}"
            )
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0; got {eps!r}")
    dtype = autocast_dtype(x) or weight.dtype
    if OPERATOR.choose(impl, x, y, weight) == "fused":
        return _AddRMSNorm.apply(x, y, weight, eps, dtype)
    return reference(x, y, weight, eps, dtype)


def reference(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    s = x if y is None else (x + y).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    return s, F.rms_norm(s.to(wide), weight.shape, weight.to(wide), eps).to(dtype)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, weight, eps, dtype):
        from . import fused

        s, n, r = fused.forward(x, y, weight, eps, dtype)
        ctx.save_for_backward(s, weight, r)
        ctx.y_dtype = None if y is None else y.dtype
        ctx.set_materialize_grads(False)
        return s, n

    @staticmethod
    def backward(ctx, ds, dn):
        from . import fused

        refuse_twice("add_rms_norm")
        _, needs_y, needs_weight, *_ = ctx.needs_input_grad
        y_dtype = ctx.y_dtype if needs_y else None
        if dn is None:  # dy is a copy, because autograd may add to a gradient in place
            return ds, None if y_dtype is None else ds.to(y_dtype, copy=True), None, None, None
        return *fused.backward(ds, dn, *ctx.saved_tensors, y_dtype, needs_weight), None, None

"""The public operator: its contract and the choice of an implementation.

    a = silu(gate) value          silu(x) = x σ(x)

(Shazeer 2020, "GLU Variants Improve Transformer", eq. 5, without its matrices.) gate and value are the halves of one
projection. The gradients are

    ∂gate = ∂a value σ(gate) (1 + gate (1 - σ(gate)))          ∂value = ∂a silu(gate)

In plain torch, autograd saves silu(gate) in addition to the halves and concatenates their gradients. The kernels save only h
and write its gradient once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IMPLS = ("auto", "reference", "fused")


def swiglu(h: Tensor, impl: str = "auto") -> Tensor:
    """silu(gate) * value of h = [gate, value] along the last dimension.

    Args:
        h: (..., 2H), the gate, then the value; any strides, any float dtype.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        (..., H) in h's dtype, computed in float32 (float64 if h is). Differentiable once.

    Raises:
        ValueError: an invalid shape, dtype or name, or an implementation that cannot run here.
    """
    if h.dim() == 0 or h.shape[-1] % 2 or not h.is_floating_point():
        raise ValueError(f"h must be (..., 2H) and real; got shape {tuple(h.shape)}, {h.dtype}")
    if impl == "auto":
        impl, _ = which_impl(h)
    elif impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    elif impl == "fused" and (reason := why_not(h)):
        raise ValueError(f"impl='fused' cannot run here: {reason}")
    return _SwiGLU.apply(h) if impl == "fused" else reference(h)


def reference(h: Tensor) -> Tensor:
    gate, value = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * value).to(h.dtype)


def which_impl(h: Tensor) -> tuple[str, str]:
    """What "auto" selects for an h like this, and why: ("fused", "fused GPU kernels")."""
    if torch.compiler.is_compiling():
        return "reference", "torch.compile fuses it by itself"
    reason = why_not(h)
    return ("fused", "fused GPU kernels") if reason is None else ("reference", f"fused cannot run: {reason}")


def why_not(h: Tensor) -> str | None:
    """Why the kernels cannot run on an h like this; None if they can."""
    try:
        from .. import fused_rowwise  # imports Triton, which a machine without a GPU may lack
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused_rowwise.why_not(h)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        from . import fused

        ctx.save_for_backward(h)
        return fused.forward(h)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, da):
        from . import fused

        return fused.backward(da, *ctx.saved_tensors)

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

from ...frame import FUSES, Impl, Operator, refuse_twice

OPERATOR = Operator(
    __package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", plain_tensors=True), compiled=FUSES
)
IMPLS, which_impl = OPERATOR.names, OPERATOR.which_impl  # what decides the choice: h


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
    return _SwiGLU.apply(h) if OPERATOR.choose(impl, h) == "fused" else reference(h)


def reference(h: Tensor) -> Tensor:
    gate, value = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * value).to(h.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        from . import fused

        ctx.save_for_backward(h)
        return fused.forward(h)

    @staticmethod
    def backward(ctx, da):
        from . import fused

        refuse_twice("swiglu")
        return fused.backward(da, *ctx.saved_tensors)

"""Registers autograd for an op and its backward by hand under the Autograd key: torch.library.register_autograd does the same
but takes 150 us more per call, longer than the kernels of a small step. It also makes second derivatives raise an error."""

from collections.abc import Callable

import torch
from torch import Tensor


def below(op: Callable) -> Callable:
    """`op`, called below the Autograd key, as an implementation under that key calls it."""

    def call(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    return call


def refuse_twice(name: str) -> None:
    """Raises an error in the backward of a torch.autograd.Function under create_graph=True. once_differentiable would not, if
    the incoming gradient is a constant: it ignores that gradients depend on tensors saved in the forward."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} is differentiable once, not with create_graph=True; impl='reference' is differentiable twice"
        )


def needs_gradient(inputs: tuple) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in inputs)


def register(name: str, apply: Callable, wanted: Callable[[tuple], bool], refusal: str) -> None:
    """seqmix::{name}_fwd runs `apply` (of a torch.autograd.Function) if gradients are enabled and `wanted(inputs)` is true.
    seqmix::{name}_bwd has no gradient: computing one raises a NotImplementedError with the text `refusal`."""
    forward, backward = (below(getattr(torch.ops.seqmix, f"{name}_{way}")) for way in ("fwd", "bwd"))

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return backward(*inputs)

        @staticmethod
        def backward(ctx, *_):
            raise NotImplementedError(refusal)

    def run_forward(*inputs):
        return (apply if torch.is_grad_enabled() and wanted(inputs) else forward)(*inputs)

    def run_backward(*inputs):
        return (Once.apply if torch.is_grad_enabled() and needs_gradient(inputs) else backward)(*inputs)

    torch.library.impl(f"seqmix::{name}_fwd", "Autograd", run_forward)
    torch.library.impl(f"seqmix::{name}_bwd", "Autograd", run_backward)

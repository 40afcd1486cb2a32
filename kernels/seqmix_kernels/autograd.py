"""Autograd of a registered op and its backward, by hand under the Autograd key: torch.library.register_autograd does the same
in 150 us more a call, more than the kernels of a small step take. And the refusal of a second derivative."""

from collections.abc import Callable

import torch
from torch import Tensor


def below(op: Callable) -> Callable:
    """`op`, called below the Autograd key: what an implementation under that key goes on to."""

    def call(*inputs):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    return call


def refuse_twice(name: str) -> None:
    """For the backward of a torch.autograd.Function. once_differentiable would not notice that gradients depend on tensors
    saved in the forward, where the gradient that arrives is a constant."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{name} is differentiable once, not with create_graph=True; impl='reference' is, twice")


def needs_gradient(inputs: tuple) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in inputs)


def register(name: str, apply: Callable, wanted: Callable[[tuple], bool], refusal: str) -> None:
    """Of seqmix::{name}_fwd: `apply`, a torch.autograd.Function's, where gradients are on and `wanted` of the inputs. Of
    seqmix::{name}_bwd: no gradient of its own; one that is asked for is a NotImplementedError that says `refusal`."""
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

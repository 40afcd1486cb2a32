"""The loss per token, from hidden states (with one tensor of logits) or from logits. `which_impl` returns what "auto" selects
and why."""

from .op import IMPLS, cross_entropy, linear_cross_entropy, which_impl

__all__ = ["IMPLS", "cross_entropy", "linear_cross_entropy", "which_impl"]

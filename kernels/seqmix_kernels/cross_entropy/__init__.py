"""The loss of each token from its logits, without a float32 copy of them. `which_impl` says what "auto" takes and why."""

from .op import IMPLS, cross_entropy, which_impl

__all__ = ["IMPLS", "cross_entropy", "which_impl"]

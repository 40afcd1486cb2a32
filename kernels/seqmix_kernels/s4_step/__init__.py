"""One token of an S4 or S4D layer. `which_impl` says what "auto" takes and why."""

from .op import IMPLS, gated_projection, s4_step, which_impl, why_not

__all__ = ["IMPLS", "gated_projection", "s4_step", "which_impl", "why_not"]

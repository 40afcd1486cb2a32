"""One token of an S4 or S4D layer. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, gated_projection, s4_step, which_impl, why_not

__all__ = ["IMPLS", "gated_projection", "s4_step", "which_impl", "why_not"]

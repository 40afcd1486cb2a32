"""One token of a Mamba block. `which_impl` says what "auto" takes and why."""

from .op import IMPLS, mamba_step, which_impl, why_not

__all__ = ["IMPLS", "mamba_step", "which_impl", "why_not"]

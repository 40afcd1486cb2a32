"""One token of a Mamba block. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, mamba_step, which_impl, why_not

__all__ = ["IMPLS", "mamba_step", "which_impl", "why_not"]

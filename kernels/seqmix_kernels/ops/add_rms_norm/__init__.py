"""The residual addition and the RMSNorm after it, fused in one pass. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, add_rms_norm, which_impl

__all__ = ["IMPLS", "add_rms_norm", "which_impl"]

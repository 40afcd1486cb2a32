"""The gate of SwiGLU, silu(gate) * value, in one pass. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, swiglu, which_impl

__all__ = ["IMPLS", "swiglu", "which_impl"]

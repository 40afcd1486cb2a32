"""Short causal depthwise convolution with a state: `causal_conv1d`, and `which_impl` for what "auto" takes and why."""

from .op import IMPLS, causal_conv1d, which_impl

__all__ = ["IMPLS", "causal_conv1d", "which_impl"]

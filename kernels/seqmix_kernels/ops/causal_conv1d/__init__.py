"""Short causal depthwise convolution with a state: `causal_conv1d`. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, causal_conv1d, which_impl

__all__ = ["IMPLS", "causal_conv1d", "which_impl"]

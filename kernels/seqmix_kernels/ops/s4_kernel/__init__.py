"""Convolution kernels of S4 and S4D. `which_impl` returns what "auto" selects and why; README.md has the mathematics."""

from .modes import conj, dense, discretize, dplr_modes, expm1, increment, power, real, row, times
from .op import IMPLS, dplr_kernel, dplr_layer_kernel, s4d_kernel, s4d_layer_kernel, which_impl, why_not

__all__ = [
    "IMPLS", "conj", "dense", "discretize", "dplr_kernel", "dplr_layer_kernel", "dplr_modes", "expm1", "increment", "power",
    "real", "row", "s4d_kernel", "s4d_layer_kernel", "times", "which_impl", "why_not",
]  # fmt: skip

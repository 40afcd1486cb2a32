"""Convolution kernels of S4 and S4D. `which_impl` says what "auto" takes and why; README.md has the mathematics."""

from .modes import conj, dense, discretize, expm1, increment, power, real, row, times
from .op import IMPLS, dplr_kernel, s4d_kernel, which_impl

__all__ = [
    "IMPLS", "conj", "dense", "discretize", "dplr_kernel", "expm1", "increment", "power", "real", "row", "s4d_kernel",
    "times", "which_impl",
]  # fmt: skip

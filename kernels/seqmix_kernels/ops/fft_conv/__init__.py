"""Long causal convolution by FFT. `which_impl` returns what "auto" selects and why; README.md has the mathematics."""

from .op import ACTIVATIONS, IMPLS, fft_conv, fft_conv_carry, which_impl, why_not
from .torch_forms import fft_length

__all__ = ["ACTIVATIONS", "IMPLS", "fft_conv", "fft_conv_carry", "fft_length", "which_impl", "why_not"]

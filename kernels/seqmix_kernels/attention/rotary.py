"""Rotary positions (Su et al. 2021, "RoFormer", §3.4.2), in the halves layout: pair i is numbers i and i + R/2 of a head."""

import functools

import torch
from torch import Tensor


def rotary_frequencies(width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """base^(-2i/width), (width/2,), in float32 or wider whatever `dtype`."""
    dtype = torch.promote_types(dtype, torch.float32)
    return (_compute if torch.compiler.is_compiling() else _kept)(width, base, device, dtype)


def _compute(width, base, device, dtype):
    return base ** (torch.arange(0, width, 2, device=device, dtype=dtype) / -max(width, 1))


@functools.cache
def _kept(width, base, device, dtype):
    with torch.inference_mode(False), torch.no_grad():
        return _compute(width, base, device, dtype)


def rotary_phases(positions: Tensor, width: int, base: float, shrink: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (..., 1, width/2) of t/shrink · base^(-2i/width) for positions t (...), integers.

    In float32 or wider whatever `dtype`: 16-bit numbers cannot tell position 256 from 257.
    """
    frequency = rotary_frequencies(width, base, positions.device, dtype)
    phase = (positions.to(frequency.dtype) / shrink)[..., None, None] * frequency  # (..., 1, R/2)
    return phase.cos(), phase.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (i, i + R/2) of the first R numbers of x (..., H, P) by phase i; result in the dtype of the phases."""
    half = cos.shape[-1]
    a, b, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)

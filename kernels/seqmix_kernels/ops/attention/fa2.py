"""The flash-attn package (FlashAttention-2, Dao 2023), if the user has built it."""

import functools
import importlib

import torch
from torch import Tensor

from ... import frame


def why_not(case) -> str | None:
    if case.device.type != "cuda":
        return f"it needs an NVIDIA GPU, q is on the {case.device.type.upper()}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, q is {str(case.dtype)[6:]}"
    major, minor = torch.cuda.get_device_capability(case.device)
    if major < 8:
        return f"it needs compute capability 8.0, this GPU has {major}.{minor}"
    if case.head_dim > 256:
        return f"heads are at most 256 wide, these are {case.head_dim} with padding and positions"
    if case.cached:
        return "it takes no lengths"
    return missing()


@frame.constant
def missing() -> str | None:
    """Why the package cannot be used; None if it can."""
    return _missing()


@functools.cache
def _missing() -> str | None:
    try:
        package = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"the flash-attn package cannot be imported ({error}); it is built with pip install flash-attn"
    if not hasattr(package, "flash_attn_func"):  # flash-attn-4 installs into the same folder
        return "the flash-attn package is not installed; it is built with pip install flash-attn"
    return None


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    offsets: Tensor | None,
    lengths: None,
    dropout: float,
    longest: int | None = None,
) -> Tensor:
    """On (B, L, H, P); with offsets on (B L, H, P)."""
    package = importlib.import_module("flash_attn")
    options = {
        "dropout_p": dropout,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if offsets is None:
        return package.flash_attn_func(q, k, v, **options)
    return package.flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, **options)

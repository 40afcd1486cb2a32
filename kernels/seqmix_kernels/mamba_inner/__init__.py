"""The Mamba block from u to y under one autograd node, saving as little as asked for. README.md has the bytes."""

from .op import LEVELS, mamba_inner, saved_bytes, which_impls

__all__ = ["LEVELS", "mamba_inner", "saved_bytes", "which_impls"]

"""The inside of the Mamba block as one autograd node that saves only what its level asks for. README.md counts the bytes."""

from .op import LEVELS, mamba_inner, saved_bytes, which_impls

__all__ = ["LEVELS", "mamba_inner", "saved_bytes", "which_impls"]

"""Embedding whose gradient is summed in a fixed order. `which_impl` returns what "auto" selects and why."""

from .op import IMPLS, embedding, which_impl

__all__ = ["IMPLS", "embedding", "which_impl"]

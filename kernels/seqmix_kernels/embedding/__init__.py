"""Rows of a table by number, and the sums of their gradients in a fixed order. `which_impl` says what "auto" takes and why."""

from .op import IMPLS, embedding, which_impl

__all__ = ["IMPLS", "embedding", "which_impl"]

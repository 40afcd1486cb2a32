"""Mamba's selective scan. `which_impl` says what "auto" takes and why; README.md has the mathematics."""

from .op import IMPLS, selective_scan, which_impl

__all__ = ["IMPLS", "selective_scan", "which_impl"]

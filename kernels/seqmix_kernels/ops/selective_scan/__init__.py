"""Mamba's selective scan. `which_impl` returns what "auto" selects and why; README.md has the mathematics."""

from .op import IMPLS, selective_scan, which_impl

__all__ = ["IMPLS", "selective_scan", "which_impl"]

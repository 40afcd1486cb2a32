"""Mamba's selective scan. `which_impl` returns what "auto" selects and why; README.md has the mathematics."""

from .op import DISCRETIZATIONS, IMPLS, selective_scan, which_impl, why_not

__all__ = ["DISCRETIZATIONS", "IMPLS", "selective_scan", "which_impl", "why_not"]

"""Mamba's selective scan: `selective_scan` is the operator, `which_impl` says what "auto" takes and why. See README.md."""

from .op import IMPLS, selective_scan, which_impl

__all__ = ["IMPLS", "selective_scan", "which_impl"]

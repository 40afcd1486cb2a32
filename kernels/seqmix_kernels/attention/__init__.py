"""Causal softmax attention. `which_impl` says what "auto" takes and why; README.md has the mathematics."""

from .op import IMPLS, Case, alibi_slopes, attention, case_of, which_impl

__all__ = ["IMPLS", "Case", "alibi_slopes", "attention", "case_of", "which_impl"]

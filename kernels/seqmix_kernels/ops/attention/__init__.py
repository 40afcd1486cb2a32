"""Causal softmax attention. `which_impl` returns what "auto" selects and why; README.md has the mathematics."""

from .op import IMPLS, Case, alibi_slopes, attention, case_of, take_choices, tried_choices, which_impl, why_not
from .rotary import rotary_phases, rotate, rotate_queries_and_keys
from .step import STEP_IMPLS, attention_step

__all__ = [
    "IMPLS",
    "STEP_IMPLS",
    "Case",
    "alibi_slopes",
    "attention",
    "attention_step",
    "case_of",
    "rotary_phases",
    "rotate",
    "rotate_queries_and_keys",
    "take_choices",
    "tried_choices",
    "which_impl",
    "why_not",
]

"""Sequence-mixing operators, one folder each: the equation (reference.py), fast forms of it, and one public function.

Importing this package needs torch alone: no Triton, no GPU, no compiler.
"""

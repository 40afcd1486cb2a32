"""Sequence-mixing operators, one folder each: the equation (reference.py), fast forms of it, and one public function.

    from seqmix_kernels.selective_scan import selective_scan

Importing an operator needs torch alone: Triton is imported, and C compiled, when a call first takes such a form.
"""

__version__ = "0.1.0"  # of the distributions seqmix and seqmix-kernels

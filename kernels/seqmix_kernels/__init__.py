"""Sequence-mixing operators. Each is one public function, and one folder under ops/ with its equation and its fast forms.

    from seqmix_kernels import selective_scan

Importing an operator needs torch alone: Triton is imported, and C compiled, when a call first takes such a form.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ops.add_rms_norm import add_rms_norm as add_rms_norm
    from .ops.attention import attention as attention
    from .ops.attention import attention_step as attention_step
    from .ops.causal_conv1d import causal_conv1d as causal_conv1d
    from .ops.cross_entropy import cross_entropy as cross_entropy
    from .ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .ops.embedding import embedding as embedding
    from .ops.fft_conv import fft_conv as fft_conv
    from .ops.mamba_inner import mamba_inner as mamba_inner
    from .ops.mamba_step import mamba_step as mamba_step
    from .ops.s4_kernel import dplr_layer_kernel as dplr_layer_kernel
    from .ops.s4_kernel import s4d_layer_kernel as s4d_layer_kernel
    from .ops.s4_step import gated_projection as gated_projection
    from .ops.s4_step import s4_step as s4_step
    from .ops.selective_scan import selective_scan as selective_scan
    from .ops.swiglu import swiglu as swiglu

__version__ = "0.1.0"  # of the distributions seqmix and seqmix-kernels

# public function -> its folder
FOLDERS = {
    "add_rms_norm": "add_rms_norm",
    "attention": "attention",
    "attention_step": "attention",
    "causal_conv1d": "causal_conv1d",
    "cross_entropy": "cross_entropy",
    "dplr_layer_kernel": "s4_kernel",
    "embedding": "embedding",
    "fft_conv": "fft_conv",
    "gated_projection": "s4_step",
    "linear_cross_entropy": "cross_entropy",
    "mamba_inner": "mamba_inner",
    "mamba_step": "mamba_step",
    "s4_step": "s4_step",
    "s4d_layer_kernel": "s4_kernel",
    "selective_scan": "selective_scan",
    "swiglu": "swiglu",
}


def __getattr__(name: str):
    if name not in FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.ops.{FOLDERS[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *FOLDERS))

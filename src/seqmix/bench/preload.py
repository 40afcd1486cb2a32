"""Imported once, by the server that is forked for every point: what a point's process would import, or compute, for itself.

Nothing here touches a GPU: a process forked from one that had could not use it.
"""

import contextlib
import importlib

MODULES = (
    "seqmix.bench.__main__", "seqmix.bench.kernels", "seqmix.bench.point", "seqmix.channel_mixers", "seqmix.mixers.attention",
    "seqmix.mixers.lstm", "seqmix.mixers.mamba", "seqmix.mixers.rnn", "seqmix.mixers.s4", "seqmix.mixers.s4d",
    "seqmix_kernels.cross_entropy", "torch.profiler",
)  # fmt: skip
WITH_TRITON = (
    "attention.fused_rotary", "attention.fused_step", "causal_conv1d.fused", "cross_entropy.fused", "fft_conv.fused",
    "mamba_inner.inner", "mamba_step.fused", "s4_kernel.fused", "s4_step.fused", "selective_scan.fused",
    "selective_scan.gluon_kernels",
)  # fmt: skip


def load() -> None:
    for name in MODULES:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # a machine without a GPU may lack Triton
        for name in WITH_TRITON:
            importlib.import_module(f"seqmix_kernels.{name}")
    with contextlib.suppress(ImportError):
        hash_triton()


def hash_triton() -> None:
    """Triton's hash of itself, a second's work, is part of the name of every kernel in its cache on disk. It is remembered."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        from triton.compiler.compiler import triton_key
    triton_key()


load()

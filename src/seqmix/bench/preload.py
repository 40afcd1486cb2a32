"""Imported once, by the server that is forked for every point: what a point's process would import, or compute, for itself.

Nothing here touches a GPU: a process forked from one that had could not use it.
"""

import contextlib
import importlib
import pkgutil

import seqmix.mixers
import seqmix_kernels

MODULES = ("seqmix.bench.__main__", "seqmix.bench.kernels", "seqmix.bench.point", "seqmix.channel_mixers")
MODULES += ("torch.profiler", "torch.utils.flop_counter")
# a kernel package's modules that import Triton, by their names
LAUNCHING = ("fused", "fused_rotary", "fused_step", "gluon_kernels", "inner")


def load() -> None:
    mixers = pkgutil.iter_modules(seqmix.mixers.__path__, "seqmix.mixers.")
    for name in (*MODULES, *(module.name for module in mixers)):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # a machine without a GPU may lack Triton
        for module in pkgutil.walk_packages(seqmix_kernels.__path__, "seqmix_kernels."):
            if module.name.rpartition(".")[2] in LAUNCHING:
                importlib.import_module(module.name)
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

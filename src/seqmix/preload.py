"""What a fork server imports for its children, beside what its caller names: every mixer and task, and Triton's kernels.

Nothing here touches a GPU: a process forked from one that had could not use it.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

# a kernel package's modules that import Triton, by their names
LAUNCHING = ("fused", "fused_rotary", "fused_step", "gluon_backward", "gluon_forward", "inner")


def load(*names: str, kernels: bool = True) -> None:
    """Import `names`, all of seqmix.mixers and seqmix.tasks, and with `kernels` the modules that launch Triton's kernels."""
    for package in map(importlib.import_module, ("seqmix.mixers", "seqmix.tasks")):
        names += tuple(module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    for name in names:
        importlib.import_module(name)
    if kernels:
        with contextlib.suppress(ImportError):  # a machine without a GPU may lack Triton
            for module in pkgutil.walk_packages(importlib.import_module("seqmix_kernels").__path__, "seqmix_kernels."):
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

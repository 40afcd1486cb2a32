"""`python train.py ...` in a process that a fork server starts: the server has imported what the script imports."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

from seqmix import preload


def prepare(script: str, kernels: bool) -> None:
    """In the server: import what the script and its jobs import. All jobs run the code that is on disk now, and say so."""
    execute(script, "__mp_main__")  # the name that multiprocessing gives a script whose `__main__` part is not to run
    preload.load("torch._dynamo", "torch.distributed.fsdp", kernels=kernels)
    from seqmix import tracking

    tracking.source_state = functools.cache(tracking.source_state)
    tracking.source_state()


def run(script: str, arguments: Sequence[str], env: Mapping[str, str], output: int, lock: int) -> None:
    """In the job: `python script *arguments` in the environment `env`, which prints to `output`. `lock` is kept open.

    If CUDA cannot be used in a fork (an import in the server has opened it), a new Python takes this process over.
    """
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    if env.get("CUDA_VISIBLE_DEVICES") and not torch.cuda.is_available():
        os.set_inheritable(lock, True)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    sys.argv = [script, *arguments]
    execute(script, "__main__")


def execute(script: str, name: str) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = script
    exec(_code(script), module.__dict__)


@functools.cache
def _code(script: str) -> object:
    return compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)

"""A run folder belongs to one run, whose config.yaml is in it, and to one process at a time, which holds its lock.

Both are checked before Hydra or the run writes to the folder. A run with the same config may use the folder again, from the
start or from a checkpoint. A run that resumes from a checkpoint in the folder may differ in settings that a resume may change
(trainer.max_steps, callbacks, ...).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf, read_write

from seqmix.config import find_checkpoint
from seqmix.display import refuse
from seqmix.folders import lock, read_file
from seqmix.identity import changed, flat, matters
from seqmix.sweep.jobs import in_a_sweep
from seqmix.sweep.names import resolved


class ClaimFolder(Callback):
    """Hydra calls this before it makes the folder of a single run or of a job in the queue. Only rank zero takes the lock."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        HydraConfig.instance().set_config(config)  # as run_job does later: the folder's name needs it
        with read_write(config.hydra):
            folder = config.hydra.run.dir = str(config.hydra.run.dir)
            if rank_zero_only.rank != 0:
                config.hydra.output_subdir = None  # rank zero writes .hydra/
        if rank_zero_only.rank != 0:
            return
        if in_a_sweep():  # the name of a job's folder contains a hash of its config, and the queue has checked it
            lock(Path(folder))
        else:
            claim(Path(folder), resolved(config, os.path.abspath(folder)))


def claim(folder: Path, cfg: DictConfig) -> None:
    """Lock `folder` for the run of `cfg`. Exits with code 2 and a one-line error if it holds another run or is in use."""
    if (folder / "config.yaml").is_file():
        mine = flat(OmegaConf.to_container(cfg, resolve=True))
        try:
            other = flat(read_file(folder / "config.yaml"))
            checkpoint = find_checkpoint(cfg)
        except ValueError as error:
            refuse(str(error))
        resumes = checkpoint is not None and checkpoint.resolve().is_relative_to(folder.resolve())
        inside = os.path.abspath(folder)
        for key, before in changed(other, mine, "resume" if resumes else "job").items():
            if not any(str(value).startswith(inside) for value in (before, mine.get(key))):  # its own paths do not count
                last = folder / "checkpoints" / "last.ckpt"
                also = f", or resume that run with ckpt={last}" if not matters(key, "resume") and last.is_file() else ""
                found = f"{key} is {before!r} there and {mine.get(key)!r} here"
                refuse(f"{folder} holds another run: {found}; name another folder, or remove this one{also}")
    lock(folder)

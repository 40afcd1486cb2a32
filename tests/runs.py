"""Runs made small, for the tests: the real config, the real train(), in a folder of the test's own."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
from omegaconf import open_dict
from train import train

from seqmix.config import compose_run

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
SMALL = (
    "size.d_model=16", "size.n_layer=1", "task.batch_size=4", "task.eval_batch_size=8", "task.eval_samples=16",
    "trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu",
    "scheduler.warmup_steps=0",
)  # fmt: skip
SELECTIVE_COPY = ("task.seq_len=12", "task.n_tokens=3")


class Raise(L.Callback):
    """Raises after an optimizer step, as a machine that goes away would."""

    def __init__(self, step: int, error: Exception):
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        if trainer.global_step == self.step:
            raise self.error


def start(folder: Path, *overrides: str, error_at: tuple[int, Exception] | None = None) -> dict:
    """A small run in `folder`; an override wins over the small sizes where both name a key."""
    folder.mkdir()
    cfg = compose_run([*SMALL, "logger=csv", *overrides], CONF, folder)
    if error_at is not None:
        with open_dict(cfg.callbacks):
            step, error = error_at
            cfg.callbacks["raise"] = {"_target_": "runs.Raise", "step": step, "error": {"_target_": _path(error), "_args_": list(error.args)}}  # fmt: skip  # noqa: E501
    return train(cfg, folder)


def small(*overrides: str) -> list[str]:
    """The overrides over the small sizes, the later of two: a command line may set a key once."""
    return list({override.split("=")[0]: override for override in (*SMALL, *overrides)}.values())


def command(cwd: Path, *overrides: str, env: dict | None = None, launcher: tuple[str, ...] = (), multirun: bool = False):
    """`python train.py ...` in a process of its own, standing in `cwd`; an override wins over the small sizes."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
    line = [sys.executable, *launcher, str(ROOT / "train.py"), *["-m"][:multirun], *small(*overrides)]
    return subprocess.run(
        line, capture_output=True, text=True, env=clean | (env or {}), timeout=240, cwd=cwd, stdin=subprocess.DEVNULL
    )


def metrics(folder: Path, name: str) -> dict[int, str]:
    """One column of metrics.csv, as written, by step."""
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): row[name] for row in csv.DictReader(file) if row.get(name)}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _path(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"

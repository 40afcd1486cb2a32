"""Runs made small, for the tests: the real config, the real train(), in a folder of the test's own."""

import csv
import functools
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
from omegaconf import open_dict
from train import train

from seqmix.config import compose_run
from seqmix.fork_server import Server

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
    """`python train.py ...` in a process of its own, standing in `cwd`; an override wins over the small sizes.

    The process is forked from one that has imported what train.py does, which saves seconds per run; with a launcher (torchrun)
    it is a new interpreter, as it is in the tests of the start (test_startup.py, test_display.py)."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))} | (env or {})
    arguments = [*["-m"][:multirun], *small(*overrides)]
    if launcher:
        line = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments]
        return subprocess.run(line, capture_output=True, text=True, env=env, timeout=240, cwd=cwd, stdin=subprocess.DEVNULL)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = _server().start(_main, cwd, arguments, env, descriptors=(out.fileno(), err.fileno()))
        code = child.poll(240)
        out.seek(0)
        err.seek(0)
        assert code is not None, f"train.py {arguments} has not ended: {err.read()[-3000:]}"
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


@functools.cache
def _server() -> Server:
    return Server(importlib.import_module, "runs")


def _main(cwd: Path, arguments: list[str], env: dict, out: int, err: int) -> None:
    """What `python train.py` does once the interpreter runs."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, stream in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(number, stream)
        os.close(number)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))  # as a new interpreter does
    sys.argv = [str(ROOT / "train.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def metrics(folder: Path, name: str) -> dict[int, str]:
    """One column of metrics.csv, as written, by step."""
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): row[name] for row in csv.DictReader(file) if row.get(name)}


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _path(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"

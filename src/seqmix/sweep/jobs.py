"""One job of a sweep: its process, how it ended, and the files that are written for it if it dies too early."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from seqmix.folders import read_file
from seqmix.fork_server import die_with_parent

log = logging.getLogger(__name__)
ENDS = ("complete", "failed", "oom", "diverged", "interrupted", "killed")  # values of status in summary.json
PARENT = "SEQMIX_SWEEP"  # set for the process of a job: the process id of its sweep
GONE = {-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM}


@dataclass
class Job:
    """A job as sweep.json records it.

    status: queued, running, complete, failed, oom, diverged, interrupted, killed (kill -9, or by the system when memory ran
    out), skipped (an earlier command had run it). attempts: processes that this command has started for it; `retried` of them
    followed a failure. halvings: how often any command has halved its micro-batch. seconds: duration of the last process.
    isolated: a GPU fault, its own or that of a job on the same GPU, ended it under MPS; since then it runs without MPS.
    """

    number: int
    run_id: str
    folder: str
    overrides: list[str]
    status: str = "queued"
    error: str | None = None
    attempts: int = 0
    retried: int = 0
    halvings: int = 0
    isolated: bool = False
    exit_code: int | None = None
    seconds: float | None = None
    result: float | None = None  # token accuracy: test, else validation
    seen: float = field(default=0.0, repr=False)  # when a command last included it, seconds since the epoch

    @property
    def path(self) -> Path:
        return Path(self.folder)


def in_a_sweep() -> bool:
    """Whether this process runs a job of a queue. If so, on Linux, it gets SIGTERM (save and stop) when the queue's process
    dies."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return False
    if os.getppid() == int(parent):  # else a fork server's job, or a runner's
        die_with_parent()
    return True


def take_up(folder: Path) -> tuple[dict | None, Path | None]:
    """What an earlier process left in a job's folder: (its summary if it is complete, its last.ckpt if there is one).

    The summary of an unfinished job is removed.
    """
    summary = read_summary(folder)
    if summary.get("status") == "complete":
        return summary, None
    if PARENT not in os.environ:  # else the queue has removed it, and other ranks may have written a new one
        (folder / "summary.json").unlink(missing_ok=True)
        os.environ |= wandb_names(folder)
    last = folder / "checkpoints" / "last.ckpt"
    return None, last if last.is_file() else None


def wandb_names(folder: Path) -> dict[str, str]:
    """The environment variables that give a job one wandb run, which a resumed job continues; the sweep is its group.

    A random token per sweep folder distinguishes the run from that of the same config in another folder or on another machine.
    """
    token = folder.parent / ".token"
    if not token.exists():
        token.write_text(secrets.token_hex(2))
    return {
        "WANDB_RUN_ID": f"{folder.name.rsplit('-', 1)[-1]}-{token.read_text()}",
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": folder.parent.name,
        "WANDB_JOB_TYPE": "train",
    }


def objective(summary: Mapping) -> float:
    """What a search minimises: the best validation loss; infinite for a run that is not complete, or has none."""
    value = summary.get("best/val/loss")
    return float(value) if summary.get("status") == "complete" and value is not None else math.inf


def outcome(exit_code: int, summary: Mapping, last_line: str) -> tuple[str, str | None]:
    """(status, error) of a process that has ended: from its summary.json if that has a status, else from its exit code."""
    if "status" in summary:
        return summary["status"], summary.get("error")
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "killed", "SIGKILL: by hand, or by the system when memory ran out"
    if exit_code in GONE:
        return "interrupted", f"{signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name} before training"
    if exit_code < 0:
        return "failed", f"{signal.Signals(-exit_code).name}; {last_line}"
    return "failed", f"exit code {exit_code} and no summary.json; {last_line}"


def read_summary(folder: Path) -> dict:
    """summary.json, or {} if there is none, or, with a warning, if it cannot be read (cut short by a full disk)."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    try:
        return read_file(path)
    except ValueError as error:
        log.warning("%s; the run counts as unfinished", error)
        return {}


def read_jobs(sweep: Path) -> list[Job]:
    """The jobs in sweep.json, or [] if there is none. ValueError, which names the file, if it is broken."""
    path = sweep / "sweep.json"
    if not path.exists():
        return []
    try:
        return [Job(**job) for job in read_file(path)["jobs"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the record of a sweep ({type(error).__name__}: {error})") from error


def accuracy(summary: Mapping) -> float | None:
    return summary.get("test/token_accuracy", summary.get("val/token_accuracy"))


def write_json(plain: Mapping, path: Path) -> None:
    """Write a JSON file atomically."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def last_line(path: Path, starting: str = "") -> str:
    """The last line in the last 4 KiB of a log that begins with `starting`, or ''."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip().startswith(starting) and line.strip()), "")


def halved(cfg: DictConfig, times: int) -> list[str]:
    """Overrides that compute the rows of a step in 2^times as many micro-batches; [] if there are too few rows.

    cfg: the resolved config, without halvings. Evaluation batches shrink by the same factor, and limits of their number grow.
    """
    rows = (cfg.micro_batch_size or cfg.task.batch_size) >> times
    if times == 0 or rows == 0:
        return []
    overrides = [f"micro_batch_size={rows}", f"task.eval_batch_size={max(1, cfg.task.eval_batch_size >> times)}"]
    for key in ("limit_val_batches", "limit_test_batches"):
        if isinstance(cfg.trainer.get(key), int):
            overrides.append(f"trainer.{key}={cfg.trainer[key] << times}")
    return overrides


def prepare(folder: Path, cfg: DictConfig, hydra: DictConfig, overrides: list[str]) -> None:
    """Write what a report needs to know about a job, in case it dies before it can do so. The job writes it again."""
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    if not (folder / "checkpoints" / "last.ckpt").is_file():  # else the job has written it, with resumed_over
        OmegaConf.save(cfg, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), folder / ".hydra" / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    (folder / "summary.json").unlink(missing_ok=True)


def quoted(value: str) -> str:
    """A value quoted so that Hydra's grammar and OmegaConf read it literally."""
    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", value), Quote.single).with_quotes()

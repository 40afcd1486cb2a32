"""One job of a sweep: its process, how it ended, what it leaves when it could not say so itself."""

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
ENDS = ("complete", "failed", "oom", "diverged", "interrupted", "killed")  # how a job can have ended, in its summary.json
PARENT = "SEQMIX_SWEEP"  # set for the process of a job: the process id of its sweep
GONE = {-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM}


@dataclass
class Job:
    """A job as sweep.json records it.

    status: queued, running, complete, failed, oom, diverged, interrupted, killed (kill -9, or the system for want of
    memory), skipped (it was complete). attempts: processes that this command has started for it, of which `retried` after
    a failure. halvings: how often its micro-batch was halved, ever. seconds: of the last process.
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
    exit_code: int | None = None
    seconds: float | None = None
    result: float | None = None  # token accuracy: test, else validation
    seen: float = field(default=0.0, repr=False)  # when a command last asked for it, seconds since the epoch

    @property
    def path(self) -> Path:
        return Path(self.folder)


def in_a_sweep() -> bool:
    """Whether this process is a job's; if so it is told (SIGTERM: save and stop) when its sweep dies without a word."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return False
    if os.getppid() == int(parent):  # else a fork server's job, or a runner's
        die_with_parent()
    return True


def take_up(folder: Path) -> tuple[dict | None, Path | None]:
    """What the folder of a job holds from an earlier time: (its summary if it is complete, its last.ckpt if there is one).

    What an unfinished job said of itself is removed.
    """
    summary = read_summary(folder)
    if summary.get("status") == "complete":
        return summary, None
    if PARENT not in os.environ:  # else the sweep has done it, and other ranks may have written since
        (folder / "summary.json").unlink(missing_ok=True)
        os.environ |= wandb_names(folder)
    last = folder / "checkpoints" / "last.ckpt"
    return None, last if last.is_file() else None


def wandb_names(folder: Path) -> dict[str, str]:
    """The environment that gives a job its wandb run: the same again when it goes on, its sweep as the group.

    A token, drawn once for a sweep's folder, tells the run from that of the same config in another folder, or elsewhere.
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
    """(status, error) of a process that has ended: its own word if it left one in summary.json, else its exit code's."""
    if "status" in summary:
        return summary["status"], summary.get("error")
    if exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "killed", "SIGKILL: by hand, or by the system for want of memory"
    if exit_code in GONE:
        return "interrupted", f"{signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name} before training"
    if exit_code < 0:
        return "failed", f"{signal.Signals(-exit_code).name}; {last_line}"
    return "failed", f"exit code {exit_code} and no summary.json; {last_line}"


def read_summary(folder: Path) -> dict:
    """summary.json, or {} where there is none; also, with a warning, where it cannot be read (cut short by a full disk)."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    try:
        return read_file(path)
    except ValueError as error:
        log.warning("%s; its run counts as not ended", error)
        return {}


def read_jobs(sweep: Path) -> list[Job]:
    """The jobs in sweep.json, or [] where there is none. ValueError, which names the file, where it is broken."""
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
    """Whole or not at all."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def last_line(path: Path, starting: str = "") -> str:
    """The last line of the last 4 KiB of a log that begins so, or ''."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip().startswith(starting) and line.strip()), "")


def halved(cfg: DictConfig, times: int) -> list[str]:
    """Overrides under which the rows of a step are computed in 2^times as many micro-batches; [] where there are too few.

    cfg: the resolved config of the whole batch. An evaluation's batches are as much smaller, and limits of their number grow.
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
    """What a report needs to place a job, also one that dies before it can write it; the job writes it again."""
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    if not (folder / "checkpoints" / "last.ckpt").is_file():  # else the job has written it, and what it was resumed over
        OmegaConf.save(cfg, folder / "config.yaml")
    OmegaConf.save(OmegaConf.create({"hydra": hydra}), folder / ".hydra" / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    (folder / "summary.json").unlink(missing_ok=True)


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as it is, and OmegaConf too."""
    return QuotedString(re.sub(r"(\\*)\$\{", r"\1\1\\${", value), Quote.single).with_quotes()

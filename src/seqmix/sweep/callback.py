"""The first and the last word of a multirun, whichever launcher runs it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from seqmix.sweep import table
from seqmix.sweep.jobs import Job, accuracy, quoted, read_jobs, read_summary


class SweepTable(Callback):
    """Names the folder of a sweep; at the end its table, and exit code 1 where a job is not complete."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.started = time.time()
        folder = str(config.hydra.sweep.dir)
        # each job composes anew, from overrides of its own: it must not name the sweep after them
        config.hydra.sweep.dir = folder
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        Path(folder).mkdir(parents=True, exist_ok=True)  # an Optuna storage in it is opened before the first job

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [job for job in read_jobs(folder) if job.seen >= self.started] or jobs_of_folders(folder)
        table.show(folder, jobs)
        if table.bad(jobs):
            raise SystemExit(1)


def jobs_of_folders(sweep: Path) -> list[Job]:
    """What the folders of a sweep tell, where the launcher kept no record: `unfinished` for one without a summary."""
    jobs = []
    for number, path in enumerate(sorted(sweep.glob("*/.hydra/overrides.yaml"), key=lambda p: p.stat().st_mtime)):
        folder = path.parent.parent
        summary = read_summary(folder)
        overrides = yaml.safe_load(path.read_text(encoding="utf-8"))
        job = Job(number, folder.name, str(folder), overrides, summary.get("status", "unfinished"), summary.get("error"))
        job.result, job.seconds = accuracy(summary), summary.get("seconds")
        jobs.append(job)
    return jobs

"""The first and the last word of a multirun, whichever launcher runs it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from seqmix.display import refuse
from seqmix.folders import lock, read_file
from seqmix.sweep import table
from seqmix.sweep.jobs import Job, accuracy, quoted, read_jobs, read_summary

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """Names the folder of a sweep and locks it; at the end its table, and exit code 1 where a job is not complete."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.started = time.time()
        folder = str(config.hydra.sweep.dir)
        # each job composes anew, from overrides of its own: it must not name the sweep after them
        config.hydra.sweep.dir = folder
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        lock(Path(folder))  # makes it, too: an Optuna storage in it is opened before the first job
        try:
            read_jobs(Path(folder))
        except ValueError as error:
            refuse(f"{error}; restore it, or remove it together with the folders of jobs that are not complete")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        jobs = [job for job in read_jobs(folder) if job.seen >= self.started] or jobs_of_folders(folder)
        table.show(folder, jobs)
        if table.bad(jobs):
            raise SystemExit(1)


def jobs_of_folders(sweep: Path) -> list[Job]:
    """What the folders of a sweep tell, where the launcher kept no record: `unfinished` for one without a summary.

    A folder whose overrides cannot be read is skipped, with a warning.
    """
    jobs = []
    for number, path in enumerate(sorted(sweep.glob("*/.hydra/overrides.yaml"), key=lambda p: p.stat().st_mtime)):
        folder = path.parent.parent
        try:
            overrides = [str(override) for override in read_file(path, list)]
        except ValueError as error:
            log.warning("%s; it is left out of the table", error)
            continue
        summary = read_summary(folder)
        job = Job(number, folder.name, str(folder), overrides, summary.get("status", "unfinished"), summary.get("error"))
        job.result, job.seconds = accuracy(summary), summary.get("seconds")
        jobs.append(job)
    return jobs

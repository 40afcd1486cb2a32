"""What happens before and after a multirun, with any launcher."""

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
    """Names the folder of a sweep and locks it. At the end it shows the table; exit code 1 unless all jobs are complete."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.started = time.time()
        folder = str(config.hydra.sweep.dir)
        # each job is composed from overrides of its own, by which the sweep must not be named
        config.hydra.sweep.dir = folder
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(folder)}")
        lock(Path(folder))  # also makes the folder: an Optuna storage in it is opened before the first job
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
    """The jobs of a sweep according to their folders, for launchers that keep no record. A job without a summary is
    `unfinished`. A folder whose overrides cannot be read is skipped, with a warning.
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

"""What is shown of a sweep: in a terminal a live table, elsewhere a line per start and end; after it, a table of all jobs.

outputs/sweeps/model-seed-3fa9c1d27b  9/24 done, 2 running, 1 failed, 12 queued  0:02:10 < 0:03:31
running   model=mamba seed=1   step 1450/2600 (56%), 0:00:33 left, train/loss 0.412
failed    model=lstm seed=0    ValueError: ...
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import rich.live
from rich.console import Group
from rich.table import Table
from rich.text import Text

from seqmix import display
from seqmix.sweep.jobs import Job, last_line

DONE = ("complete", "skipped")
STYLE = {"complete": "green", "skipped": "dim", "running": "cyan", "queued": "dim", "interrupted": "yellow"}  # else red
SHOWN = 12  # failures in the live table


class Live:
    """`with Live(...) as live`: call `started` and `ended` for each job, and `refresh` as often as you like."""

    def __init__(self, folder: Path, jobs: Sequence[Job], n_jobs: int, steps: Mapping[str, int], sharing: str = ""):
        """steps: run_id -> the optimizer steps of the whole run, or -1. sharing: words about jobs that share a GPU."""
        self.folder, self.jobs, self.n_jobs, self.steps, self.sharing = folder, jobs, n_jobs, steps, sharing
        self.console = display.console(stderr=True)
        self.labels = labels(jobs)
        self.began = self.drawn = time.monotonic()
        self.first: dict[int, int] = {}  # job's number -> steps that earlier processes had taken
        self.live = None

    def __enter__(self) -> Live:
        if self.console.is_terminal:
            self.live = rich.live.Live(self._draw(), console=self.console, auto_refresh=False, transient=True)
            self.live.start()
        else:
            steps = sum(max(0, self.steps[job.run_id]) for job in self.jobs if job.status == "queued")
            self.say(f"sweep {self.folder}: {self._counts()}; {steps:,} steps; at most {self.n_jobs} at once{self.sharing}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def started(self, job: Job) -> None:
        self.first.setdefault(job.number, _steps_of(job))
        if self.live is None:
            self.say(f"start     {self.labels[job.run_id]}" + (f"  (attempt {job.attempts})" if job.attempts > 1 else ""))

    def ended(self, job: Job) -> None:
        word = "retry" if job.status == "queued" else job.status
        line = f"{word:9} {self.labels[job.run_id]}  {result(job)}  {job.seconds:.1f} s"
        if self.live is None:
            left = self._seconds_left()
            words = [self._counts(), f"{self._rate():,.0f} steps/s", *([] if left is None else [f"{_clock(left)} left"])]
            self.say(f"{line}  [{', '.join(words)}]")
        elif job.status not in DONE:
            self.say(line)

    def say(self, line: str) -> None:
        self.console.print(display.visible(line), soft_wrap=True)

    def refresh(self) -> None:
        if self.live is not None and time.monotonic() - self.drawn >= 0.5:
            self.drawn = time.monotonic()
            self.live.update(self._draw(), refresh=True)

    def _draw(self) -> Group:
        left = self._seconds_left()
        passed = _clock(time.monotonic() - self.began)
        head = f"{self.folder}  {self._counts()}  {passed}" + (f" < {_clock(left)}" if left is not None else "")
        head += f"  {self._rate():,.0f} steps/s, at most {self.n_jobs} at once{self.sharing}"
        rows = Table(box=None, show_header=False, pad_edge=False)
        for job in [j for j in self.jobs if j.status == "running"]:
            step = display.visible(last_line(job.path / "output.log", display.PROGRESS))
            rows.add_row(_colored("running"), self.labels[job.run_id], step)
        bad = [j for j in self.jobs if j.status not in (*DONE, "running", "queued")]
        for job in bad[-SHOWN:]:
            rows.add_row(_colored(job.status), self.labels[job.run_id], result(job))
        return Group(Text(head, style="bold"), rows)

    def _counts(self) -> str:
        count = Counter(job.status for job in self.jobs)
        skipped = f" ({count['skipped']} skipped)" if count["skipped"] else ""
        words = [f"{count['complete'] + count['skipped']}/{len(self.jobs)} done{skipped}"]
        words += [f"{n} {status}" for status, n in count.items() if status not in DONE]
        return ", ".join(words)

    def _rate(self) -> float:
        """Optimizer steps per second of all jobs of this command, since it began. What a running job has not printed yet, at
        most its last 15 seconds, is missing."""
        steps = sum(max(0, _steps_of(job) - self.first[job.number]) for job in self.jobs if job.number in self.first)
        return steps / (time.monotonic() - self.began)

    def _seconds_left(self) -> float | None:
        """Extrapolated from the share of the work that is done: an ended job counts 1, a running one the share of its steps."""
        asked = [job for job in self.jobs if job.status != "skipped"]
        done = sum(self._share(job) for job in asked)
        return (time.monotonic() - self.began) * (len(asked) - done) / done if done else None

    def _share(self, job: Job) -> float:
        if job.status not in ("queued", "running"):
            return 1.0
        first, steps = self.first.get(job.number, 0), self.steps[job.run_id]
        return (_steps_of(job) - first) / (steps - first) if job.status == "running" and steps > first else 0.0


def _steps_of(job: Job) -> int:
    """The steps of a job so far, according to its last line of progress."""
    words = last_line(job.path / "output.log", display.PROGRESS).removeprefix(display.PROGRESS)
    return int(re.match(r"\d*", words)[0] or 0)


def show(folder: Path, jobs: Sequence[Job]) -> None:
    """Print one line per job; a failed job with its error."""
    count = Counter(job.status for job in jobs)
    shared = " ".join(_shared(jobs))
    table = Table(
        title=f"{len(jobs)} jobs in {folder}: " + ", ".join(f"{n} {status}" for status, n in count.items()),
        caption=f"all with {shared}" if shared else None,
    )
    for column in ("job", "status", "token accuracy, or error"):
        table.add_column(column, overflow="fold")
    table.add_column("s", justify="right")
    names = labels(jobs)
    for job in jobs:
        again = f" ({job.attempts} attempts)" if job.attempts > 1 else ""
        seconds = "" if job.seconds is None else f"{job.seconds:.0f}"
        table.add_row(names[job.run_id], Text.assemble(_colored(job.status), again), Text(result(job)), seconds)
    display.console(stderr=True).print(table)


def labels(jobs: Sequence[Job]) -> dict[str, str]:
    """run_id -> the overrides of the job, without those that all jobs share; if none is left, its number."""
    shared = set(_shared(jobs))
    own = {job.run_id: " ".join(o for o in job.overrides if o not in shared) or f"job {job.number}" for job in jobs}
    return {run_id: display.visible(text) for run_id, text in own.items()}


def result(job: Job) -> str:
    if job.status in DONE and not job.error:
        return "" if job.result is None else f"{job.result:.4f}"
    return display.visible(" ".join((job.error or "").split())[:300])


def _shared(jobs: Sequence[Job]) -> list[str]:
    if len(jobs) < 2:
        return []
    return [o for o in jobs[0].overrides if all(o in job.overrides for job in jobs)]


def _colored(status: str) -> Text:
    return Text(status, style=STYLE.get(status, "red"))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def bad(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that count as failures, including those that were skipped with an error or not run."""
    return [job for job in jobs if job.status not in DONE or job.error]

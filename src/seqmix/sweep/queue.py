"""The queue of a sweep: each job runs `python train.py ...` in a process of its own, at most `n_jobs` at once. On Linux a
fork server that has imported what jobs need starts them; with `hydra.launcher.runner` each job imports for itself.

sweep.json in the sweep's folder is the record of its jobs, rewritten at each change; output.log in a job's folder has
all that its processes have printed. The queue's process trains nothing and uses no GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from seqmix import signatures
from seqmix.display import refuse
from seqmix.folders import lock
from seqmix.fork_server import Child, Server
from seqmix.sweep import script as scripts
from seqmix.sweep import sharing, table
from seqmix.sweep.jobs import (
    ENDS,
    PARENT,
    Job,
    accuracy,
    halved,
    last_line,
    objective,
    outcome,
    prepare,
    quoted,
    read_jobs,
    read_summary,
    wandb_names,
    write_json,
)
from seqmix.sweep.names import resolved, run_id
from seqmix.tracking import source_facts, source_state

log = logging.getLogger(__name__)
# overrides of Hydra's config that concern the sweep, and are not passed to its jobs
OF_THE_SWEEP = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Settings:
    """The settings in conf/hydra/launcher/queue.yaml, which explains them. ValueError for an invalid one."""

    n_jobs: int | None
    jobs_per_gpu: int | str
    gpus_per_job: int
    threads: int | None
    retries: int
    max_failures: int | None
    on_oom: str
    skip: Sequence[str]
    runner: Sequence[str | int]
    grace_seconds: float

    def __post_init__(self):
        for name, least in (("n_jobs", 1), ("gpus_per_job", 1), ("threads", 1), ("retries", 0), ("max_failures", 1)):
            value = getattr(self, name)
            if value is None and name in ("n_jobs", "threads", "max_failures"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"hydra.launcher.{name} must be an integer of at least {least}, got {value!r}")
        if self.jobs_per_gpu != "auto" and (not signatures.fits(self.jobs_per_gpu, int) or self.jobs_per_gpu < 1):
            raise ValueError(f"hydra.launcher.jobs_per_gpu must be auto or at least 1, got {self.jobs_per_gpu!r}")
        if not self.grace_seconds >= 0:
            raise ValueError(f"hydra.launcher.grace_seconds must be at least 0, got {self.grace_seconds!r}")
        if self.on_oom not in ("record", "halve"):
            raise ValueError(f"hydra.launcher.on_oom must be record or halve, got {self.on_oom!r}")
        if isinstance(self.skip, str) or not {"complete"} <= {*self.skip} <= {*ENDS}:
            raise ValueError(
                f"hydra.launcher.skip must be a list of {', '.join(ENDS)}, with complete among them, got {self.skip!r}; to run "
                "complete jobs again name another hydra.sweep.dir"
            )
        if isinstance(self.runner, str):
            raise ValueError(f"hydra.launcher.runner must be a list of words, got {self.runner!r}")


class Running(NamedTuple):
    job: Job
    process: subprocess.Popen | Child
    slot: int
    gpus: str | None  # CUDA_VISIBLE_DEVICES of the process
    shares: bool  # a GPU with other jobs under MPS, whose faults end it too
    began: float


class Queue:
    """The jobs of one sweep, which start in the order in which they were given.

    A job that is complete in its folder is skipped. An unfinished job resumes from its last.ckpt. The sweep's folder is
    locked until the last of its processes has ended, so that no two sweeps write to it.
    """

    def __init__(self, settings: Settings, config: DictConfig, context: HydraContext, script: Path):
        self.settings = settings
        self.config = config
        self.context = context
        self.script = script
        self.folder = Path(config.hydra.sweep.dir)
        self.failures = 0
        self.gpus = _gpus()
        self.n_jobs = 1
        self.mps: dict[str, str] | None = None  # the environment of jobs that share a GPU under MPS
        self.source = source_facts(source_state())
        self.forks = sys.platform == "linux" and not settings.runner
        self.server: Server | None = None  # of all the batches of a search

    def run(self, asked: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run, skip or resume each of the jobs; the return value of each is what a search minimises.

        SystemExit, after the table: 130 or 143 after Ctrl-C or SIGTERM, 1 if max_failures was reached.
        """
        descriptor = lock(self.folder)
        record = self._record()
        jobs, configs = self._compose(asked, first_number, record["jobs"])
        unique = list({job.run_id: job for job in jobs}.values())
        record["jobs"] |= {job.run_id: job for job in unique}
        self._skip_complete(unique)
        with self._sharing([configs[job.run_id][0] for job in unique if job.status == "queued"]) as note:
            steps = {job.run_id: configs[job.run_id][0].trainer.max_steps for job in unique}
            with table.Live(self.folder, unique, self.n_jobs, steps, note) as live:
                stopped = self._work(unique, configs, record, descriptor, live)
        if stopped:
            table.show(self.folder, unique)
            log.warning("%s; run the same command again to resume", stopped[1])
            raise SystemExit(stopped[0])
        values = {job.run_id: objective(read_summary(job.path)) for job in unique}
        return [
            JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED, _return_value=values[job.run_id]) for job in jobs
        ]

    def _work(self, jobs: list[Job], configs: dict, record: dict, descriptor: int, live: table.Live) -> tuple[int, str] | None:
        """Run the jobs; returns None when all have ended, or (exit code, reason) if the queue stopped before."""
        waiting = [job for job in jobs if job.status == "queued"]
        running: list[Running] = []
        self._save(record)
        with _signals() as received:
            while (running or waiting) and not received:
                too_many = self.settings.max_failures is not None and self.failures >= self.settings.max_failures
                while waiting and len(running) < self.n_jobs and not too_many:
                    job = waiting.pop(0)
                    slot = min(set(range(self.n_jobs)) - {at.slot for at in running})
                    running.append(self._start(job, configs[job.run_id], slot, descriptor))
                    self._save(record)
                    live.started(job)
                if not running:
                    return 1, f"max_failures={self.settings.max_failures} was reached, {len(waiting)} jobs were not started"
                for at in [at for at in running if at.process.poll() is not None]:
                    running.remove(at)
                    self._end(at, configs[at.job.run_id][0])
                    if self._again(at, configs[at.job.run_id][0]):
                        waiting.insert(0, at.job)
                    self._save(record)
                    live.ended(at.job)
                live.refresh()
                time.sleep(POLL_SECONDS)
            if not received:
                return None
            live.say(f"stopping: {len(running)} running jobs save and end; interrupt again to kill them at once")
            self._stop([at.process for at in running], received)
            for at in running:
                self._end(at, configs[at.job.run_id][0])
                live.ended(at.job)
            self._save(record)
            return 128 + received[0], f"interrupted, {len(waiting)} jobs were not started"

    @contextlib.contextmanager
    def _sharing(self, configs: Sequence[DictConfig]) -> Iterator[str]:
        """Decides how many jobs run at once, and under MPS where several share a GPU; gives a note about it."""
        alone = max(1, len(self.gpus) // self.settings.gpus_per_job)
        per_gpu = self.settings.jobs_per_gpu
        chosen = per_gpu == "auto" and self.settings.n_jobs is None
        estimate = max(map(sharing.bytes_of, configs), default=0) if self.gpus else 0
        if per_gpu == "auto":
            may_share = chosen and estimate and self.settings.gpus_per_job == 1
            per_gpu = sharing.jobs_per_gpu(estimate, _cores() // len(self.gpus)) if may_share else 1
        self.n_jobs = self.settings.n_jobs or alone * per_gpu
        self.mps = None
        if not self.gpus or self.n_jobs <= alone:
            yield ""
            return
        with sharing.daemon() as found:
            if isinstance(found, str):
                how = "each GPU runs one job at a time" if chosen else "the jobs on a GPU take turns"
                log.warning("%s, because there is no MPS: %s", how, found)
                self.n_jobs = alone if chosen else self.n_jobs
                yield ""
            else:
                self.mps = found
                yield f" under MPS, at most about {estimate / 2**30:.1f} GiB each"

    def _compose(self, asked: Sequence[Sequence[str]], first: int, known: dict[str, Job]) -> tuple[list[Job], dict]:
        jobs, configs = [], {}
        owners = {job.folder: job.run_id for job in known.values()}
        for number, overrides in enumerate(asked, first):
            cfg = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(cfg.hydra.job):
                cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
            name = run_id(cfg)
            if name not in configs:
                folder = self.folder / str(cfg.hydra.sweep.subdir)
                if owners.setdefault(str(folder), name) != name:
                    refuse(f"hydra.sweep.subdir: {folder} would hold two runs; leave it out, or make it distinguish the runs")
                before = known.get(name)
                job = Job(number, name, str(folder), list(overrides), seen=time.time())
                job.halvings = before.halvings if before else 0
                configs[name] = (resolved(cfg, folder), cfg.hydra)
                jobs.append(job)
            else:  # given twice
                jobs.append(next(job for job in jobs if job.run_id == name))
        return jobs, configs

    def _skip_complete(self, jobs: list[Job]) -> None:
        other = 0
        for job in jobs:
            summary = read_summary(job.path)
            if summary.get("status") in self.settings.skip:
                job.status, job.error = "skipped", summary.get("error")
                job.result, job.attempts = accuracy(summary), summary.get("job", {}).get("attempts", 0)
                other += summary.get("source") != self.source
        if other:
            log.warning("%d skipped jobs were run by other code; to run them again, set another hydra.sweep.dir", other)

    def _start(self, job: Job, config: tuple[DictConfig, DictConfig], slot: int, descriptor: int) -> Running:
        cfg, hydra = config
        job.status, job.error, job.attempts = "running", None, job.attempts + 1
        prepare(job.path, cfg, hydra, job.overrides)
        own = [o for o in self.config.hydra.overrides.hydra if not o.startswith(OF_THE_SWEEP)]
        overrides = [*job.overrides, *halved(cfg, job.halvings), *own]
        overrides += ["hydra.mode=RUN", f"hydra.run.dir={quoted(job.folder)}"]
        overrides += [f"++hydra.job.num={job.number}", f"++hydra.job.id={job.number}"]
        env = wandb_names(job.path)
        gpus = None
        if self.gpus:
            k = self.settings.gpus_per_job
            gpus = env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[(slot * k + i) % len(self.gpus)] for i in range(k))
        if self.mps is not None:
            env |= sharing.ISOLATED if job.isolated else self.mps
        with (job.path / "output.log").open("a", encoding="utf-8") as output:
            line = [*map(str, self.settings.runner), str(self.script), *overrides]
            output.write(f"$ {shlex.join(['python', *line])}\n")
            output.flush()
            began = time.monotonic()
            process = self._process(line, env, output, descriptor)
        return Running(job, process, slot, gpus, self.mps is not None and not job.isolated, began)

    def _process(self, line: list[str], own: dict[str, str], output: TextIO, descriptor: int) -> subprocess.Popen | Child:
        """`python *line`, with `own` in its environment. In a process group of its own, and in another session than this
        process: Ctrl-C reaches a job through this process, once."""
        env = os.environ | {PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        threads = self.settings.threads or max(1, _cores() // self.n_jobs)
        env.setdefault("OMP_NUM_THREADS", str(threads))  # not MKL_NUM_THREADS, which could contradict it
        if self.forks:
            try:
                if self.server is None:  # what libraries read when they are loaded is the same for all jobs
                    self.server = Server(scripts.prepare, line[0], bool(self.gpus), env=env, output=output)
                return self.server.start(scripts.run, line[0], line[1:], env | own, descriptors=[output.fileno(), descriptor])
            except OSError as error:
                log.warning("%s; each further job imports for itself", error)
                self.forks = False
        return subprocess.Popen(
            [sys.executable, *line], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env | own,
            start_new_session=True, pass_fds=[descriptor],
        )  # fmt: skip

    def _end(self, at: Running, cfg: DictConfig) -> None:
        """Record how the process ended, in the job and in its summary.json."""
        job = at.job
        summary = read_summary(job.path)
        job.exit_code, job.seconds = at.process.returncode, round(time.monotonic() - at.began, 2)
        job.status, job.error = outcome(job.exit_code, summary, last_line(job.path / "output.log"))
        job.result = accuracy(summary)
        summary = {"status": job.status, "folder": str(job.path.absolute())} | summary
        if job.error:
            summary["error"] = job.error
        summary["job"] = {
            "run_id": job.run_id,
            "sweep": self.folder.name,
            "wandb_id": wandb_names(job.path)["WANDB_RUN_ID"],
            "attempts": job.attempts,
            "exit_code": job.exit_code,
            "gpus": at.gpus,
            "mps": at.shares,
            "process_seconds": job.seconds,
        }
        if overrides := halved(cfg, job.halvings):
            summary["micro_batch"] = {"halvings": job.halvings} | dict(o.split("=") for o in overrides[:2])
        write_json(summary, job.path / "summary.json")

    def _again(self, at: Running, cfg: DictConfig) -> bool:
        """Whether to start the job again; if not, and it did not complete, it counts as a failure."""
        again, job = False, at.job
        aborted = job.exit_code in (-signal.SIGABRT, -signal.SIGSEGV)
        if at.shares and job.status == "failed" and (aborted or read_summary(job.path).get("gpu_fault")):
            # its own fault, or that of a job beside it: CUDA does not say
            again = job.isolated = True
            log.warning("%s: a GPU fault, its own or that of a job beside it; it runs again without MPS", job.folder)
        elif job.status == "oom" and self.settings.on_oom == "halve" and halved(cfg, job.halvings + 1):
            again = True
            job.halvings += 1
        elif job.status in ("failed", "killed", "interrupted"):
            again = job.retried < self.settings.retries
            job.retried += again
        if again:
            job.status = "queued"
        self.failures += job.status not in ("complete", "queued")
        return again

    def _stop(self, processes: list[subprocess.Popen | Child], received: list[int]) -> None:
        """Forward the signal and wait. A second signal, or the end of grace_seconds, kills the processes."""
        for process in processes:
            _signal(process, received[0])
        deadline = time.monotonic() + self.settings.grace_seconds
        while any(process.poll() is None for process in processes):
            if len(received) > 1 or time.monotonic() > deadline:
                for process in processes:
                    _signal(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _record(self) -> dict:
        """The content of sweep.json, with its jobs by run_id."""
        jobs = {job.run_id: job for job in read_jobs(self.folder)}
        return {"sweep": self.folder.name, "command": _command(), "jobs": jobs}

    def _save(self, record: dict) -> None:
        write_json(record | {"jobs": [asdict(job) for job in record["jobs"].values()]}, self.folder / "sweep.json")


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of raising, so that no process is lost between its start and its record."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) != signal.SIG_IGN  # a sweep put in the background keeps running
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _signal(process: subprocess.Popen | Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        os.killpg(process.pid, number)


def _gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them, counted without creating a context on one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (visible.split(",") if visible else [str(i) for i in range(count)])[:count]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _command() -> str:
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])

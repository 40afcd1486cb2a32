"""The launcher `hydra/launcher=queue`. Hydra only finds launchers in this namespace, and imports them at every start, so this
file imports seqmix.sweep.queue only when needed. There is no __init__.py, because other plugins share the namespace."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class QueueLauncher(Launcher):
    """Runs every job in a process of its own (seqmix.sweep.queue). The arguments are those of its Settings."""

    def __init__(
        self, n_jobs: int | None, jobs_per_gpu: int | str, gpus_per_job: int, threads: int | None, retries: int,
        max_failures: int | None, on_oom: str, skip: Sequence[str], runner: Sequence[str | int], grace_seconds: float,
    ):  # fmt: skip
        from seqmix.sweep.queue import Settings

        self.settings = Settings(
            n_jobs, jobs_per_gpu, gpus_per_job, threads, retries, max_failures, on_oom, skip, runner, grace_seconds
        )

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from seqmix.sweep.queue import Queue

        script = Path(sys.modules["__main__"].__file__)
        self.queue = Queue(self.settings, config, hydra_context, script)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from hydra.core.utils import configure_log

        configure_log(self.queue.config.hydra.hydra_logging, self.queue.config.hydra.verbose)
        return self.queue.run(job_overrides, initial_job_idx)

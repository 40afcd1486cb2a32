"""Tokens per second and milliseconds per optimizer step, in steady state.

Timed are: fetching a batch, moving it, forward, backward, and the optimizer step. Not timed are: the first steps (compiling,
autotuning, cold caches), evaluation, checkpoints, logging, and the change of epochs. A window closes at a step that logs, and
the clock pauses until the next batch is requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import lightning as L

from seqmix.measure import Window, WindowTimer, spread, synchronizer


class Throughput(L.Callback):
    """Logs `speed/{tokens_per_second,step_ms,data_wait_fraction}` of each window, every trainer.log_every_n_steps.

    warmup_steps: optimizer steps before the first window, including the very first (`speed/first_step_s`).
    clock: seconds, for tests; it must be the clock of the loader.

    Tokens are all inputs of all ranks, including padding, since the model processes it. data_wait_fraction is the share of
    a window in which the host waited for the loader (`asked_at` to `given_at` of seqmix.tasks.base.TrainLoader), until a batch
    was read or made on the CPU, or until its making was queued on the device. Only windows of this process count, not those
    from before a resume.
    """

    def __init__(self, warmup_steps: int = 10, *, clock: Callable[[], float] = time.perf_counter):
        if warmup_steps < 1:
            raise ValueError(f"warmup_steps must be at least 1, the first step, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        self.clock = clock
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.windows: list[Window] = []
        self.first_step_s: float | None = None
        self._timer: WindowTimer | None = None
        self._warm = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_afresh()
        self._timer = WindowTimer(synchronizer(pl_module.device), self.clock)
        self._first_step = trainer.global_step
        self._first_batch_at: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch, batch_idx: int) -> None:
        if self._first_batch_at is None:
            self._first_batch_at = self.clock()
        if self._warm:
            loader = trainer.train_dataloader
            self._timer.resume(loader.asked_at)
            self._timer.add(data_seconds=loader.given_at - loader.asked_at)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if not self._warm:
            self._warm_up(step - self._first_step)
            return
        self._timer.add(steps=1, tokens=batch.inputs.numel() * trainer.world_size)
        if step % trainer.log_every_n_steps == 0:
            window = self._timer.close()
            self.windows.append(window)
            pl_module.log_dict(
                {
                    "speed/tokens_per_second": window.tokens / window.seconds,
                    "speed/step_ms": 1e3 * window.seconds / window.steps,
                    "speed/data_wait_fraction": window.data_seconds / window.seconds,
                }
            )

    def _warm_up(self, done: int) -> None:
        if self.first_step_s is None:
            self._timer.synchronize()
            self.first_step_s = self.clock() - self._first_batch_at
        if done >= self.warmup_steps:
            self._timer.synchronize()  # the first window must not pay for the warm-up
            self._warm = True

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        self._pause()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.pause()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a run without a whole window reports its unfinished one
        if self._timer.steps > 0 and not self.windows:
            self.windows.append(self._timer.close())
        self._timer.discard()

    def summary(self) -> dict[str, float | int | None]:
        """Medians over the windows; None where the run was too short to have one."""
        step_ms = spread(1e3 * w.seconds / w.steps for w in self.windows)
        return {
            "speed/tokens_per_second": spread(w.tokens / w.seconds for w in self.windows).median,
            "speed/step_ms": step_ms.median,
            "speed/step_ms_iqr": step_ms.iqr,
            "speed/windows": step_ms.count,
            "speed/data_wait_fraction": spread(w.data_seconds / w.seconds for w in self.windows).median,
            "speed/first_step_s": self.first_step_s,
        }

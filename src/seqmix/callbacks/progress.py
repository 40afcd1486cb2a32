"""Progress, time left and metrics of training: a bar in a terminal, elsewhere a line every `line_seconds`.

training  ━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━  1450/2600  0:00:42 < 0:00:33  train/loss 0.412  val/token_accuracy 0.871
step 1450/2600 (56%), 0:00:33 left, train/loss 0.412, val/token_accuracy 0.871
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from seqmix import display


class Progress(ProgressBar):
    """Counts optimizer steps to max_steps, over epochs; after a resume it starts at the checkpoint's step.

    metrics: names, shown with their latest values. refresh_seconds: between updates of the bar; reading a metric waits for
    the device, so metrics are read no more often. line_seconds: between plain lines, if the output is not a terminal.
    stream, clock: for tests.

    The time left is extrapolated from the steps of this process, including evaluations but not the first step (compiling).
    If a bar or a line cannot be shown, the display ends and training continues.
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("train/loss", "val/token_accuracy"),
        refresh_seconds: float = 0.5,
        line_seconds: float = 15.0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        for name, seconds in (("refresh_seconds", refresh_seconds), ("line_seconds", line_seconds)):
            if seconds <= 0:
                raise ValueError(f"{name} must be above 0, got {seconds}")
        self.metrics = tuple(metrics)
        self.refresh_seconds = refresh_seconds
        self.line_seconds = line_seconds
        self.stream = stream
        self.clock = clock
        self._enabled = True
        self._bar: Bar | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._total = trainer.estimated_stepping_batches  # of max_steps and the epochs, whichever ends first
        self._anchor: tuple[int, float] | None = None  # step and time from which speed is measured
        self._shown_at = self.clock()
        if self._enabled:
            self._draw(self._start_bar)

    def _start_bar(self) -> None:
        console = display.console(self.stream or sys.stdout)
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("<"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}", markup=False),
                console=console,
                refresh_per_second=1 / self.refresh_seconds,
                speed_estimate_period=600.0,
            )
            total = self._total if math.isfinite(self._total) else None
            self._task = self._bar.add_task("training", total=total, completed=self._step, metrics="")
            self._bar.start()

    def _draw(self, draw: Callable[[], object]) -> None:
        if not display.attempt("progress", draw):
            self._enabled, self._bar = False, None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        stepped = trainer.global_step > self._step
        self._step = trainer.global_step
        if not self._enabled or not stepped:
            return
        now = self.clock()
        if self._anchor is None:
            self._anchor = (self._step, now)
        if now - self._shown_at >= (self.line_seconds if self._bar is None else self.refresh_seconds):
            self._show(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._draw(lambda: self._bar.update(self._task, description="validating"))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._draw(lambda: self._bar.update(self._task, description="training"))
            self._show(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._enabled:
            self._show(trainer)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def print(self, *args: object, sep: str = " ", end: str = "\n") -> None:
        """As the built-in, above the bar if there is one. Prints nothing after the display has failed."""
        if self._bar is not None:
            self._draw(lambda: self._bar.console.print(sep.join(map(str, args)), end=end))
        elif self._enabled:
            self._draw(lambda: print(*args, sep=sep, end=end, file=self.stream or sys.stdout, flush=True))

    def _show(self, trainer: L.Trainer) -> None:
        self._shown_at = self.clock()
        known = trainer.callback_metrics
        values = [f"{name} {float(known[name]):.3f}" for name in self.metrics if name in known]
        if self._bar is not None:
            self._draw(lambda: self._bar.update(self._task, completed=self._step, metrics="  ".join(values)))
            return
        parts = [f"{display.PROGRESS}{self._step}"]
        if math.isfinite(self._total):
            parts[0] += f"/{self._total} ({self._step / self._total:.0%})"
        if (left := self._seconds_left()) is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        self.print(", ".join(parts + values))

    def _seconds_left(self) -> float | None:
        if self._anchor is None or not math.isfinite(self._total) or self._step == self._anchor[0]:
            return None
        step, at = self._anchor
        return (self.clock() - at) / (self._step - step) * (self._total - self._step)

    def _stop(self) -> None:
        if self._bar is not None:
            self._draw(self._bar.stop)
            self._bar = None

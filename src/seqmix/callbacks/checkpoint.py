"""The checkpoints of a run. Their names can be pasted into `ckpt=`: they have no `=`, and no `/` from a metric's name.

    checkpoints/best.ckpt           the weights with the best validation score so far
    checkpoints/last.ckpt           to resume from: saved every n steps or minutes, at the end, on Ctrl-C and on SIGTERM
    checkpoints/step_000010.ckpt    copies of last.ckpt, if keep_steps is set

Lightning writes to another file and then moves it to the target, so a crash or a full disk leaves the earlier one intact.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)


def best_checkpoint(trainer: L.Trainer) -> str | None:
    """Path of the best checkpoint of the run; None if no validation had a finite score."""
    for callback in trainer.callbacks:
        if isinstance(callback, BestCheckpoint) and callback.best_model_path:
            return callback.best_model_path
    return None


class BestCheckpoint(Checkpoint):
    """Keeps `<dirpath>/best.ckpt`: the weights at the validation with the smallest `monitor` (largest, if mode=max).

    Scores that are NaN or infinite, and those of the sanity check, do not count. A resumed run keeps the best score so far,
    also in a new folder, if it is comparable: the same monitor and mode, on the same rows. If `monitor` does not exist, the
    first validation (or the sanity check) raises a ValueError that lists the names.
    """

    def __init__(self, dirpath: str | os.PathLike, monitor: str = "val/loss", mode: str = "min"):
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be min or max, got {mode!r}")
        self.path = Path(dirpath).absolute() / "best.ckpt"
        self.monitor = monitor
        self.mode = mode
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.best_step: int | None = None
        self._measures: dict = {"monitor": monitor, "mode": mode}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._measures |= {"rows": trainer.datamodule.evaluation(), "batches": trainer.limit_val_batches}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        if self.monitor not in scores:
            raise unknown_monitor(self.monitor, scores)
        if trainer.sanity_checking or trainer.fast_dev_run:
            return
        score = float(scores[self.monitor])
        if trainer.strategy.broadcast(math.isfinite(score) and self._beats(score)):
            self.best_model_score, self.best_step = score, trainer.global_step
            self.best_model_path = str(self.path)  # before saving: it is part of the state
            trainer.save_checkpoint(self.path)

    def _beats(self, score: float) -> bool:
        if self.best_model_score is None:
            return True
        return score < self.best_model_score if self.mode == "min" else score > self.best_model_score

    def state_dict(self) -> dict:
        return {
            "path": self.best_model_path, "score": self.best_model_score, "step": self.best_step, "measures": self._measures,
        }  # fmt: skip

    def load_state_dict(self, state: dict) -> None:
        if state["measures"] != self._measures:
            changed = [key for key, now in self._measures.items() if state["measures"].get(key) != now]
            log.warning("the best score of the resumed run is not comparable (changed: %s), so it begins anew", changed)
            return
        if state["path"] and not os.path.exists(state["path"]):
            log.warning("the best checkpoint of the resumed run does not exist any more: %s", state["path"])
            return
        self.best_model_path, self.best_model_score, self.best_step = state["path"], state["score"], state["step"]

    def summary(self) -> dict[str, float | int | None]:
        """The best score, under `best/<monitor>`, and the number of steps at which it was reached."""
        return {f"best/{self.monitor}": self.best_model_score, "best/step": self.best_step}


def unknown_monitor(monitor: str, scores: dict) -> ValueError:
    valid = sorted(name for name in scores if name.startswith("val"))
    near = difflib.get_close_matches(monitor, valid, n=1)
    return ValueError(
        f"monitor={monitor!r} is not logged by validation"
        + (f"; did you mean {near[0]!r}?" if near else ".")
        + f" Valid names: {', '.join(valid) or 'none'}"
    )


class LastCheckpoint(Checkpoint):
    """Keeps `<dirpath>/last.ckpt`, from which a run resumes exactly.

    every_n_steps: optimizer steps between saves, null to not save by steps. every_minutes: minutes between saves, null to
    not save by time; both may be set. keep_steps: how many of the saves by steps to keep as `step_000010.ckpt` (-1: all).
    The last step is always saved. Checkpoints are only saved between steps: during a step the data are one batch ahead of the
    weights, and during a validation its sums are incomplete, so no exact resume would be possible. An error therefore leaves
    the previous last.ckpt. Ctrl-C and SIGTERM take effect when the current step or validation is done and saved (on several
    ranks: the next step that logs). A second Ctrl-C stops at once and does not save.
    If a validation follows a step that was saved, the file is saved again after it, and an interrupted run stops only then: a
    resumed run does not repeat that validation, so the file must hold its result (the best score so far).
    """

    def __init__(
        self,
        dirpath: str | os.PathLike,
        every_n_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep_steps: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, or null, got {every_n_steps}")
        if every_minutes is not None and every_minutes <= 0:
            raise ValueError(f"every_minutes must be above 0, or null, got {every_minutes}")
        if keep_steps < -1:
            raise ValueError(f"keep_steps must be at least -1, got {keep_steps}")
        self.folder = Path(dirpath).absolute()
        self.path = self.folder / "last.ckpt"
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.keep_steps = keep_steps
        self.clock = clock
        self._kept: list[Path] = []
        self._handlers: dict[int, object] = {}
        self._saved_step, self._step, self._signal = 0, 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = self._step = trainer.global_step
        self._saved_at = self.clock()
        self._signal = 0
        if threading.current_thread() is threading.main_thread():  # only it may set a handler
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._handlers[signum] = signal.signal(signum, self._hold_back)

    def _hold_back(self, signum: int, frame: object) -> None:
        if self._signal == signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signum
        again = "; press Ctrl-C again to stop at once" if signum == signal.SIGINT else ""
        log.warning("interrupted: the run stops when the step, or the validation, is done and saved%s", again)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        by_steps = self.every_n_steps is not None and self._step % self.every_n_steps == 0
        stops = self._is_stopped(trainer)
        if by_steps or stops or self._step == trainer.max_steps or self._time_is_up(trainer):
            self._save(trainer)
        every = trainer.val_check_batch if trainer.enable_validation else None
        if stops and (every is None or (trainer.fit_loop.total_batch_idx + 1) % every):  # else once it has been validated
            self._stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        stops = self._is_stopped(trainer)
        if stops or self._saved_step == trainer.global_step:
            self._save(trainer)
        if stops:
            self._stop()

    def _is_stopped(self, trainer: L.Trainer) -> bool:
        if trainer.world_size == 1:
            return self._signal != 0
        logged = self._step % trainer.log_every_n_steps == 0  # ranks must agree
        return logged and trainer.strategy.reduce_boolean_decision(self._signal != 0, all=False)

    def _stop(self) -> None:
        raise SIGTERMException if self._signal == signal.SIGTERM else KeyboardInterrupt

    def _time_is_up(self, trainer: L.Trainer) -> bool:
        if self.every_minutes is None:
            return False
        up = self.clock() - self._saved_at >= 60 * self.every_minutes
        if trainer.world_size == 1:
            return up
        # ranks must agree, and the broadcast waits for the device, so it is not done at each step
        return self._step % trainer.log_every_n_steps == 0 and trainer.strategy.broadcast(up)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._step > self._saved_step:
            self._save(trainer)
        if self._signal:  # received after the last step
            self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        if trainer.global_step == 0 or trainer.global_step == self._saved_step:
            return
        kept = f"last.ckpt is still that of step {self._saved_step}" if self.path.exists() else "there is no last.ckpt"
        log.warning("the run stopped during step %d, without saving; %s", trainer.global_step + 1, kept)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:
            return
        trainer.save_checkpoint(self.path)
        self._saved_step, self._saved_at = trainer.global_step, self.clock()
        if self.keep_steps != 0 and self.every_n_steps is not None and self._saved_step % self.every_n_steps == 0:
            self._keep(trainer)

    def _keep(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        path = self.folder / f"step_{trainer.global_step:06d}.ckpt"
        shutil.copyfile(self.path, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        if path not in self._kept:
            self._kept.append(path)
        while 0 < self.keep_steps < len(self._kept):
            self._kept.pop(0).unlink(missing_ok=True)

"""How many steps a run takes to reach an accuracy, and the end of a run that has solved its task."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning as L

from seqmix.callbacks.checkpoint import unknown_monitor

log = logging.getLogger(__name__)


class Solved(L.Callback):
    """Records the first validation at which `monitor` reaches each of `thresholds`; can end a run that has solved its task.

    patience: the run ends once so many validations in a row have reached the largest threshold; None never ends it. Only
    validation rows decide, never test rows. The number of steps is that of the validation, so it is known to within
    trainer.val_check_interval.

    A resumed run keeps what it has reached if `monitor` and the validation rows are the same.
    """

    def __init__(
        self,
        monitor: str = "val/token_accuracy",
        thresholds: Sequence[float] = (0.5, 0.9, 0.99),
        patience: int | None = None,
    ):
        if not thresholds or not all(0 < threshold <= 1 for threshold in thresholds):
            raise ValueError(f"thresholds must be accuracies above 0 and at most 1, got {list(thresholds)}")
        if patience is not None and patience < 1:
            raise ValueError(f"patience must be at least 1 validation, or null, got {patience}")
        self.monitor = monitor
        self.patience = patience
        self.reached: dict[float, int | None] = dict.fromkeys(sorted(thresholds))
        self._in_a_row = 0
        self._measures: dict = {"monitor": monitor}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._measures |= {"rows": trainer.datamodule.evaluation(), "batches": trainer.limit_val_batches}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        if self.monitor not in trainer.callback_metrics:
            raise unknown_monitor(self.monitor, trainer.callback_metrics)
        score = float(trainer.callback_metrics[self.monitor])
        for threshold, step in self.reached.items():
            if step is None and score >= threshold:
                self.reached[threshold] = trainer.global_step
        self._in_a_row = self._in_a_row + 1 if score >= max(self.reached) else 0
        if self.patience is not None and self._in_a_row >= self.patience and not trainer.should_stop:
            trainer.should_stop = True
            log.info(
                "%s has been at least %g in %d validations in a row: the run ends after %d steps",
                self.monitor, max(self.reached), self._in_a_row, trainer.global_step,
            )  # fmt: skip

    def state_dict(self) -> dict:
        return {"reached": list(self.reached.items()), "in_a_row": self._in_a_row, "measures": self._measures}

    def load_state_dict(self, state: dict) -> None:
        if state["measures"] != self._measures:
            log.warning("the resumed run measured steps_to/* on another monitor or other rows: this run counts anew")
            return
        reached = dict(state["reached"])
        if max(reached) == max(self.reached):
            self._in_a_row = state["in_a_row"]
        self.reached |= {threshold: reached[threshold] for threshold in self.reached if threshold in reached}

    def summary(self) -> dict[str, int | None]:
        """Optimizer steps to each threshold, under `steps_to/0.99`; None where it was not reached."""
        return {f"steps_to/{threshold:g}": step for threshold, step in self.reached.items()}

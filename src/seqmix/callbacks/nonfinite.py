"""Stops a run whose loss or gradients are no longer finite, and reports which tensor was the first.

The step itself checks on the device whether its loss and gradients are finite, before the optimizer uses them (step.py). A
bad step leaves weights and optimizer unchanged, and after `patience` bad steps in a row no step changes them any more. So the
host can check later: on a GPU when metrics are logged, before an evaluation, and before a checkpoint.
"""

from __future__ import annotations

import lightning as L


class NonFiniteGuard(L.Callback):
    """Raises NonFiniteError when loss or gradients were not finite for `patience` optimizer steps in a row.

    The weights are then those from before the first of these steps. Under float16 infinite gradients are normal, and the
    gradient scaler skips such steps itself, so only the loss is checked.
    """

    def __init__(self, patience: int = 1):
        if patience < 1:
            raise ValueError(f"patience must be at least 1 step, got {patience}")
        self.patience = patience

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.patience = self.patience

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx: int) -> None:
        if pl_module.device.type == "cpu" or trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.step.check()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            pl_module.step.check()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        if trainer.state.fn == "fit":
            pl_module.step.check()
            pl_module.step.check_weights()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.step.check()

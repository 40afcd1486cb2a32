"""Stop a run whose loss or gradients are no longer finite, and say where that began.

The step itself asks, on the device, whether its loss and its gradients are finite, before the optimizer uses them
(step.py). A bad step leaves weights and optimizer as they were, and once there were `patience` in a row nothing is trained
any more. So the host may ask late: on a GPU where numbers are logged, before an evaluation, before a checkpoint.
"""

from __future__ import annotations

import lightning as L


class NonFiniteGuard(L.Callback):
    """Raises NonFiniteError when loss or gradients were not finite for `patience` optimizer steps in a row.

    The weights are then those from before the first of these steps. Under float16 the gradient scaler meets infinite
    gradients as a matter of course and skips such steps itself: there only the loss is judged.
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

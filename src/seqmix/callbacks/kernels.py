"""Which implementation of each operator a run took, and why not a faster one: into the run's config and its summary."""

from __future__ import annotations

import lightning as L
import torch


class Kernels(L.Callback):
    """Asks the model, by `kernels_used(batch, length)`: names of operators, what computes them and why.

    At the start of training, under the precision and on the device of the run: where a choice is measured, this is when.
    """

    def __init__(self):
        self._used: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with trainer.precision_plugin.forward_context(), torch.enable_grad():
            self._used = pl_module.model.kernels_used(trainer.datamodule.batch_size, trainer.datamodule.seq_len)
        for logger in trainer.loggers:
            logger.log_hyperparams({"kernels": self._used})

    def summary(self) -> dict[str, dict[str, str]]:
        return {"kernels": self._used}

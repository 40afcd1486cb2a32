"""Records in the run's config and summary which implementation of each operator it uses, and why not a faster one."""

from __future__ import annotations

import lightning as L
import torch


class Kernels(L.Callback):
    """Calls `model.kernels_used(batch, length)`, which returns the implementation of each operator and the reason.

    The call is made at the start of training, under the precision and on the device of the run. If a choice is measured, the
    measurement happens then.
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

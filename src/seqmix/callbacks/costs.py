"""What inference with the trained model costs: the prefill of a prompt, the step per token after it, the bytes of state."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning as L
import torch

from seqmix.costs import Numbers, decoding_cost, prompt_cost, random_tokens

log = logging.getLogger(__name__)
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
KEPT = (
    "prefill_ms", "prefill_ms_iqr", "state_bytes", "state_bytes_measured", "eager_ms", "eager_ms_iqr",
    "eager_tokens_per_second", "graph_ms", "graph_ms_iqr", "graph_tokens_per_second", "check_error",
)  # fmt: skip


class Costs(L.Callback):
    """Measured after training, at batch 1 and in the run's precision, as in `python -m seqmix.bench`. summary.json has the
    numbers per context length, as `decode/L256/prefill_ms` and so on.

    lengths: context lengths in tokens, null for task.seq_len only. seconds: time of timed calls per measurement. Runs on
    several ranks are not measured, because the model may be sharded.
    """

    def __init__(self, lengths: Sequence[int] | None = None, seconds: float = 0.5):
        if lengths is not None and (not lengths or min(lengths) < 1):
            raise ValueError(f"lengths must be of at least one token each, got {lengths}")
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        self.lengths = lengths
        self.seconds = seconds
        self._numbers: dict[str, float | int | None] = {}

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._numbers = {}
        if trainer.world_size > 1:
            log.warning("the cost of decoding is not measured on several ranks")
            return
        model, was_training = pl_module.model, pl_module.model.training
        autocast = AUTOCAST.get(trainer.precision)
        for length in self.lengths or [trainer.datamodule.seq_len]:
            tokens = random_tokens(model.vocab_size, 1, length, pl_module.device)
            found: Numbers = prompt_cost(model, tokens, autocast=autocast, seconds=self.seconds)
            found |= decoding_cost(model, tokens, 1, autocast=autocast, seconds=self.seconds)
            self._numbers |= {f"decode/L{length}/{name}": found[name] for name in KEPT}
        model.train(was_training)

    def summary(self) -> dict[str, float | int | None]:
        return self._numbers

"""The one LightningModule: a language-model loss over scored tokens, for any SequenceModel on any task."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from seqmix.metrics import ScoredTokens, scored_cross_entropy
from seqmix.optim import make_optimizer, marks_of
from seqmix.sharding import shard


class SequenceModule(L.LightningModule):
    """model: tokens (B, L) -> logits (B, L, V). optimizer: called with parameter groups; scheduler: with the optimizer.

    Batches are (inputs (B, L), targets (B, L)), targets -100 where nothing is scored. The loss is summed over the
    scored tokens of an optimizer step, over micro-batches and ranks, and divided once by their number.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler],
        token_bytes: Tensor | None = None,
    ):
        super().__init__()
        self.model = model
        self.marks = marks_of(model)  # before anything shards it
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        # one metric object a split: a sanity check or an evaluation never leaks into another's sums
        self.window = ScoredTokens(token_bytes, saved=True)
        self.val_scores = ScoredTokens(token_bytes)
        self.test_scores = ScoredTokens(token_bytes)
        # of the optimizer step under way: micro-batches seen, scored tokens of the first, of all
        self._micro_batches, self._first_tokens, self._step_tokens = 0, None, None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        inputs, targets = batch
        if self._micro_batches == 0 and self.trainer.global_step % self.trainer.log_every_n_steps == 0:
            self.window.reset()  # here, not where it was logged: a checkpoint may be saved before or after that
        logits = self.model(inputs)  # (B, L, V)
        loss_sum, tokens = scored_cross_entropy(logits, targets)
        self.window.update(logits, targets, loss_sum)
        if self.trainer.world_size > 1:  # DDP averages gradients over ranks; the mean is over all their tokens
            tokens = self.trainer.strategy.reduce(tokens.float(), reduce_op="mean")
        if self._micro_batches == 0:
            self._first_tokens, self._step_tokens = tokens.clamp(min=self._least_tokens()), torch.zeros_like(tokens)
        self._micro_batches += 1
        self._step_tokens = self._step_tokens + tokens
        return (loss_sum / self._first_tokens).float()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Micro-batches were divided by the tokens of the first; divide by the tokens of all instead."""
        if self.trainer.accumulate_grad_batches > 1:
            # Lightning divided each micro-batch's loss by their configured number
            step_tokens = self._step_tokens.clamp(min=self._least_tokens())
            scale = self.trainer.accumulate_grad_batches * self._first_tokens / step_tokens
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # the guard against non-finite ones may have dropped them
                torch._foreach_mul_(gradients, scale)
        self._micro_batches = 0

    def on_train_batch_end(self, outputs: object, batch: object, batch_index: int) -> None:
        if self._micro_batches > 0:  # more of this optimizer step is to come
            return
        step, last = self.trainer.global_step, self.trainer.max_steps
        if step == last:
            self.trainer.should_stop = True  # as when time is up: Lightning then validates the last weights too
        if step % self.trainer.log_every_n_steps == 0 or step == last:
            self.log_dict({f"train/{name}": value for name, value in self.window.compute().items()})
            self.log("train/lr", self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_start(self) -> None:
        self.val_scores.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._score(batch, self.val_scores)

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_scores)

    def on_test_epoch_start(self) -> None:
        self.test_scores.reset()

    def test_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self._score(batch, self.test_scores)

    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_scores)

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # of a strategy that shards: conf/trainer/fsdp.yaml
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> dict:
        optimizer = make_optimizer(self.model, self.make_optimizer, self.marks)
        scheduler = self.make_scheduler(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # dropout draws from the global generators: without their states a resumed run would differ
        checkpoint["generators"] = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self._generators = checkpoint["generators"]

    def on_train_start(self) -> None:
        if generators := self.__dict__.pop("_generators", None):
            torch.set_rng_state(generators[0].cpu())
            if len(generators) - 1 == torch.cuda.device_count():  # else it was saved on another machine
                torch.cuda.set_rng_state_all([g.cpu() for g in generators[1:]])

    def _least_tokens(self) -> float:
        """One token on one of the ranks, as a mean over them: less is none."""
        return 1 / self.trainer.world_size

    def _score(self, batch: tuple[Tensor, Tensor], scores: ScoredTokens) -> None:
        inputs, targets = batch
        logits = self.model(inputs)  # (B, L, V)
        loss_sum, _ = scored_cross_entropy(logits, targets)
        scores.update(logits, targets, loss_sum)

    def _log_scores(self, split: str, scores: ScoredTokens) -> None:
        self.log_dict({f"{split}/{name}": value for name, value in scores.compute().items()})

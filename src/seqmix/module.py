"""The one LightningModule: a language-model loss over scored tokens, for any SequenceModel on any task."""

from __future__ import annotations

import logging
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from seqmix.metrics import ScoredTokens
from seqmix.optim import make_optimizer, marks_of
from seqmix.sharding import shard
from seqmix.step import TrainingStep

log = logging.getLogger(__name__)


class SequenceModule(L.LightningModule):
    """model: see SequenceModel. optimizer: called with the parameter groups. scheduler: called with the optimizer.

    Batches are (inputs (B, L), targets (B, L)), targets -100 where nothing is scored; each is one optimizer step (step.py).
    The loss is summed over the scored tokens of the step, over micro-batches and ranks, and divided once by their number.

    micro_batch_size: rows per forward and backward pass, None for the whole batch; the gradients are the same.
    gradient_clip_val: largest 2-norm of the gradients, None for no limit. cuda_graph: "auto" replays each step as a CUDA
    graph if it can be captured, "off" never does.
    """

    automatic_optimization = False  # Lightning's own loop costs the host a millisecond per step, more than many steps take

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler],
        token_bytes: Tensor | None = None,
        *,
        micro_batch_size: int | None = None,
        gradient_clip_val: float | None = None,
        cuda_graph: str = "auto",
    ):
        super().__init__()
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, or null, got {micro_batch_size}")
        if gradient_clip_val is not None and not gradient_clip_val >= 0:
            raise ValueError(f"gradient_clip_val must be at least 0, or null, got {gradient_clip_val}")
        if cuda_graph not in ("auto", "off"):
            raise ValueError(f"cuda_graph must be auto or off, got {cuda_graph!r}")
        self.model = model
        self.marks = marks_of(model)  # sharding drops the marks
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.micro_batch_size, self.gradient_clip_val, self.cuda_graph = micro_batch_size, gradient_clip_val, cuda_graph
        self.patience: int | None = None  # bad steps in a row before an error; NonFiniteGuard sets it
        self.step: TrainingStep | None = None
        # one metric object per split, so that no sanity check or evaluation adds to the sums of another
        self.window = ScoredTokens(token_bytes, saved=True)
        self.val_scores = ScoredTokens(token_bytes)
        self.test_scores = ScoredTokens(token_bytes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def on_train_start(self) -> None:
        if generators := self.__dict__.pop("_generators", None):
            torch.set_rng_state(generators[0].cpu())
            if len(generators) - 1 == torch.cuda.device_count():  # else it was saved on another machine
                torch.cuda.set_rng_state_all([g.cpu() for g in generators[1:]])
        self._keep_settings()
        self.step = TrainingStep(
            self.model,
            self.trainer.optimizers[0],
            self.window,
            micro_batch_size=self.micro_batch_size,
            gradient_clip_val=self.gradient_clip_val,
            patience=self.patience,
            scaler=getattr(self.trainer.precision_plugin, "scaler", None),
            no_graph="cuda_graph=off" if self.cuda_graph == "off" else None,
            taken=self.trainer.global_step,
            named=self._named,
        )
        self._steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        if self.step.taken % self.trainer.log_every_n_steps == 0:
            self.window.reset()  # here, not after logging: a checkpoint may be saved before or after it
        self._lr = self.step.optimizer.param_groups[0]["lr"]
        self._steps.increment_ready()
        self.step(*batch)
        self.lr_schedulers().step()
        self._steps.increment_completed()  # Lightning's global_step

    def on_train_batch_end(self, outputs: object, batch: object, batch_index: int) -> None:
        step, last = self.step.taken, self.trainer.max_steps
        if step == last:
            self.trainer.should_stop = True  # as at max_time: Lightning then validates the last weights, too
        if step % self.trainer.log_every_n_steps == 0 or step == last:
            self.log_dict({f"train/{name}": value for name, value in self.window.compute().items()} | {"train/lr": self._lr})

    def on_train_end(self) -> None:
        self.step.graphs.clear()  # frees their memory, and NCCL's communicator, which waits for them

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
        if self.device_mesh is not None:  # set by a strategy that shards (conf/trainer/fsdp.yaml)
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> dict:
        optimizer = make_optimizer(self.model, self.make_optimizer, self.marks)
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        scheduler = self.make_scheduler(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        self._settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _keep_settings(self) -> None:
        """Restore the learning rates, decay and schedule of this run's config if a checkpoint has replaced them. Only the
        optimizer's moments and the number of steps are taken from a checkpoint."""
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        changed = {
            f"{key} {group[key]!r} -> {value!r}"
            for group, own in zip(optimizer.param_groups, self._settings, strict=True)
            for key, value in own.items()
            if key != "lr" and _plain(group[key]) != _plain(value)
        }
        if not changed:
            return
        if not isinstance(scheduler, LambdaLR):
            kind = type(scheduler).__name__
            raise ValueError(f"a run with a {kind} cannot be resumed with other settings: {', '.join(sorted(changed))}")
        scheduler.base_lrs = [own["initial_lr"] for own in self._settings]
        for group, own, factor in zip(optimizer.param_groups, self._settings, scheduler.lr_lambdas, strict=True):
            group.update(own, lr=own["initial_lr"] * factor(scheduler.last_epoch))
        log.warning("settings that differ from those of the resumed run: %s", ", ".join(sorted(changed)))

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # dropout draws from the global generators: without their states a resumed run would differ
        checkpoint["generators"] = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self._generators = checkpoint["generators"]

    def _score(self, batch: tuple[Tensor, Tensor], scores: ScoredTokens) -> None:
        inputs, targets = batch
        scores.update(*self.model.score(inputs, targets), targets)

    def _log_scores(self, split: str, scores: ScoredTokens) -> None:
        self.log_dict({f"{split}/{name}": value for name, value in scores.compute().items()})


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value  # a checkpoint may hold betas as either

"""Callbacks on a tiny model: what they measure on a clock that lies, what they stop, what they leave on disk."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from seqmix import callbacks, measure
from seqmix.memory import MIB, PeakMemory
from seqmix.metrics import ScoredTokens
from seqmix.module import SequenceModule
from seqmix.optim import constant
from seqmix.step import NonFiniteError

# Lightning 2.6 asks torch 2.13 for a class that it deprecates, and wants workers for every DataLoader of torch's
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # by most tests here, on purpose
]

V, LENGTH, BATCH = 7, 12, 4


class Batch(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Rows(Dataset):
    """Row i, a pure function of i; `fetch_s` pass on the clock for each batch."""

    def __init__(self, n: int, clock: Clock | None, fetch_s: float):
        self.n, self.clock, self.fetch_s = n, clock, fetch_s

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, index: list[int]) -> list[Tensor]:
        if self.clock is not None:
            self.clock.sleep(self.fetch_s)
        return [torch.arange(i, i + LENGTH) % V for i in index]


def collate(rows: list[Tensor]) -> Batch:
    inputs = torch.stack(rows)  # (B, L)
    targets = inputs.clone()
    targets[:, ::2] = -100
    return Batch(inputs, targets)


class Timed(DataLoader):
    """Says when a batch was asked for and given, as the tasks' own loader does."""

    asked_at = given_at = 0.0
    clock: Clock | None = None

    def __iter__(self):
        clock = self.clock or (lambda: 0.0)
        batches = super().__iter__()
        while True:
            self.asked_at = clock()
            batch = next(batches, None)
            self.given_at = clock()
            if batch is None:
                return
            yield batch


class TinyTask(L.LightningDataModule):
    seq_len, vocab_size = LENGTH, V
    token_bytes = None

    def __init__(self, clock: Clock | None = None, fetch_s: float = 0.0, batches: int = 1000, num_workers: int = 0):
        super().__init__()
        self.clock, self.fetch_s, self.batches, self.num_workers = clock, fetch_s, batches, num_workers

    def train_dataloader(self):
        rows = Rows(BATCH * self.batches, self.clock, self.fetch_s)
        loader = Timed(rows, batch_size=BATCH, collate_fn=collate, num_workers=self.num_workers)
        loader.clock = self.clock
        return loader

    def val_dataloader(self):
        return DataLoader(Rows(BATCH, None, 0.0), batch_size=BATCH, collate_fn=collate)

    test_dataloader = val_dataloader

    def sample(self, split: str, index: Tensor) -> Batch:
        return collate(Rows(100, None, 0.0).__getitems__(index.tolist()))

    def eval_rows(self, split: str) -> int:
        return 3

    def evaluation(self) -> dict:
        return {"rows": BATCH}

    def decode(self, ids: Tensor) -> str:
        return "".join("abcdefg"[i] for i in ids.tolist())


class State(NamedTuple):
    total: Tensor  # (B, D)
    seen: Tensor  # (B, L) int64, grows: a cache


class TinyModel(nn.Module):
    """Running mean of embeddings; its state is a sum, and a cache of what it saw. bad_steps: training steps whose loss is
    NaN, counted on the device."""

    def __init__(self, bad_steps: tuple[int, ...] = ()):
        super().__init__()
        self.embedding = nn.Embedding(V, 3)
        self.head = nn.Linear(3, V)
        self.register_buffer("bad_steps", torch.tensor([-1, *bad_steps]), persistent=False)
        self.register_buffer("steps", torch.tensor(0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).cumsum(1))

    def score(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        if self.training:
            losses = losses * torch.where((self.bad_steps == self.steps).any(), math.nan, 1.0)
            self.steps += 1
        return losses, logits.argmax(-1) == targets

    def init_state(self, batch: int) -> State:
        device = self.head.weight.device
        return State(torch.zeros(batch, 3, device=device), torch.zeros(batch, 0, dtype=torch.int64, device=device))

    def prefill(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        x = self.embedding(tokens).cumsum(1) + state.total[:, None]
        return self.head(x), State(x[:, -1], torch.cat([state.seen, tokens], 1))

    def generate(self, tokens: Tensor, n: int, temperature: float, generator: torch.Generator) -> Tensor:
        return torch.cat([tokens, tokens.flip(1)[:, :1].expand(-1, n)], dim=1)


class TinyModule(SequenceModule):
    """step_s, eval_s: pass on the clock in each training, validation step. val_losses: one per validation."""

    def __init__(
        self,
        clock: Clock | None = None,
        step_s: float = 0.0,
        eval_s: float = 0.0,
        bad_steps: tuple[int, ...] = (),
        val_losses: tuple[float, ...] = (),
        lr: float = 0.1,
        model: nn.Module | None = None,
        optimizer: partial | None = None,
        **settings: object,
    ):
        optimizer = optimizer or partial(torch.optim.AdamW, lr=lr, fused=True)
        super().__init__(model or TinyModel(bad_steps), optimizer, constant, **settings)
        self.clock, self.step_s, self.eval_s = clock or Clock(), step_s, eval_s
        self.val_losses = list(val_losses)
        self.validations = 0

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.clock.sleep(self.step_s)
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.clock.sleep(self.eval_s)
        super().validation_step(batch, batch_idx)

    def _log_scores(self, split: str, scores: ScoredTokens) -> None:
        super()._log_scores("measured/" + split, scores)
        loss = scores.compute()["loss"]
        if self.trainer.sanity_checking:
            loss = 0.0  # better than any score to come
        elif self.val_losses and split == "val":
            loss = self.val_losses[self.validations]
            self.validations += 1
        self.log_dict({f"{split}/loss": loss, f"{split}/token_accuracy": 0.5})


class Logged(L.pytorch.loggers.logger.Logger):
    """Keeps what was logged; writing takes `log_s` on the clock."""

    name, version = "logged", "0"

    def __init__(self, clock: Clock | None = None, log_s: float = 0.0):
        super().__init__()
        self.clock, self.log_s = clock or Clock(), log_s
        self.rows: list[dict] = []

    def log_hyperparams(self, params) -> None:
        raise AssertionError("no hyperparameters are logged here")

    def log_metrics(self, metrics: dict, step: int | None = None) -> None:
        self.clock.sleep(self.log_s)
        self.rows.append(metrics)


def make_trainer(tmp_path: Path, *extra: L.Callback, **settings) -> L.Trainer:
    defaults = dict(
        max_steps=20,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=any(isinstance(c, L.pytorch.callbacks.Checkpoint) for c in extra),
        enable_progress_bar=any(isinstance(c, callbacks.Progress) for c in extra),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=5,
        default_root_dir=tmp_path,
        callbacks=list(extra),
    )
    return L.Trainer(**(defaults | settings))


# Solved


def solving(tmp_path, scores, *extra, solved=None, ckpt=None, **settings):
    """A run with a validation every second step that scores `scores`, one after another."""
    solved = solved or callbacks.Solved("val/loss", (0.99, 0.5), patience=2)
    settings = {"max_steps": 2 * len(scores), "limit_val_batches": 1, "val_check_interval": 2} | settings
    trainer = make_trainer(tmp_path, solved, *extra, check_val_every_n_epoch=None, **settings)
    module = TinyModule(val_losses=scores)
    trainer.fit(module, datamodule=TinyTask(), ckpt_path=ckpt, weights_only=True)
    return trainer, module, solved


def test_a_run_that_has_solved_its_task_ends_and_says_how_many_steps_each_threshold_took(tmp_path, caplog):
    caplog.set_level("INFO", "seqmix.callbacks.solved")
    trainer, module, solved = solving(tmp_path, (0.2, 0.995, 0.6, 0.99, 1.0, 1.0, 1.0))
    assert trainer.global_step == 10 and module.validations == 5, "the third 0.6 starts the count anew"
    assert solved.summary() == {"steps_to/0.5": 4, "steps_to/0.99": 4}
    assert "val/loss has been at least 0.99 in 2 validations in a row: the run ends after 10 steps" in caplog.text


def test_without_patience_steps_are_counted_and_no_run_is_ended(tmp_path):
    trainer, _, solved = solving(tmp_path, (0.6, 1.0, 1.0, math.nan), solved=callbacks.Solved("val/loss", (0.5, 0.7, 1.0)))
    assert trainer.global_step == 8 and solved.summary() == {"steps_to/0.5": 2, "steps_to/0.7": 4, "steps_to/1": 4}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint:UserWarning")  # the rows do not matter here
def test_what_a_run_has_reached_is_kept_where_it_is_resumed_and_measures_the_same(tmp_path, caplog):
    scores, last = (0.6, 1.0, 1.0, 1.0), callbacks.LastCheckpoint(tmp_path, every_n_steps=None, every_minutes=None)
    whole, _, solved = solving(tmp_path, scores)
    solving(tmp_path, scores[:3], last, max_steps=5)
    resumed, _, again = solving(tmp_path, scores[2:], max_steps=8, ckpt=tmp_path / "last.ckpt")
    assert resumed.global_step == whole.global_step == 6 and again.summary() == solved.summary()
    other = callbacks.Solved("measured/val/token_accuracy", (0.99, 0.5))
    assert solving(tmp_path, scores[2:], solved=other, max_steps=8, ckpt=tmp_path / "last.ckpt")[2].summary() != again.summary()
    assert "this run counts anew" in caplog.text


def test_settings_of_solved_that_cannot_be_are_refused(tmp_path):
    for bad in ((), (0.0,), (1.5,)):
        with pytest.raises(ValueError, match=r"thresholds must be accuracies above 0 and at most 1, got \["):
            callbacks.Solved(thresholds=bad)
    with pytest.raises(ValueError, match="patience must be at least 1 validation, or null, got 0"):
        callbacks.Solved(patience=0)
    with pytest.raises(ValueError, match="monitor='val/acuracy' is not logged by validation"):
        solving(tmp_path, (0.5,), solved=callbacks.Solved("val/acuracy"))


# Throughput


class SaveEvery(L.pytorch.callbacks.Checkpoint):
    """Saves after every third step; the disk takes `save_s`."""

    def __init__(self, clock: Clock, save_s: float):
        self.clock, self.save_s = clock, save_s

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 3 == 0 and trainer.global_step > 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "x.ckpt")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.clock.sleep(self.save_s)


def test_speed_is_that_of_steps_and_fetches_and_of_nothing_else(tmp_path):
    clock = Clock()
    speed = callbacks.Throughput(warmup_steps=3, clock=clock)
    logged = Logged(clock, log_s=1000.0)
    module = TinyModule(clock, step_s=0.75, eval_s=500.0)
    slow_first = module.training_step

    def training_step(batch, batch_idx):
        clock.sleep(60.0 if batch_idx == 0 else 0.0)  # compiling
        return slow_first(batch, batch_idx)

    module.training_step = training_step
    trainer = make_trainer(
        tmp_path,
        speed,
        SaveEvery(clock, 300.0),
        max_steps=20,
        logger=logged,
        limit_val_batches=1,
        val_check_interval=4,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, datamodule=TinyTask(clock, fetch_s=0.25))
    summary = speed.summary()
    assert summary["speed/step_ms"] == pytest.approx(1000.0, rel=1e-12)
    assert summary["speed/tokens_per_second"] == pytest.approx(BATCH * LENGTH, rel=1e-12)
    assert summary["speed/data_wait_fraction"] == pytest.approx(0.25, rel=1e-12)
    assert summary["speed/first_step_s"] == pytest.approx(60.75)
    # edges at steps 5, 10, 15, 20; the first window holds steps 4 and 5
    assert [w.steps for w in speed.windows] == [2, 5, 5, 5]
    assert summary["speed/windows"] == 4 and summary["speed/step_ms_iqr"] == pytest.approx(0.0, abs=1e-9)
    live = [row["speed/tokens_per_second"] for row in logged.rows if "speed/tokens_per_second" in row]
    assert live == pytest.approx([BATCH * LENGTH] * 4)


def test_speed_after_a_resume_counts_only_what_ran_since(tmp_path):
    clock = Clock()
    first = callbacks.LastCheckpoint(tmp_path, every_minutes=None)
    make_trainer(tmp_path, first, max_steps=7).fit(TinyModule(clock, step_s=100.0), datamodule=TinyTask())
    speed = callbacks.Throughput(warmup_steps=2, clock=clock)
    again = callbacks.LastCheckpoint(tmp_path / "again", every_minutes=None)
    trainer = make_trainer(tmp_path, speed, again, max_steps=20)
    with pytest.warns(UserWarning, match="dataloader is not resumable"):
        trainer.fit(TinyModule(clock, step_s=2.0), datamodule=TinyTask(clock), ckpt_path=tmp_path / "last.ckpt")
    assert [w.steps for w in speed.windows] == [1, 5, 5], "warm-up is steps 8 and 9; edges at 10, 15, 20"
    assert speed.summary()["speed/step_ms"] == pytest.approx(2000.0)
    assert speed.summary()["speed/first_step_s"] == pytest.approx(2.0)


def test_a_run_shorter_than_a_window_has_one_and_one_shorter_than_the_warm_up_none(tmp_path):
    clock = Clock()
    speed = callbacks.Throughput(warmup_steps=2, clock=clock)
    make_trainer(tmp_path, speed, max_steps=4).fit(TinyModule(clock, step_s=2.0), datamodule=TinyTask(clock))
    assert [w.steps for w in speed.windows] == [2] and speed.summary()["speed/step_ms"] == 2000.0
    make_trainer(tmp_path, speed, max_steps=2).fit(TinyModule(clock, step_s=3.0), datamodule=TinyTask(clock))
    summary = speed.summary()
    assert summary.pop("speed/first_step_s") == 3.0 and summary.pop("speed/windows") == 0
    assert set(summary.values()) == {None}, "nothing is carried over from the run before"


def test_epochs_do_not_end_a_window_but_their_change_is_not_timed(tmp_path):
    clock = Clock()

    class Pauses(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            clock.sleep(700.0)

    speed = callbacks.Throughput(warmup_steps=1, clock=clock)
    trainer = make_trainer(tmp_path, Pauses(), speed, max_steps=10)
    trainer.fit(TinyModule(clock, step_s=1.0), datamodule=TinyTask(clock, batches=3))
    assert [w.steps for w in speed.windows] == [4, 5]
    assert speed.summary()["speed/step_ms"] == pytest.approx(1000.0)


def test_warm_up_must_hold_the_first_step():
    with pytest.raises(ValueError, match="got 0"):
        callbacks.Throughput(warmup_steps=0)


# Memory


def test_memory_reports_state_after_the_prefill_parameters_and_null_for_a_gpu_that_is_not_there(tmp_path):
    memory = callbacks.Memory(warmup_steps=2)
    module = TinyModule()
    make_trainer(tmp_path, memory, max_steps=4).fit(module, datamodule=TinyTask())
    summary = memory.summary()
    assert summary["memory/state_bytes"] == 3 * 4 + LENGTH * 8, "the cache has grown to seq_len tokens"
    assert summary["memory/params"] == V * 3 + 3 * V + V and summary["memory/params_non_embedding"] == 3 * V + V
    assert summary["memory/peak_allocated_mib"] is None and summary["memory/peak_reserved_mib"] is None
    assert summary["memory/peak_host_mib"] is None or summary["memory/peak_host_mib"] > 50
    assert module.model.training
    json.dumps(summary, allow_nan=False)


def test_peaks_leave_out_the_warm_up_and_evaluation(tmp_path, monkeypatch):
    peak = [0.0]

    class Fake(PeakMemory):
        def reset(self):
            peak[0] = 100.0  # what is held all the time

        def allocated(self):
            return peak[0]

    def needs(mib: float):
        peak[0] = max(peak[0], mib)

    class Hungry(TinyModule):
        def training_step(self, batch, batch_idx):
            needs(9000.0 if self.trainer.global_step < 2 else 300.0 + batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            needs(8000.0)
            super().validation_step(batch, batch_idx)

    monkeypatch.setattr("seqmix.callbacks.memory.PeakMemory", Fake)
    memory = callbacks.Memory(warmup_steps=2)
    trainer = make_trainer(tmp_path, memory, max_steps=6, limit_val_batches=1, val_check_interval=1)
    trainer.fit(Hungry(), datamodule=TinyTask())
    assert memory.summary()["memory/peak_allocated_mib"] == 305.0


# Non-finite guard


def test_a_bad_loss_stops_the_run_before_the_weights_are_touched(tmp_path):
    module = TinyModule(bad_steps=(3,), lr=0.25)
    best, last = callbacks.BestCheckpoint(tmp_path), callbacks.LastCheckpoint(tmp_path, every_n_steps=1)
    trainer = make_trainer(tmp_path, callbacks.NonFiniteGuard(), best, last, limit_val_batches=1, val_check_interval=1)
    with pytest.raises(NonFiniteError, match=r"after 3 steps: the loss \(lr 0.25") as caught:
        trainer.fit(module, datamodule=TinyTask())
    error = caught.value
    assert (error.step, error.lr, error.tensor) == (3, 0.25, "the loss") and math.isnan(error.grad_norm)
    assert measure.first_nonfinite(module.named_parameters()) is None
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 3 and measure.first_nonfinite(saved["state_dict"].items()) is None


def test_a_bad_gradient_is_named_though_the_loss_is_finite(tmp_path):
    module = TinyModule(micro_batch_size=2)
    module.model.head.bias.register_hook(lambda g: g.clone().fill_(math.inf) if module.global_step == 2 else g)
    trainer = make_trainer(tmp_path, callbacks.NonFiniteGuard())
    with pytest.raises(NonFiniteError, match="1 of 3 gradients") as caught:
        trainer.fit(module, datamodule=TinyTask())
    assert (caught.value.step, caught.value.tensor) == (2, "gradient of head.bias")


def test_an_absurd_learning_rate_diverges_and_the_best_checkpoint_is_finite(tmp_path):
    class Quartic(TinyModel):  # a loss that an overshooting step makes larger and larger
        def score(self, tokens, targets):
            losses, right = super().score(tokens, targets)
            return losses + sum((p**4).sum() for p in self.parameters()), right

    best, last = callbacks.BestCheckpoint(tmp_path), callbacks.LastCheckpoint(tmp_path, every_n_steps=1)
    trainer = make_trainer(
        tmp_path, callbacks.NonFiniteGuard(), best, last, max_steps=50, limit_val_batches=1, val_check_interval=1
    )
    with pytest.raises(NonFiniteError):
        trainer.fit(TinyModule(model=Quartic(), optimizer=partial(torch.optim.SGD, lr=1e6)), datamodule=TinyTask())
    for name in ("best.ckpt", "last.ckpt"):
        saved = torch.load(tmp_path / name, weights_only=True)
        assert measure.first_nonfinite(saved["state_dict"].items()) is None
    assert math.isfinite(best.best_model_score)


@pytest.mark.parametrize(("bad", "stops_after"), [((2, 3), None), ((2, 3, 5, 6, 7), 7)])
def test_with_patience_bad_steps_in_a_row_are_skipped_and_counted(tmp_path, bad, stops_after):
    skipped, plain = TinyModule(bad_steps=bad), TinyModule()
    plain.load_state_dict(skipped.state_dict())
    weights = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            weights.append(pl_module.model.head.weight.detach().clone())

    trainer = make_trainer(tmp_path, callbacks.NonFiniteGuard(patience=3), Watch(), max_steps=10)
    if stops_after is None:
        trainer.fit(skipped, datamodule=TinyTask())
        assert len(weights) == 10
    else:
        with pytest.raises(NonFiniteError, match=f"after {stops_after} steps"):
            trainer.fit(skipped, datamodule=TinyTask())
    assert torch.equal(weights[1], weights[3]), "steps 2 and 3 changed nothing"
    assert not torch.equal(weights[3], weights[4])
    assert measure.first_nonfinite(skipped.named_parameters()) is None


def test_no_checkpoint_is_written_of_weights_that_are_not_finite(tmp_path):
    module = TinyModule()
    trainer = make_trainer(tmp_path, callbacks.NonFiniteGuard(), max_steps=2)
    trainer.fit(module, datamodule=TinyTask())
    trainer.state.fn = "fit"
    with torch.no_grad():
        module.model.head.bias[1] = math.nan
    with pytest.raises(NonFiniteError, match=r"parameter head\.bias"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()


# Checkpoints


def test_checkpoint_names_can_be_pasted_and_the_kept_ones_are_the_newest(tmp_path):
    last = callbacks.LastCheckpoint(tmp_path / "c", every_n_steps=2, every_minutes=None, keep_steps=2)
    trainer = make_trainer(tmp_path, last, callbacks.BestCheckpoint(tmp_path / "c"), max_steps=9)
    trainer.fit(TinyModule(), datamodule=TinyTask())
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["last.ckpt", "step_000006.ckpt", "step_000008.ckpt"]
    assert torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["global_step"] == 9
    assert torch.load(tmp_path / "c" / "step_000006.ckpt", weights_only=True)["global_step"] == 6
    assert callbacks.best_checkpoint(trainer) is None, "nothing was validated"


def test_checkpoints_by_minutes_follow_the_clock(tmp_path):
    clock = Clock()
    last = callbacks.LastCheckpoint(tmp_path, every_minutes=1.0, clock=clock)
    saves = []

    class Watch(L.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            saves.append(trainer.global_step)

    make_trainer(tmp_path, last, Watch(), max_steps=10).fit(TinyModule(clock, step_s=25.0), datamodule=TinyTask())
    assert saves == [3, 6, 9, 10]


def test_the_best_is_the_best_finite_score_after_the_sanity_check(tmp_path):
    best = callbacks.BestCheckpoint(tmp_path)
    module = TinyModule(val_losses=(math.nan, 3.0, math.inf, 1.5, -math.inf, 2.0))
    trainer = make_trainer(
        tmp_path, best, max_steps=6, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1
    )
    trainer.fit(module, datamodule=TinyTask())
    assert callbacks.best_checkpoint(trainer) == str(tmp_path / "best.ckpt")
    assert best.summary() == {"best/val/loss": 1.5, "best/step": 4}
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == 4


def test_a_resumed_run_in_another_folder_keeps_the_best_so_far(tmp_path):
    def fit(folder, losses, max_steps, ckpt=None):
        best = callbacks.BestCheckpoint(tmp_path / folder)
        last = callbacks.LastCheckpoint(tmp_path / folder, every_minutes=None)
        trainer = make_trainer(tmp_path, best, last, max_steps=max_steps, limit_val_batches=1, val_check_interval=1)
        trainer.fit(TinyModule(val_losses=losses), datamodule=TinyTask(), ckpt_path=ckpt)
        return best

    fit("a", (5.0, 1.0, 4.0), 3)
    with pytest.warns(UserWarning, match="dataloader is not resumable"):
        worse = fit("b", (2.0, 3.0), 5, tmp_path / "a" / "last.ckpt")
    assert (worse.best_model_path, worse.best_model_score) == (str(tmp_path / "a" / "best.ckpt"), 1.0)
    with pytest.warns(UserWarning, match="dataloader is not resumable"):
        better = fit("c", (2.0, 0.5), 5, tmp_path / "a" / "last.ckpt")
    assert (better.best_model_path, better.best_step) == (str(tmp_path / "c" / "best.ckpt"), 5)


@pytest.mark.parametrize("sanity_steps", [0, 1])
def test_a_wrong_monitor_fails_at_the_first_validation_with_the_names(tmp_path, sanity_steps):
    trainer = make_trainer(
        tmp_path,
        callbacks.BestCheckpoint(tmp_path, monitor="val/los"),
        limit_val_batches=1,
        num_sanity_val_steps=sanity_steps,
        val_check_interval=1,
    )
    with pytest.raises(ValueError, match=r"'val/los'.*did you mean 'val/loss'.*val/loss, val/token_accuracy"):
        trainer.fit(TinyModule(), datamodule=TinyTask())
    assert trainer.global_step == 1 - sanity_steps


def test_an_error_leaves_the_last_checkpoint_that_something_can_go_on_from(tmp_path, caplog):
    class Breaks(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    last = callbacks.LastCheckpoint(tmp_path, every_n_steps=3, every_minutes=None)
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(tmp_path, last).fit(Breaks(), datamodule=TinyTask())
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert "last.ckpt is still that of step 3" in caplog.text


@pytest.mark.parametrize(("signum", "becomes"), [(signal.SIGINT, SystemExit), (signal.SIGTERM, SIGTERMException)])
def test_a_signal_finishes_the_step_saves_it_and_stops(tmp_path, signum, becomes):
    class Interrupted(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signum)
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(signum)
    last = callbacks.LastCheckpoint(tmp_path, every_minutes=None)
    module = Interrupted()
    try:
        with pytest.raises(becomes):  # a KeyboardInterrupt is made a SystemExit by Lightning
            make_trainer(tmp_path, last).fit(module, datamodule=TinyTask())
        after = signal.getsignal(signum)
    finally:
        signal.signal(signum, before)
    assert after in (before, signal.SIG_IGN), "ours is gone; Lightning ignores further ones"
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 5, "the step in which it came is done"
    assert torch.equal(saved["state_dict"]["model.head.bias"], module.model.head.bias.detach())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, or null, got 0"),
        ({"every_minutes": -1.0}, "got -1"),
        ({"keep_steps": -2}, "got -2"),
    ],
)
def test_impossible_checkpoint_keys_are_refused(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        callbacks.LastCheckpoint(tmp_path, **keys)
    with pytest.raises(ValueError, match="'smallest'"):
        callbacks.BestCheckpoint(tmp_path, mode="smallest")


# Progress


def test_without_a_terminal_progress_is_plain_lines_now_and_then(tmp_path):
    clock, stream = Clock(), io.StringIO()
    bar = callbacks.Progress(line_seconds=10.0, stream=stream, clock=clock)
    trainer = make_trainer(tmp_path, bar, max_steps=20, limit_val_batches=1, val_check_interval=5)
    trainer.fit(TinyModule(clock, step_s=4.0), datamodule=TinyTask())
    text = stream.getvalue()
    lines = text.splitlines()
    assert "\x1b" not in text and "\r" not in text, "no control codes"
    assert [line.split()[1] for line in lines] == ["3/20", "6/20", "9/20", "12/20", "15/20", "18/20", "20/20"]
    assert lines[1].startswith("step 6/20 (30%), 0:00:56 left, train/loss ")
    assert "val/token_accuracy 0.500" in lines[1] and "val/token_accuracy" not in lines[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_progress_is_a_bar_that_ends_with_training(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    bar = callbacks.Progress(refresh_seconds=1e-6, stream=stream)
    trainer = make_trainer(tmp_path, bar, max_steps=8, limit_val_batches=1, val_check_interval=4)
    trainer.fit(TinyModule(), datamodule=TinyTask())
    text = stream.getvalue()
    assert "8/8" in text and "train/loss" in text and "val/token_accuracy 0.500" in text
    assert bar._bar is None
    with pytest.raises(RuntimeError, match="stops"):

        class Stops(TinyModule):
            def training_step(self, batch, batch_idx):
                raise RuntimeError("stops")

        make_trainer(tmp_path, bar).fit(Stops(), datamodule=TinyTask())
    assert bar._bar is None, "a crash does not leave the terminal without a cursor"


# Predictions


def test_predictions_are_printed_written_and_counted(tmp_path, capsys):
    shown = callbacks.Predictions(tmp_path / "run", rows=2, max_chars=8, generate_tokens=3)
    module = TinyModule()
    text_task = TinyTask()
    text_task.token_bytes = torch.ones(V)
    make_trainer(tmp_path, shown, max_steps=1).fit(module, datamodule=text_task)
    batch = TinyTask().sample("val", torch.arange(2))
    with torch.no_grad():
        right = (module.model(batch.inputs).argmax(-1) == batch.targets).sum(-1).tolist()
    text = (tmp_path / "run" / "predictions.txt").read_text()
    assert f"validation row 0: {right[0]} of 6 right" in text and f"validation row 1: {right[1]} of 6 right" in text
    assert "input       bcdefgabcdef\n" in text and "target      cegbdf\n" in text
    assert "prompt        bcdefg\n  continuation  ggg\n" in text
    assert "input       bcdefgab …" in capsys.readouterr().out
    assert module.model.training
    make_trainer(tmp_path, shown, max_steps=1).fit(TinyModule(), datamodule=TinyTask())
    assert "continuation" not in (tmp_path / "run" / "predictions.txt").read_text(), "not a task of text"


# On a GPU, where nothing may wait for the device at every step

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("step", [3, 19])
@pytest.mark.parametrize("patience", [1, 2])
def test_on_a_gpu_a_bad_step_is_found_late_but_never_saved(tmp_path, step, patience):
    bad = tuple(range(step, step + patience))
    module = TinyModule(bad_steps=bad)
    best, last = callbacks.BestCheckpoint(tmp_path), callbacks.LastCheckpoint(tmp_path, every_n_steps=2, every_minutes=None)
    trainer = make_trainer(
        tmp_path, callbacks.NonFiniteGuard(patience), best, last, accelerator="cuda", limit_val_batches=1, val_check_interval=5,
        max_steps=30,
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match="the loss") as caught:
        trainer.fit(module, datamodule=TinyTask())
    assert caught.value.step == bad[-1]
    assert measure.first_nonfinite(module.named_parameters()) is None, "a bad step has left the weights as they were"
    saved = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")}
    assert ("best.ckpt" in saved) == (step > 5)
    assert saved["last.ckpt"]["global_step"] == bad[-1] // 2 * 2
    for checkpoint in saved.values():
        weights = [(name, t) for name, t in checkpoint["state_dict"].items() if name.startswith("model.")]
        assert measure.first_nonfinite(weights) is None


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_host_waits_for_the_device_only_where_numbers_are_logged(tmp_path):
    heard: dict[int, int] = {}

    class Listens(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.waits = warnings.catch_warnings(record=True)
            self.said = self.waits.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    class Ends(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("default")
            heard[trainer.global_step] = sum("called a synchronizing" in str(w.message) for w in listens.said)
            listens.waits.__exit__(None, None, None)

    listens = Listens()
    speed = callbacks.Throughput(warmup_steps=10)
    trainer = make_trainer(
        tmp_path, listens, callbacks.NonFiniteGuard(), speed, callbacks.Memory(), Ends(), accelerator="cuda", max_steps=60,
        log_every_n_steps=20,
    )  # fmt: skip
    trainer.fit(TinyModule(), datamodule=TinyTask())
    waiting = {step for step, waits in heard.items() if waits}
    assert waiting <= {1, 4, 10, 20, 40, 60}, "the first, the capture, the end of the warm-up, and what is logged"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cuda_graph", ["auto", "off"])
def test_on_a_gpu_peaks_are_given_and_do_not_leak_between_runs(tmp_path, cuda_graph):
    peaks = []
    for mib in (512, 16):

        class Hungry(TinyModel):
            def score(self, tokens, targets, mib=mib):
                torch.empty(mib * MIB, dtype=torch.uint8, device=tokens.device)
                return super().score(tokens, targets)

        memory = callbacks.Memory(warmup_steps=2)
        trainer = make_trainer(tmp_path, memory, accelerator="cuda", max_steps=8)
        trainer.fit(TinyModule(model=Hungry(), cuda_graph=cuda_graph), datamodule=TinyTask())
        summary = memory.summary()
        assert summary["memory/peak_host_mib"] is None
        assert summary["memory/peak_reserved_mib"] >= summary["memory/peak_allocated_mib"]
        peaks.append(summary["memory/peak_allocated_mib"])
    assert 512 <= peaks[0] < 600 and 16 <= peaks[1] < 100


def test_importing_the_callbacks_does_not_import_wandb_and_triton_only_where_lightning_does():
    code = (
        "import sys, lightning; before = set(sys.modules); import seqmix.callbacks;"
        "print([m for m in ('wandb', 'triton', 'flash_attn') if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

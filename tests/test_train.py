"""train.py from end to end: every config takes a step, one batch is learnt by heart, a resumed run is the same run."""

import json
import os
import re
import signal

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import CONF, SELECTIVE_COPY, command, metrics, names, start

from seqmix.config import compose_run
from seqmix.metrics import ScoredTokens
from seqmix.module import SequenceModule
from seqmix.step import TrainingStep
from seqmix.tasks.base import Task

# Every config


@pytest.mark.parametrize("model", names("model"))
def test_every_model_takes_steps(tmp_path, model):
    folder = tmp_path / "run"
    summary = start(folder, f"model={model}", *SELECTIVE_COPY)
    assert summary["status"] == "complete" and summary["steps"] == 4
    assert 0 <= summary["test/token_accuracy"] <= 1 and summary["chance/token_accuracy"] == pytest.approx(1 / 14)
    assert summary["memory/params"] > 0 and summary["memory/state_bytes"] > 0 and summary["speed/first_step_s"] > 0
    mixer = instantiate(OmegaConf.load(CONF / "model" / f"{model}.yaml").model)(d_model=16)
    ours = mixer.kernels_used(torch.zeros(4, 12, 16)).keys()
    assert summary["kernels"].keys() == ours | {"embedding", "add_rms_norm", "linear_cross_entropy"}
    assert summary["memory/peak_allocated_mib"] is None  # no GPU: unknown, not zero (case E16)
    assert len(metrics(folder, "train/loss")) == 4 and len(metrics(folder, "val/token_accuracy")) == 2
    written = json.loads((folder / "summary.json").read_text())
    assert written["test/loss"] == summary["test/loss"] and written["status"] == "complete"
    assert len(written["source"]["commit"]) == 40 and written["data"]["n_tokens"] == 3 and written["environment"]["torch"]


@pytest.mark.parametrize("task", names("task"))
def test_every_task_takes_steps(tmp_path, task):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    keys = OmegaConf.load(CONF / "task" / f"{task}.yaml")
    source = (f"task.source={text}", "task.seq_len=16") if "source" in keys else ()
    summary = start(tmp_path / "run", f"task={task}", *source)
    assert summary["status"] == "complete"
    assert ("test/bits_per_byte" in summary) == ("source" in keys)


@pytest.mark.parametrize("scheduler", names("scheduler"))
@pytest.mark.parametrize("optimizer", names("optimizer"))
def test_every_optimizer_and_scheduler_takes_steps(tmp_path, optimizer, scheduler):
    overrides = [f"optimizer={optimizer}", f"scheduler={scheduler}", "callbacks=none", *SELECTIVE_COPY]
    assert start(tmp_path / "run", *overrides)["steps"] == 4


@pytest.mark.parametrize("group", ["size", "trainer", "logger", "callbacks", "debug", "experiment"])
def test_every_other_choice_composes(group, tmp_path):
    for name in names(group):
        assert not OmegaConf.missing_keys(compose_run([f"{group}={name}"], CONF, tmp_path))


@pytest.mark.parametrize("model", names("model"))
def test_one_batch_is_learnt_by_heart(tmp_path, model):
    summary = start(
        tmp_path / "run", *SELECTIVE_COPY, f"model={model}", "debug=overfit", "size.d_model=32", "task.batch_size=8",
        "optimizer.lr=1e-2", "trainer.max_steps=80", "trainer.val_check_interval=80", "trainer.log_every_n_steps=20",
        "callbacks=none", "test=false",
    )  # fmt: skip
    assert summary["train/loss"] < 0.1, "chance is ln 14 = 2.64"
    assert summary["train/token_accuracy"] == 1.0


def test_mixed_precision_trains_the_same(tmp_path):
    full, mixed = (
        start(tmp_path / precision, *SELECTIVE_COPY, f"trainer.precision={precision}")["val/loss"]
        for precision in ("32-true", "bf16-mixed")
    )
    assert mixed == pytest.approx(full, rel=0.02)


# Resume

RESUME = (
    *SELECTIVE_COPY, "trainer.max_steps=9", "trainer.val_check_interval=3", "trainer.log_every_n_steps=2",
    "dropout=0.1", "callbacks.last.every_n_steps=3", "callbacks.last.keep_steps=-1",
)  # fmt: skip


def same_from(step, whole, resumed):
    """The resumed run's curves and last weights are the uninterrupted one's, bit for bit."""
    for name in ("train/loss", "train/token_accuracy", "train/lr", "val/loss"):
        expected = {at: value for at, value in metrics(whole, name).items() if at >= step}
        assert metrics(resumed, name) == expected and expected, name
    weights = [torch.load(f / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for f in (whole, resumed)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    summaries = [json.loads((f / "summary.json").read_text()) for f in (whole, resumed)]
    assert all(summaries[0][key] == summaries[1][key] for key in ("best/val/loss", "best/step"))


@pytest.mark.parametrize("model", names("model"))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, model):
    whole, crashed, resumed = (tmp_path / name for name in ("whole", "crashed", "resumed"))
    start(whole, f"model={model}", *RESUME)
    with pytest.raises(RuntimeError, match="went away"):
        start(crashed, f"model={model}", *RESUME, error_at=(5, RuntimeError("the machine went away")))
    assert json.loads((crashed / "summary.json").read_text())["status"] == "failed"
    saved = torch.load(crashed / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    start(resumed, f"model={model}", *RESUME, f"ckpt={crashed}/checkpoints/last.ckpt")
    same_from(saved, whole, resumed)


@pytest.mark.parametrize("moment", ["in a validation", "as a batch is moved", "in a step", "in a step before a validation"])
def test_a_run_goes_on_bitwise_after_ctrl_c_at_any_moment(tmp_path, monkeypatch, moment):
    """The interruption is held back to the end of the step, and of the validation that follows it."""
    whole, stopped, resumed = (tmp_path / name for name in ("whole", "stopped", "resumed"))
    start(whole, "model=lstm", *RESUME)
    owner, name, steps = {
        "in a validation": (SequenceModule, "on_validation_batch_start", lambda self: self.trainer.global_step),
        "as a batch is moved": (Task, "transfer_batch_to_device", lambda self: self.trainer.global_step),
        "in a step": (TrainingStep, "_update", lambda self: self.taken - 1),
        "in a step before a validation": (TrainingStep, "_update", lambda self: self.taken),
    }[moment]
    method, calls = getattr(owner, name), []

    def interrupted(self, *arguments, **named):
        calls.append(steps(self))
        if steps(self) == 3 and calls.count(3) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return method(self, *arguments, **named)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        start(stopped, "model=lstm", *RESUME)
    signal.signal(signal.SIGINT, handler)
    checkpoint = torch.load(stopped / "checkpoints/last.ckpt", weights_only=True)
    saved = checkpoint["global_step"]
    assert saved == (4 if moment == "in a step" else 3)
    assert checkpoint["callbacks"]["BestCheckpoint"]["step"] == 3, "no run repeats the validation after step 3"
    start(resumed, "model=lstm", *RESUME, f"ckpt={stopped}/checkpoints/last.ckpt")
    same_from(saved, whole, resumed)


def test_a_longer_run_does_not_forget_what_the_last_validation_found(tmp_path):
    """The validation after the last step is in last.ckpt, and so is one that falls together with a save by steps."""
    start(tmp_path / "whole", "model=lstm", *RESUME, "trainer.max_steps=6", "scheduler=constant")
    for name in ("last", "step_000006"):
        state = torch.load(tmp_path / f"whole/checkpoints/{name}.ckpt", weights_only=True)["callbacks"]["BestCheckpoint"]
        assert state["step"] == 6 == json.loads((tmp_path / "whole/summary.json").read_text())["best/step"]


def test_a_resumed_run_trains_with_the_settings_of_its_own_config(tmp_path, caplog):
    """Rates, decay and schedule; from the checkpoint come weights, moments and the number of steps."""
    first = start(tmp_path / "first", "model=s4", *RESUME, "optimizer.lr=1e-2")
    ckpt = f"ckpt={tmp_path}/first/checkpoints/step_000006.ckpt"
    start(tmp_path / "same", "model=s4", *RESUME, "optimizer.lr=1e-2", ckpt)
    assert "settings that differ" not in caplog.text
    changes = ("optimizer.lr=1e-5", "optimizer.weight_decay=0", "optimizer.betas=[0.8,0.9]", "scheduler=constant")
    start(tmp_path / "other", "model=s4", *RESUME, *changes, ckpt)
    assert "settings that differ" in caplog.text and "initial_lr 0.01 -> 1e-05" in caplog.text
    assert [float(lr) for lr in metrics(tmp_path / "other", "train/lr").values()] == pytest.approx([1e-5, 1e-5])
    groups = torch.load(tmp_path / "other/checkpoints/last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert {(g["lr"], g["weight_decay"], tuple(g["betas"])) for g in groups} == {(1e-5, 0.0, (0.8, 0.9))}
    assert first["status"] == "complete"


def test_a_resumed_run_follows_the_schedule_of_its_own_length(tmp_path):
    """Cosine over 9 steps, then over 18: from step 6 on the rate is that of a run of 18 steps."""
    start(tmp_path / "short", "model=lstm", *RESUME)
    start(tmp_path / "long", "model=lstm", *RESUME, "trainer.max_steps=18")
    ckpt = f"ckpt={tmp_path}/short/checkpoints/step_000006.ckpt"
    start(tmp_path / "longer", "model=lstm", *RESUME, "trainer.max_steps=18", ckpt)
    want = {at: lr for at, lr in metrics(tmp_path / "long", "train/lr").items() if at > 6}
    assert want and metrics(tmp_path / "longer", "train/lr") == want


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed=1", "another data: seed=0 in the checkpoint, 1 now"),
        ("task.n_tokens=2", "another data: n_tokens=3 in the checkpoint, 2 now"),
        ("task.batch_size=5", "24 rows, no multiple of batch_size=5"),
    ],
)
def test_data_that_cannot_be_resumed_are_named_in_the_summary(tmp_path, change, said):
    start(tmp_path / "first", "model=rnn", *RESUME)
    with pytest.raises(ValueError, match=re.escape(said)):
        start(tmp_path / "other", "model=rnn", *RESUME, change, f"ckpt={tmp_path}/first/checkpoints/step_000006.ckpt")
    assert said in json.loads((tmp_path / "other/summary.json").read_text())["error"]


def test_a_checkpoint_that_cannot_be_resumed_is_refused_in_one_line_before_a_folder_is_made(tmp_path):
    start(tmp_path / "first", "model=rnn", *RESUME)
    whole = tmp_path / "first/checkpoints/step_000006.ckpt"
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "cut.ckpt").write_bytes(whole.read_bytes()[:3000])
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    tries = {
        f"ckpt={whole} trainer.max_steps=5": "has 6 steps behind it",
        f"ckpt={whole} task.n_symbols=13": "model.embedding.weight is (16, 16) there and (15, 16) here",
        f"ckpt={whole} model=lstm": "parameters differ",
        **{f"ckpt={name}.ckpt": f"{name}.ckpt is damaged" for name in ("empty", "cut", "text")},
    }
    for line, said in tries.items():
        done = command(tmp_path, "model=rnn", *RESUME, "logger=csv", *line.split())
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "outputs").exists()


ANEW = ["task.eval_seed=5", "task.eval_samples=8", "callbacks.checkpoint.monitor=val/token_accuracy"]


@pytest.mark.parametrize("change", [None, *ANEW])
def test_the_best_so_far_is_kept_where_it_measured_the_same(tmp_path, caplog, change):
    start(tmp_path / "first", "model=rnn", *RESUME)
    changes = [] if change is None else [change, "callbacks.checkpoint.mode=max"] if "monitor" in change else [change]
    ckpt = f"ckpt={tmp_path}/first/checkpoints/last.ckpt"
    summary = start(tmp_path / "other", "model=rnn", *RESUME, *changes, "trainer.max_steps=10", ckpt)
    best = torch.load(tmp_path / "other/checkpoints/last.ckpt", weights_only=True)["callbacks"]["BestCheckpoint"]
    assert ("begins anew" in caplog.text) == (change is not None)
    assert summary["best/step"] == 10 if change else best["path"].startswith(str(tmp_path))


@pytest.mark.parametrize("rows", [2, 3])
def test_micro_batches_are_one_batch(tmp_path, rows):
    """Of one size or not, with unlike numbers of scored tokens or not: gradients are those of the whole batch."""
    whole = start(tmp_path / "whole", *SELECTIVE_COPY, "task.batch_size=8")
    parts = start(tmp_path / "parts", *SELECTIVE_COPY, "task.batch_size=8", f"micro_batch_size={rows}")
    assert parts["steps"] == whole["steps"] == 4
    for name in ("train/loss", "val/loss"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-5)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_one_scored_token_among_four_ranks_counts_as_one(micro_batch_size, monkeypatch):
    """Of four ranks one has a token: the sum of its gradient and three zeros is that of the token's loss."""
    targets = torch.full((3, 3), -100)
    targets[0, 1] = 4
    tokens = torch.tensor([[1, 2, 3]] * 3)
    weights = torch.randn(5, 5)

    def trained(targets, world_size):
        model = Table(weights.clone())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = TrainingStep(model, optimizer, ScoredTokens(), micro_batch_size=micro_batch_size)
        step.world_size = world_size
        monkeypatch.setattr(step, "_over_ranks", lambda value: value)  # the others' sums are zeros
        step(tokens, targets)
        return model.weight.detach()

    assert torch.equal(trained(targets, 4), trained(targets, 1)) and not torch.equal(trained(targets, 4), weights)
    assert torch.equal(trained(torch.full_like(targets, -100), 4), weights)


class Table(torch.nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def score(self, tokens, targets):
        logits = self.weight[tokens]
        losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        return losses, logits.argmax(-1) == targets

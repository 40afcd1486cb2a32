"""One optimizer step: its arithmetic, what a bad one leaves alone, and that a replayed CUDA graph is the eager step."""

import functools
import json
import math

import pytest
import torch
from runs import SELECTIVE_COPY, metrics, names, start
from torch import nn

from seqmix.metrics import ScoredTokens
from seqmix.model import SequenceModel
from seqmix.step import NonFiniteError, TrainingStep

V = 7


class Table(nn.Module):
    """Logits of the next token from the last one. factor: of the losses, on the device: NaN makes a step a bad one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(V, V))
        self.bias = nn.Parameter(torch.randn(V))
        self.factor = torch.ones(())

    def score(self, tokens, targets):
        logits = self.weight[tokens] + self.bias
        losses = nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        return losses * self.factor, logits.argmax(-1) == targets


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (4, 5), generator=generator)
    targets = torch.randint(V, (4, 5), generator=generator)
    targets[:, :2] = -100
    targets[0] = -100
    return tokens, targets


def adamw(model, fused=True):
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
def test_a_step_is_the_mean_loss_over_scored_tokens_clipped_as_torch_clips(clip, fused):
    ours, plain = Table(), Table()
    step = TrainingStep(ours, adamw(ours, fused), ScoredTokens(), gradient_clip_val=clip, patience=1)
    optimizer = adamw(plain, fused)
    for seed in range(3):
        tokens, targets = batch(seed)
        step(tokens, targets)
        losses, _ = plain.score(tokens, targets)
        (losses.sum() / (targets != -100).sum()).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, plain.weight)
    torch.testing.assert_close(ours.bias, plain.bias)


@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_step_leaves_weights_and_the_optimizer_as_they_were(fused):
    model = Table()
    step = TrainingStep(model, optimizer := adamw(model, fused), ScoredTokens(), patience=2)
    step(*batch())
    before = [t.clone() for t in (model.weight, *optimizer.state[model.weight].values())]
    model.factor.fill_(math.nan)
    step(*batch())
    step.check()
    for then, now in zip(before, (model.weight, *optimizer.state[model.weight].values()), strict=True):
        assert torch.equal(then, now)
    model.factor.fill_(1.0)
    step(*batch())
    assert not torch.equal(before[0], model.weight), "and the next good one trains"


@pytest.mark.parametrize("fused", [True, False])
def test_once_patience_has_run_out_nothing_is_trained_and_the_first_fault_is_told(fused):
    model = Table()
    step = TrainingStep(model, adamw(model, fused), ScoredTokens(), patience=2, taken=10)
    step(*batch())
    weight = model.weight.clone()
    model.factor.fill_(math.inf)
    step(*batch())
    step(*batch())
    model.factor.fill_(1.0)
    for _ in range(3):  # the host has not asked yet
        step(*batch())
    assert torch.equal(weight, model.weight)
    fault = r"after 12 steps: the loss \(lr 0.1, gradient norm (nan|inf); loss (nan|inf)"
    with pytest.raises(NonFiniteError, match=fault) as caught:
        step.check()
    assert caught.value.step == 12 and caught.value.lr == pytest.approx(0.1)


def test_without_patience_nobody_looks():
    model = Table()
    step = TrainingStep(model, adamw(model), ScoredTokens())
    model.factor.fill_(math.nan)
    step(*batch())
    step.check()
    assert model.weight.isnan().any()
    with pytest.raises(NonFiniteError):
        TrainingStep(model, adamw(model), ScoredTokens(), patience=1).check_weights()


def test_metrics_are_those_of_all_micro_batches():
    whole, parts = ScoredTokens(), ScoredTokens()
    for window, rows in ((whole, None), (parts, 3)):
        model = Table()
        TrainingStep(model, adamw(model), window, micro_batch_size=rows)(*batch())
    assert whole.counts.tolist() == parts.counts.tolist() and whole.counts[0] == 9
    assert whole.compute()["loss"] == pytest.approx(parts.compute()["loss"].item(), rel=1e-6)


def test_the_logged_rate_is_that_of_the_step(tmp_path):
    start(tmp_path / "run", *SELECTIVE_COPY, "optimizer.lr=0.4", "scheduler=constant", "scheduler.warmup_steps=4")
    assert [float(lr) for lr in metrics(tmp_path / "run", "train/lr").values()] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_run_says_how_its_steps_ran(tmp_path):
    summary = start(tmp_path / "run", *SELECTIVE_COPY)
    assert summary["steps_run_as"] == "kernel by kernel (CUDA graphs need a GPU, the model is on cpu)"


# On a GPU: a replay is the eager step, bit by bit

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RUN = (
    "trainer.accelerator=cuda", "trainer.max_steps=12", "trainer.val_check_interval=4", "task.batch_size=8",
    "size.d_model=32", "size.n_layer=2", "callbacks.last.every_n_steps=6", "callbacks.last.keep_steps=-1", "test=false",
)  # fmt: skip
COPY = ("task=copy", "task.seq_len=24", "task.n_tokens=3")
LM = ("task=lm", "task.seq_len=48", "task.source=python", "task.max_bytes=200000")
BF16 = "trainer.precision=bf16-mixed"
CASES = [[f"model={model}", precision] for model in names("model") for precision in (BF16, "trainer.precision=32-true")]
CASES += [
    ["model=mamba", BF16, "dropout=0.1", "micro_batch_size=3", "scheduler.warmup_steps=5"],
    ["model=transformer", BF16, "dropout=0.1", "model.attn_dropout=0.1", "micro_batch_size=4"],
    ["model=s4", "dropout=0.2", "scheduler=constant", "scheduler.warmup_steps=20", "gradient_clip_val=null"],
    ["model=lstm", "trainer.precision=16-mixed", "micro_batch_size=3"],
    ["model=mamba", BF16, "model.checkpoint_level=2"],
    ["model=mamba", BF16, "callbacks.nonfinite.patience=3"],
    ["model=mamba", BF16, "task.train_samples=20", "task.make_on=loader"],
    ["model=transformer", BF16, *COPY],
    ["model=mamba", BF16, *LM],
    ["model=transformer", BF16, "task.seq_len=600", "task.n_tokens=16", "trainer.deterministic=true"],
]
# every other task, whose rows must be made without a wait for the device
CASES += [["model=rnn", f"task={task}"] for task in names("task") if task not in ("copy", "lm", "selective_copy")]


def weights(folder, name="last"):
    saved = torch.load(folder / f"checkpoints/{name}.ckpt", weights_only=True, map_location="cpu")
    return saved["state_dict"] | {f"{i}.{k}": t for i, s in saved["optimizer_states"][0]["state"].items() for k, t in s.items()}


def same(a, b, since=0):
    """Curves from a step on, last weights and optimizer states."""
    for name in ("train/loss", "train/token_accuracy", "val/loss"):
        want = {step: value for step, value in metrics(a, name).items() if step >= since}
        assert want and {step: value for step, value in metrics(b, name).items() if step >= since} == want, name
    left, right = weights(a), weights(b)
    assert left.keys() == right.keys()
    assert not [key for key in left if not torch.equal(left[key], right[key])]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_on_a_gpu_a_replayed_step_is_the_eager_one(tmp_path, case):
    sizes = () if any(key.startswith(("task=", "task.seq_len=")) for key in case) else SELECTIVE_COPY
    for way in ("auto", "off"):
        summary = start(tmp_path / way, *RUN, *sizes, *case, f"cuda_graph={way}")
        assert summary["status"] == "complete" and ("one CUDA graph" in summary["steps_run_as"]) == (way == "auto")
    same(tmp_path / "auto", tmp_path / "off")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("model", names("model"))
@pytest.mark.parametrize("way", ["auto", "off"])
def test_on_a_gpu_a_run_resumed_from_its_middle_is_the_same_run(tmp_path, model, way):
    case = [*SELECTIVE_COPY, f"model={model}", BF16, "dropout=0.1"]
    start(tmp_path / "whole", *RUN, *case)
    start(tmp_path / "resumed", *RUN, *case, f"cuda_graph={way}", f"ckpt={tmp_path}/whole/checkpoints/step_000006.ckpt")
    same(tmp_path / "whole", tmp_path / "resumed", since=6)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", [BF16, "trainer.precision=32-true"])
def test_on_a_gpu_a_dropped_step_is_dropped_in_a_replay_too(tmp_path, monkeypatch, precision):
    """Steps 3 (eager) and 8 (replayed) are bad; their number is counted on the device, as a graph must."""
    score, calls = SequenceModel.score, {}

    @functools.wraps(score)
    def spoilt(self, tokens, targets):
        losses, right = score(self, tokens, targets)
        if not self.training:
            return losses, right
        count = calls.setdefault(id(self), torch.zeros((), dtype=torch.int64, device=losses.device))
        count += 1
        return losses * torch.where((count == 3) | (count == 8), math.nan, 1.0), right

    monkeypatch.setattr(SequenceModel, "score", spoilt)
    for way in ("auto", "off"):
        summary = start(tmp_path / way, *RUN, *SELECTIVE_COPY, precision, "callbacks.nonfinite.patience=2", f"cuda_graph={way}")
        assert summary["status"] == "complete"
    same(tmp_path / "auto", tmp_path / "off")
    losses = metrics(tmp_path / "auto", "train/loss")
    assert [step for step, loss in losses.items() if loss == "nan"] == [2, 7]
    assert all(t.isfinite().all() for t in weights(tmp_path / "auto").values())


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_shapes_have_a_graph_each_and_one_memory(tmp_path):
    def run(no_graph):
        torch.manual_seed(0)
        model = Table().cuda()
        model.factor = model.factor.cuda()
        step = TrainingStep(model, adamw(model), ScoredTokens().cuda(), patience=1, no_graph=no_graph)
        for i in range(24):
            tokens, targets = batch(i)
            step(tokens[:, : 3 + i % 3].cuda(), targets[:, : 3 + i % 3].cuda())
        step.check()
        return model.weight.detach(), step

    (replayed, step), (eager, _) = run(None), run("cuda_graph=off")
    assert torch.equal(replayed, eager) and len(step.graphs) == 3
    assert len({captured.graph.pool() for captured in step.graphs.values()}) == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("trainer.detect_anomaly=true", "detect_anomaly"),
        ("optimizer.fused=false", "fused=true"),
        ("cuda_graph=off", "cuda_graph=off"),
    ],
)
def test_on_a_gpu_a_run_says_why_its_steps_are_not_captured(tmp_path, override, reason):
    start(tmp_path / "run", *RUN, *SELECTIVE_COPY, override, "trainer.max_steps=6")
    assert reason in json.loads((tmp_path / "run/summary.json").read_text())["steps_run_as"]


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_a_model_that_asks_the_host_trains_eagerly_and_says_so(tmp_path, monkeypatch, caplog):
    score = SequenceModel.score

    def asks(self, tokens, targets):
        losses, right = score(self, tokens, targets)
        assert losses.sum().item() > 0
        return losses, right

    monkeypatch.setattr(SequenceModel, "score", asks)
    for way in ("auto", "off"):
        summary = start(tmp_path / way, *RUN, *SELECTIVE_COPY, f"cuda_graph={way}")
    same(tmp_path / "auto", tmp_path / "off")
    assert summary["status"] == "complete"
    assert "cannot be captured" in json.loads((tmp_path / "auto/summary.json").read_text())["steps_run_as"]

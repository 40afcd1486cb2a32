"""eval.lengths: the chosen weights on rows of other lengths, streamed through the state."""

import json

import pytest
import runs
import torch
from omegaconf import OmegaConf
from runs import CONF, SELECTIVE_COPY, command, names, start

from seqmix import lengths
from seqmix.build import build, build_model
from seqmix.config import check, compose_run
from seqmix.report.results import build_report
from seqmix.report.runs import find_runs
from seqmix.report.tables import figures, markdown
from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch
from seqmix.tasks.selective_copy import SelectiveCopy

OVER_MODELS = pytest.mark.parametrize("model", names("model"))


class SayAgain(SelectiveCopy):
    """The tokens of a row, then the same again, each answer the next input: what a model says decides what it reads."""

    answers_are_inputs = True

    def sample(self, split, index):
        half = self.seq_len // 2
        tokens = rng.integers(self.row_keys(split, index), half, self.n_symbols, stream=0) + self.first_symbol
        inputs = torch.cat((tokens, tokens), 1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, half - 1 : -1] = inputs[:, half:]
        return Batch(inputs, targets)


def made(name, *overrides):
    cfg = compose_run([*runs.SMALL, *SELECTIVE_COPY, f"model={name}", "logger=none", *overrides], CONF, "nowhere")
    torch.manual_seed(0)
    task = build(cfg.task)
    return cfg, task, build_model(cfg, task.vocab_size).eval()


def made_again(name):
    cfg, _, net = made(name)
    return SayAgain(**{key: value for key, value in OmegaConf.to_container(cfg.task).items() if key != "_target_"}), net


@pytest.mark.parametrize("piece", [1, 5, 100])
@OVER_MODELS
def test_pieces_score_as_the_whole_row_does(model, piece):
    _, task, net = made(model)
    batch = task.sample("test", torch.arange(3))
    losses, right = net.score(*batch)
    pieces = lengths.score(net, batch, piece)
    torch.testing.assert_close(pieces[0], losses, rtol=1e-4, atol=1e-5)
    assert torch.equal(pieces[1], right)


@OVER_MODELS
def test_free_running_is_generation_and_its_first_answer_that_of_teacher_forcing(model):
    task, net = made_again(model)
    batch = task.sample("test", torch.arange(5))
    _, forced = lengths.score(net, batch, 4)
    free = lengths.run_free(net, batch, 4)
    half = task.seq_len // 2
    assert torch.equal(free[:, half - 1], forced[:, half - 1]) and not free[:, : half - 1].any()
    answers = net.generate(batch.inputs[:, :half], half, temperature=0)[:, half:]
    assert torch.equal(free[:, half - 1 : -1], answers == batch.inputs[:, half:])


def test_a_row_that_is_answered_right_is_right_in_both(monkeypatch):
    task, net = made_again("lstm")
    batch = task.sample("test", torch.arange(4))
    seen = []

    def step(tokens, state):
        seen.append(tokens)
        at = task.seq_len // 2 - 1 + len(seen)
        answer = batch.inputs[:, at] if at < batch.inputs.shape[1] else tokens
        logits = torch.nn.functional.one_hot(answer, net.vocab_size).float()
        if len(seen) == 2:
            logits[0] = torch.nn.functional.one_hot((batch.inputs[0, at] + 1) % net.vocab_size, net.vocab_size)
        return logits, state

    monkeypatch.setattr(net, "step", step)
    right = lengths.run_free(net, batch, 100)
    answers = right[:, task.seq_len // 2 - 1 : -1]
    assert answers[1:].all() and answers[0].tolist() == [True, False, *[True] * (answers.shape[1] - 2)]
    assert seen[2][0] == (batch.inputs[0, task.seq_len // 2 + 1] + 1) % net.vocab_size, "its own mistake is what it reads"
    assert torch.equal(seen[2][1:], batch.inputs[1:, task.seq_len // 2 + 1])


@pytest.mark.parametrize("model", ["mamba", "transformer"])
def test_a_run_tests_its_weights_at_other_lengths(tmp_path, model):
    lengths_ = "eval.lengths=[6,12,200]"
    summary = start(tmp_path / "run", *SELECTIVE_COPY, f"model={model}", lengths_, "eval.samples=16")
    assert summary["length/12/loss"] == pytest.approx(summary["test/loss"], rel=1e-4)
    assert summary["length/12/token_accuracy"] == pytest.approx(summary["test/token_accuracy"])
    assert summary["length/200/loss"] > 0
    assert not {"length/200/status", "length/12/free_token_accuracy"} & summary.keys()
    plain = start(tmp_path / "plain", *SELECTIVE_COPY, f"model={model}")
    assert plain["test/loss"] == summary["test/loss"] and not any(key.startswith("length/") for key in plain)


def test_a_task_that_answers_token_by_token_is_also_run_free(tmp_path):
    """Strings of exactly the lengths that are asked for."""
    line = ["task=copy_ar", "task.seq_len=12", "model=lstm", "eval.lengths=[6,30]", "eval.samples=16", "trainer.max_steps=2"]
    summary = start(tmp_path / "run", *line)
    for length in (6, 30):
        scores = {key: summary[f"length/{length}/{key}"] for key in ("token_accuracy", "free_token_accuracy", "loss")}
        assert 0 <= scores["free_token_accuracy"] <= 1 and scores["loss"] > 0
    cfg = compose_run([*runs.SMALL, *line, "logger=none"], CONF, "nowhere")
    assert {n: (task.shortest, task.longest) for n, task in lengths.tasks_at(cfg).items()} == {6: (2, 2), 30: (14, 14)}


def test_out_of_memory_at_a_length_is_its_result(tmp_path, monkeypatch):
    score = lengths.score

    def full(model, batch, piece):
        if batch.inputs.shape[1] > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(model, batch, piece)

    monkeypatch.setattr(lengths, "score", full)
    for seed in (0, 1):
        summary = start(tmp_path / f"{seed}", *SELECTIVE_COPY, "model=lstm", "eval.lengths=[24,200]", f"seed={seed}")
    assert summary["status"] == "complete" and summary["length/200/status"] == "oom" and "length/200/loss" not in summary
    report = build_report(find_runs([tmp_path]), "lengths")
    text, drawn = markdown(report), figures(report)
    assert "task, trained at L=12: Token accuracy (test)" in text.replace("selective_copy", "task")
    assert "| L=24 | L=200 |" in text and "out of memory" in text
    (name,) = drawn
    assert name in text and "training length" in drawn[name] and "out of memory" in drawn[name] and ">24<" in drawn[name]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.lengths=[12,12]"], r"eval.lengths=\[12, 12\] names a length twice"),
        (["eval.lengths=[0]"], "eval.lengths=0 < 1"),
        (["eval.lengths=[2]"], "n_tokens=3 > seq_len=2"),
        (["eval.lengths=[12]", "eval.samples=0"], "eval.samples=0 < 1"),
        (["eval.lengths=[12]", "test=false"], "with test=false: nothing is tested"),
    ],
)
def test_what_cannot_be_tested_is_refused_before_training(overrides, words):
    cfg, *_ = made("lstm", *overrides)
    with pytest.raises(ValueError, match=words):
        check(cfg)


def test_sharded_parameters_are_refused(tmp_path):
    line = ["trainer=fsdp", "trainer.devices=1", "task.batch_size=2", "eval.lengths=[24]", "logger=none", "hydra.run.dir=run"]
    done = command(tmp_path, *SELECTIVE_COPY, *line)
    assert done.returncode == 1 and "eval.lengths=[24] needs a whole model on each device" in done.stdout + done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"

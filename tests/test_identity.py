"""What makes two runs the same run, for each of three questions."""

import pytest
from omegaconf import OmegaConf
from runs import CONF, SELECTIVE_COPY, start

from seqmix.config import compose_run, record_resume, register_resolvers
from seqmix.identity import MATTERS, QUESTIONS, cell_config, changed, flat, matters
from seqmix.report.results import build_report
from seqmix.report.runs import AVERAGED, read_run

register_resolvers()


def of(*overrides):
    return flat(OmegaConf.to_container(compose_run(list(overrides), CONF, "x")))


def test_every_entry_of_the_table_names_questions_and_a_reason():
    assert all({*questions.split()} <= {*QUESTIONS} and reason for questions, reason in MATTERS.values())


@pytest.mark.parametrize("key", ["a_new_setting", "model.a_new_setting", "optimizer.fused", "task.seq_len", "size.d_model"])
def test_a_setting_that_nobody_has_thought_of_matters_for_every_question(key):
    assert all(matters(key, question) for question in QUESTIONS)


@pytest.mark.parametrize(
    ("override", "questions"),
    [
        ("seed=1", "resume job"),
        ("optimizer.lr=1", "resume job"),
        ("model.d_state=8", "resume job cell"),
        ("trainer.max_steps=9", "job cell"),
        ("trainer.precision=bf16-mixed", "resume job cell"),
        ("matmul_precision=high", "job cell"),
        ("gradient_clip_val=2.0", "resume job cell"),
        ("micro_batch_size=8", "job"),
        ("cuda_graph=off", "job cell"),
        ("compile=true", "job cell"),
        ("test=false", "job"),
        ("task.eval_batch_size=9", "job"),
        ("callbacks.nonfinite.patience=2", "job"),
        ("callbacks.checkpoint.mode=max", "job cell"),
        ("callbacks.solved.patience=3", "job cell"),
        ("ckpt=x.ckpt", "job"),
        ("logger.wandb.group=x", ""),
    ],
)
def test_runs_that_differ_in_a_key_are_the_same_for_some_questions(override, questions):
    key = override.split("=")[0]
    assert {question for question in QUESTIONS if key in changed(of(), of(override), question)} == {*questions.split()}
    assert (cell_config(of()) == cell_config(of(override))) == ("cell" not in questions)


def test_thresholds_matter_for_a_cell_where_they_may_end_a_run():
    thresholds = "callbacks.solved.thresholds=[0.9]"
    assert cell_config(of()) == cell_config(of(thresholds)) == cell_config(of("~callbacks.solved"))
    ends = "callbacks.solved.patience=3"
    assert cell_config(of(ends)) != cell_config(of(ends, thresholds))


def test_a_key_that_one_config_lacks_is_a_difference():
    """An older run, or one with a key that no file names."""
    assert changed({}, {"gradient_clip_val": 1.0}, "cell") == {"gradient_clip_val": None}
    assert changed({"gradient_clip_val": 1.0}, {}, "cell") == {"gradient_clip_val": 1.0}
    assert changed({}, {"logger.wandb.mode": "x"}, *QUESTIONS) == {}


def test_a_resumed_run_is_in_the_cell_of_others_unless_a_setting_has_changed(tmp_path):
    """The report goes by what differed before the resume, however often a run was resumed, and not by the name of a file."""
    base = ("model=lstm", *SELECTIVE_COPY, "scheduler=constant")
    places = {
        "whole": (0, None, 4),
        "first": (1, None, 2),
        "longer": (1, "first", 4),
        "again": (1, "longer", 4),
        "rest": (2, None, 4),
    }
    for name, (seed, before, steps) in places.items():
        ckpt = f"ckpt={tmp_path / before / 'checkpoints/last.ckpt'}" if before else "ckpt=null"
        start(tmp_path / name, *base, f"seed={seed}", f"trainer.max_steps={steps}", ckpt)
    start(tmp_path / "crashed", *base, "seed=2", "trainer.max_steps=4", f"ckpt={tmp_path}/rest/checkpoints/last.ckpt")
    kept = {name: read_run(tmp_path / name, name).config for name in (*places, "crashed")}
    over = {
        name: {key: value for key, value in config.items() if key.startswith("resumed_over")} for name, config in kept.items()
    }
    assert over["longer"] == over["again"] == {"resumed_over.trainer.max_steps": 2}
    assert not any(over[name] for name in ("whole", "first", "rest", "crashed"))
    cells = build_report([read_run(tmp_path / name, name) for name in kept], "x", AVERAGED).cells
    assert sorted(sorted({run.seed for run in c.runs}) for c in cells) == [[0, 2], [1], [1]]
    (tmp_path / "first" / "config.yaml").unlink()
    cfg = compose_run([*base, "seed=1"], CONF, "x")
    record_resume(tmp_path / "first/checkpoints/last.ckpt", cfg)
    assert cfg.resumed_over == {"ckpt": str(tmp_path / "first/checkpoints/last.ckpt")}, "where nothing says what it was"

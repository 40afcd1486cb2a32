"""What makes two runs the same run, for each of three questions."""

import pytest
from made_runs import CONF
from omegaconf import OmegaConf

from seqmix.config import compose_run, register_resolvers
from seqmix.identity import MATTERS, QUESTIONS, cell_config, changed, flat, matters

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
        ("ckpt=x.ckpt", "job"),
        ("logger.wandb.group=x", ""),
    ],
)
def test_runs_that_differ_in_a_key_are_the_same_for_some_questions(override, questions):
    key = override.split("=")[0]
    assert {question for question in QUESTIONS if key in changed(of(), of(override), question)} == {*questions.split()}
    assert (cell_config(of()) == cell_config(of(override))) == ("cell" not in questions)


def test_a_key_that_one_config_lacks_is_a_difference():
    """An older run, or one with a key that no file names."""
    assert changed({}, {"gradient_clip_val": 1.0}, "cell") == {"gradient_clip_val": None}
    assert changed({"gradient_clip_val": 1.0}, {}, "cell") == {"gradient_clip_val": 1.0}
    assert changed({}, {"logger.wandb.mode": "x"}, *QUESTIONS) == {}

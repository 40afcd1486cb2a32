"""The weights that a run has chosen, on test rows of other lengths than it was trained on.

    inputs (B, L)  ──►  pieces of at most P tokens  ──►  model.score_from(piece, state)  ──►  the state after them

Rows go through the state of the model piece by piece, so a recurrent model needs the same memory at any length. The cache of
attention grows with the length; where it does not fit, the result of that length is "oom".

A row is scored with its own tokens as inputs (teacher forcing). Where a task's answer is also its next input
(Task.answers_are_inputs), it is scored once more with the model's own predictions as the inputs that follow (free running).
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from seqmix.build import build
from seqmix.memory import out_of_memory
from seqmix.metrics import ScoredTokens
from seqmix.model import ModelState, SequenceModel
from seqmix.state import reserved
from seqmix.tasks.base import IGNORE, Batch, Task, whole


def tasks_at(cfg: DictConfig) -> dict[int, Task]:
    """length -> the task of a config with rows of that `task.seq_len`; reads no data.

    ValueError for a length that is no integer of at least 1 or stands twice, for one of which the task makes no rows, and
    where ids would mean something else there than in training.
    """
    if not cfg.eval.lengths:
        return {}
    lengths = [whole("eval.lengths", length, 1) for length in cfg.eval.lengths]
    if len({*lengths}) < len(lengths):
        raise ValueError(f"eval.lengths={lengths} names a length twice")
    whole("eval.samples", cfg.eval.samples, 1)
    here, found = build(cfg.task), {}
    for length in lengths:
        keys = {"seq_len": length, "eval_samples": cfg.eval.samples}
        if "min_len" in cfg.task:
            keys["min_len"] = length  # in the units of seq_len
        found[length] = build(OmegaConf.merge(cfg.task, keys))
        if found[length].vocab_size != here.vocab_size:
            raise ValueError(
                f"eval.lengths: the task has {found[length].vocab_size} ids at task.seq_len={length} and {here.vocab_size} at "
                f"{cfg.task.seq_len}: the model does not know them"
            )
    return found


def test_at_lengths(model: SequenceModel, cfg: DictConfig) -> dict[str, float | str]:
    """The scores of `model` on eval.samples test rows of each of eval.lengths, in the caller's precision.

    {"length/512/token_accuracy": 0.97, "length/512/loss": ..., "length/512/free_token_accuracy": ..., "length/4096/status":
    "oom"}. A piece holds as many tokens as a batch of the run's own evaluation, and at least one of one row.
    """
    if not cfg.eval.lengths:
        return {}
    tokens = cfg.task.eval_batch_size * build(cfg.task).seq_len
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    results: dict[str, float | str] = {}
    try:
        for length, task in tasks_at(cfg).items():
            task.prepare_data()
            task.setup("test")
            try:
                scores = _test(model, task, tokens, device)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                scores = {"status": "oom"}
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            results |= {f"length/{length}/{name}": value for name, value in scores.items()}
    finally:
        for module, mode in modes:
            module.training = mode
    return results


@torch.no_grad()
def _test(model: SequenceModel, task: Task, tokens: int, device: torch.device) -> dict[str, float]:
    rows = task.eval_rows("test")
    at_once = max(1, min(rows, tokens // task.seq_len))
    forced, free = (ScoredTokens(task.token_bytes).to(device) for _ in range(2))
    for start in range(0, rows, at_once):
        batch = task.sample("test", torch.arange(start, min(rows, start + at_once), device=device))
        forced.update(*score(model, batch, max(1, tokens // at_once)), batch.targets)
        if task.answers_are_inputs:
            right = run_free(model, batch, max(1, tokens // at_once))
            free.update(torch.zeros(()), right, batch.targets)
    scores = {name: value.item() for name, value in forced.compute().items()}
    if task.answers_are_inputs:
        scores |= {f"free_{name}": free.compute()[name].item() for name in ("token_accuracy", "sequence_accuracy")}
    return scores


def score(model: SequenceModel, batch: Batch, piece: int) -> tuple[Tensor, Tensor]:
    """losses (B, L) and right (B, L), as SequenceModel.score gives them, by pieces of `piece` tokens per row."""
    inputs, targets = batch
    L = inputs.shape[1]
    state, losses, right = _room(model, inputs), [], []
    for start in range(0, L, piece):
        part = slice(start, start + piece)
        nats, correct, state = model.score_from(inputs[:, part], targets[:, part], state, IGNORE)
        losses.append(nats)
        right.append(correct)
    return torch.cat(losses, 1), torch.cat(right, 1)


def run_free(model: SequenceModel, batch: Batch, piece: int) -> Tensor:
    """right (B, L), where every input that follows a scored position is the model's prediction there.

    Up to the first scored position of the batch in pieces, from there on in steps of one token.
    """
    inputs, targets = batch
    L = inputs.shape[1]
    scored = targets != IGNORE  # (B, L)
    first = int(scored.any(0).int().argmax())
    state = _room(model, inputs)
    for start in range(0, first, piece):
        _, state = model.prefill_last(inputs[:, start : min(first, start + piece)], state)
    right, tokens = torch.zeros_like(scored), inputs[:, first]  # (B, L), (B,)
    for t in range(first, L):
        logits, state = model.step(tokens, state)
        guess = logits.argmax(-1)  # (B,)
        right[:, t] = guess == targets[:, t]
        if t + 1 < L:
            tokens = torch.where(scored[:, t], guess, inputs[:, t + 1])
    return right


def _room(model: SequenceModel, inputs: Tensor) -> ModelState:
    """The state before any token, with room for all of them in a cache."""
    B, L = inputs.shape
    return reserved(model.init_state(B), L)

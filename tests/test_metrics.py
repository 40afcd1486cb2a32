"""Sums over scored tokens, divided once (cases E03, E04, E11, R4)."""

import math

import pytest
import torch

from seqmix.metrics import IGNORE, ScoredTokens
from seqmix_kernels.ops.cross_entropy import cross_entropy


def scored(logits, targets):
    """What SequenceModel.score gives, of logits."""
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORE).view_as(targets)
    return losses, logits.argmax(-1) == targets, targets


def scores(batches, token_bytes=None):
    metric = ScoredTokens(token_bytes)
    for logits, targets in batches:
        metric.update(*scored(logits, targets))
    return {name: value.item() for name, value in metric.compute().items()}


def logits_of(targets, vocab, nats):
    """Logits whose loss at each target is `nats`."""
    p = math.exp(-nats)
    other = math.log((1 - p) / (vocab - 1)) - math.log(p)
    return torch.nn.functional.one_hot(targets, vocab).float() * -other


def test_loss_is_the_mean_over_tokens_not_over_batches():
    batches = []
    for rows, tokens, nats in ((4, 10, 1.0), (4, 10, 1.0), (1, 1, 4.0)):
        targets = torch.zeros(rows, tokens, dtype=torch.int64)
        batches.append((logits_of(targets, 5, nats), targets))
    expected = (40 * 1.0 + 40 * 1.0 + 1 * 4.0) / 81
    assert scores(batches)["loss"] == pytest.approx(expected, rel=1e-6)


def test_loss_does_not_depend_on_the_batch_size():
    torch.manual_seed(0)
    logits, targets = torch.randn(64, 7, 11), torch.randint(11, (64, 7))
    targets[torch.rand(64, 7) < 0.4] = IGNORE
    whole = scores([(logits, targets)])
    for size in (1, 3, 64):
        parts = scores(list(zip(logits.split(size), targets.split(size), strict=True)))
        assert parts == pytest.approx(whole, rel=1e-6)


def test_perplexity_is_the_exponential_of_the_mean():
    targets = torch.zeros(1, 1, dtype=torch.int64)
    values = scores([(logits_of(targets, 5, 1.0), targets), (logits_of(targets, 5, 3.0), targets)])
    assert values["perplexity"] == pytest.approx(math.exp(2), rel=1e-5)
    assert scores([(torch.tensor([[[0.0, 800.0]]]), targets)])["perplexity"] == math.inf


def test_oracle_and_constant_predictor():
    torch.manual_seed(0)
    targets = torch.randint(16, (2000, 16))
    targets[:, :8] = IGNORE
    oracle = scores([(torch.nn.functional.one_hot(targets.clamp(min=0), 16).float(), targets)])
    assert oracle["token_accuracy"] == oracle["sequence_accuracy"] == 1.0
    constant = scores([(torch.zeros(2000, 16, 16), targets)])
    assert constant["token_accuracy"] == pytest.approx(1 / 16, abs=0.01)
    assert constant["sequence_accuracy"] == 0.0
    assert constant["loss"] == pytest.approx(2.772589, rel=1e-6)  # ln 16


def test_a_prediction_outside_the_answer_earns_nothing():
    targets = torch.tensor([[IGNORE, IGNORE, 3]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 4).float()
    assert scores([(logits, targets)])["token_accuracy"] == 0.0


def test_rows_without_targets_are_no_sequences():
    targets = torch.tensor([[1, IGNORE], [IGNORE, IGNORE]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 0], [0, 0]]), 3).float()
    assert scores([(logits, targets)])["sequence_accuracy"] == 1.0


def test_bits_per_byte_counts_the_bytes_of_the_targets():
    targets = torch.tensor([[0, 1, IGNORE]])
    logits = torch.zeros(1, 3, 4)
    values = scores([(logits, targets)], token_bytes=torch.tensor([1, 3, 50, 50]))
    assert values["bits_per_byte"] == pytest.approx(2 * 2.0 / 4)  # two tokens of two bits over four bytes


def test_state_survives_a_checkpoint_where_it_is_asked_for():
    assert not ScoredTokens().state_dict()
    metric = ScoredTokens(saved=True)
    targets = torch.tensor([[1, 2]])
    logits = torch.randn(1, 2, 4)
    metric.update(*scored(logits, targets))
    other = ScoredTokens(saved=True)
    other.load_state_dict(metric.state_dict())
    for each in (metric, other):
        each.update(*scored(logits, targets))
    assert other.counts[0] == 4 and other.compute() == metric.compute()


def test_sums_stay_at_their_addresses():
    metric = ScoredTokens()
    before = metric.loss_sum.data_ptr(), metric.counts.data_ptr()
    for _ in range(2):
        metric.update(*scored(torch.randn(1, 2, 4), torch.tensor([[1, 2]])))
        metric.compute()
        metric.reset()
    assert before == (metric.loss_sum.data_ptr(), metric.counts.data_ptr())
    assert metric.loss_sum == 0 and not metric.counts.any()

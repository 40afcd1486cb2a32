"""What a model costs: every model of conf/model, on the CPU; numbers that must agree, and what is wrong is not timed."""

import math

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import CONF, SELECTIVE_COPY, names, start

from seqmix import costs
from seqmix.measure import parameter_count
from seqmix.mixers.base import GrowingState
from seqmix.model import SequenceModel
from seqmix.state import state_bytes, tensors

V, D = 13, 32
over_models = pytest.mark.parametrize("name", names("model"))


def make(name, n_layer=2):
    torch.manual_seed(0)
    config = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    return SequenceModel(V, D, n_layer, instantiate(config.model), instantiate(config.channel_mixer))


def tokens(batch, length):
    return costs.random_tokens(V, batch, length, torch.device("cpu"))


@over_models
def test_a_training_step_is_timed_in_its_parts_and_trains(name):
    model = make(name)
    before = [p.clone() for p in model.parameters()]
    numbers = costs.training_cost(model, torch.optim.AdamW(model.parameters()), tokens(2, 81), seconds=0.01)
    assert numbers["tokens"] == 160 and numbers["calls"] >= 1  # three where the machine is not busy
    parts = [numbers[f"{part}_ms"] for part in ("forward", "backward", "optimizer")]
    assert all(part > 0 for part in parts) and sum(parts) < 3 * numbers["step_ms"]
    assert numbers["tokens_per_second"] == pytest.approx(160e3 / numbers["step_ms"])
    assert 0 <= numbers["check_error"] < 1e-4
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert numbers["mfu"] is None and numbers["peak_allocated_mib"] is None


@over_models
def test_flops_are_those_of_the_weights_and_grow_with_the_length_only_where_the_state_does(name):
    model = make(name)
    _, state = model.prefill(tokens(1, 2), model.init_state(1))
    products = sum(
        p.numel() for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.RNNBase, torch.nn.Embedding))
        for p in m.parameters(recurse=False) if p.ndim == 2
    )  # fmt: skip
    scores = [(costs.forward_flops(model, length) - 2 * products) / length for length in (10, 1000)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[0] == pytest.approx(0, abs=1e-6) or any(isinstance(part, GrowingState) for part in state)
    if name == "transformer":  # q·k and weights·v, a head's width in each, two layers
        assert scores[0] == pytest.approx(4 * D * 2)


@over_models
def test_a_prompt_leaves_a_state_of_the_bytes_that_are_held(name):
    model, prompt = make(name), tokens(3, 70)
    numbers = costs.prompt_cost(model, prompt, seconds=0.01)
    _, state = model.prefill(prompt, model.init_state(3))
    assert numbers["state_bytes"] == state_bytes(state) and numbers["state_tensors"] == len(list(tensors(state)))
    assert numbers["state_bytes"] <= numbers["state_bytes_measured"] <= 1.35 * numbers["state_bytes"]  # W of a window's W - 1
    assert numbers["prefill_ms"] > 0 and numbers["prefill_tokens_per_second"] == pytest.approx(210e3 / numbers["prefill_ms"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@over_models
def test_the_allocator_holds_the_bytes_of_the_state(name):
    prompt = costs.random_tokens(V, 3, 70, torch.device("cuda"))
    numbers = costs.prompt_cost(make(name).cuda(), prompt, autocast=torch.bfloat16, seconds=0.01)
    rounded = numbers["state_bytes"] + 512 * numbers["state_tensors"]  # the allocator's smallest piece
    assert numbers["state_bytes"] <= numbers["state_bytes_measured"] <= 1.35 * rounded


@over_models
def test_a_token_is_decoded_for_as_many_rows_as_asked(name):
    numbers = costs.decoding_cost(make(name), tokens(2, 20), batch=5, seconds=0.01)
    assert numbers["batch"] == 5 and numbers["eager_tokens_per_second"] == pytest.approx(5e3 / numbers["eager_ms"])
    assert numbers["graph_ms"] is None and "CUDA" in numbers["no_graph"]
    assert numbers["check_error"] < 1e-4


@over_models
def test_the_rows_that_fit_are_counted_from_the_state(name):
    model = make(name)
    numbers = costs.largest_batch(model, tokens(1, 20), 2**20)
    left = 2**20 - numbers["weight_bytes"] - numbers["rows_counted"] * numbers["state_bytes"]
    assert 0 <= left < numbers["state_bytes"]
    assert numbers["weight_bytes"] == 4 * parameter_count(model).total
    assert costs.largest_batch(model, tokens(1, 20), 1)["rows_counted"] == 0


class Leaking(SequenceModel):
    """Sees the future: what a causal check must find."""

    def hidden(self, tokens):
        x = super().hidden(tokens)
        return x + (x.mean(1, keepdim=True) if tokens.shape[1] > costs.CHECKED else 0)


def test_a_model_that_is_wrong_at_the_length_asked_for_is_not_timed():
    torch.manual_seed(0)
    config = OmegaConf.load(CONF / "model" / "rnn.yaml")
    model = Leaking(V, D, 1, instantiate(config.model))
    with pytest.raises(costs.WrongError, match="from those in float64"):
        costs.training_cost(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(1, 100), seconds=0.01)


def test_a_model_in_float64_is_within_its_own_tolerance():
    model, text = make("mamba").double(), tokens(1, 20)
    numbers = [
        costs.training_cost(model, torch.optim.SGD(model.parameters(), lr=0.1), text, seconds=0.01),
        costs.prompt_cost(model, text, seconds=0.01),
        costs.decoding_cost(model, text, 1, seconds=0.01),
    ]
    assert all(n["check_error"] < costs.TOLERANCE[torch.float64] for n in numbers)


def test_logits_are_compared_before_the_next_replay_writes_over_them(monkeypatch):
    advance = costs.Decoder.advance

    def replay(self):
        place = self.logits
        advance(self)
        if place is not None:
            self.logits = place.copy_(self.logits)

    monkeypatch.setattr(costs.Decoder, "advance", replay)
    assert costs.decoding_cost(make("rnn"), tokens(1, 20), 1, seconds=0.01)["check_error"] < 1e-4


def test_a_model_whose_loss_is_not_finite_is_not_timed():
    model = make("rnn")
    with torch.no_grad():
        model.embedding.weight[3] = math.nan
    with pytest.raises(costs.WrongError):
        costs.training_cost(model, torch.optim.SGD(model.parameters(), lr=0.1), tokens(1, 100), seconds=0.01)


@pytest.mark.parametrize("truth", [0, 1, 2, 3, 17, 100, 1000, 4096])
def test_the_boundary_is_found_to_a_twentieth(truth):
    asked = []

    def fits(n):
        asked.append(n)
        return n <= truth

    found = costs.boundary(fits, most=4096)
    assert found <= truth and (found >= truth - max(1, 0.05 * truth))
    assert len(asked) < 30


def test_a_run_says_what_its_model_costs_to_use(tmp_path):
    summary = start(
        tmp_path / "run", *SELECTIVE_COPY, "model=mamba", "callbacks=costs", "callbacks.costs.seconds=0.01",
        "callbacks.costs.lengths=[16,40]",
    )  # fmt: skip
    assert summary["status"] == "complete"
    for length in (16, 40):
        assert summary[f"decode/L{length}/prefill_ms"] > 0 and summary[f"decode/L{length}/eager_tokens_per_second"] > 0
        assert summary[f"decode/L{length}/state_bytes"] == summary["memory/state_bytes"]

"""Decoding in place and under a CUDA graph is stepping, for every model of conf/model."""

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from runs import CONF, names

from seqmix.decode import WARMUP, Decoder, greedy, in_precision
from seqmix.mixers.attention import AttentionState
from seqmix.model import SequenceModel
from seqmix.state import tensors

V, N_NEW = 11, 12
over_models = pytest.mark.parametrize("name", names("model"))
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(name, device="cpu"):
    torch.manual_seed(0)
    config = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    parts = instantiate(config.model), instantiate(config.channel_mixer)
    model = SequenceModel(V, 32, 2, *parts).to(device).eval()
    with torch.no_grad():  # so that the likeliest token is not a toss-up
        model.embedding.weight *= 50
    return model


@torch.no_grad()
def prompted(model, autocast=None):
    """The state after a prompt of two rows, the next token of each, and what stepping on gives: logits, tokens."""
    device = model.embedding.weight.device
    prompt = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        logits, state = model.prefill_last(prompt, model.init_state(2))
        first = tokens = greedy(logits)
        kept, all_logits, all_tokens = state, [], []
        for _ in range(N_NEW):
            logits, state = model.step(tokens, state)
            tokens = greedy(logits)
            all_logits.append(logits.float())
            all_tokens.append(tokens)
    return kept, first, torch.stack(all_logits, 1), torch.stack(all_tokens, 1)


@over_models
def test_the_decoder_steps(name):
    state, first, logits, tokens = prompted(make(name))
    decoder = Decoder(make(name), state, first)
    assert torch.equal(decoder.generate(N_NEW), tokens)
    torch.testing.assert_close(decoder.logits, logits[:, -1])


@over_models
def test_what_a_graph_does_is_stepping_over_one_buffer(name, monkeypatch):
    """All but the capture: the same addresses from step to step, room given before."""
    state, first, logits, tokens = prompted(make(name))
    held = [t.clone() for t in tensors(state)]
    decoder = Decoder(make(name), state, first)
    decoder._own_state(room=N_NEW)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as in a capture, nobody on the host looks at values
    addresses = [t.data_ptr() for t in tensors(decoder.state)]
    assert len(set(addresses)) == len(addresses)
    for i in range(N_NEW):
        with torch.no_grad():
            decoder._advance_in_place()
        torch.testing.assert_close(decoder.logits, logits[:, i], msg=f"step {i}")
        assert torch.equal(decoder.tokens, tokens[:, i])
    assert [t.data_ptr() for t in tensors(decoder.state)] == addresses
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), held, strict=True)), "the state handed in was written to"


@over_models
@torch.no_grad()
def test_what_comes_before_a_capture_copies_no_cache_and_changes_nothing(name, monkeypatch):
    state, first, logits, _ = prompted(make(name))
    decoder = Decoder(make(name), state, first)
    decoder._own_state(room=N_NEW)
    own, after = [t.clone() for t in tensors(decoder.state)], []
    check = decoder._check_fits
    monkeypatch.setattr(decoder, "_check_fits", lambda state: (check(state), after.append(state)))
    decoder._warm_up()
    assert len(after) == WARMUP
    for before, *later in zip(decoder.state, *after, strict=True):  # a block's
        if isinstance(before, AttentionState):  # a step may write behind its end
            places = [(part.k.data_ptr(), part.v.data_ptr()) for part in (before, *later)]
            assert len(set(places)) == 1, "a step of the warm-up copied the cache"
            seen = int(before.length.max())
            own[:2] = own[0][:, :, :seen], own[1][:, :, :seen]  # behind that it is spare
            before = before._replace(k=before.k[:, :, :seen], v=before.v[:, :, :seen])
        for t in tensors(before):
            assert torch.equal(t, own.pop(0))
    decoder._advance_in_place()
    torch.testing.assert_close(decoder.logits, logits[:, 0])


def test_a_state_that_grows_is_refused():
    class Growing(torch.nn.Module):
        def step(self, tokens, state):
            return torch.zeros(len(tokens), V), (torch.cat((state[0], tokens[:, None]), dim=1),)

    decoder = Decoder(Growing(), (torch.zeros(2, 3, dtype=torch.long),), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 3\).*in place"):
        decoder._advance_in_place()


def test_a_graph_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    model = make("lstm")
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device"):
        Decoder(model, model.init_state(1), torch.zeros(1, dtype=torch.long)).capture(room=1)


@over_models
@torch.no_grad()
def test_weights_in_16_bits_are_those_that_autocast_casts(name):
    """Norms, spectra and step sizes stay as they were; the logits are those of autocast over float32 weights."""
    plain, cast = make(name), in_precision(make(name), torch.bfloat16)
    tokens = torch.randint(V, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = plain(tokens).float(), cast(tokens).float()
    # but for the embedding: rounded before the first norm rather than after it
    assert (got - want).norm() / want.norm() < 2e-2
    kept = {n: p.dtype for n, p in cast.named_parameters()}
    assert kept["norm.weight"] == kept["blocks.0.norm.weight"] == torch.float32
    assert kept["embedding.weight"] == kept["blocks.0.mixer.out_proj.weight"] == torch.bfloat16
    marked = [n for n, p in plain.named_parameters() if hasattr(p, "_optim")]
    assert all(kept[n] == torch.float32 for n in marked)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@over_models
def test_a_replay_is_a_step(name, autocast):
    model = make(name, "cuda")
    if autocast is not None:
        in_precision(model, autocast)
    state, first, logits, tokens = prompted(model, autocast)
    decoder = Decoder(model, state, first, autocast=autocast)
    decoder.capture(room=N_NEW)
    for i in range(N_NEW):
        decoder.tokens.copy_(first if i == 0 else tokens[:, i - 1])  # by rounding, a toss-up could go the other way
        decoder.advance()
        got, want = decoder.logits.float(), logits[:, i]
        error = float((got - want).norm() / want.norm())
        assert error < (1e-5 if autocast is None else 2e-2), f"step {i}: {error:.1e}"
    again = Decoder(model, state, first, autocast=autocast)  # the state handed in is as it was
    again.capture(room=N_NEW)
    again.advance()
    assert (again.logits.float() - logits[:, 0]).norm() / logits[:, 0].norm() < (1e-5 if autocast is None else 2e-2)


test_a_replay_is_a_step.pytestmark += on_gpu

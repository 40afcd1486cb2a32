"""The backbone with every model of conf/model in it: what reaches the logits, what a finished model's parameters hold,
and what generation does at its edges."""

import copy
import hashlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from seqmix.channel_mixers import GELUMLP, SwiGLU
from seqmix.mixers.mamba import Mamba
from seqmix.mixers.s4d import StateSpace
from seqmix.model import Block, SequenceModel, aligned_product
from seqmix.optim import param_groups

CONFIGS = {path.stem: OmegaConf.load(path) for path in sorted((Path(__file__).parents[1] / "conf" / "model").glob("*.yaml"))}
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
over_models = pytest.mark.parametrize("name", CONFIGS)
V = 11


def make(name, dtype=torch.float32, d_model=32, n_layer=2, dropout=0.0):
    torch.manual_seed(0)
    config = CONFIGS[name]
    parts = instantiate(config.model), instantiate(config.channel_mixer)
    return SequenceModel(V, d_model, n_layer, *parts, dropout=dropout).to(dtype).eval()


def random_tokens(batch, length, seed=1):
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(seed))


def fingerprint(model):
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def mixers(model, cls):
    return [block.mixer for block in model.blocks if isinstance(block.mixer, cls)]


# -- one function, seen three ways ------------------------------------------------------------------------------------


@over_models
@torch.no_grad()
def test_logits_are_the_same_whole_in_pieces_and_step_by_step(name):
    model, tokens = make(name), random_tokens(2, 37)
    logits = model(tokens)
    assert logits.shape == (2, 37, V)
    state, pieces = model.init_state(2), []
    for piece in tokens.split([3, 1, 0, 33], dim=1):
        out, state = model.prefill(piece, state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), logits, rtol=0, atol=1e-5)
    state, steps = model.init_state(2), []
    for token in tokens.unbind(1):
        out, state = model.step(token, state)
        steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), logits, rtol=0, atol=1e-5)


@over_models
@torch.no_grad()
def test_logits_ignore_padding_and_companions(name):
    model, tokens = make(name), random_tokens(3, 9)
    padded = torch.cat((tokens, random_tokens(3, 9, seed=2)), dim=1)
    alone = model(tokens[1:2])
    torch.testing.assert_close(model(padded)[1:2, :9], alone, rtol=0, atol=1e-5)


@over_models
@torch.no_grad()
def test_branches_from_a_kept_state(name):
    """A prompt is prefilled once and continued twice; neither continuation knows of the other."""
    model, tokens, x, y = make(name), random_tokens(2, 9), random_tokens(2, 5, seed=3), random_tokens(2, 5, seed=4)
    before = fingerprint(model)
    _, kept = model.prefill(tokens, model.init_state(2))

    def continue_with(branch, state):
        outs = []
        for token in branch.unbind(1):
            out, state = model.step(token, state)
            outs.append(out)
        return torch.stack(outs, 1)

    continue_with(x, kept)
    branch = continue_with(y, kept)
    torch.testing.assert_close(branch, model(torch.cat((tokens, y), 1))[:, 9:], rtol=0, atol=1e-5)
    assert fingerprint(model) == before


# -- parameters of a finished model -----------------------------------------------------------------------------------


@over_models
def test_every_parameter_learns(name):
    model, tokens = make(name), random_tokens(4, 20)
    F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), key
        assert p.grad.abs().max() > 0, key


@over_models
@torch.no_grad()
def test_autocast_keeps_the_residual_stream_in_float32_and_the_loss(name):
    model, tokens = make(name), random_tokens(4, 40)
    model.embedding.weight *= 10  # logits of size 1, not 0.1: else any logits give ln V
    seen = []
    hook = model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    exact = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    hook.remove()
    assert seen == [torch.float32] * 2
    assert logits.dtype == torch.bfloat16
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    assert abs(exact - math.log(V)) > 0.05
    assert abs(loss - exact) < 0.02 * exact


@over_models
def test_a_step_under_autocast_leaves_float32_gradients(name):
    model, tokens = make(name).train(), random_tokens(4, 20)
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in model.parameters())


@over_models
def test_builds_on_the_meta_device(name):
    """The config check builds every model without its memory."""
    with torch.device("meta"):
        shadow = make(name)
    assert all(p.is_meta for p in shadow.parameters())
    real = make(name)
    assert [(k, p.shape, p.dtype) for k, p in shadow.named_parameters()] == [
        (k, p.shape, p.dtype) for k, p in real.named_parameters()
    ]


@over_models
def test_parameters_are_in_one_group_each_and_survive_training_without_gradients(name):
    """What a mixer set at its start stays set: through the backbone's own initialisation and through weight decay."""
    model = make(name, d_model=64)
    groups = param_groups(model, lr=3e-3, weight_decay=0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    group_of = {id(p): group for group in groups for p in group["params"]}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(groups)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(20):  # a decayed parameter moves in the first
        optimizer.step()
    special = [p for block in model.blocks for p in block.mixer.parameters(recurse=False) if hasattr(p, "_optim")]
    assert len(special) == {"mamba": 6, "s4": 12, "s4d": 8}.get(name, 0)
    for p in special:
        assert group_of[id(p)]["weight_decay"] == 0
    for key, value in model.state_dict().items():
        decayed = group_of[id(model.get_parameter(key))]["weight_decay"] > 0
        assert torch.equal(value, before[key]) == (not decayed), key
    for mixer in mixers(model, Mamba):
        dt = F.softplus(mixer.dt_bias)
        assert dt.min() >= 1e-3 * (1 - 1e-5) and dt.max() <= 0.1 * (1 + 1e-5)
        assert torch.equal(mixer.A_log, torch.arange(1.0, 17.0).log().expand(128, 16))
    for mixer in mixers(model, StateSpace):
        for p in (mixer.log_dt, mixer.A_log_decay, mixer.A_imag):
            assert group_of[id(p)]["lr"] <= 1e-3
        assert group_of[id(mixer.C)]["lr"] == 3e-3
        dt = mixer.log_dt.exp()
        assert dt.min() >= 1e-3 * (1 - 1e-5) and dt.max() <= 0.1 * (1 + 1e-5)


@over_models
def test_residual_projections_shrink_with_depth(name):
    """Each of the 2 or 4 additions of a model of 2 blocks writes 1/√2 or 1/√4 of what a lone one would."""
    additions = 2 if CONFIGS[name].channel_mixer is None else 4
    torch.manual_seed(0)
    drawn = []

    def mixer(d_model):
        drawn.append(instantiate(CONFIGS[name].model)(d_model=d_model))
        drawn.append(copy.deepcopy(drawn[-1].out_proj.weight))
        return drawn[-2]

    model = SequenceModel(V, 32, 2, mixer, instantiate(CONFIGS[name].channel_mixer))
    for block, weight in zip(model.blocks, drawn[1::2], strict=True):
        torch.testing.assert_close(block.mixer.out_proj.weight, weight / math.sqrt(additions))


@over_models
def test_depth_and_width_are_free(name):
    for d_model, n_layer in ((8, 1), (40, 3)):
        model = make(name, d_model=d_model, n_layer=n_layer)
        assert len(model.blocks) == n_layer
        assert model(random_tokens(1, 5)).shape == (1, 5, V)


def test_the_head_is_the_embedding():
    model = make("rnn")
    assert [key for key, p in model.named_parameters() if V in p.shape] == ["embedding.weight"]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(vocab_size=0), "vocab_size must be a positive integer, got 0"),
        (dict(d_model=-4), "d_model must be a positive integer, got -4"),
        (dict(n_layer=2.5), "n_layer must be a positive integer, got 2.5"),
        (dict(n_layer=True), "n_layer must be a positive integer, got True"),
        (dict(dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_backbone_refuses_what_cannot_be(keys, words):
    sizes = dict(vocab_size=V, d_model=8, n_layer=1) | keys
    with pytest.raises(ValueError, match=words):
        SequenceModel(**sizes, mixer=instantiate(CONFIGS["rnn"].model))


@pytest.mark.parametrize("channel_mixer", [SwiGLU, GELUMLP])
def test_channel_mixers_keep_positions_apart(channel_mixer):
    torch.manual_seed(0)
    mix = channel_mixer(8)
    x = torch.randn(2, 5, 8, requires_grad=True)
    mix(x)[:, 2].sum().backward()
    assert (x.grad.abs().sum((0, 2)) > 0).tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match="expand must be positive, got 0"):
        channel_mixer(8, expand=0)


def test_dropout_is_for_training_alone():
    tokens = random_tokens(2, 9)
    block = Block(8, instantiate(CONFIGS["rnn"].model)(d_model=8), SwiGLU(8), dropout=0.5)
    assert sum(isinstance(module, torch.nn.Dropout) for module in block.modules()) == 1
    model = make("rnn", dropout=0.5)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


# -- generation -------------------------------------------------------------------------------------------------------


@over_models
def test_greedy_generation_is_repeated_argmax_and_leaves_no_trace(name):
    model, prompt = make(name).train(), random_tokens(2, 3)
    model.blocks[0].eval()  # a frozen part stays as it was
    before = fingerprint(model)
    out = model.generate(prompt, 6, temperature=0)
    assert model.training and not model.blocks[0].norm.training and model.blocks[1].norm.training
    assert fingerprint(model) == before
    assert torch.equal(out, model.generate(prompt, 6, temperature=0))
    assert torch.equal(out, model.generate(prompt, 6, temperature=1e-8))
    expected = prompt
    for _ in range(6):
        expected = torch.cat((expected, model.eval()(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, expected)


@over_models
def test_generation_follows_the_weights(name):
    """Nothing that was made from the weights is kept: after an optimiser step, and another in inference mode, a model
    generates what a fresh copy of it does."""
    model, tokens = make(name), random_tokens(4, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    outs = []
    for _ in range(2):
        with torch.inference_mode():
            outs.append(model.generate(tokens[:, :3], 12, temperature=0))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.inference_mode():
        outs.append(model.generate(tokens[:, :3], 12, temperature=0))
    fresh = make(name)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(outs[-1], fresh.generate(tokens[:, :3], 12, temperature=0))
    assert not torch.equal(outs[0], outs[-1])


def test_sampling_is_drawn_from_the_generator_handed_in():
    model, prompt = make("rnn"), random_tokens(3, 1)

    def draw(seed, **keys):
        return model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed), **keys)

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0, top_k=10 * V), draw(0))  # more than there are is all of them
    assert torch.equal(draw(0, top_k=1), model.generate(prompt, 20, temperature=0))


def test_generation_at_its_edges():
    model, prompt = make("rnn"), random_tokens(2, 1)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt, 1).shape == (2, 2)
    for keys, words in (
        (dict(tokens=prompt[:, :0], max_new_tokens=1), r"at least one token per row, got shape \(2, 0\)"),
        (dict(tokens=prompt[0], max_new_tokens=1), r"got shape \(1,\)"),
        (dict(tokens=prompt, max_new_tokens=-1), "max_new_tokens must be at least 0, got -1"),
        (dict(tokens=prompt, max_new_tokens=1, temperature=-1.0), "temperature must be at least 0, got -1.0"),
        (dict(tokens=prompt, max_new_tokens=1, top_k=0), "top_k must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(**keys)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_generation_refuses_logits_that_are_not_finite(bad):
    model = make("rnn").train()
    with torch.no_grad():
        model.embedding.weight[0] = bad
    with pytest.raises(ValueError, match="not finite"):
        model.generate(torch.ones(1, 1, dtype=torch.long), 1, temperature=0)
    assert model.training  # put back also on the way out


@pytest.mark.parametrize("shape", [(1, 8), (5, 8), (0, 8), (2, 3, 8)])
def test_aligned_logits_are_the_logits(shape):
    """What a GPU's head computes where V is no multiple of 8, as V = 11 here."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    E = torch.randn(V, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    results = []
    for logits in (aligned_product(x, E), F.linear(x, E)):
        assert logits.shape == (*shape[:-1], V)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), (x, E))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@over_models
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_nothing_gives_gradients_of_zeros(name, shape):
    model = make(name)
    tokens = torch.zeros(shape, dtype=torch.int64)
    logits, _ = model.prefill(tokens, model.init_state(shape[0]))
    for out in (model(tokens), logits):
        assert out.shape == (*shape, V)
        gradients = torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True)
        for (key, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            assert gradient is not None and torch.equal(gradient, torch.zeros_like(parameter)), key


@over_models
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_runs_on_tensors_without_numbers(name, device):
    """FakeTensorMode: what a model would need, without running it."""
    if device == "cuda" and name in ("lstm", "rnn"):
        pytest.skip("there torch's recurrent layers ask their weights for addresses")
    parts = instantiate(CONFIGS[name].model), instantiate(CONFIGS[name].channel_mixer)
    with FakeTensorMode(), torch.device(device):
        model, tokens = SequenceModel(V, 32, 2, *parts), torch.zeros(2, 9, dtype=torch.int64)
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)
        logits.sum().backward()
        assert logits.shape == (2, 9, V) and all(p.grad.shape == p.shape for p in model.parameters())
        with torch.no_grad():
            logits, state = model.prefill(tokens, model.init_state(2))
            logits, _ = model.step(tokens[:, 0], state)
        assert logits.shape == (2, V)
    model, tokens = make(name).to(device), random_tokens(2, 9).to(device)
    with torch.autocast(device, torch.bfloat16):
        assert model(tokens).isfinite().all()  # and nothing of it is left behind
        if name == "transformer":
            assert not model.kernels_used(2, 9)["attention"].startswith("math")


# -- cast whole -------------------------------------------------------------------------------------------------------


def logits_and_gradients(model, tokens, autocast=None):
    """Of a fixed weighting of the logits, float32; parameters by name."""
    with torch.autocast(tokens.device.type, autocast, enabled=autocast is not None):
        logits = model(tokens).float()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits.device)
    gradients = torch.autograd.grad((logits * weights).sum(), list(model.parameters()))
    return {"logits": logits} | {name: g for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),  # torch's LSTM has no float16 there
        pytest.param("cuda", torch.bfloat16, marks=on_gpu),
        pytest.param("cuda", torch.float16, marks=on_gpu),
    ],
)
# torch packs no bfloat16 weights of an LSTM for cuDNN, and says so; it copies them at each call
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@over_models
def test_a_model_cast_to_16_bits_is_as_right_as_autocast(name, device, dtype):
    """Logits and every gradient, forward and decoding, with no autocast; what decays stays in float32."""
    model, tokens = make(name).to(device).train(), random_tokens(2, 37).to(device)  # cuDNN's LSTM has no backward in eval()
    truth, budget = logits_and_gradients(model, tokens), logits_and_gradients(model, tokens, dtype)
    model.to(dtype)
    ours = logits_and_gradients(model, tokens)
    assert model(tokens).dtype == dtype
    for key, wanted in truth.items():
        error, allowed = ((found[key].float() - wanted).norm() for found in (ours, budget))
        assert error <= 3 * allowed, (key, error / wanted.norm(), allowed / wanted.norm())  # the two differ by rounding
    own = [p for block in model.blocks for p in block.mixer.parameters(recurse=False)]
    assert all(p.dtype == torch.float32 for p in own)
    with torch.no_grad():
        logits, state = model.prefill(tokens[:, :30], model.init_state(2))
        rows = [logits]
        for t in range(30, 37):
            logits, state = model.step(tokens[:, t], state)
            rows.append(logits[:, None])
    stepped = torch.cat(rows, 1)
    assert stepped.dtype == dtype
    assert (stepped.float() - truth["logits"]).norm() <= 3 * (budget["logits"] - truth["logits"]).norm()

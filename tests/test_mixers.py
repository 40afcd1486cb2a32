"""The laws of mixers/base.py over every model of conf/model, then each paper's equations by themselves."""

import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from seqmix.measure import state_bytes
from seqmix.mixers import s4d
from seqmix.mixers.attention import Attention, causal_attention, rotary_phases, rotate
from seqmix.mixers.lstm import LSTM
from seqmix.mixers.mamba import Mamba, inverse_softplus
from seqmix.mixers.rnn import RNN
from seqmix.mixers.s4d import S4D
from seqmix_kernels.selective_scan import IMPLS

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: OmegaConf.load(path) for path in sorted((ROOT / "conf" / "model").glob("*.yaml"))}
over_models = pytest.mark.parametrize("name", CONFIGS)

D = 24
EXACT = dict(rtol=0, atol=1e-12)  # float64, outputs of size 1: rounding is 2e-16 an operation
SPLITS = {
    "whole": [37],
    "tokens": [1] * 37,
    "2+35": [2, 35],
    "3+1+33": [3, 1, 33],
    "36+1": [36, 1],
    "0+5+0+32": [0, 5, 0, 32],
    "random": None,
}


def make(name, dtype=torch.float64, d_model=D):
    """A mixer of conf/model, every parameter moved a little, so that zeros and ones at the start hide nothing."""
    torch.manual_seed(0)
    return jitter(instantiate(CONFIGS[name].model)(d_model=d_model)).to(dtype).eval()


def jitter(module):
    with torch.no_grad():
        for p in module.parameters():
            p += 0.02 * torch.randn_like(p)
    return module


def normal(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def prefill(mixer, x, sizes):
    state, ys = mixer.init_state(len(x)), []
    for piece in x.split(sizes, dim=1):
        y, state = mixer.prefill(piece, state)
        ys.append(y)
    return torch.cat(ys, dim=1), state


def steps(mixer, x):
    state, ys = mixer.init_state(len(x)), []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        ys.append(y_t)
    return torch.stack(ys, dim=1), state


def sizes_of(split):
    if SPLITS[split] is not None:
        return SPLITS[split]
    cuts = torch.randperm(36, generator=torch.Generator().manual_seed(3))[:6].add(1).sort().values.tolist()
    return np.diff([0, *cuts, 37]).tolist()


# -- the laws ---------------------------------------------------------------------------------------------------------


def test_every_mixer_file_has_a_config_and_every_config_names_the_keys_people_change():
    """A new model is a Python file and a YAML file, and the laws below then run over it."""
    files = {path.stem for path in (ROOT / "src" / "seqmix" / "mixers").glob("*.py")} - {"__init__", "base"}
    assert files == {config.model._target_.split(".")[-2] for config in CONFIGS.values()}
    for name, config in CONFIGS.items():
        assert set(config) == {"model", "channel_mixer"} and config.model._partial_ is True, name
        parameters = inspect.signature(get_class(config.model._target_)).parameters.values()
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters), name
        by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert by_position == ["d_model", *(key for key in config.model if not key.startswith("_"))], name


@over_models
@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000, 1023, 1025])
def test_future_does_not_leak(name, length):
    mixer, x = make(name), normal(1, length, D).requires_grad_()
    t = length // 2
    (mixer(x)[:, t] * normal(1, D, seed=2)).sum().backward()
    reach = x.grad[0].abs().amax(-1)  # (L,)
    assert reach[t] > 0
    assert (reach[max(0, t - 3) : t] > 0).all()  # and the past does arrive
    assert (reach[t + 1 :] <= 1e-12 * reach.max()).all()  # rounding of an FFT; exactly 0 elsewhere


@over_models
def test_stepping_equals_forward(name):
    mixer, x = make(name), normal(2, 37, D)
    y = mixer(x)
    stepped, state = steps(mixer, x)
    torch.testing.assert_close(stepped, y, **EXACT)
    _, after = mixer.prefill(x, mixer.init_state(2))
    assert type(state) is type(after)
    for a, b in zip(state, after, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@over_models
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_prefill_in_any_pieces_equals_one(name, split, dtype):
    mixer, x = make(name, dtype), normal(2, 37, D, dtype=dtype)
    tolerance = EXACT if dtype == torch.float64 else dict(rtol=0, atol=1e-5)
    y, state = prefill(mixer, x, sizes_of(split))
    whole, after = mixer.prefill(x, mixer.init_state(2))
    torch.testing.assert_close(y, mixer(x), **tolerance)
    torch.testing.assert_close(whole, mixer(x), **tolerance)
    for a, b in zip(state, after, strict=True):
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, **tolerance)


@over_models
def test_gradients_cross_the_cut(name):
    """Truncating nothing: the gradient through a handed-over state is the gradient of the whole."""
    mixer, weight = make(name), normal(2, 37, D, seed=2)

    def gradients(forward):
        x = normal(2, 37, D).requires_grad_()
        mixer.zero_grad()
        (forward(x) * weight).sum().backward()
        return [x.grad, *(p.grad for p in mixer.parameters())]

    whole = gradients(mixer)
    for cut in (gradients(lambda x: prefill(mixer, x, [2, 35])[0]), gradients(lambda x: steps(mixer, x)[0])):
        for a, b in zip(whole, cut, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11 * max(1.0, float(a.abs().max())))


@over_models
@torch.no_grad()
def test_state_is_functional(name):
    mixer, x = make(name), normal(2, 9, D)
    attributes = {module: set(vars(module)) for module in mixer.modules()}
    weights = {key: value.clone() for key, value in mixer.state_dict().items()}
    _, kept = mixer.prefill(x, mixer.init_state(2))
    copy = [t.clone() for t in kept]
    branch = mixer.prefill(normal(2, 4, D, seed=5), kept)[0]
    other = mixer.step(normal(2, D, seed=6), kept)[0]
    assert all(torch.equal(a, b) for a, b in zip(kept, copy, strict=True))
    assert torch.equal(mixer.prefill(normal(2, 4, D, seed=5), kept)[0], branch)
    assert torch.equal(mixer.step(normal(2, D, seed=6), kept)[0], other)
    assert {module: set(vars(module)) for module in mixer.modules()} == attributes
    assert all(torch.equal(value, weights[key]) for key, value in mixer.state_dict().items())


@over_models
def test_state_bytes_are_counted_on_the_tensors(name):
    mixer = make(name, torch.float32)
    state = mixer.init_state(3)
    assert all(len(t) == 3 and t.dtype == torch.float32 for t in state)
    assert state_bytes(state) == sum(t.numel() * 4 for t in state) == 3 * state_bytes(mixer.init_state(1))
    growth = [state_bytes(mixer.prefill(normal(3, length, D, dtype=torch.float32), state)[1]) for length in (1, 2, 9)]
    a_token = {"Attention": 2 * D * 4}.get(type(mixer).__name__, 0)
    assert growth == [state_bytes(state) + 3 * length * a_token for length in (1, 2, 9)]


@over_models
def test_padding_and_companions_change_nothing(name):
    mixer, x = make(name), normal(3, 11, D)
    padded = torch.cat((x, 1e3 * normal(3, 11, D, seed=7)), dim=1)
    alone, state = mixer.prefill(x[1:2], mixer.init_state(1))
    together, states = mixer.prefill(x, mixer.init_state(3))
    torch.testing.assert_close(together[1:2], alone, **EXACT)
    torch.testing.assert_close(
        mixer(padded)[:, :11], together, rtol=0, atol=1e-10
    )  # an FFT's error follows the largest
    for a, b in zip(states, state, strict=True):
        torch.testing.assert_close(a[1:2], b, **EXACT)


@over_models
@pytest.mark.parametrize("batch, length", [(2, 0), (1, 1)])
def test_short_pieces(name, batch, length):
    mixer, x = make(name), normal(batch, length, D)
    y, state = mixer.prefill(x, mixer.init_state(batch))
    assert y.shape == mixer(x).shape == (batch, length, D)
    if length == 0:
        assert all(torch.equal(a, b) for a, b in zip(state, mixer.init_state(batch), strict=True))


@over_models
def test_autocast_runs_in_bfloat16_and_leaves_float32_gradients(name):
    mixer, x = make(name, torch.float32), normal(2, 40, D, dtype=torch.float32)
    y = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = mixer(x)
        stepped, state = steps(mixer, x)
    assert low.dtype == torch.bfloat16
    for z in (low, stepped):
        assert (z.float() - y).norm() < 0.02 * y.norm()
    if isinstance(mixer, (S4D, Mamba)):
        assert state[-1].dtype == torch.float32  # a 16-bit state cannot decay slowly
    low.float().sum().backward()
    assert {p.grad.dtype for p in mixer.parameters()} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@over_models
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_own_parameters_stay_in_float32_in_a_16_bit_module(name, low):
    mixer = make(name, torch.float32)
    own = {key: value.clone() for key, value in mixer.named_parameters(recurse=False)}
    x = normal(2, 40, D, dtype=torch.float32)
    y = mixer(x)
    mixer.to(low)
    for key, p in mixer.named_parameters():
        assert p.dtype == (torch.float32 if key in own else low), key
    assert all(torch.equal(p, own[key]) for key, p in mixer.named_parameters(recurse=False))
    z, _ = mixer.prefill(x.to(low), mixer.init_state(2))
    assert z.dtype == low and (z.float() - y).norm() < 0.03 * y.norm()


@over_models
def test_parameters_are_real_and_float32(name):
    """Complex parameters are pairs: casts, gradient reductions and fused optimizers each lose imaginary parts."""
    assert {p.dtype for p in instantiate(CONFIGS[name].model)(d_model=D).parameters()} == {torch.float32}


# -- attention --------------------------------------------------------------------------------------------------------


def test_attention_is_its_equation():
    mixer, x = make("transformer"), normal(2, 13, D)
    B, L, H, P = 2, 13, 4, D // 4
    q, k, v = (layer(x).view(B, L, H, P) for layer in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    turn = torch.polar(  # pair (i, i + P/2) as one complex number, turned by t · 10000^(-2i/P)
        torch.ones(L, P // 2, dtype=torch.float64),
        torch.arange(L)[:, None] * 10_000.0 ** (-2 * torch.arange(P // 2, dtype=torch.float64) / P),
    )
    q, k = (torch.complex(z[..., : P // 2], z[..., P // 2 :]) * turn[:, None] for z in (q, k))
    scores = torch.einsum("blhp,bshp->bhls", q, k.conj()).real / math.sqrt(P)
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
    y = torch.einsum("bhls,bshp->blhp", scores.softmax(-1), v).reshape(B, L, D)
    torch.testing.assert_close(mixer(x), mixer.out_proj(y), **EXACT)


def test_causal_mask_is_anchored_at_the_last_key():
    v = torch.arange(4.0).view(1, 4, 1, 1)
    zero = torch.zeros(1, 4, 1, 1)
    assert causal_attention(zero[:, :1], zero, v).flatten().tolist() == [1.5]
    assert causal_attention(zero[:, :2], zero, v).flatten().tolist() == [1.0, 1.5]
    assert causal_attention(zero, zero, v).flatten().tolist() == [0.0, 0.5, 1.0, 1.5]


def test_key_heads_are_shared_by_neighbouring_query_heads():
    q, k, v = normal(2, 5, 8, 4), normal(2, 5, 2, 4, seed=2), normal(2, 5, 2, 4, seed=3)
    y = causal_attention(q, k, v)
    k8, v8 = k.repeat_interleave(4, dim=2), v.repeat_interleave(4, dim=2)
    torch.testing.assert_close(y, causal_attention(q, k8, v8), **EXACT)
    tiled = causal_attention(q, k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1))
    assert (y - tiled).abs().max() > 0.1


@pytest.mark.parametrize("keys", [{"n_kv_heads": 2}, {"qk_norm": True}, {"rotary_fraction": 0.0}, {"bias": True}])
def test_attention_options_keep_the_laws(keys):
    mixer, x = jitter(Attention(D, **keys)).double().eval(), normal(2, 17, D)
    torch.testing.assert_close(steps(mixer, x)[0], mixer(x), **EXACT)
    torch.testing.assert_close(prefill(mixer, x, [3, 1, 13])[0], mixer(x), **EXACT)


def test_grouped_queries_shrink_the_cache():
    full, grouped = (Attention(D, n_heads=4, n_kv_heads=n) for n in (4, 1))
    x = normal(1, 5, D, dtype=torch.float32)
    a, b = (state_bytes(m.prefill(x, m.init_state(1))[1]) for m in (full, grouped))
    assert a == 4 * b


def test_attention_dropout_is_for_training_alone():
    mixer, x = Attention(D, attn_dropout=0.5).eval(), normal(2, 9, D, dtype=torch.float32)
    assert torch.equal(mixer(x), mixer(x))
    mixer.train()
    assert not torch.equal(mixer(x), mixer(x))


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(d_model=100, n_heads=3), ["100", "3"]),
        (dict(d_model=24, n_heads=0), ["24", "0"]),
        (dict(d_model=24, n_heads=8), ["24", "8", "head of 3", "0.667"]),
        (dict(d_model=24, n_heads=4, n_kv_heads=3), ["n_kv_heads=3", "n_heads=4"]),
        (dict(d_model=24, rotary_fraction=1.5), ["1.5"]),
        (dict(d_model=24, attn_dropout=1.0), ["1.0"]),
    ],
)
def test_attention_refuses_sizes_that_cannot_be(keys, words):
    with pytest.raises(ValueError) as error:
        Attention(**keys)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("d_model, n_heads, fraction", [(24, 8, 0.667), (257, 1, 0.5), (3, 3, 0.0)])
def test_odd_heads_work_where_the_rotated_part_is_even(d_model, n_heads, fraction):
    mixer = Attention(d_model, n_heads, rotary_fraction=fraction).double()
    x = normal(1, 6, d_model)
    torch.testing.assert_close(steps(mixer, x)[0], mixer(x), **EXACT)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
def test_rotary_positions_stay_apart(low):
    for start in (255, 4097, 65_536):
        cos, sin = rotary_phases(start, 7, 8, 10_000.0, torch.zeros((), dtype=low))
        assert cos.dtype == torch.float32
        angle = torch.atan2(sin[:, 0, 0], cos[:, 0, 0]).double()  # the first pair turns by one radian a position
        turned = torch.remainder(angle - torch.arange(start, start + 7) + math.pi, 2 * math.pi) - math.pi
        assert turned.abs().max() < 1e-6 * 2


def test_rotation_sees_distances_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=2)

    def score(t, s):
        (a, b), (c, d) = (rotary_phases(position, 1, 8, 10_000.0, q) for position in (t, s))
        return (rotate(q, a, b) * rotate(k, c, d)).sum()

    torch.testing.assert_close(score(5, 2), score(1005, 1002), **EXACT)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3


# -- recurrent networks -----------------------------------------------------------------------------------------------


def test_lstm_is_its_equation_and_remembers_at_the_start():
    mixer, u = make("lstm"), normal(2, 5, D)
    W, U = mixer.lstm.weight_ih_l0, mixer.lstm.weight_hh_l0
    bias = mixer.lstm.bias_ih_l0 + mixer.lstm.bias_hh_l0
    h, c, ys = torch.zeros(2, D).double(), torch.zeros(2, D).double(), []
    for u_t in u.unbind(1):
        i, f, g, o = (u_t @ W.T + h @ U.T + bias).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        ys.append(h @ mixer.out_proj.weight.T)
    torch.testing.assert_close(mixer(u), torch.stack(ys, 1), **EXACT)
    start = LSTM(D)
    gates = (start.lstm.bias_ih_l0 + start.lstm.bias_hh_l0).view(4, D)
    assert (gates[1] == 1).all()


def test_rnn_is_its_equation_and_starts_orthogonal():
    mixer, u = make("rnn"), normal(2, 5, D)
    h, ys = torch.zeros(2, D).double(), []
    for u_t in u.unbind(1):
        h = torch.tanh(
            u_t @ mixer.rnn.weight_ih_l0.T + mixer.rnn.bias_ih_l0 + h @ mixer.rnn.weight_hh_l0.T + mixer.rnn.bias_hh_l0
        )
        ys.append(h @ mixer.out_proj.weight.T)
    torch.testing.assert_close(mixer(u), torch.stack(ys, 1), **EXACT)
    U = RNN(D, expand=2).rnn.weight_hh_l0.double()
    torch.testing.assert_close(U @ U.T, torch.eye(2 * D).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [LSTM, RNN, Mamba])
def test_an_inner_width_of_zero_is_refused(cls):
    with pytest.raises(ValueError, match=r"expand=0\.01 and d_model=8"):
        cls(8, expand=0.01)


# -- S4D --------------------------------------------------------------------------------------------------------------

R2 = [0.737462, 0.486689, 0.181674, -0.012578, -0.034883, 0.052136, 0.132917, 0.134457]


def one_channel(d_state, init, dt, discretization="zoh"):
    """C = 1 everywhere, and no skip."""
    mixer = S4D(1, d_state, init, discretization, dt_min=dt, dt_max=dt).double()
    with torch.no_grad():
        mixer.C.zero_()[..., 0] = 1
        mixer.D.zero_()
    return mixer


def test_s4d_kernel_taps():
    """A_n = -½ + iπn for n < 4, Δ = 0.1, zero-order hold; convolution view and recurrent view."""
    mixer = one_channel(8, "lin", 0.1)
    assert mixer.A_imag.max().item() == pytest.approx(9.4248, abs=1e-4)
    assert mixer.kernel(8)[0].tolist() == pytest.approx(R2, abs=1e-6)
    log_A, B, C = mixer.discretize()
    x, taps = torch.zeros_like(B), []
    for t in range(8):
        x = log_A.exp() * x + (B if t == 0 else 0)
        taps.append(2 * (C * x).real.sum().item())
    assert taps == pytest.approx(R2, abs=1e-6)


@pytest.mark.parametrize(
    "discretization, taps",  # A = -1, Δ = ½. bilinear: Ā = 3/5, B̄ = 2/5. zoh: Ā = e^-½, B̄ = 1 - e^-½
    [
        ("bilinear", [0.4 * 0.6**l for l in range(4)]),
        ("zoh", [-math.expm1(-0.5) * math.exp(-0.5 * l) for l in range(4)]),
    ],
)
def test_s4d_discretizations_by_hand(discretization, taps):
    assert one_channel(1, "real", 0.5, discretization).kernel(4)[0].tolist() == pytest.approx(taps, abs=1e-7)


@pytest.mark.parametrize("init", s4d.INITS)
@pytest.mark.parametrize("discretization", s4d.DISCRETIZATIONS)
def test_s4d_options_keep_the_laws(init, discretization):
    mixer, x = jitter(S4D(D, 8, init, discretization)).double(), normal(2, 37, D)
    y, state = steps(mixer, x)
    torch.testing.assert_close(y, mixer(x), **EXACT)
    pieces, after = prefill(mixer, x, [2, 1, 34])
    torch.testing.assert_close(pieces, y, **EXACT)
    torch.testing.assert_close(after.x, state.x, **EXACT)
    assert state.x.shape == (2, D, 8 if init == "real" else 4, 1 if init == "real" else 2)  # d_state numbers a channel


def test_s4d_legs_spectrum_is_that_of_hippo():
    N = 16
    n = np.arange(N)
    A = -np.sqrt(np.outer(2 * n + 1, 2 * n + 1)) * (n[:, None] > n) - np.diag(n + 1.0)
    P = np.sqrt(n + 0.5)
    eigenvalues = np.linalg.eigvals(A + np.outer(P, P))
    wanted = sorted(eigenvalues[eigenvalues.imag > 0], key=lambda a: a.imag)
    np.testing.assert_allclose(s4d.spectrum("legs", N), wanted, rtol=0, atol=1e-8)
    np.testing.assert_allclose(s4d.spectrum("inv", 4), [-0.5 + 1j * 4 / np.pi * 3, -0.5 + 1j * 4 / np.pi / 3])


@pytest.mark.parametrize("length", [1, 2, 3, 7, 36, 37, 100])
def test_tables_of_powers_equal_the_plain_sums(length):
    log_a = torch.complex(-normal(3, 5).abs(), normal(3, 5, seed=2))
    c = torch.complex(normal(2, 3, 5, seed=3), normal(2, 3, 5, seed=4))
    u = normal(2, 3, length, seed=5)
    a = log_a[..., None].exp() ** torch.arange(length)  # (D, M, L)
    torch.testing.assert_close(s4d.power_sum(c, log_a, length), (c[..., None] * a).sum(-2).real, **EXACT)
    torch.testing.assert_close(s4d.decayed_sum(u, log_a), (a.flip(-1) * u.unsqueeze(2)).sum(-1), **EXACT)


def test_causal_convolution_does_not_wrap_around():
    u, k = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1), torch.ones(4, 1)
    assert s4d.causal_convolution(u, k).flatten().tolist() == pytest.approx([1, 3, 6, 10], abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 1023])
def test_causal_convolution_equals_the_sum(length):
    u, k = normal(2, length, 3), normal(length, 3, seed=2)
    y = F.conv1d(F.pad(u.mT, (length - 1, 0)), k.T.flip(-1).unsqueeze(1), groups=3).mT
    torch.testing.assert_close(s4d.causal_convolution(u, k), y, rtol=0, atol=1e-12 * length)


def test_fft_length_reaches_twice_the_length():
    for least in [*range(2, 3000, 2), 2 * 65_537]:
        n = s4d.fft_length(least)
        assert least <= n <= 1.34 * least
        while n % 2 == 0:
            n //= 2
        assert n in (1, 3, 5, 9, 15)


@pytest.mark.parametrize("length", [1024, 65_536])
def test_long_convolution_in_float32(length):
    k = torch.exp(-0.001 * torch.arange(length, dtype=torch.float64))[:, None]
    u = normal(1, length, 1)
    y, low = s4d.causal_convolution(u, k), s4d.causal_convolution(u.float(), k.float())
    assert (low - y).abs().max() < 2e-6 * y.abs().max()  # two FFTs: a few eps · log2(2L) = 1.2e-7 · 17


def test_s4d_kernel_decays_at_length_16384():
    torch.manual_seed(0)
    mixer = S4D(64)
    K = mixer.kernel(16_384)
    assert K.isfinite().all()
    assert K[:, -64:].abs().max() < 0.02 * K.abs().max()
    with torch.no_grad():
        mixer.A_log_decay.fill_(-20.0)  # wherever training takes it, Re A stays below 0
    log_A, _, _ = mixer.discretize()
    assert (log_A.real < 0).all()


@pytest.mark.parametrize("length", [1024, 65_536])
def test_s4d_kernel_in_float32(length):
    torch.manual_seed(0)
    mixer = S4D(16)
    K = mixer.kernel(length)
    truth = mixer.double().kernel(length)
    assert (K - truth).norm() < 1e-5 * truth.norm()  # the phase Δ Im(A) l is rounded in float32: 2 to 3e-6


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(d_state=63), "63"),
        (dict(d_state=0), "0"),
        (dict(init="hippo"), "lin, inv, legs, real, got 'hippo'"),
        (dict(discretization="euler"), "zoh, bilinear, got 'euler'"),
        (dict(dt_min=0.1, dt_max=0.01), "dt_min=0.1 and dt_max=0.01"),
    ],
)
def test_s4d_refuses_what_cannot_be(keys, words):
    with pytest.raises(ValueError, match=words):
        S4D(D, **keys)


# -- Mamba ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_mamba_is_its_equation(discretization):
    torch.manual_seed(0)
    m, u = jitter(Mamba(D, d_state=5, discretization=discretization)).double(), normal(2, 11, D)
    E, N, R = 2 * D, 5, 2
    x, z = (u @ m.in_proj.weight.T).split(E, dim=-1)
    x = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), m.conv.weight, m.conv.bias, groups=E).mT)
    delta, B, C = (x @ m.x_proj.weight.T).split((R, N, N), dim=-1)
    delta = torch.log1p(torch.exp(delta @ m.dt_proj.weight.T + m.dt_bias))[..., None]  # (B, L, E, 1)
    A = -torch.exp(m.A_log)
    B_bar = delta * B[:, :, None] if discretization == "euler" else (torch.exp(delta * A) - 1) / A * B[:, :, None]
    h, ys = torch.zeros(2, E, N).double(), []
    for t in range(11):
        h = torch.exp(delta[:, t] * A) * h + B_bar[:, t] * x[:, t, :, None]
        ys.append((h * C[:, t, None]).sum(-1) + m.D * x[:, t])
    y = (torch.stack(ys, 1) * F.silu(z)) @ m.out_proj.weight.T
    torch.testing.assert_close(m(u), y, **EXACT)


@pytest.mark.parametrize(
    "keys",
    [
        dict(discretization="zoh"),
        dict(d_conv=1),
        dict(d_conv=2, d_state=1),
        dict(d_conv=3, d_state=5, expand=1.5, dt_rank=1),
        dict(bias=True, conv_bias=False),
    ],
)
def test_mamba_options_keep_the_laws(keys):
    mixer, x = jitter(Mamba(D, **keys)).double(), normal(2, 17, D)
    y, state = steps(mixer, x)
    torch.testing.assert_close(y, mixer(x), **EXACT)
    pieces, after = prefill(mixer, x, [2, 1, 14])
    torch.testing.assert_close(pieces, y, **EXACT)
    for a, b in zip(state, after, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("scan", IMPLS)
def test_scans_compute_one_function(scan):
    torch.manual_seed(0)
    truth = jitter(Mamba(D, scan="sequential")).double()
    mixer = Mamba(D, scan=scan)
    mixer.load_state_dict(truth.state_dict())
    x, weight = normal(2, 37, D), normal(2, 37, D, seed=2)
    try:
        y = mixer(x.float())
    except ValueError as error:
        assert scan in ("cpu", "fused") and "cannot run here" in str(error), error
        pytest.skip(str(error))
    (y * weight.float()).sum().backward()
    exact = truth(x)
    (exact * weight).sum().backward()
    assert (y - exact).norm() < 1e-5 * exact.norm()
    for p, q in zip(mixer.parameters(), truth.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 1e-5 * q.grad.norm()


def test_inverse_softplus():
    dt = torch.tensor([1e-3, 1e-2, 1e-1], dtype=torch.float64)
    bias = inverse_softplus(dt)
    assert bias.tolist() == pytest.approx([-6.907255, -4.600166, -2.252168], abs=1e-6)
    torch.testing.assert_close(F.softplus(bias), dt)


def test_mamba_starts_as_its_paper_says():
    torch.manual_seed(0)
    m = Mamba(64)
    assert (m.d_inner, m.dt_rank, m.conv.weight.shape) == (128, 4, (128, 1, 4))
    torch.testing.assert_close(m.A_log.exp(), torch.arange(1.0, 17.0).expand(128, 16))
    assert (m.D == 1).all() and m.in_proj.bias is None and m.conv.bias is not None
    dt = F.softplus(m.dt_bias)
    assert dt.min() >= 1e-3 * (1 - 1e-5) and dt.max() <= 0.1 * (1 + 1e-5)
    assert dt.log().std() > 1.0  # log-uniform over two decades: 4.6/√12 = 1.33
    assert 0.49 < m.dt_proj.weight.abs().max() <= 0.5  # 4^-½


@pytest.mark.parametrize(
    "keys, words",
    [
        (dict(d_state=0), "0"),
        (dict(d_state=300), "300"),
        (dict(d_conv=0), "0"),
        (dict(dt_rank=0), "0"),
        (dict(scan="magic"), "auto, .*got 'magic'"),
        (dict(discretization="bilinear"), "euler, zoh, got 'bilinear'"),
        (dict(dt_min=0.0), "dt_min=0.0"),
    ],
)
def test_mamba_refuses_what_cannot_be(keys, words):
    with pytest.raises(ValueError, match=words):
        Mamba(D, **keys)

"""The laws of mixers/base.py over every model of conf/model, then each paper's equations by themselves."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._python_dispatch as dispatch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from seqmix.mixers.base import GrowingState
from seqmix.mixers.lstm import LSTM
from seqmix.mixers.mamba import Mamba, inverse_softplus
from seqmix.mixers.rnn import RNN
from seqmix.mixers.s4d import StateSpace
from seqmix.state import state_bytes
from seqmix_kernels.frame import CannotRun
from seqmix_kernels.ops.selective_scan import IMPLS, cpu

needs_compiler = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no C kernel here: {cpu.why_not()}")
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
        cls = get_class(config.model._target_)
        parameters = inspect.signature(cls).parameters.values()
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters), name
        by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert by_position == ["d_model", *(key for key in config.model if not key.startswith("_"))], name
        assert set(cls.kernel_arguments) == {p.name for p in parameters if p.default == "auto"}, name


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
        assert a.dtype == b.dtype == (dtype if a.is_floating_point() else torch.int32)  # a cache's lengths
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keys", [{}, {"n_kv_heads": 2}, {"positions": "alibi"}, {"window": 3}], ids=str)
@pytest.mark.parametrize("sizes", [[1] * 5, [2, 3]], ids=["steps", "pieces"])
@over_models
def test_on_a_gpu_gradients_through_steps_and_pieces_are_those_of_forward(name, sizes, keys):
    """A fused operator without a backward must not stand where a gradient is wanted, and every backward reads any strides."""
    if not keys.keys() <= CONFIGS[name].model.keys():
        return pytest.skip("it has no such option")
    torch.manual_seed(0)
    mixer = jitter(instantiate(CONFIGS[name].model, **keys)(d_model=64)).cuda()
    x, weight = (normal(3, 5, 64, dtype=torch.float32, seed=seed).cuda() for seed in (1, 2))

    def gradients(way):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad((way(leaf) * weight).sum(), [leaf, *mixer.parameters()])

    def stepped(x):
        state, ys = mixer.init_state(len(x)), []
        for piece in x.split(sizes, dim=1):
            if piece.shape[1] == 1:
                y, state = mixer.step(piece[:, 0], state)
                y = y[:, None]
            else:
                y, state = mixer.prefill(piece, state)
            ys.append(y)
        return torch.cat(ys, dim=1)

    for (parameter, _), got, want in zip([("x", x), *mixer.named_parameters()], *map(gradients, (stepped, mixer)), strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm() + 1e-6, parameter


@over_models
@torch.no_grad()
def test_state_is_functional(name):
    mixer, x = make(name), normal(2, 9, D)
    attributes = {module: set(vars(module)) for module in mixer.modules()}
    weights = {key: value.clone() for key, value in mixer.state_dict().items()}
    _, kept = mixer.prefill(x, mixer.init_state(2))
    # a state that grows may have room to spare, which others may fill: there the outputs below tell
    fixed = [] if isinstance(kept, GrowingState) else list(kept)
    copy = [t.clone() for t in fixed]
    branch = mixer.prefill(normal(2, 4, D, seed=5), kept)[0]
    other = mixer.step(normal(2, D, seed=6), kept)[0]
    assert all(torch.equal(a, b) for a, b in zip(fixed, copy, strict=True))
    assert torch.equal(mixer.prefill(normal(2, 4, D, seed=5), kept)[0], branch)
    assert torch.equal(mixer.step(normal(2, D, seed=6), kept)[0], other)
    assert {module: set(vars(module)) for module in mixer.modules()} == attributes
    assert all(torch.equal(value, weights[key]) for key, value in mixer.state_dict().items())


@over_models
def test_state_bytes_are_counted_on_the_tensors(name):
    mixer = make(name, torch.float32)
    state = mixer.init_state(3)
    assert all(len(t) == 3 and t.dtype in (torch.float32, torch.int32) for t in state)
    assert state_bytes(state) == sum(t.numel() * 4 for t in state) == 3 * state_bytes(mixer.init_state(1))
    lengths = (1, 256, 257, 600)
    sizes = [state_bytes(mixer.prefill(normal(3, length, D, dtype=torch.float32), state)[1]) for length in lengths]
    if isinstance(state, GrowingState):
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    else:
        assert set(sizes) == {state_bytes(state)}


@over_models
@torch.no_grad()
def test_a_state_with_room_is_the_same_state_and_keeps_its_shapes(name):
    mixer = make(name)
    _, kept = mixer.prefill(normal(2, 9, D), mixer.init_state(2))
    if not isinstance(kept, GrowingState):
        return pytest.skip("its state has one size")
    state, larger, index = kept, kept.reserve(7), torch.tensor([1, 0, 1])
    rows, shapes = kept.rows(index), [t.shape for t in larger]
    assert larger.reserve(7) is larger
    for x_t in normal(2, 7, D, seed=2).unbind(1):
        y_t, state = mixer.step(x_t, state)
        z_t, larger = mixer.step(x_t, larger)
        of_rows, rows = mixer.step(x_t[index], rows)
        torch.testing.assert_close(z_t, y_t, **EXACT)
        torch.testing.assert_close(of_rows, y_t[index], **EXACT)
        assert [t.shape for t in larger] == shapes


@over_models
def test_padding_and_companions_change_nothing(name):
    mixer, x = make(name), normal(3, 11, D)
    padded = torch.cat((x, 1e3 * normal(3, 11, D, seed=7)), dim=1)
    alone, state = mixer.prefill(x[1:2], mixer.init_state(1))
    together, states = mixer.prefill(x, mixer.init_state(3))
    torch.testing.assert_close(together[1:2], alone, **EXACT)
    torch.testing.assert_close(mixer(padded)[:, :11], together, rtol=0, atol=1e-10)  # an FFT's error follows the largest
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
        cast, _ = steps(mixer, x.bfloat16())  # as the norm before it hands its input over
    assert low.dtype == torch.bfloat16
    for z in (low, stepped, cast):
        assert (z.float() - y).norm() < 0.02 * y.norm()
    if isinstance(mixer, (StateSpace, Mamba)):
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


# -- recurrent networks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lstm", "rnn"])
def test_a_recurrent_layer_takes_a_long_row_in_pieces(name, monkeypatch):
    mixer, x = make(name), normal(2, 11, D).requires_grad_()
    whole = mixer(x)
    (gradient,) = torch.autograd.grad(whole.square().sum(), x)
    monkeypatch.setattr("seqmix.mixers.base.PIECE", 4)
    pieces = mixer(x)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(torch.autograd.grad(pieces.square().sum(), x)[0], gradient)


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
    except CannotRun as error:
        assert scan in ("cpu", "fused"), error
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


# What is said of the kernels


class Seen(dispatch.TorchDispatchMode):
    """The compiled operators of a call and their backends."""

    def __init__(self):
        super().__init__()
        self.backends = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "seqmix":
            name = func.name().removeprefix("seqmix::").removesuffix("_fwd")
            self.backends["s4_kernel" if name in ("s4d_kernel", "dplr_kernel") else name] = args[-1]
        return func(*args, **(kwargs or {}))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "keys", "seen"),
    [
        ("mamba", {}, {"mamba_inner": "cpu"}),  # one node around the others
        ("mamba", {"scan": "chunked"}, {"causal_conv1d": "cpu"}),
        ("mamba", {"d_conv": 9}, {"selective_scan": "cpu"}),  # more taps than the compiled convolution takes
        ("s4", {}, {"s4_kernel": "torch", "fft_conv": "torch"}),
        ("s4d", {"impl": "reference"}, {}),
        ("lstm", {}, {}),
    ],
)
def test_what_a_mixer_says_of_its_kernels_is_what_runs(name, keys, seen):
    mixer = instantiate(CONFIGS[name].model, **keys)(d_model=D)
    x = normal(2, 7, D, dtype=torch.float32)
    with Seen() as mode:
        mixer(x)
    used = mixer.kernels_used(x)
    assert mode.backends == seen and all(used[op].split()[0] == backend for op, backend in seen.items())
    assert (used == {}) == (name == "lstm")
    if name == "mamba":
        parts = {op: what.split()[0] for op, what in used.items()}
        wanted = {"selective_scan": keys.get("scan", "cpu"), "causal_conv1d": "reference" if "d_conv" in keys else "cpu"}
        assert parts == wanted | {"mamba_inner": "reference" if keys else "cpu", "mamba_step": "reference"}

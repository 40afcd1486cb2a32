"""S4 and S4D by themselves: spectra, kernels in both views, precision, what training may do to them. The laws that every
mixer keeps are in test_mixers.py."""

import copy
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from seqmix.mixers import s4d
from seqmix.mixers.s4 import S4
from seqmix.mixers.s4d import S4D
from seqmix.model import SequenceModel
from seqmix.optim import param_groups
from seqmix.state import held_bytes, state_bytes
from seqmix_kernels.ops.s4_kernel import dense, real
from seqmix_kernels.ops.s4_step.reference import advance, discrete

D = 24
EXACT = dict(rtol=0, atol=1e-12)  # float64, outputs of size 1: rounding is 2e-16 an operation
both = pytest.mark.parametrize("cls", [S4, S4D])


@pytest.fixture(autouse=True)
def two_threads():
    """One here: thousands of small operations, that a second thread only waits for."""
    torch.set_num_threads(1)


def normal(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def jitter(module):
    with torch.no_grad():
        for p in module.parameters():
            p += 0.02 * torch.randn_like(p)
    return module


def made(cls, *args, **keys):
    torch.manual_seed(0)
    return jitter(cls(*args, **keys))


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


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def discretized(mixer):
    log_dt, log_decay, imag, C, _, P, B, method = mixer.recurrence()
    return discrete(log_dt, log_decay, imag, P, B, method, C.dtype)


@torch.no_grad()
def taps(mixer, length):
    """K by the recurrent view: what `step` runs, given an impulse. (D, L)."""
    dtype = mixer.C.dtype
    u, x, discrete, out = torch.ones(1, mixer.d_model, dtype=dtype), mixer.init_state(1).x, discretized(mixer), []
    for _ in range(length):
        y, x = advance(u, x, mixer.C, *discrete)
        out.append(y)
        u = torch.zeros_like(u)
    return torch.cat(out).T


# -- convolution and step ---------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("d_state", [4, 16, 64, 256])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 31, 64, 127, 500])
def test_convolution_equals_step(cls, d_state, length):
    """A channel each at the ends and the middle of the range of Δ; also after the weights have changed."""
    mixer = made(cls, 3, d_state)
    for _ in range(2):
        with torch.no_grad():
            mixer.log_dt.copy_(torch.tensor([1e-3, 1e-2, 1e-1]).log())
            for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
                m = copy.deepcopy(mixer).to(dtype)
                K = m.kernel(length)
                assert K.dtype == dtype
                assert relative(K, taps(m, length)) <= bound
        jitter(mixer)


@pytest.mark.slow
@both
def test_convolution_equals_step_at_length_16384(cls):
    mixer = made(cls, 3, 64)
    with torch.no_grad():
        mixer.log_dt.copy_(torch.tensor([1e-3, 1e-2, 1e-1]).log())
        truth = taps(copy.deepcopy(mixer).double(), 16_384)
        assert relative(copy.deepcopy(mixer).double().kernel(16_384), truth) <= 1e-10
        assert relative(mixer.kernel(16_384), truth) <= 5e-6  # "kernel against complex128", each channel of which:
        for K, true in zip(mixer.kernel(16_384), truth, strict=True):
            assert relative(K, true) <= 5e-6
        assert relative(taps(mixer, 16_384), truth) <= 1e-4


@both
@pytest.mark.parametrize("length", [1, 5, 64, 509, 8191])
def test_a_longer_kernel_continues_a_shorter_one(cls, length):
    """Nothing is built for a length: neither twice the one of training nor a prime one changes a tap."""
    mixer = made(cls, 5, 32)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        m = copy.deepcopy(mixer).to(dtype)
        K = m.kernel(2 * length)
        assert relative(m.kernel(length), K[:, :length]) <= bound


@both
@pytest.mark.parametrize("n_ssm", [1, 3, None])
def test_spectra_are_shared_in_turn(cls, n_ssm):
    mixer, x = made(cls, 6, 8, n_ssm=n_ssm).double(), normal(2, 19, 6)
    assert len(mixer.A_imag) == (n_ssm or 6)
    y = mixer(x)
    torch.testing.assert_close(steps(mixer, x)[0], y, **EXACT)
    torch.testing.assert_close(prefill(mixer, x, [2, 17])[0], y, **EXACT)
    wide = made(cls, 6, 8, n_ssm=None).double()  # the same with a copy a channel
    state = {k: p[torch.arange(6) % len(p)] if k[0] in "ABP" else p for k, p in mixer.state_dict().items()}
    wide.load_state_dict(state)
    torch.testing.assert_close(wide(x), y, **EXACT)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@both
def test_every_implementation_is_one_function(cls, impl):
    a, b, x = made(cls, D, 16).double(), made(cls, D, 16, impl=impl).double(), normal(2, 33, D)
    torch.testing.assert_close(a(x), b(x), **EXACT)
    torch.testing.assert_close(prefill(b, x, [3, 30])[0], a(x), **EXACT)


@both
def test_a_weight_update_reaches_both_views_and_nothing_is_kept(cls):
    """C05: in inference mode, then a step of training, then in inference mode, then another step."""
    mixer, x = made(cls, D, 16).double(), normal(2, 12, D)
    names = set(vars(mixer))
    seen = []
    for _ in range(3):
        with torch.inference_mode():
            y = mixer(x)
            torch.testing.assert_close(steps(mixer, x)[0], y, **EXACT)
            torch.testing.assert_close(prefill(mixer, x, [5, 7])[0], y, **EXACT)
            seen.append(y.clone())
        mixer.zero_grad()
        mixer(x).square().sum().backward()
        with torch.no_grad():
            for p in mixer.parameters():
                p -= 0.01 * p.grad / p.grad.norm()
    assert set(vars(mixer)) == names
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.pairwise(seen))


@both
def test_a_projection_that_something_watches_is_called(cls):
    """A step reads the weights of plain Linears itself; a hook, or an adapter in a Linear's place, it must not pass by."""
    mixer, x, calls = made(cls, D, 8).double(), normal(2, 5, D), []
    y, _ = steps(mixer, x)
    mixer.gate_proj.register_forward_hook(lambda *given: calls.append(given))
    torch.testing.assert_close(steps(mixer, x)[0], y, **EXACT)
    assert len(calls) == 5
    mixer.out_proj = torch.nn.Sequential(mixer.out_proj)
    torch.testing.assert_close(steps(mixer, x)[0], y, **EXACT)


# -- S4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_state", [2, 8, 64])
def test_s4_starts_at_hippo_legs(d_state):
    """The dense system in real coordinates has HiPPO's own impulse response: A -(2n+1)^½(2k+1)^½ below, -(n+1) on it."""
    N = d_state
    n = np.arange(N)
    A = -np.sqrt(np.outer(2 * n + 1, 2 * n + 1)) * (n[:, None] > n) - np.diag(n + 1.0)
    lam, P, B = s4d.hippo_legs(N)
    full = [np.concatenate((t, t.conj())) for t in (lam, P, B)]
    ours = np.diag(full[0]) - np.outer(full[1], full[1].conj())
    for power in range(4):  # invariants of the basis: P* A^k B, with P = √(n + ½), B = √(2n + 1)
        wanted = np.sqrt(n + 0.5) @ np.linalg.matrix_power(A, power) @ np.sqrt(2 * n + 1.0)
        got = full[1].conj() @ np.linalg.matrix_power(ours, power) @ full[2]
        assert abs(got - wanted) < 1e-11 * abs(wanted) * N
    # and the trapezoid rule of A itself gives the taps that the mixer's step gives
    dt, steps_ = 0.01, 20
    left, right = np.eye(N) - dt / 2 * A, np.eye(N) + dt / 2 * A
    A_bar, x = np.linalg.solve(left, right), np.linalg.solve(left, dt * np.sqrt(2 * n + 1.0))
    mixer = S4(1, N, dt_min=dt, dt_max=dt).double()
    with torch.no_grad():  # C reads P* x
        mixer.C.copy_(torch.tensor(np.stack((P.real, -P.imag), -1))[None])
        for t in (mixer.A_log_decay, mixer.A_imag, mixer.P, mixer.B, mixer.log_dt):
            assert t.dtype == torch.float64
        wanted = []
        for _ in range(steps_):
            wanted.append(np.sqrt(n + 0.5) @ x)
            x = A_bar @ x
        # parameters are stored in float32: that much they may differ
        np.testing.assert_allclose(taps(mixer, steps_)[0].numpy(), wanted, rtol=2e-5)


def test_s4_prefill_of_one_token_is_the_dense_step():
    mixer, x = made(S4, 5, 8).double(), normal(2, 5, 4, 2)
    A_bar, B_bar = dense(*mixer.modes())
    u = normal(2, 5, seed=3)
    _, after = advance(u, x, mixer.C, *discretized(mixer))
    wanted = torch.einsum("dnm,bdm->bdn", A_bar, real(x)) + B_bar * u[..., None]
    torch.testing.assert_close(real(after), wanted, **EXACT)
    torch.testing.assert_close(mixer.carry(u[:, None], x)[1], after, **EXACT)


@pytest.mark.parametrize("length", [100, 300, 4097])
def test_s4_prefill_of_long_pieces(length):
    mixer = made(S4, 2, 16)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        m, x = copy.deepcopy(mixer).to(dtype), normal(1, length, 2, dtype=dtype)
        y, _ = prefill(m, x, [length // 3, length - length // 3])
        assert relative(y, m(x)) < bound


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
    assert taps(mixer, 8)[0].tolist() == pytest.approx(R2, abs=1e-6)


@pytest.mark.parametrize(
    "discretization, wanted",  # A = -1, Δ = ½. bilinear: Ā = 3/5, B̄ = 2/5. zoh: Ā = e^-½, B̄ = 1 - e^-½
    [
        ("bilinear", [0.4 * 0.6**l for l in range(4)]),
        ("zoh", [-math.expm1(-0.5) * math.exp(-0.5 * l) for l in range(4)]),
    ],
)
def test_s4d_discretizations_by_hand(discretization, wanted):
    assert one_channel(1, "real", 0.5, discretization).kernel(4)[0].tolist() == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("init", s4d.INITS)
@pytest.mark.parametrize("discretization", s4d.DISCRETIZATIONS)
def test_s4d_options_keep_the_laws(init, discretization):
    mixer, x = jitter(S4D(D, 8, init, discretization)).double(), normal(2, 37, D)
    y, state = steps(mixer, x)
    torch.testing.assert_close(y, mixer(x), **EXACT)
    pieces, after = prefill(mixer, x, [2, 1, 34])
    torch.testing.assert_close(pieces, y, **EXACT)
    torch.testing.assert_close(after.x, state.x, **EXACT)
    assert held_bytes(after) == held_bytes(state) == state_bytes(state)
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
def test_decayed_sum_equals_the_plain_one(length):
    log_a = torch.stack((-normal(3, 5).abs(), normal(3, 5, seed=2)), -1)
    u = normal(2, 3, length, seed=5)
    a = torch.view_as_complex(log_a)[..., None].exp() ** torch.arange(length - 1, -1, -1)  # (D, M, L)
    torch.testing.assert_close(torch.view_as_complex(s4d.decayed_sum(u, log_a)), (a * u.unsqueeze(2)).sum(-1), **EXACT)


# -- what training may do ---------------------------------------------------------------------------------------------


@both
def test_kernel_decays_and_cannot_grow(cls):
    """C07: wherever training takes the parameters, the real part of A stays below zero, and so does all of A."""
    torch.manual_seed(0)
    mixer = cls(8)
    K = mixer.kernel(16_384)
    assert K.isfinite().all()
    assert K[:, -64:].abs().max() < 0.05 * K.abs().max()
    with torch.no_grad():
        mixer.A_log_decay.fill_(-20.0)
        if cls is S4:
            mixer.P.mul_(3)
    K = mixer.double().kernel(16_384)
    assert K.isfinite().all()
    if cls is S4:
        A_bar, _ = dense(*mixer.modes())
        assert torch.linalg.eigvals(A_bar[:4]).abs().max() < 1
    else:
        assert (mixer.discretize()[0][..., 0] < 0).all()


@both
def test_optimiser_groups(cls):
    """C08: Δ, A, P and B at 1e-3 at most and undecayed, C at the model's rate; each parameter in one group, also where
    the model has been copied or compiled."""
    torch.manual_seed(0)
    model = SequenceModel(11, 16, 2, lambda d_model: cls(d_model, 8))
    for m in (model, copy.deepcopy(model), torch.compile(model, backend="eager")):
        groups = param_groups(m, lr=4e-3, weight_decay=0.1)
        group_of = {id(p): group for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(group_of) == len(list(m.parameters()))
        own = {"log_dt", "A_log_decay", "A_imag"} | ({"P", "B"} if cls is S4 else set())
        for name, p in m.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            group = group_of[id(p)]
            if "mixer" in name and leaf in own:
                assert (group["lr"], group["weight_decay"]) == (1e-3, 0.0), name
            elif "mixer" in name and leaf == "C":
                assert (group["lr"], group["weight_decay"]) == (4e-3, 0.1), name


@both
def test_complex_parameters_keep_their_imaginary_parts_in_16_bits(cls):
    """C02."""
    mixer = cls(4, 8)
    before = {k: p.clone() for k, p in mixer.named_parameters(recurse=False)}
    mixer.to(torch.bfloat16)
    assert mixer.A_imag.abs().max() == before["A_imag"].abs().max() > 1
    assert all(torch.equal(p, before[k]) for k, p in mixer.named_parameters(recurse=False))


def test_two_ranks_keep_the_same_weights(tmp_path):
    """C03: DDP over gloo, other data on each rank, clipping, AdamW: equal bits after a step, imaginary halves included."""
    script, store = Path(__file__).with_name("ddp_s4.py"), tmp_path / "store"
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    first, second = (json.loads(out) for out, _ in outs)
    assert first == second and len(first) == 20


@both
def test_training_in_bfloat16_keeps_to_float32(cls):
    """Forty steps of a small model on delayed copying from the same start: the loss within 2 %."""
    tokens = torch.randint(8, (40, 8, 48), generator=torch.Generator().manual_seed(0))
    losses = []
    for low in (False, True):
        torch.manual_seed(0)
        model = SequenceModel(8, 32, 2, lambda d_model: cls(d_model, 16))
        optimizer = torch.optim.AdamW(param_groups(model, lr=4e-3, weight_decay=0.01))
        for batch in tokens:
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                logits = model(batch)
            loss = F.cross_entropy(logits[:, 4:].float().flatten(0, 1), batch[:, :-4].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.8 * math.log(8)  # it has learned something
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(
    "cls, keys, words",
    [
        (S4D, dict(d_state=63), "63"),
        (S4D, dict(d_state=0), "0"),
        (S4D, dict(init="hippo"), "lin, inv, legs, real, got 'hippo'"),
        (S4D, dict(discretization="euler"), "zoh, bilinear, got 'euler'"),
        (S4D, dict(dt_min=0.1, dt_max=0.01), "dt_min=0.1 and dt_max=0.01"),
        (S4, dict(d_state=7), "even, for conjugate pairs, got 7"),
        (S4, dict(d_state=0), "got 0"),
        (S4, dict(dt_min=math.nan), "dt_min=nan"),
        (S4, dict(dt_max=math.inf), "dt_max=inf"),
        (S4, dict(n_ssm=5), "n_ssm must divide d_model=24, got 5"),
        (S4D, dict(n_ssm=0), "n_ssm must divide d_model=24, got 0"),
        (S4, dict(impl="cuda"), "auto, reference, torch, fused, got 'cuda'"),
        (S4D, dict(decode="torch"), "auto, reference, fused, got 'torch'"),
    ],
)
def test_what_cannot_be_is_refused(cls, keys, words):
    with pytest.raises(ValueError, match=words):
        cls(D, **keys)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_size_that_is_not_finite_is_named(cls, bad):
    mixer = cls(4, 8)
    with torch.no_grad():
        mixer.log_dt[2] = bad
    x, state = torch.zeros(1, 5, 4), mixer.init_state(1)
    for call in (mixer.kernel, lambda n: mixer(x), lambda n: mixer.prefill(x, state), lambda n: mixer.step(x[:, 0], state)):
        with pytest.raises(ValueError, match=rf"not finite in channels \[2\]: log_dt = \[{bad}\]"):
            call(5)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        cls(4, 8).kernel(0)

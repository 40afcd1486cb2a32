"""S4's and S4D's convolution kernels: each implementation against the recurrence in float64, gradients, precision, contract."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from seqmix_kernels.ops.s4_kernel import (
    conj,
    dense,
    discretize,
    dplr_kernel,
    dplr_layer_kernel,
    expm1,
    increment,
    power,
    real,
    reference,
    row,
    s4d_kernel,
    s4d_layer_kernel,
    times,
    torch_forms,
    which_impl,
)
from seqmix_kernels.ops.s4_kernel import op as s4_op

IMPLS = ("reference", "torch")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def legs(modes, dts):
    """HiPPO-LegS with Δ inside, one channel for each of dts, and a row C: lam, P, B, C (D, M, 2) float64."""
    n = np.arange(2 * modes)
    P = np.sqrt(n + 0.5)
    w, V = np.linalg.eigh(-1j * (np.triu(np.outer(P, P), 1) - np.tril(np.outer(P, P), -1)))
    w, V = w[modes:], V[:, modes:].conj().T
    lam, P, B = (torch.view_as_real(torch.tensor(t)) for t in (-0.5 + 1j * w, V @ P, V @ np.sqrt(2 * n + 1.0)))
    dt = torch.tensor(dts, dtype=torch.float64)[:, None, None]
    return dt * lam, dt.sqrt() * P, dt * B, normal(len(dts), modes, 2)


def random_dplr(width, modes, seed=0):
    lam = torch.stack((-0.02 - normal(width, modes, seed=seed).abs(), 3 * normal(width, modes, seed=seed + 1)), -1)
    return lam, *(normal(width, modes, 2, seed=seed + i) for i in (2, 3, 4))


def random_s4d(width, modes, *batch):
    log_a = torch.stack((-0.05 * normal(width, modes).abs(), 4 * normal(width, modes, seed=1)), -1)
    return log_a, normal(*batch, width, modes, 2, seed=2)


def gradients(f, inputs, weight):
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = f(*leaves)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


# -- DPLR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 97, 300])
def test_dplr_is_the_recurrence(modes, length):
    given = legs(modes, (1e-3, 1e-2, 1e-1))
    truth = reference.recurrence(*given, length)
    for impl in IMPLS:
        assert relative(dplr_kernel(*given, length, impl), truth) < 1e-11
    lam, P, B, C = given
    for K, true in zip(dplr_kernel(lam, P, B, C.float(), length, "torch"), truth, strict=True):
        assert relative(K, true) < 5e-6


@pytest.mark.parametrize("length", [1, 2, 5, 8, 33, 64])
def test_dplr_gradients(length):
    """Of the form with hand-written sums, against automatic differentiation of the recurrence; float32 beside it."""
    given, weight = random_dplr(3, 4), normal(3, length, seed=9)
    truth = gradients(lambda *t: reference.recurrence(*t, length), given, weight)
    for impl in IMPLS:
        got = gradients(partial(dplr_kernel, length=length, impl=impl), given, weight)
        for ours, true in zip(got, truth, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-10 * float(true.abs().max()))
    low = gradients(lambda *t: dplr_kernel(*t[:3], t[3].float(), length), given, weight)
    assert all(relative(ours, true) < 1e-4 for ours, true in zip(low, truth, strict=True))


def test_dplr_gradients_against_finite_differences():
    lam, P, B, C = (t.requires_grad_() for t in random_dplr(2, 3))
    assert torch.autograd.gradcheck(lambda *t: dplr_kernel(*t, 6, "torch"), (lam, P, B, C))


def test_dplr_does_not_depend_on_how_frequencies_are_cut(monkeypatch):
    given, weight = random_dplr(2, 3), normal(2, 41)
    whole = gradients(lambda *t: dplr_kernel(*t, 41), given, weight)
    monkeypatch.setattr(torch_forms, "CPU_PIECE", 30)  # five frequencies at a time
    for a, b in zip(gradients(lambda *t: dplr_kernel(*t, 41), given, weight), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_dplr_nyquist_is_the_limit():
    """At ω = -1 both 2/(1+ω) and z are infinite; what is left is ½ C̃ B, whatever the rank-one part is."""
    lam, P, B, C = random_dplr(2, 5)
    w = s4_op.residues(lam, P, B, C)
    at = torch_forms.nodes(2, lam.device)[:, 1:]
    U, W = torch_forms._sums(*torch_forms.fractions(lam, at, torch.float64), w)
    k, _, _ = torch_forms.combine(U, W, at[2], at[1])
    torch.testing.assert_close((1j * k)[:, 0].real, times(C, B)[..., 0].sum(-1), rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.float64):
        assert torch_forms.dplr_forward(lam, w.to(dtype), 16).isfinite().all()


def test_steps_in_linear_time_are_those_of_the_dense_matrix():
    lam, P, B, C = random_dplr(3, 4)
    A_bar, B_bar = dense(lam, P, B)
    x, u = normal(2, 3, 4, 2, seed=7), normal(2, 3, seed=8)
    wanted = torch.einsum("dnm,bdm->bdn", A_bar, real(x)) + B_bar * u[..., None]
    torch.testing.assert_close(real(x + increment(x, lam, P, B * u[..., None, None])), wanted, rtol=1e-12, atol=1e-12)
    y = (row(C) * wanted).sum(-1)
    after = x + increment(x, lam, P, B * u[..., None, None])
    torch.testing.assert_close(y, 2 * times(C, after)[..., 0].sum(-1), rtol=1e-12, atol=1e-12)


# -- S4D --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 36, 37, 100])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_s4d_is_the_plain_sum(length, batch):
    log_a, c = random_s4d(3, 5, *batch)
    a = torch.view_as_complex(log_a)[..., None].exp() ** torch.arange(length)  # (D, M, L)
    truth = (torch.view_as_complex(c)[..., None] * a).sum(-2).real
    weight = normal(*truth.shape, seed=5)
    plain = gradients(lambda *t: s4d_kernel(*t, length, "reference"), (log_a, c), weight)
    torch.testing.assert_close(plain[0], truth, rtol=0, atol=1e-12)
    for ours, true in zip(gradients(lambda *t: s4d_kernel(*t, length), (log_a, c), weight), plain, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-11 * float(true.abs().max()))


def test_s4d_gradients_against_finite_differences():
    log_a, c = (t.requires_grad_() for t in random_s4d(2, 3))
    assert torch.autograd.gradcheck(lambda *t: s4d_kernel(*t, 7), (log_a, c))


@pytest.mark.parametrize("length", [1024, 16_384])
def test_s4d_in_float32_keeps_its_phase(length):
    """From float32 parameters, against complex128: the bound holds in each channel, slow or fast."""
    dt = torch.logspace(-3, -1, 7)
    A = torch.stack((torch.full((7, 32), -0.5), math.pi * torch.arange(32.0).repeat(7, 1)), -1)
    log_a, B = discretize(dt, A, "zoh")
    c = 2 * times(normal(7, 32, 2), B)
    truth = s4d_kernel(log_a, c, length, "reference")
    for K, true in zip(s4d_kernel(log_a, c.float(), length), truth, strict=True):
        assert relative(K, true) < 1e-6
    # what a phase in float32 makes of it
    assert max(relative(K, t) for K, t in zip(s4d_kernel(log_a.float(), c.float(), length), truth, strict=True)) > 1e-6


@pytest.mark.parametrize("method", ["zoh", "bilinear"])
def test_discretize_is_its_formula_and_differentiable(method):
    dt, A = normal(6).abs() / 10 + 1e-3, torch.stack((-0.1 - normal(3, 4).abs(), 5 * normal(3, 4, seed=1)), -1)
    log_a, b = (torch.view_as_complex(t) for t in discretize(dt, A, method))
    D, a = dt[:, None], torch.view_as_complex(A)[torch.arange(6) % 3]  # channel d has spectrum d mod 3
    if method == "zoh":
        wanted = (D * a).exp(), ((D * a).exp() - 1) / a
    else:
        wanted = (1 + D * a / 2) / (1 - D * a / 2), D / (1 - D * a / 2)
    torch.testing.assert_close(log_a.exp(), wanted[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(b, wanted[1], rtol=1e-11, atol=1e-13)
    assert torch.autograd.gradcheck(lambda *t: discretize(*t, method), (dt.requires_grad_(), A.requires_grad_()))


def test_helpers_of_pairs():
    x, y = normal(3, 2), normal(3, 2, seed=1)
    a, b = torch.view_as_complex(x), torch.view_as_complex(y)
    for ours, wanted in (
        (times(x, y), a * b), (conj(x), a.conj()), (power(x, 3), (3 * a).exp()), (expm1(x), a.exp() - 1),
    ):  # fmt: skip
        torch.testing.assert_close(torch.view_as_complex(ours), wanted.resolve_conj())
    small = torch.tensor([[-1e-12, 3e-12]], dtype=torch.float64)
    torch.testing.assert_close(expm1(small), small + times(small, small) / 2, rtol=1e-14, atol=0)


# -- from a layer's parameters ----------------------------------------------------------------------------------------


def layer(width, sets, modes):
    """log_dt, log_decay, imag, P, B, C: channel d has number d mod sets of the four in the middle."""
    return (
        normal(width) / 2 - 4, normal(sets, modes, seed=1), 9 * normal(sets, modes, seed=2), normal(sets, modes, 2, seed=3),
        normal(sets, modes, 2, seed=4), normal(width, modes, 2, seed=5),
    )  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_layer_kernels_are_those_of_their_modes(impl):
    log_dt, log_decay, imag, P, B, C = layer(6, 3, 4)
    dt, A = log_dt.exp(), torch.complex(-log_decay.exp(), imag)[torch.arange(6) % 3]
    lam = torch.view_as_real(dt[:, None] * A)
    p, b = (t[torch.arange(6) % 3] * scale[:, None, None] for t, scale in ((P, dt.sqrt()), (B, dt)))
    torch.testing.assert_close(
        dplr_layer_kernel(log_dt, log_decay, imag, P, B, C, 11, impl), dplr_kernel(lam, p, b, C, 11, impl)
    )
    for method in ("zoh", "bilinear"):
        log_a, b = discretize(dt, torch.stack((-log_decay.exp(), imag), -1), method)
        ours = s4d_layer_kernel(log_dt, log_decay, imag, C, 11, method, impl)
        torch.testing.assert_close(ours, s4d_kernel(log_a, 2 * times(C, b), 11, impl))
    real_modes = s4d_layer_kernel(log_dt, log_decay, None, C[..., :1], 11, impl=impl)
    a = torch.exp(-dt[:, None] * log_decay.exp()[torch.arange(6) % 3])  # (D, M)
    c = C[..., 0] * (1 - a) / log_decay.exp()[torch.arange(6) % 3]
    torch.testing.assert_close(real_modes, (c[..., None] * a[..., None] ** torch.arange(11)).sum(1))


# -- contract ---------------------------------------------------------------------------------------------------------


def test_memory_stays_below_a_number_a_mode_and_tap(monkeypatch):
    """No (D, M, L) array, forward or backward: the largest tensor made is watched."""
    width, modes, length = 4, 32, 4096
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    log_a, c = (t.float() for t in random_s4d(width, modes))
    lam, P, B, C = random_dplr(width, modes)
    with Watch():
        torch_forms.s4d_backward(torch_forms.s4d_forward(log_a, c, length), log_a, c, length)
    assert 4 * width * length <= largest <= 4 * width * length * 2
    largest = 0
    monkeypatch.setattr(torch_forms, "CPU_PIECE", width * modes * 64)
    w = s4_op.residues(lam, P, B, C).float()
    with Watch():
        torch_forms.dplr_backward(torch_forms.dplr_forward(lam, w, length), lam, w, length)
    assert 4 * width * length <= largest <= 8 * width * length


def test_registration():
    log_a, c = (t.requires_grad_() for t in random_s4d(2, 3))
    lam, P, B, C = random_dplr(2, 3)
    w = s4_op.residues(lam, P, B, C).requires_grad_()
    torch.library.opcheck(torch.ops.seqmix.s4d_kernel_fwd.default, (log_a, c, 7, "torch"))
    torch.library.opcheck(torch.ops.seqmix.dplr_kernel_fwd.default, (lam.requires_grad_(), w, 8, "torch"))


def test_compiles_without_a_break():
    given = random_dplr(2, 3)
    log_a, c = random_s4d(2, 3)
    for f, args in ((dplr_kernel, (*given, 9)), (s4d_kernel, (log_a, c, 9))):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*args), f(*args))


def test_autocast_changes_nothing():
    log_a, c = random_s4d(2, 3)
    lam, P, B, C = random_dplr(2, 3)
    for f in (lambda c, C: s4d_kernel(log_a, c, 9), lambda c, C: dplr_kernel(lam, P, B, C, 9)):
        leaves = [[t.float().requires_grad_() for t in (c, C)] for _ in range(2)]
        outs = [f(*leaves[0])]
        outs[0].sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(f(*leaves[1]))
            outs[1].sum().backward()
        assert torch.equal(*outs)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True) if a.grad is not None)


def test_gradients_are_the_same_bits_twice():
    log_a, c = random_s4d(5, 7)
    given = random_dplr(5, 7)
    for f, inputs in ((lambda *t: s4d_kernel(*t, 333), (log_a, c.float())), (lambda *t: dplr_kernel(*t, 333), given)):
        one, two = (gradients(f, inputs, normal(5, 333)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_choice_says_why():
    assert which_impl(torch.zeros(1, 1, 2)) == ("torch", "products of small matrices in plain torch")
    with pytest.raises(ValueError, match="impl='fused' cannot run here"):
        s4d_kernel(*random_s4d(2, 3), 4, "fused")


LOG_A, C = random_s4d(2, 3)
BAD = LOG_A.clone()
BAD[1, 2, 0] = math.nan


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: s4d_kernel(LOG_A, C, 0), "length must be at least 1, got 0"),
        (lambda: dplr_kernel(LOG_A, C, C, C, -3), "length must be at least 1, got -3"),
        (lambda: s4d_kernel(LOG_A[:1], C, 4), r"log_a must be \(D, M, 2\).*\(1, 3, 2\) and \(2, 3, 2\)"),
        (lambda: s4d_kernel(LOG_A[..., 0], C[..., 0], 4), r"\(2, 3\) and \(2, 3\)"),
        (lambda: dplr_kernel(LOG_A, C[:, :2], C, C, 4), r"must all be \(D, M, 2\); got \(2, 3, 2\), \(2, 2, 2\)"),
        (lambda: s4d_kernel(LOG_A, C.bfloat16(), 4), "c must be float32 or float64, because in 16 bits .* got torch.bfloat16"),
        (lambda: dplr_kernel(LOG_A, C, C, C.half(), 4), "C must be float32 or float64"),
        (lambda: s4d_kernel(BAD, C, 4), "log_a is not finite in 1 of 12 numbers"),
        (lambda: dplr_kernel(BAD, C, C, C, 4), "lam is not finite in 1 of 12 numbers"),
        (lambda: dplr_layer_kernel(*layer(6, 4, 3), 5), r"log_dt must be \(6,\), 4 a divisor of D"),
        (lambda: dplr_layer_kernel(*layer(6, 3, 3)[:5], normal(6, 4, 2), 5), r"log_decay must be \(3, 4\).*got \(3, 3\)"),
        (lambda: s4d_layer_kernel(*layer(6, 4, 3)[:3], normal(6, 3, 2), 5), "n a divisor of D"),
        (lambda: s4d_layer_kernel(*layer(6, 3, 3)[:3], normal(6, 3, 1), 5), r"C must be .* got \(6, 3, 1\)"),
        (lambda: s4d_layer_kernel(*layer(6, 3, 3)[:2], None, normal(6, 3, 2), 5), r"C must be .* got \(6, 3, 2\)"),
        (lambda: dplr_layer_kernel(*layer(6, 3, 3)[:5], normal(6, 3, 1), 5), r"C must be .* got \(6, 3, 1\)"),
        (lambda: s4d_layer_kernel(*layer(6, 3, 3)[:3], normal(6, 3, 2), 5, "euler"), 'method must be .* got .euler.'),
        (lambda: s4d_layer_kernel(*layer(6, 3, 3)[:3], normal(6, 3, 2), 0), "length must be at least 1, got 0"),
        (lambda: s4d_kernel(LOG_A, C, 4, "cauchy"), "auto, reference, torch, fused; got 'cauchy'"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()

"""The step of S4 and S4D: the convolution tap by tap, its contract, and what it refuses. Its kernels: test_s4_step_gpu.py."""

import math

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.ops.s4_kernel import dplr_layer_kernel, s4d_layer_kernel
from seqmix_kernels.ops.s4_step import gated_projection, s4_step, which_impl, why_not

B, E, M, n = 2, 6, 4, 3


def make(kind="dplr", dtype=torch.float64):
    """A token, a state and the parameters of a layer."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    parts = 1 if kind == "real" else 2
    made = {
        "u": normal(B, E), "x": normal(B, E, M, parts), "log_dt": normal(E) / 2 - 3, "log_decay": normal(n, M),
        "imag": None if parts == 1 else math.pi * normal(n, M), "C": normal(E, M, parts), "D": normal(E),
    }  # fmt: skip
    if kind == "dplr":
        made |= {"P": normal(n, M, 2), "B": normal(n, M, 2)}
    return {k: t if t is None else t.to(dtype) for k, t in made.items()}


@pytest.mark.parametrize("kind, method", [("dplr", "bilinear"), ("s4d", "zoh"), ("s4d", "bilinear"), ("real", "zoh")])
def test_an_impulse_gives_the_kernel_of_the_convolution(kind, method):
    made, L = make(kind) | {"D": torch.zeros(E, dtype=torch.float64), "method": method, "activation": None}, 9
    parameters = [made[name] for name in ("log_dt", "log_decay", "imag")]
    K = (
        dplr_layer_kernel(*parameters, made["P"], made["B"], made["C"], L)
        if kind == "dplr"
        else s4d_layer_kernel(*parameters, made["C"], L, method)
    )
    made |= {"u": torch.ones_like(made["u"]), "x": torch.zeros_like(made["x"])}
    for l in range(L):
        y, made["x"] = s4_step(**made)
        torch.testing.assert_close(y, K[:, l].expand(B, E), rtol=1e-11, atol=1e-12)
        made["u"] = torch.zeros_like(made["u"])


@pytest.mark.parametrize("kind", ["dplr", "s4d", "real"])
def test_skip_activation_and_gradients(kind):
    made = {k: t if t is None else t.requires_grad_() for k, t in make(kind).items()}
    y, _ = s4_step(**made)
    plain, _ = s4_step(**made | {"D": torch.zeros(E, dtype=torch.float64)}, activation=None)
    torch.testing.assert_close(y, F.gelu(plain + made["D"] * made["u"]))
    names, leaves = zip(*((k, t) for k, t in made.items() if t is not None), strict=True)

    def both(*given):
        return s4_step(**made | dict(zip(names, given, strict=True)))

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype):
    exact, state = s4_step(**make())
    low = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        cast = s4_step(**low)
    for y, x in (cast, s4_step(**low | {"u": low["u"].to(dtype)})):
        assert y.dtype == dtype and x.dtype == torch.float32
        assert (y.double() - exact).norm() < 0.01 * exact.norm() and (x.double() - state).norm() < 0.01 * state.norm()


def test_the_gated_projection_is_two_linears():
    y, W, b = (torch.randn(*s, dtype=torch.float64) for s in ((B, E), (2, 5, E), (2, 5)))
    out = gated_projection(y, *W, *b)
    torch.testing.assert_close(out, F.linear(y, W[1], b[1]) * torch.sigmoid(F.linear(y, W[0], b[0])))
    torch.testing.assert_close(gated_projection(y, *W), F.linear(y, W[1]) * torch.sigmoid(F.linear(y, W[0])))
    with torch.autocast("cpu", torch.bfloat16):
        low = gated_projection(y.float(), *W.float(), *b.float())
    assert low.dtype == torch.bfloat16 and (low.double() - out).norm() < 0.03 * out.norm()


def test_auto_says_what_it_takes():
    u = make(dtype=torch.float32)["u"]
    name, reason = which_impl(u, 8, False)
    assert name == "reference" and "cpu" in reason
    assert "gradient" in which_impl(u, 8, True)[1]
    assert why_not("reference", u, 8, True) is None


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(u=torch.zeros(B, 1, E)), "u must be .B, E."),
        (dict(u=torch.zeros(B, E, dtype=torch.long)), "u must be .* of torch.int64"),
        (dict(x=torch.zeros(B, E, M)), r"x must have shape \(2, 6, 4, 2\); got \(2, 6, 4\)"),
        (dict(x=torch.zeros(B, E, M, 2).double()), "x must be torch.float32, as D is; got torch.float64"),
        (dict(C=torch.zeros(E, M, 1)), r"C must be \(E, M, 2\).* got \(6, 4, 1\)"),
        (dict(log_decay=torch.zeros(4, M)), r"log_decay must be \(n, M\), n a divisor of E = 6; got \(4, 4\)"),
        (dict(imag=None), "C must be"),
        (dict(B=None), "P and B must be given together"),
        (dict(P=torch.zeros(1, M, 2)), r"P must have shape \(3, 4, 2\); got \(1, 4, 2\)"),
        (dict(D=torch.zeros(E).half()), "the parameters must be float32 or float64; got D of torch.float16"),
        (dict(log_dt=torch.zeros(E, device="meta")), "log_dt must be on cpu like the token; got meta"),
        (dict(P=None, B=None, method="euler"), "got 'euler'"),
        (dict(activation="silu"), "got 'silu'"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: it needs a CUDA device, the tensors are on cpu"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        s4_step(**(make(dtype=torch.float32) | change))


def test_bad_weights_are_named():
    y, W = torch.zeros(B, E), torch.zeros(5, E)
    for given, words in (
        ((y[0], W, W), "y must be .B, E."),
        ((y, W[:4], W), r"gate_proj must have shape \(5, 6\); got \(4, 6\)"),
        ((y, W, W, None, torch.zeros(4)), r"out_bias must have shape \(5,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            gated_projection(*given)

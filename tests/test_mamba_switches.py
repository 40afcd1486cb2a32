"""Mamba's switches: every block between an ungated S4 with fixed Δ, B, C and Mamba is one set of keys."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from runs import SELECTIVE_COPY, start

from seqmix.mixers.mamba import Mamba
from seqmix_kernels.frame import CannotRun
from seqmix_kernels.ops.selective_scan import selective_scan

E, N = 8, 3
SWITCHES = {
    "delta": ("input", "fixed"), "B": ("input", "fixed"), "C": ("input", "fixed"), "gate": (True, False), "conv": (True, False),
    "norms": (False, True), "eigen_range": ([0, 1], [-1, 1]), "discretization": ("euler", "zoh"),
}  # fmt: skip
# each switch alone, and each pair of a switch with the next
ONE = [{name: values[1]} for name, values in SWITCHES.items()]
BLOCKS = ONE + [a | b for a, b in itertools.pairwise(ONE)]
BLOCKS += [dict(B="fixed", norms=True)]
BLOCKS += [dict(delta="fixed", B="fixed", C="fixed", gate=gate, conv=False) for gate in (True, False)]


def made(dtype=torch.float64, **switches):
    torch.manual_seed(0)
    mixer = Mamba(E // 2, d_state=N, dt_rank=2, dt_min=0.1, dt_max=1.0, **switches)
    for p in mixer.parameters():  # so that no part is at its simplest
        p.data += 0.1 * torch.randn_like(p)
    return mixer.to(dtype) if dtype == torch.float32 else mixer.double()


def slow(
    mixer, u, delta="input", B="input", C="input", gate=True, conv=True, norms=False, eigen_range=(0, 1), discretization="euler"
):
    """One step after the other, written from the paper's equations. u (L, D) -> y (L, D)."""

    def rms(x, weight):
        return x / (x.square().mean() + 1e-5).sqrt() * weight if norms else x

    h, past, out = torch.zeros(E, N, dtype=u.dtype), torch.zeros(3, E, dtype=u.dtype), []
    A = -mixer.A_log.exp()
    for u_t in u:
        x, *z = (mixer.in_proj.weight @ u_t).split(E)
        if conv:
            window = torch.cat((past, x[None]))
            past, x = window[1:], (window.T * mixer.conv.weight[:, 0]).sum(1) + mixer.conv.bias
        x = F.silu(x)
        widths = [n for n, source in ((2, delta), (N, B), (N, C)) if source == "input"]
        given = iter((mixer.x_proj.weight @ x).split(widths) if widths else ())
        weights = mixer.norms or [None] * 3
        raw = mixer.dt_proj.weight @ rms(next(given), weights[0]) if delta == "input" else 0
        b = rms(next(given), weights[1]) if B == "input" else mixer.B
        c = rms(next(given), weights[2]) if C == "input" else mixer.C
        step = F.softplus(raw + mixer.dt_bias)[:, None]
        decay = torch.exp(step * A)
        into = step * b if discretization == "euler" else (decay - 1) / A * b
        h = (decay if tuple(eigen_range) == (0, 1) else 2 * decay - 1) * h + into * x[:, None]
        y = (c * h).sum(1) + mixer.D * x
        out.append(mixer.out_proj.weight @ (y * F.silu(z[0]) if gate else y))
    return torch.stack(out)


@pytest.mark.parametrize("switches", [{}, *BLOCKS], ids=str)
def test_every_block_is_its_equations(switches):
    mixer = made(**switches)
    u = torch.randn(1, 11, E // 2, dtype=torch.float64, requires_grad=True)
    got, want = mixer(u), slow(mixer, u[0], **switches)[None]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    parameters = [u, *mixer.parameters()]
    dy = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, parameters, dy), torch.autograd.grad(want, parameters, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("switches", BLOCKS, ids=str)
def test_every_block_runs_in_pieces_and_steps(switches):
    mixer = made(torch.float32, **switches)
    u = torch.randn(2, 9, E // 2)
    whole = mixer(u)
    state, parts = mixer.init_state(2), []
    for piece in u.split([4, 0, 1, 4], 1):
        y, state = mixer.prefill(piece, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    state, steps = mixer.init_state(2), []
    for u_t in u.unbind(1):
        y, state = mixer.step(u_t, state)
        steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = mixer(u)
    assert low.dtype == torch.bfloat16 and (low.float() - whole).norm() < 0.05 * whole.norm()
    assert "selective_scan" in mixer.kernels_used(u)


@pytest.mark.parametrize("impl", ["blelloch", "kogge_stone", "chunked"])
@pytest.mark.parametrize("discretization", ["euler_signed", "zoh_signed"])
def test_every_plain_scan_has_signed_decays(impl, discretization):
    torch.manual_seed(0)
    x, dt = torch.randn(2, 2, 37, 6, dtype=torch.float64, requires_grad=True).unbind()
    A = (-3 * torch.rand(6, 4, dtype=torch.float64)).requires_grad_()
    B, C = torch.randn(2, 2, 37, 2, 4, dtype=torch.float64, requires_grad=True).unbind()
    h = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    seq = torch.tensor([[0] * 20 + [1] * 17, [0] * 37])

    def run(impl):
        outputs = selective_scan(x, dt, A, B, C, discretization=discretization, initial_state=h, seq_idx=seq, impl=impl)
        return *outputs, *torch.autograd.grad(sum((o * o).sum() for o in outputs), (x, dt, A, B, C, h))

    for ours, true in zip(run(impl), run("sequential"), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-10)


def test_a_kernel_without_signs_says_so_and_auto_does_not_take_it():
    mixer = made(torch.float32, eigen_range=[-1, 1])
    u = torch.randn(1, 5, E // 2)
    used = mixer.kernels_used(u)["selective_scan"]
    assert used.startswith("chunked (cpu cannot run: it has no discretization='euler_signed'")
    mixer.scan = "cpu"
    with pytest.raises(CannotRun, match="it has no discretization='euler_signed'"):
        mixer(u)


def test_decays_in_minus_one_to_one_solve_parity_exactly():
    """Ā = 1 at a zero and -1 at a one: with h = 1 before the first bit, the sign of h is the parity, at any length."""
    bits = torch.randint(0, 2, (1, 5000))
    dt = torch.where(bits == 1, 50.0, 0.0)[..., None]  # exp(ΔA) is 0 or 1
    nothing = torch.zeros(1, 5000, 1)
    run = dict(dt_softplus=False, initial_state=torch.ones(1, 1, 1), impl="chunked")
    one = torch.ones(1, 5000, 1, 1)
    y, _ = selective_scan(nothing, dt, torch.full((1, 1), -1.0), one, one, discretization="euler_signed", **run)
    assert torch.equal(y[0, :, 0], 1.0 - 2.0 * (bits[0].cumsum(0) % 2))
    y, _ = selective_scan(nothing, dt, torch.full((1, 1), -1.0), one, one, **run)
    assert y[0, int(bits[0].argmax()) :].abs().max() < 1e-6, "in [0, 1] the first one ends all memory"


def test_an_ungated_s4_is_trained(tmp_path):
    keys = ("model.delta=fixed", "model.B=fixed", "model.C=fixed", "model.gate=false", "model.conv=false")
    summary = start(tmp_path / "run", "model=mamba", *keys, *SELECTIVE_COPY)
    assert summary["status"] == "complete" and summary["memory/state_bytes"] == 4 * 32 * 16


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        (dict(delta="none"), "delta must be one of input, fixed, got 'none'"),
        (dict(B="token"), "B must be one of input, fixed, got 'token'"),
        (dict(eigen_range=[0, 2]), r"eigen_range must be \[0, 1\] or \[-1, 1\], got \[0, 2\]"),
    ],
)
def test_what_no_switch_has_is_refused(switches, words):
    with pytest.raises(ValueError, match=words):
        Mamba(4, **switches)

"""The step of a Mamba block: a sequence of one, its contract, and what it refuses. Its kernels: test_mamba_step_gpu.py."""

import pytest
import torch

from seqmix_kernels.ops.mamba_inner import mamba_inner
from seqmix_kernels.ops.mamba_step import mamba_step, which_impl

B, M, E, N, R, W = 3, 6, 10, 5, 3, 4
SHAPES = {
    "u": (B, M), "in_proj": (2 * E, M), "conv": (E, W), "x_proj": (R + 2 * N, E), "dt_proj": (E, R), "dt_bias": (E,),
    "A_log": (E, N), "D": (E,), "out_proj": (M, E), "conv_state": (B, W - 1, E), "ssm_state": (B, E, N),
    "in_bias": (2 * E,), "conv_bias": (E,), "out_bias": (M,),
}  # fmt: skip
OWN = ("ssm_state", "dt_bias", "A_log", "D")


def make(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    made = {k: torch.randn(*s, generator=g, dtype=torch.float64) for k, s in SHAPES.items()}
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        made[name] /= made[name].shape[1] ** 0.5
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {k: t.to(wide if k in OWN else dtype) for k, t in made.items()}


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_it_is_a_sequence_of_one(discretization):
    tensors = {k: t.requires_grad_() for k, t in make().items()}
    whole = {**tensors, "u": tensors["u"].unsqueeze(1)}
    out, *states = mamba_inner(**whole, discretization=discretization, scan="sequential", level=0)
    wanted = (out.squeeze(1), *states)
    got = mamba_step(**tensors, discretization=discretization)
    losses = [sum(t.square().sum() for t in results) for results in (got, wanted)]
    grads = [torch.autograd.grad(loss, list(tensors.values())) for loss in losses]
    for a, b in zip((*got, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_state_that_does_not_decay_only_adds():
    """A that float32 rounds to 0: (exp(ΔA) - 1)/A is Δ there, as in the scan, and not 0/0."""
    tensors = make(torch.float32) | {"A_log": torch.full((E, N), -200.0, requires_grad=True)}
    both = [mamba_step(**tensors, discretization=d) for d in ("zoh", "euler")]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.grad(both[0][0].sum(), tensors["A_log"])[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_autocast(dtype):
    exact = mamba_step(**make())
    low = mamba_step(**make(dtype))
    with torch.autocast("cpu", dtype):
        cast = mamba_step(**make(torch.float32))
    for results, kept in ((low, dtype), (cast, torch.float32)):
        assert [t.dtype for t in results] == [dtype, kept, torch.float32]
        for t, e in zip(results, exact, strict=True):
            assert (t.double() - e).norm() < 0.03 * e.norm()


def test_auto_says_what_it_takes():
    tensors = make(torch.float32)
    name, reason = which_impl(tensors["u"], tensors["conv"], False)
    assert name == "reference" and "cpu" in reason
    assert "gradient" in which_impl(tensors["u"], tensors["conv"], True)[1]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(u=torch.zeros(B, 1, M)), "u must be .B, M."),
        (dict(u=torch.zeros(B, M, dtype=torch.long)), "u must be float32, .* got torch.int64"),
        (dict(in_proj=torch.zeros(E, M)), r"in_proj must have shape \(20, 6\); got \(10, 6\)"),
        (dict(conv_state=torch.zeros(B, W, E)), r"conv_state must have shape \(3, 3, 10\)"),
        (dict(ssm_state=torch.zeros(B, E, N).double()), "ssm_state must be torch.float32; got torch.float64"),
        (dict(out_proj=torch.zeros(M, E).bfloat16()), "out_proj must be torch.float32; got torch.bfloat16"),
        (dict(D=torch.zeros(E, device="meta")), "D must be on cpu like u; got meta"),
        (dict(discretization="bilinear"), "got 'bilinear'"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: it needs a CUDA device, the tensors are on cpu"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        mamba_step(**(make(torch.float32) | change))

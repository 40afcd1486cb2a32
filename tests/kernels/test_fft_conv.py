"""The long convolution against its sum in float64: any lengths, skip, activation, gate, pieces with a state, precision."""

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.ops.fft_conv import fft_conv, fft_conv_carry, fft_length, torch_forms, which_impl
from seqmix_kernels.ops.fft_conv import op as conv_op

EPILOGUES = [(None, False), ("gelu", False), (None, True), ("silu", True)]
epilogues = pytest.mark.parametrize("activation, gated", EPILOGUES)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(batch, length, width, taps, gated=True, dtype=torch.float64):
    """u, kernel, D and a gate; u and gate with unusual strides."""
    acc = torch.promote_types(dtype, torch.float32)
    gate = normal(batch, width, length, seed=3, dtype=dtype).mT if gated else None
    kernel = normal(width, taps, seed=1, dtype=acc) / taps**0.5
    return normal(batch, length, 2 * width, dtype=dtype)[..., ::2], kernel, normal(width, seed=2, dtype=acc), gate


def run(given, activation, impl, dtype=torch.float64):
    """y and the gradients of all that is given."""
    acc = torch.promote_types(dtype, torch.float32)
    u = given[0]
    casts = (dtype, acc, acc, dtype)
    leaves = [None if t is None else t.detach().to(c).requires_grad_() for t, c in zip(given, casts, strict=True)]
    y = fft_conv(leaves[0], leaves[1], leaves[2], activation, leaves[3], impl)
    used = [t for t in leaves if t is not None]
    weight = normal(u.shape[0], u.shape[2], u.shape[1], seed=9).mT.to(dtype)
    names = ["du", "dkernel", "dD", "dgate"][: len(used)]
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, used, weight), strict=True))}


@epilogues
@pytest.mark.parametrize(
    "batch, length, width, taps",
    [
        (1, 1, 1, 1),
        (2, 2, 3, 2),
        (2, 7, 3, 7),
        (1, 33, 2, 20),
        (1, 64, 2, 100),
        (2, 127, 2, 127),
        (2, 3000, 2, 17),
        (1, 3000, 1, 700),
    ],
)
def test_equals_the_sum(batch, length, width, taps, activation, gated):
    given = make(batch, length, width, taps, gated)
    truth, ours = (run(given, activation, impl) for impl in ("reference", "torch"))
    for name, true in truth.items():
        torch.testing.assert_close(ours[name], true, rtol=0, atol=1e-12 * max(1.0, float(true.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_the_dtype(dtype, assert_no_worse):
    given = make(2, 101, 3, 101, dtype=dtype)
    truth, plain = run(given, "gelu", "reference"), run(given, "gelu", "reference", dtype)
    ours = run(given, "gelu", "torch", dtype)
    assert ours["y"].dtype == ours["du"].dtype == dtype and ours["dkernel"].dtype == torch.float32
    assert_no_worse(ours, plain, truth, factor=8)  # a transform's error follows the largest number, not each


def test_gradients_against_finite_differences():
    u, kernel, D, gate = (t.detach().clone().requires_grad_() for t in make(2, 5, 2, 4))
    for activation in (None, "gelu", "silu"):
        assert torch.autograd.gradcheck(lambda *t: fft_conv(*t[:3], activation, t[3], "torch"), (u, kernel, D, gate))  # noqa: B023


# -- cases C01, C09 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_does_not_wrap_around(impl):
    y = fft_conv(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1), torch.ones(1, 4), impl=impl)
    assert y.flatten().tolist() == pytest.approx([1, 3, 6, 10], abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000, 1023, 1025])
def test_the_future_does_not_reach_the_past(length):
    u = normal(1, length, 2).requires_grad_()
    t = length // 2
    fft_conv(u, normal(2, length, seed=1))[0, t].sum().backward()
    reach = u.grad[0].abs().amax(-1)
    assert (reach[: t + 1] > 1e-6).all() and (reach[t + 1 :] < 1e-12 * reach.max()).all()


@pytest.mark.parametrize("length", [1024, 65_536])
def test_long_convolution_in_float32(length):
    kernel = torch.exp(-0.001 * torch.arange(length, dtype=torch.float64))[None]
    u = normal(1, length, 1)
    y, low = fft_conv(u, kernel), fft_conv(u.float(), kernel.float())
    assert (low - y).abs().max() < 2e-6 * y.abs().max()  # two FFTs: a few eps · log2(2L) = 1.2e-7 · 17


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_transforms_run_in_float32_under_autocast(low):
    """At a length 16-bit transforms do not know."""
    u, kernel, D, _ = make(1, 1000, 2, 1000, False, torch.float32)
    leaves = [t.clone().requires_grad_() for t in (u, kernel, D)]
    with torch.autocast("cpu", low):
        y = fft_conv(*leaves, "gelu")
        y.float().sum().backward()
    assert y.dtype == low and {t.grad.dtype for t in leaves} == {torch.float32}
    truth = fft_conv(u.to(low).double(), kernel.double(), D.double(), "gelu")
    assert (y.double() - truth).norm() < torch.finfo(low).eps * truth.norm()


def test_fft_length_is_the_next_good_one():
    for least in [*range(1, 3000), 2 * 65_537]:
        n = fft_length(least)
        assert least <= n <= 1.34 * least
        while n % 2 == 0:
            n //= 2
        assert n in (1, 3, 5, 9, 15)


# -- pieces -----------------------------------------------------------------------------------------------------------


@epilogues
@pytest.mark.parametrize("taps", [1, 2, 9, 50])
def test_pieces_with_a_state_equal_the_whole(taps, activation, gated):
    u, kernel, D, gate = make(2, 37, 3, taps, gated)
    truth = run((u, kernel, D, gate), activation, "reference")
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (u, kernel, D, gate)]
    state, ys, start = u.new_zeros(2, taps - 1, 3), [], 0
    for size in (1, 0, 5, 2, 29):
        piece = slice(start, start + size)
        g = None if gate is None else leaves[3][:, piece]
        y, state = fft_conv_carry(leaves[0][:, piece], leaves[1], state, leaves[2], activation, g)
        ys.append(y)
        start += size
    y = torch.cat(ys, 1)
    used = [t for t in leaves if t is not None]
    got = [y, *torch.autograd.grad(y, used, normal(2, 3, 37, seed=9).mT)]
    for ours, true in zip(got, truth.values(), strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-11)
    full = F.conv1d(F.pad(u.mT, (taps - 1, taps - 1)), kernel.flip(-1).unsqueeze(1), groups=3).mT
    torch.testing.assert_close(state, full[:, 37:], rtol=0, atol=1e-11)


def test_few_taps_are_convolved_in_pieces():
    for length, taps in ((3000, 17), (10_000, 1), (5000, 1200)):
        T, n = torch_forms.pieces(length, taps)
        assert T < length and taps - 1 <= T and T + taps - 1 <= n
    assert torch_forms.pieces(100, 100) == (100, fft_length(199))


# -- contract ---------------------------------------------------------------------------------------------------------


def test_no_spectrum_is_kept():
    """Saved for the backward: the arguments and, with an activation, one tensor like u in u's dtype."""
    u, kernel, D, _ = make(2, 64, 8, 64, False, torch.bfloat16)
    leaves = [t.clone().requires_grad_() for t in (u, kernel, D)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fft_conv(*leaves, "gelu").sum()
    sizes = sorted(t.numel() * t.element_size() for t in kept if all(t.data_ptr() != x.data_ptr() for x in leaves))
    assert sizes[-1] == u.numel() * 2 and sum(sizes) == u.numel() * 2


def test_registration():
    for gated, activation in ((True, "silu"), (False, None)):
        u, kernel, D, gate = make(2, 9, 2, 9, gated)
        given = [None if t is None else t.contiguous().requires_grad_() for t in (u, kernel, D, gate)]
        torch.library.opcheck(torch.ops.seqmix.fft_conv_fwd.default, (*given, activation, "torch"))


def test_compiles_without_a_break():
    u, kernel, D, gate = make(2, 9, 2, 9)
    compiled = torch.compile(fft_conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u, kernel, D, "gelu", gate), fft_conv(u, kernel, D, "gelu", gate))


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3)])
def test_empty_sequences(shape, dtype, impl):
    u, gate = (torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(2))
    kernel, D = (torch.full(size, torch.nan, requires_grad=True) for size in ((3, 4), (3,)))
    state = torch.ones(shape[0], 3, 3, requires_grad=True)
    y = fft_conv(u, kernel, D, "gelu", gate, impl)
    carried, after = fft_conv_carry(u, kernel, state, D, "gelu", gate)
    assert y.shape == carried.shape == shape and y.dtype == carried.dtype == dtype
    assert torch.equal(after, state)
    for out in (y, carried):  # nothing depends on them: zeros, also where they are not finite
        for t, g in zip((u, kernel, D, gate), torch.autograd.grad(out.sum(), (u, kernel, D, gate)), strict=True):
            assert torch.equal(g, torch.zeros_like(t))


def test_the_choice_says_why():
    assert which_impl(torch.zeros(1, 1, 1)) == ("torch", "plain torch")
    assert "cannot be imported" in (conv_op.why_not("fused", torch.zeros(1, 1, 1)) or "") or "CUDA" in conv_op.why_not(
        "fused", torch.zeros(1, 1, 1)
    )


U, KERNEL = torch.zeros(2, 5, 3), torch.zeros(3, 5)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"u": U[0]}, r"u must be \(B, L, D\); got shape \(5, 3\)"),
        ({"u": U.long()}, "got torch.int64"),
        ({"kernel": KERNEL.T}, r"kernel must be \(D, K\) with D = 3"),
        ({"kernel": KERNEL[:, :0]}, "K >= 1"),
        ({"kernel": KERNEL.bfloat16()}, "kernel must be torch.float32; got torch.bfloat16"),
        ({"D": torch.zeros(4)}, r"D must have shape \(3,\); got \(4,\)"),
        ({"gate": U[:, :1]}, r"gate must have shape \(2, 5, 3\)"),
        ({"gate": U.double()}, "gate must be torch.float32"),
        ({"activation": "relu"}, "'gelu' or 'silu'; got 'relu'"),
        ({"impl": "cufft"}, "auto, reference, torch, fused; got 'cufft'"),
        ({"impl": "fused"}, "impl='fused' cannot run here"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        fft_conv(**({"u": U, "kernel": KERNEL} | change))


def test_a_state_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"state must be torch.float32 of shape \(2, 4, 3\); got torch.float32 of \(2, 5, 3\)"):
        fft_conv_carry(U, KERNEL, torch.zeros(2, 5, 3))

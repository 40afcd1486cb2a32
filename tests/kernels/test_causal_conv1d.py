"""The short causal convolution against its equation in float64: values, every gradient, the carried state."""

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels import c_library
from seqmix_kernels.ops.causal_conv1d import causal_conv1d, which_impl

IMPLS = ("reference", "cpu")
SEQ = torch.tensor([[5, 5, 5, 5, 2, 2, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, -1, -1, 0, 0]])


def make(B, L, D, W, *, seed=0, without=()):
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, L, D), "weight": (D, W), "bias": (D,), "initial_state": (B, W - 1, D)}
    made = {name: torch.randn(*shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: t for name, t in made.items() if name not in without}


def run(inputs, dtype=torch.float32, **kwargs):
    """y, the final state and all gradients of a random weighting of both."""
    leaves = {k: v.detach().to(dtype).clone().requires_grad_() for k, v in inputs.items()}
    y, final = causal_conv1d(**leaves, **kwargs)
    g = torch.Generator().manual_seed(7)
    wy, wf = (torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype) for t in (y, final))
    ((y * wy).sum() + (final * wf).sum()).backward()
    grads = {f"d{k}": torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}
    return {"y": y.detach(), "final": final.detach(), **grads}


def compare(assert_no_worse, inputs, dtype=torch.float32, factor=4.0, **kwargs):
    truth = run({k: v.to(dtype).double() for k, v in inputs.items()}, torch.float64, impl="reference", **kwargs)
    same = run(inputs, dtype, impl="reference", **kwargs)
    assert_no_worse(run(inputs, dtype, impl="cpu", **kwargs), same, truth, factor)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_running_sums(impl, taps):
    """A kernel of ones over 1, 2, 3, ...: every length from less than the window on, and the state it leaves."""
    for length in range(6):
        x = torch.arange(1.0, length + 1).view(1, length, 1)
        y, state = causal_conv1d(x, torch.ones(1, taps), impl=impl)
        assert y.flatten().tolist() == [sum(range(max(1, t - taps + 1), t + 1)) for t in range(1, length + 1)]
        padded = [0.0] * taps + x.flatten().tolist()
        assert state.shape == (1, taps - 1, 1) and state.flatten().tolist() == padded[len(padded) - taps + 1 :]


def test_reference_is_torchs_convolution():
    inputs = make(2, 13, 5, 4)
    y, state = causal_conv1d(**inputs, activation="silu", impl="reference")
    window = torch.cat([inputs["initial_state"], inputs["x"]], 1).transpose(1, 2)
    wanted = F.silu(F.conv1d(window, inputs["weight"].unsqueeze(1), inputs["bias"], groups=5)).transpose(1, 2)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(state, inputs["x"][:, -3:])


@pytest.mark.parametrize("taps", [1, 3, 6])
def test_gradients_of_the_reference(taps):
    names, tensors = zip(*make(2, 11, 3, taps).items(), strict=True)
    leaves = [t.requires_grad_() for t in tensors]

    def f(*given):
        return causal_conv1d(**dict(zip(names, given, strict=True)), activation="silu", seq_idx=SEQ, impl="reference")

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 37])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
def test_kernel_matches(assert_no_worse, poisoned, taps, length):
    for without in ((), ("bias", "initial_state")):
        for activation in (None, "silu"):
            compare(assert_no_worse, make(2, length, 7, taps, without=without), activation=activation)


@pytest.mark.parametrize("width", [1, 16, 33, 150])
def test_widths_and_sixteen_bits(assert_no_worse, poisoned, width):
    compare(assert_no_worse, make(3, 20, width, 4), activation="silu")
    for dtype in (torch.bfloat16, torch.float16):
        compare(assert_no_worse, make(3, 20, width, 4), dtype, factor=2.0, activation="silu")


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl):
    got = run(make(0, 4, 3, 4), impl=impl)
    assert got["y"].shape == (0, 4, 3) and (got["dweight"] == 0).all() and (got["dbias"] == 0).all()


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_documents_are_alone(assert_no_worse, taps):
    inputs = make(2, 11, 5, taps)
    compare(assert_no_worse, inputs, activation="silu", seq_idx=SEQ)
    given = {k: v.float() for k, v in inputs.items()}
    for impl in IMPLS:
        y, state = causal_conv1d(**given, seq_idx=SEQ, impl=impl)
        for row, start, stop in ((0, 0, 4), (0, 4, 6), (0, 6, 11), (1, 0, 1), (1, 1, 7), (1, 7, 9), (1, 9, 11)):
            first = given["initial_state"][row : row + 1] * (start == 0)
            alone, left = causal_conv1d(given["x"][row : row + 1, start:stop], given["weight"], given["bias"],
                                        initial_state=first, impl=impl)  # fmt: skip
            torch.testing.assert_close(alone[0], y[row, start:stop])
            if stop == 11:  # the state continues the last document
                torch.testing.assert_close(left[0], state[row])
        changed = given | {"x": given["x"].clone()}
        changed["x"][0, :4] += 100
        after, _ = causal_conv1d(**changed, seq_idx=SEQ, impl=impl)
        assert torch.equal(after[0, 4:], y[0, 4:]) and not torch.equal(after[0, :4], y[0, :4])


@pytest.mark.parametrize("impl", IMPLS)
def test_pieces_equal_the_whole(impl):
    inputs = make(2, 11, 5, 4)
    whole = run(inputs, torch.float64, impl="reference")
    leaves = {k: v.float().requires_grad_() for k, v in inputs.items()}
    state, ys = leaves["initial_state"], []
    for start, stop in ((0, 1), (1, 3), (3, 3), (3, 4), (4, 11)):
        x = leaves["x"][:, start:stop]
        y, state = causal_conv1d(x, leaves["weight"], leaves["bias"], initial_state=state, impl=impl)
        ys.append(y)
    g = torch.Generator().manual_seed(7)
    y = torch.cat(ys, 1)
    wy, wf = (torch.randn(t.shape, generator=g, dtype=torch.float64).float() for t in (y, state))
    ((y * wy).sum() + (state * wf).sum()).backward()
    got = {"y": y.detach(), "final": state.detach(), **{f"d{k}": v.grad for k, v in leaves.items()}}
    for name, exact in whole.items():
        torch.testing.assert_close(got[name].double(), exact, rtol=1e-5, atol=1e-5)


def test_any_strides_in_and_out():
    base = torch.randn(2, 30, 14, generator=torch.Generator().manual_seed(0))
    for x in (base[..., 3:10], base[:, ::2, ::2], base.transpose(1, 2), base[:1].expand(3, -1, -1), base.flip(1)):
        weight = torch.randn(4, x.shape[2], generator=torch.Generator().manual_seed(1)).t()
        got, plain = ([t.detach().requires_grad_() for t in given]
                      for given in ((x, weight), (x.contiguous(), weight.contiguous())))  # fmt: skip
        y, wanted = causal_conv1d(*got, impl="cpu")[0], causal_conv1d(*plain, impl="cpu")[0]
        assert torch.equal(y, wanted)
        y.sum().backward()
        (wanted * torch.ones_like(wanted)).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(got, plain, strict=True))


def test_gradients_are_the_same_bits_for_any_number_of_threads():
    inputs, threads, results = make(3, 50, 150, 4), torch.get_num_threads(), []
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            results.append(run(inputs, impl="cpu", activation="silu"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0][k], other[k]) for other in results[1:] for k in other)


def test_registration():
    for without, seq_idx in (((), SEQ), (("bias", "initial_state"), None)):
        given = {k: v.float().requires_grad_() for k, v in make(2, 11, 4, 4, without=without).items()}
        tensors = [given.get(name) for name in ("x", "weight", "bias", "initial_state")]
        torch.library.opcheck(torch.ops.seqmix.causal_conv1d_fwd.default, (*tensors, seq_idx, True, "cpu"))


def test_compiles_without_a_break():
    given = {k: v.float() for k, v in make(2, 11, 4, 4).items()}
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    got = compiled(**given, activation="silu", seq_idx=SEQ)
    for ours, plain in zip(got, causal_conv1d(**given, activation="silu", seq_idx=SEQ), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast(impl):
    leaves = {k: v.float().requires_grad_() for k, v in make(2, 11, 4, 4).items()}
    with torch.autocast("cpu", torch.bfloat16):
        y, final = causal_conv1d(**leaves, impl=impl)
    assert y.dtype == final.dtype == torch.bfloat16
    (y.float().sum() + final.float().sum()).backward()
    assert all(v.grad.dtype == torch.float32 for v in leaves.values())


def test_choice_and_where_the_library_is_kept(monkeypatch, tmp_path):
    x, weight = torch.zeros(1, 1, 1), torch.zeros(1, 4)
    assert which_impl(x, weight) == ("cpu", "C kernel compiled on this machine")
    name, reason = which_impl(x, torch.zeros(1, 5))
    assert name == "reference" and "5" in reason
    assert which_impl(x.double(), weight.double())[0] == "reference"
    for home in (tmp_path / "cache", tmp_path / "file"):
        (tmp_path / "file").touch()  # no folder can be made there: a private temporary one is used
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        c_library.load.cache_clear()
        assert which_impl(x, weight)[0] == "cpu"
        y, _ = causal_conv1d(torch.ones(1, 2, 1), torch.ones(1, 2), impl="cpu")
        assert y.flatten().tolist() == [1, 2]
    assert len(list((tmp_path / "cache" / "seqmix").iterdir())) == 1
    c_library.load.cache_clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 4)}, "x must be .B, L, D."),
        ({"weight": torch.zeros(4, 4)}, "weight must be .D, W. with D = 6"),
        ({"bias": torch.zeros(5)}, "bias must have shape"),
        ({"initial_state": torch.zeros(2, 4, 6)}, r"initial_state must have shape \(2, 3, 6\)"),
        ({"seq_idx": torch.zeros(2, 5)}, "seq_idx must hold integers"),
        ({"activation": "relu"}, "'relu'"),
        ({"impl": "quick"}, "impl must be one of .* got 'quick'"),
        ({"impl": "fused"}, "impl='fused' cannot run here"),
        ({"x": torch.zeros(2, 5, 6).double(), "weight": torch.zeros(6, 4).double(), "impl": "cpu"}, "float64"),
    ],
)
def test_bad_input_is_named(change, words):
    given = {"x": torch.zeros(2, 5, 6), "weight": torch.zeros(6, 4)}
    with pytest.raises(ValueError, match=words):
        causal_conv1d(**(given | change))

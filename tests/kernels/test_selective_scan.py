"""The selective scan against its equation in float64: values, every gradient, both states, every implementation."""

import logging
import math
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from seqmix_kernels import c_library, frame
from seqmix_kernels.ops.selective_scan import selective_scan, which_impl

TORCH = ("sequential", "blelloch", "kogge_stone", "chunked")
ALL = (*TORCH, "cpu")
OPTIONAL = ("D", "z", "dt_bias", "initial_state")


def make(B, L, D, N, G=1, *, seed=0, bias=-1.0, without=()):
    """Inputs in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    made = {
        "x": normal(B, L, D), "dt": normal(B, L, D), "A": -0.1 - 4 * torch.rand(D, N, generator=g, dtype=torch.float64),
        "B": normal(B, L, G, N), "C": normal(B, L, G, N), "D": normal(D), "z": normal(B, L, D),
        "dt_bias": normal(D) + bias, "initial_state": normal(B, D, N),
    }  # fmt: skip
    return {name: t for name, t in made.items() if name not in without}


def cast(inputs, dtype):
    """x, dt, B, C, z in dtype; the rest in float32 as the contract wants, or float64 beside float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {k: v.to(dtype if k in ("x", "dt", "B", "C", "z") else wide) for k, v in inputs.items()}


def run(inputs, dtype=torch.float32, **kwargs):
    """y, the final state and all gradients of a random weighting of both."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in cast(inputs, dtype).items()}
    y, final = selective_scan(**leaves, **kwargs)
    g = torch.Generator().manual_seed(7)
    wy, wf = (torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in (y, final))
    ((y * wy).sum() + (final * wf).sum()).backward()
    # of no steps at all autograd may say "none" for zero
    grads = {f"d{k}": torch.zeros_like(v) if v.grad is None and not y.numel() else v.grad for k, v in leaves.items()}
    assert all(grad.dtype == leaves[k[1:]].dtype for k, grad in grads.items())
    return {"y": y.detach(), "final": final.detach(), **grads}


def compare(assert_no_worse, inputs, impl, dtype=torch.float32, factor=4.0, **kwargs):
    rounded = {k: v.double() for k, v in cast(inputs, dtype).items()}  # the truth starts from the same rounded inputs
    truth = run(rounded, torch.float64, impl="sequential", **kwargs)
    torch_same = run(inputs, dtype, impl="sequential", **kwargs)
    assert_no_worse(run(inputs, dtype, impl=impl, **kwargs), torch_same, truth, factor)


def ones(*shape):
    return torch.ones(*shape, requires_grad=True)


# ---- the equation ---------------------------------------------------------------------------------------------------


def by_hand(x, dt, A, B, C, D, z, dt_bias, initial_state, discretization, seq_idx):
    """One number at a time, in Python floats."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    y, h = torch.zeros_like(x), initial_state.clone()
    for b in range(batch):
        for d in range(width):
            group = d // (width // groups)
            for t in range(length):
                delta = math.log1p(math.exp(dt[b, t, d] + dt_bias[d]))
                total = D[d].item() * x[b, t, d].item()
                for s in range(n):
                    a = A[d, s].item()
                    gain = delta if discretization == "euler" or a == 0 else math.expm1(delta * a) / a
                    keeps = t == 0 or seq_idx[b, t].item() == seq_idx[b, t - 1].item()
                    h[b, d, s] = keeps * math.exp(delta * a) * h[b, d, s] + gain * B[b, t, group, s] * x[b, t, d]
                    total += C[b, t, group, s].item() * h[b, d, s].item()
                y[b, t, d] = total * z[b, t, d] / (1 + math.exp(-z[b, t, d]))
    return y, h


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
def test_sequential_is_the_equation(discretization):
    inputs = make(2, 5, 4, 3, G=2)
    inputs["A"][0, 0], inputs["A"][1, 1] = 0.0, -1e-7
    seq_idx = torch.tensor([[4, 4, 4, 1, 1], [0, -1, -1, 0, 0]])
    args = {"discretization": discretization, "seq_idx": seq_idx}
    for got, wanted in zip(selective_scan(**inputs, **args, impl="sequential"), by_hand(**inputs, **args), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ALL)
def test_reference_numbers(impl):
    """h = e^-1 h + 1: exact sums and gradients (R1)."""
    x, dt, B, C = ones(1, 5, 1), ones(1, 5, 1), ones(1, 5, 1, 1), ones(1, 5, 1, 1)
    A = torch.tensor([[-1.0]], requires_grad=True)
    h0 = torch.full((1, 1, 1), 2.0, requires_grad=True)
    y, final = selective_scan(x, dt, A, B, C, dt_softplus=False, impl=impl)
    y.sum().backward()
    rising = [1.0, 1.367879, 1.503215, 1.553002, 1.571317]
    wanted = (
        (y, rising), (final, [1.571317]), (x.grad, rising[::-1]), (B.grad, rising[::-1]), (C.grad, rising),
        (dt.grad, [1.571317, 0.981684, 0.746775, 0.611440, 0.428683]), (A.grad, [2.655514]),
    )  # fmt: skip
    for got, numbers in wanted:
        torch.testing.assert_close(got.flatten(), torch.tensor(numbers), rtol=0, atol=1.5e-6)
    y, _ = selective_scan(x, dt, A, B, C, dt_softplus=False, initial_state=h0, impl=impl)
    y.sum().backward()
    torch.testing.assert_close(y.flatten(), torch.tensor([1.735759, 1.638550, 1.602789, 1.589633, 1.584793]))
    torch.testing.assert_close(h0.grad.item(), 0.578055, rtol=0, atol=1e-6)


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("impl", TORCH)
def test_gradients_of_the_torch_forms(impl, discretization):
    inputs = make(2, 7, 4, 2, G=2)
    inputs["A"][0, 0] = 0.0
    names = list(inputs)
    leaves = [t.requires_grad_() for t in inputs.values()]
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])

    def f(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return selective_scan(**given, discretization=discretization, seq_idx=seq_idx, chunk=3, impl=impl)

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)
    if impl != "chunked":  # which says that it has only the first
        assert torch.autograd.gradgradcheck(f, leaves, fast_mode=True)


# ---- every implementation against float64 ---------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [-4.6, 0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 100, 127, 129, 1000])
def test_no_length_is_special_to_the_kernel(assert_no_worse, length, bias):
    """A step past the end must decay nothing: a chunk's tail is the classic leak."""
    # dA of a thousand steps, summed one by one: torch's own error there depends on the processor
    compare(assert_no_worse, make(2, length, 3, 16, bias=bias), "cpu", factor=8.0 if length == 1000 else 4.0, chunk=64)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 67])
@pytest.mark.parametrize("impl", ["blelloch", "kogge_stone", "chunked"])
def test_parallel_forms_agree(assert_no_worse, impl, length):
    compare(assert_no_worse, make(2, length, 6, 3, G=3), impl)
    compare(assert_no_worse, make(2, length, 6, 3, G=3), impl, discretization="zoh")


@pytest.mark.parametrize("width", [1, 7, 96, 100])
@pytest.mark.parametrize("n", [1, 3, 5, 12, 16, 17])
def test_odd_sizes(assert_no_worse, poisoned, n, width):
    compare(assert_no_worse, make(2, 37, width, n), "cpu", discretization="zoh" if n % 2 else "euler")


def test_most_states(assert_no_worse):
    compare(assert_no_worse, make(1, 35, 5, 256), "cpu")


@pytest.mark.parametrize("groups", [2, 5, 10])
def test_groups(assert_no_worse, groups):
    compare(assert_no_worse, make(2, 20, 40, 4, G=groups), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["cpu", "chunked"])
def test_sixteen_bits(assert_no_worse, impl, dtype):
    compare(assert_no_worse, make(2, 40, 20, 8), impl, dtype, factor=2.0)


@pytest.mark.parametrize("bits", range(64))
def test_every_combination_of_options(assert_no_worse, poisoned, bits):
    without = [name for i, name in enumerate(OPTIONAL) if bits >> i & 1]
    settings = {"dt_softplus": bool(bits >> 4 & 1), "discretization": ("euler", "zoh")[bits >> 5]}
    inputs = make(2, 9, 5, 3, without=without)
    inputs["dt"] = inputs["dt"].abs()  # a negative step without softplus would blow up
    inputs["dt_bias"] = inputs["dt_bias"].abs() if "dt_bias" in inputs else None
    inputs = {k: v for k, v in inputs.items() if v is not None}
    got = run(inputs, impl="cpu", **settings)
    assert all(t.abs().sum() > 0 for t in got.values())
    compare(assert_no_worse, inputs, "cpu", **settings)


def test_growing_states(assert_no_worse):
    """Positive A, negative Δ: not Mamba's, but the equation's."""
    inputs = make(1, 12, 5, 4)
    inputs["A"] = -inputs["A"] / 8
    compare(assert_no_worse, inputs, "cpu")
    compare(assert_no_worse, inputs, "cpu", dt_softplus=False, discretization="zoh")


@pytest.mark.parametrize("impl", ALL)
def test_nothing_to_scan(impl):
    for batch, length in ((2, 0), (0, 4)):
        got = run(make(batch, length, 3, 2), impl=impl)
        assert got["y"].shape == (batch, length, 3) and got["dx"].shape == (batch, length, 3)
        for name in ("dA", "dD", "ddt_bias"):
            assert (got[name] == 0).all()
    inputs = cast(make(2, 0, 3, 2), torch.float32)
    _, final = selective_scan(**inputs, impl=impl)
    torch.testing.assert_close(final, inputs["initial_state"])
    del inputs["initial_state"]
    assert (selective_scan(**inputs, impl=impl)[1] == 0).all()


# ---- memory layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["sum", "weighted", "concatenated", "transposed", "state only"])
def test_any_layout_of_the_incoming_gradient(loss):
    inputs = make(2, 21, 6, 3)
    weight = torch.randn(2, 21, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grads = {}
    for impl, dtype in (("cpu", torch.float32), ("sequential", torch.float64)):
        leaves = {k: v.clone().requires_grad_() for k, v in cast(inputs, dtype).items()}
        y, final = selective_scan(**leaves, impl=impl)
        w = weight.to(dtype)
        value = {
            "sum": lambda y, f, w: y.sum(), "weighted": lambda y, f, w: (y * w).sum(),
            "concatenated": lambda y, f, w: (torch.cat([y, 2 * y], -1) * torch.cat([w, w], -1)).sum(),
            "transposed": lambda y, f, w: (y.transpose(1, 2) * w.transpose(1, 2).contiguous()).sum(),
            "state only": lambda y, f, w: f.sum(),
        }[loss](y, final, w)  # fmt: skip
        value.backward()
        grads[impl] = [torch.zeros_like(v) if v.grad is None else v.grad for v in leaves.values()]
    for ours, truth in zip(grads["cpu"], grads["sequential"], strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5 * (1 + truth.abs().max().item()))


def test_any_strides_in():
    batch, length, width, n = 4, 10, 6, 5
    projection = torch.randn(1, 2 * length, 3 * width + 2 * n, generator=torch.Generator().manual_seed(0))
    for view in (
        projection[:, ::2].expand(batch, -1, -1),
        projection[:, :length].flip(1),
        projection[:, 1 : 2 * length : 2],
        projection.transpose(1, 2).contiguous().transpose(1, 2)[:, :length],
    ):
        x, z, dt, B, C = view.split([width, width, width, n, n], -1)
        A = -torch.rand(n, width).t() - 0.1
        args = x, dt, A, B.unsqueeze(2), C.unsqueeze(2)
        got = selective_scan(*args, z=z, impl="cpu")
        wanted = selective_scan(*(t.contiguous() for t in args), z=z.contiguous(), impl="cpu")
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        if view.shape[0] > 1:
            assert all(torch.equal(row, got[0][0]) for row in got[0])


def test_gradients_are_the_same_bits_twice_and_for_any_number_of_threads():
    inputs = make(3, 70, 150, 17)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            results.append(run(inputs, impl="cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


# ---- states and documents -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ALL)
def test_pieces_equal_the_whole(assert_no_worse, impl):
    """The state carried from piece to piece, gradients back through it."""
    inputs = make(2, 30, 5, 3)
    whole = run(inputs, torch.float64, impl="sequential")
    plain = run(inputs, impl="sequential")
    leaves = {k: v.clone().requires_grad_() for k, v in cast(inputs, torch.float32).items()}
    state, ys = leaves["initial_state"], []
    for start, stop in ((0, 1), (1, 18), (18, 18), (18, 30)):
        piece = {k: leaves[k][:, start:stop] for k in ("x", "dt", "B", "C", "z")}
        rest = {k: leaves[k] for k in ("A", "D", "dt_bias")}
        y, state = selective_scan(**piece, **rest, initial_state=state, impl=impl)
        ys.append(y)
    y = torch.cat(ys, 1)
    g = torch.Generator().manual_seed(7)
    wy, wf = (torch.randn(t.shape, generator=g, dtype=torch.float64).float() for t in (y, state))
    ((y * wy).sum() + (state * wf).sum()).backward()
    grads = {f"d{k}": v.grad for k, v in leaves.items()}
    assert_no_worse({"y": y.detach(), "final": state.detach(), **grads}, plain, whole)


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("impl", ALL)
def test_documents_are_alone(assert_no_worse, impl, discretization):
    inputs = make(2, 23, 5, 3)
    seq_idx = torch.tensor([[3] * 9 + [1] * 4 + [2] * 10, [0] + [-1] * 15 + [0] * 7])
    settings = {"discretization": discretization, "chunk": 4}
    compare(assert_no_worse, inputs, impl, seq_idx=seq_idx, **settings)
    # one document at a time gives the same, from a state of zeros but for the first
    given = cast(inputs, torch.float32)
    y, _ = selective_scan(**given, seq_idx=seq_idx, impl=impl, **settings)
    for row, start, stop in ((0, 0, 9), (0, 9, 13), (0, 13, 23), (1, 0, 1), (1, 1, 16), (1, 16, 23)):
        one = {k: v[row : row + 1, start:stop] if k in ("x", "dt", "B", "C", "z") else v for k, v in given.items()}
        one["initial_state"] = given["initial_state"][row : row + 1] * (start == 0)
        alone, _ = selective_scan(**one, impl=impl, **settings)
        torch.testing.assert_close(alone[0], y[row, start:stop], rtol=1e-5, atol=1e-5)
    # and no bit of a document depends on another
    given["x"][0, :9] += 100
    after, _ = selective_scan(**given, seq_idx=seq_idx, impl=impl, **settings)
    assert torch.equal(after[0, 9:], y[0, 9:]) and not torch.equal(after[0, :9], y[0, :9])


def test_a_broken_document_leaves_the_others_whole():
    """In the kernel a border is not a product with zero, which would let NaN through."""
    inputs = cast(make(1, 20, 5, 3), torch.float32)
    inputs["x"][0, :8] = float("nan")
    leaves = {k: v.requires_grad_() for k, v in inputs.items()}
    y, final = selective_scan(**leaves, seq_idx=torch.tensor([[0] * 8 + [1] * 12]), impl="cpu")
    assert y[0, :8].isnan().all() and y[0, 8:].isfinite().all()
    (y[0, 8:].sum() + final.sum()).backward()
    assert all(leaves[k].grad[0, 8:].isfinite().all() for k in ("x", "dt", "B", "C", "z"))


def test_packed_numbers():
    o = torch.ones(1, 8, 1)
    seq_idx = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    for impl in ALL:
        y, _ = selective_scan(o, o, -torch.ones(1, 1), o.unsqueeze(3), o.unsqueeze(3), dt_softplus=False,
                              seq_idx=seq_idx, impl=impl)  # fmt: skip
        torch.testing.assert_close(y[0, [4, 7], 0], torch.tensor([1.0, 1.553002]), rtol=0, atol=1e-6)


# ---- numbers at the edge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ALL)
def test_strong_decay_over_long_sequences(impl):
    """Forms that subtract sums of logarithms overflow here."""
    inputs = make(1, 4096, 2, 2, without=OPTIONAL)
    g = torch.Generator().manual_seed(1)
    inputs["A"] = torch.full_like(inputs["A"], -16.0)
    inputs["dt"] = 0.001 + 49.999 * torch.rand(1, 4096, 2, generator=g, dtype=torch.float64)
    got = run(inputs, dt_softplus=False, impl=impl, chunk=64)
    truth = run({k: v.double() for k, v in cast(inputs, torch.float32).items()}, torch.float64, dt_softplus=False,
                impl="sequential")  # fmt: skip
    for name, t in got.items():
        assert t.isfinite().all(), name
        torch.testing.assert_close(t.double(), truth[name], rtol=1e-3, atol=1e-5 * truth[name].abs().max().item())
    one = torch.ones(1, 1, 1)
    y, _ = selective_scan(one, 1e4 * one, -torch.ones(1, 1), one.unsqueeze(3), one.unsqueeze(3), dt_softplus=False,
                          impl=impl)  # fmt: skip
    assert y.item() == 1e4


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("impl", ALL)
def test_a_step_of_zero_holds_the_state(impl, discretization):
    x = torch.ones(1, 5, 1)
    dt = torch.tensor([1.0, 0, 0, 0, 0]).view(1, 5, 1)
    y, _ = selective_scan(x, dt, -torch.ones(1, 1), x.unsqueeze(3), x.unsqueeze(3), dt_softplus=False, impl=impl,
                          discretization=discretization)  # fmt: skip
    assert (y == y[0, 0, 0]).all()
    assert y[0, 0, 0] == 1 or discretization == "zoh"


@pytest.mark.parametrize("impl", ALL)
def test_softplus_is_safe(impl):
    """With A = 0 and ones elsewhere y is Δ itself."""
    raw = torch.tensor([-100, -20, -5, 0, 20.5, 88, 100, 1e4])
    dt = raw.view(8, 1, 1).requires_grad_()
    x = torch.ones(8, 1, 1)
    y, _ = selective_scan(x, dt, torch.zeros(1, 1), x.unsqueeze(3), x.unsqueeze(3), impl=impl)
    y.sum().backward()
    wanted = torch.tensor([0, 2.0611537e-9, 0.0067153, 0.6931472, 20.5, 88, 100, 1e4])
    torch.testing.assert_close(y.flatten(), wanted, rtol=1e-5, atol=1e-37)
    slope = torch.sigmoid(raw.double()).float()
    torch.testing.assert_close(dt.grad.flatten(), slope, rtol=1e-5, atol=1e-37)
    # dt + log(1 - exp(-dt)) is the bias that gives a step of dt
    bias = torch.tensor([-6.907255, -4.600166, -2.252168])
    zero = torch.zeros(1, 1, 3)
    y, _ = selective_scan(zero + 1, zero, torch.zeros(3, 1), x[:1, :, None], x[:1, :, None], dt_bias=bias, impl=impl)
    torch.testing.assert_close(y.flatten(), torch.tensor([1e-3, 1e-2, 1e-1]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("impl", ALL)
def test_the_state_is_wide_where_inputs_are_narrow(impl):
    x = torch.full((1, 2048, 1), 1e-3, dtype=torch.bfloat16)
    one = torch.ones(1, 2048, 1, dtype=torch.bfloat16)
    A, h0 = torch.full((1, 1), -1e-3), torch.ones(1, 1, 1)
    args = A, one.unsqueeze(3), one.unsqueeze(3)
    _, grown = selective_scan(x, one, *args, dt_softplus=False, impl=impl)
    _, decayed = selective_scan(0 * x, one, *args, dt_softplus=False, initial_state=h0, impl=impl)
    assert grown.dtype == torch.float32
    assert grown.item() == pytest.approx(0.8714, rel=0.01) and decayed.item() == pytest.approx(0.1290, abs=5e-5)


def test_not_a_number_goes_through():
    inputs = cast(make(1, 40, 20, 3), torch.float32)
    for name in ("x", "dt"):
        bad = {k: v.clone() for k, v in inputs.items()}
        bad[name][0, 5, 2] = float("nan")
        y, final = selective_scan(**bad, impl="cpu")
        assert y[0, 5:, 2].isnan().all() and final[0, 2].isnan().all()
        clean = torch.ones_like(y, dtype=torch.bool)
        clean[0, 5:, 2] = False
        assert y[clean].isfinite().all()
    inputs["A"][3, 1] = float("nan")
    y, _ = selective_scan(**inputs, impl="cpu")
    assert y[0, :, 3].isnan().all() and y[0, :, 4].isfinite().all()


def test_the_exponential_of_the_kernel():
    """exp(ΔA) over its whole range, read off a state of one: 2 units in the last place, plus what ΔA itself is rounded."""
    u = torch.cat([-torch.logspace(-7, 2.3, 5000), torch.tensor([0.0, -87.0, -200.0, -1e9])])
    zero = torch.zeros(1, 1, u.numel())
    A, one = u.view(-1, 1), torch.ones(1, 1, 1, 1)
    for settings in ({"dt_bias": torch.ones(u.numel()), "dt_softplus": False}, {"dt_bias": torch.full_like(u, 30.0)}):
        scale = 1 if "dt_softplus" in settings else 30  # softplus(30) is 30 in float32
        _, final = selective_scan(zero, zero, A / scale, one, one, initial_state=torch.ones(1, u.numel(), 1), impl="cpu",
                                  **settings)  # fmt: skip
        exact = torch.exp(scale * (A / scale).double()).flatten()
        unit = torch.finfo(torch.float32).eps
        assert ((final.flatten() - exact).abs() <= exact * unit * (2 + u.abs()) + 1.2e-38).all()
        assert final.flatten()[5000] == 1


# ---- as an operator of torch ----------------------------------------------------------------------------------------


def op_args(dtype=torch.float32, **kwargs):
    given = {k: v.requires_grad_() for k, v in cast(make(2, 10, 4, 3, **kwargs), dtype).items()}
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
    return [given.get(name) for name in names]


@pytest.mark.parametrize("without", [(), OPTIONAL])
def test_registration(without):
    args = (*op_args(without=without), None, True, "zoh", 4, True, "cpu")
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.seqmix.selective_scan_fwd.default, args, test_utils=tests)


# torch 2.13 instantiates autograd.Function, which it deprecates, while it traces one (torch/_dynamo/side_effects.py)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("impl", ["auto", "sequential", "kogge_stone", "blelloch"])
def test_compiles_without_a_break(impl):
    inputs = make(2, 12, 5, 3)
    plain = run(inputs, impl=impl)
    leaves = {k: v.clone().requires_grad_() for k, v in cast(inputs, torch.float32).items()}
    y, final = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")(**leaves, impl=impl)
    torch.testing.assert_close(y, plain["y"])
    g = torch.Generator().manual_seed(7)
    wy, wf = (torch.randn(t.shape, generator=g, dtype=torch.float64).float() for t in (y, final))
    ((y * wy).sum() + (final * wf).sum()).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, plain[f"d{name}"])


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(impl, dtype):
    leaves = {k: v.clone().requires_grad_() for k, v in cast(make(2, 12, 5, 3), torch.float32).items()}
    leaves["B"] = leaves["B"].detach().to(dtype).requires_grad_()  # autocast gives such mixtures
    with torch.autocast("cpu", dtype):
        y, final = selective_scan(**leaves, impl=impl)
    assert y.dtype == dtype and final.dtype == torch.float32
    (y.float().sum() + final.sum()).backward()
    assert all(v.grad.dtype == v.dtype for v in leaves.values())


def test_second_derivatives_are_refused():
    leaves = {k: v.requires_grad_() for k, v in cast(make(1, 4, 3, 2), torch.float32).items()}
    y, _ = selective_scan(**leaves, impl="cpu")
    (dx,) = torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


def test_inference_saves_nothing():
    x, dt, A, B, C = cast(make(1, 64, 4, 3, without=OPTIONAL), torch.float32).values()
    args = (x, dt, A, B, C, None, None, None, None, None, True, "euler", 16)
    assert torch.ops.seqmix.selective_scan_fwd(*args, False, "cpu")[2].numel() == 0
    assert torch.ops.seqmix.selective_scan_fwd(*args, True, "cpu")[2].shape == (1, 4, 3, 4)


class Seen(TorchDispatchMode):
    """The ops of ours that the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "seqmix":
            self.names.append(func._schema.name.removeprefix("seqmix::selective_scan_"))
        return func(*args, **(kwargs or {}))


def test_what_watches_the_dispatcher_sees_the_op():
    leaves = {k: v.requires_grad_() for k, v in cast(make(2, 6, 4, 3), torch.float32).items()}
    with Seen() as both:
        torch.autograd.grad(selective_scan(**leaves, impl="cpu")[0].sum(), leaves["x"])
    y, _ = selective_scan(**leaves, impl="cpu")
    with Seen() as backward:
        torch.autograd.grad(y.sum(), leaves["x"])
    with Seen() as forward, torch.no_grad():
        selective_scan(**leaves, impl="cpu")
    assert (both.names, backward.names, forward.names) == (["fwd", "bwd"], ["bwd"], ["fwd"])
    traced = make_fx(lambda x: selective_scan(**(leaves | {"x": x}), impl="cpu")[0])(leaves["x"].detach())
    assert torch.ops.seqmix.selective_scan_fwd.default in [node.target for node in traced.graph.nodes]
    with FakeTensorMode() as mode:
        fake = selective_scan(**{k: mode.from_tensor(v) for k, v in leaves.items()}, impl="cpu")
    assert all(isinstance(t, FakeTensor) for t in fake)


def test_lazily_negated_and_batched_gradients():
    """What a plain tensor hides from whoever reads its memory."""
    leaves = {k: v.requires_grad_() for k, v in cast(make(2, 6, 4, 3), torch.float32).items()}
    dy = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(2))
    hidden = torch.complex(dy, -dy).conj().imag
    assert hidden.is_neg() and torch.equal(hidden, dy)
    for x in (leaves["x"], torch.complex(leaves["x"], -leaves["x"]).conj().imag):
        y, _ = selective_scan(**(leaves | {"x": x}), impl="cpu")
        wanted, got = (torch.autograd.grad(y, leaves["A"], g, retain_graph=True)[0] for g in (dy, hidden))
        assert torch.equal(got, wanted)
    (many,) = torch.autograd.grad(y, leaves["A"], torch.stack([dy, dy]), is_grads_batched=True)
    assert torch.equal(many, torch.stack([wanted, wanted]))


# ---- choosing, and refusing -----------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice():
    """Forgets what was compiled and said, before and after."""
    for cached in (c_library.load, frame.say_once):
        cached.cache_clear()
    yield
    for cached in (c_library.load, frame.say_once):
        cached.cache_clear()


def test_importing_needs_torch_alone():
    code = "import sys, seqmix_kernels.ops.selective_scan, seqmix_kernels.ops.causal_conv1d\n"
    code += "sys.exit(any(name in sys.modules for name in ('triton', 'torch._dynamo')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_names_what_it_takes():
    assert which_impl(torch.zeros(1)) == ("cpu", "C kernel compiled on this machine")
    assert which_impl(torch.zeros(1, dtype=torch.float64))[0] == "sequential"


def test_without_a_compiler(fresh_choice, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    name, reason = which_impl(torch.zeros(1))
    assert name == "chunked" and "no C compiler" in reason
    inputs = make(1, 9, 3, 2)
    with caplog.at_level(logging.WARNING):
        first, second = run(inputs), run(inputs)
    assert torch.equal(first["y"], run(inputs, impl="chunked")["y"]) and torch.equal(first["dA"], second["dA"])
    assert [r.getMessage() for r in caplog.records if "chunked" in r.getMessage()] == [
        f"selective_scan on cpu uses chunked: {reason}"
    ]
    with pytest.raises(ValueError, match="'cpu' cannot run here: no C compiler"):
        run(inputs, impl="cpu")


def test_a_compiler_that_fails_is_a_reason(fresh_choice, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, reason = which_impl(torch.zeros(1))
    assert name == "chunked" and "false failed" in reason
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 4)}, "x must be .B, L, D."),
        ({"x": torch.zeros(2, 4, 6, dtype=torch.int64)}, "x must be float32"),
        ({"dt": torch.zeros(2, 5, 6)}, r"dt must have shape \(2, 4, 6\); got \(2, 5, 6\)"),
        ({"dt": torch.zeros(2, 4, 6, dtype=torch.bfloat16)}, "dt must be torch.float32"),
        ({"A": torch.zeros(5, 3)}, "A must be .D, N. with D = 6"),
        ({"A": torch.zeros(6, 257)}, "N from 1 to 256 states per channel; got 257"),
        ({"A": torch.zeros(6, 3, dtype=torch.complex64)}, "A must be torch.float32 .*complex64"),
        ({"A": torch.zeros(6, 3, dtype=torch.bfloat16)}, "A must be torch.float32 .*bfloat16"),
        ({"B": torch.zeros(2, 4, 4, 3)}, "G dividing D = 6"),
        ({"C": torch.zeros(2, 4, 1, 2)}, "C must have shape"),
        ({"D": torch.zeros(5)}, "D must have shape"),
        ({"z": torch.zeros(2, 4, 5)}, "z must have shape"),
        ({"dt_bias": torch.zeros(6, device="meta")}, "dt_bias must be on cpu"),
        ({"initial_state": torch.zeros(2, 3, 6)}, "initial_state must have shape"),
        ({"seq_idx": torch.zeros(2, 4)}, "seq_idx must hold integers"),
        ({"discretization": "bilinear"}, "'bilinear'"),
        ({"chunk": 0}, "chunk must be at least 1; got 0"),
        ({"impl": "quick"}, "impl must be one of .* got 'quick'"),
        ({"impl": "fused"}, "impl='fused' cannot run here: "),
    ],
)
def test_bad_input_is_named(change, words):
    given = cast(make(2, 4, 6, 3, without=OPTIONAL), torch.float32)
    with pytest.raises(ValueError, match=words):
        selective_scan(**(given | change))


def test_double_has_no_kernel():
    with pytest.raises(ValueError, match="float64"):
        run(make(1, 4, 3, 2), torch.float64, impl="cpu")

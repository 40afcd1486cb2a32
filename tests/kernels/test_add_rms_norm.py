"""The residual addition and its norm in plain torch: the equation, the contract. test_rowwise_gpu.py has the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from seqmix_kernels.ops import cross_entropy, embedding, swiglu
from seqmix_kernels.ops.add_rms_norm import add_rms_norm, which_impl


def made(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y, weight = (torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in (shape, shape, shape[-1:]))
    return x, y, weight


def test_in_float32_it_is_bitwise_the_sum_and_torchs_norm():
    x, y, weight = leaves = made(3, 5, 65)
    s = x + y
    want = s, F.rms_norm(s, weight.shape, weight, 1e-5)
    got = add_rms_norm(x, y, weight)
    upstream = [torch.randn_like(t) for t in want]
    grads = (torch.autograd.grad(outputs, leaves, upstream) for outputs in (got, want))
    for a, b in zip((*got, *next(grads)), (*want, *next(grads)), strict=True):
        assert torch.equal(a, b)
    assert which_impl(x, y, weight) == ("reference", "fused cannot run: it needs a CUDA device, the tensors are on cpu")


def test_gradients_are_the_derivatives_and_what_the_docstring_says():
    x, y, weight = leaves = made(4, 7, dtype=torch.float64)
    assert torch.autograd.gradcheck(add_rms_norm, leaves)
    assert torch.autograd.gradcheck(lambda x, weight: add_rms_norm(x, None, weight), (x, weight))
    for used in ([0, 1], [0], [1]):  # of the outputs
        upstream = [torch.randn_like(x) if i in used else torch.zeros_like(x) for i in (0, 1)]
        results = add_rms_norm(*leaves)
        got = torch.autograd.grad(
            [results[i] for i in used], leaves, [upstream[i] for i in used], allow_unused=True, materialize_grads=True
        )
        ds, dn = upstream
        s, g = x + y, dn * weight
        r = (s.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        dx = ds + r * (g - s * r**2 * (g * s).mean(-1, keepdim=True))
        torch.testing.assert_close(got, (dx, dx, (dn * s * r).sum(0)))


def test_nothing_to_add():
    x, y, weight = made(3, 8)
    s, n = add_rms_norm(x, None, weight)
    assert s.data_ptr() == x.data_ptr() and torch.equal(n, add_rms_norm(x, torch.zeros_like(y), weight)[1])


@pytest.mark.parametrize(
    "x, y, weight, autocast, s, n",
    [
        ("float32", "bfloat16", "float32", "bfloat16", "float32", "bfloat16"),
        ("float32", None, "float32", "float16", "float32", "float16"),
        ("float32", "float16", "float32", None, "float32", "float32"),
        ("float32", "bfloat16", "bfloat16", None, "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16", None, "bfloat16", "bfloat16"),
        ("float16", "float32", "float32", None, "float16", "float32"),
        ("float64", "float32", "float32", None, "float64", "float32"),
        ("float64", "float64", "float64", "bfloat16", "float64", "float64"),
    ],
)
def test_dtypes_of_the_results(x, y, weight, autocast, s, n):
    tensors = [None if t is None else torch.ones(2, 4, dtype=getattr(torch, t)) for t in (x, y)]
    with torch.autocast("cpu", getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
        got = add_rms_norm(*tensors, torch.ones(4, dtype=getattr(torch, weight)))
    assert [str(t.dtype) for t in got] == [f"torch.{s}", f"torch.{n}"]


def test_sixteen_bits_are_normalised_in_float32():
    x, y, weight = (t.detach() for t in made(4, 300, dtype=torch.bfloat16))
    s, n = add_rms_norm(x, y, weight)
    assert torch.equal(s, x + y)
    assert torch.equal(n, F.rms_norm(s.float(), (300,), weight.float(), 1e-5).bfloat16())


def test_the_compiler_sees_plain_torch():
    x, y, weight = made(3, 8)
    compiled = torch.compile(add_rms_norm, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(compiled(x, y, weight), add_rms_norm(x, y, weight), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (3, 0), (1,), (4,)])
def test_any_shape(shape):
    x, y, weight = leaves = made(*shape)
    s, n = add_rms_norm(x, y, weight)
    assert s.shape == n.shape == shape
    assert [g.shape for g in torch.autograd.grad((s, n), leaves, (s, n))] == [t.shape for t in leaves]


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(x=torch.zeros(())), r"x must be \(..., D\) and real; got shape \(\), torch.float32"),
        (dict(x=torch.zeros(3, 4, dtype=torch.long)), "x must be .* torch.int64"),
        (dict(y=torch.zeros(4)), r"y must be \(3, 4\) and real, on cpu like x; got shape \(4,\)"),
        (dict(y=torch.zeros(3, 4, dtype=torch.long)), "y must be .* torch.int64"),
        (dict(y=torch.zeros(3, 4, device="meta")), "y must be .* on meta"),
        (dict(weight=torch.zeros(3)), r"weight must be \(4,\) and real"),
        (dict(weight=torch.zeros(4, dtype=torch.bool)), "weight must be .* torch.bool"),
        (dict(eps=-1e-5), "eps must be at least 0; got -1e-05"),
        (dict(eps=float("nan")), "eps must be at least 0; got nan"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: it needs a CUDA device"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        add_rms_norm(**(dict(x=torch.zeros(3, 4), y=torch.zeros(3, 4), weight=torch.zeros(4)) | change))


def test_long_rows_are_left_to_torch():
    pytest.importorskip("triton")
    x, weight = torch.zeros(2, 8193), torch.ones(8193)
    with pytest.raises(ValueError, match="cannot run here: it takes rows of at most 8192 elements, not 8193"):
        add_rms_norm(x, None, weight, impl="fused")


def test_tensors_without_memory_take_the_plain_path():
    """What has no address, or a part of its numbers alone, reaches no kernel: on a GPU that ended the process."""
    with FakeTensorMode(), torch.device("cuda"):
        x, weight = torch.empty(3, 8), torch.empty(8)
        choices = [which_impl(x, x, weight), *(op.which_impl(x) for op in (cross_entropy, embedding, swiglu))]
    assert choices == [("reference", "fused cannot run: it takes plain tensors, not FakeTensor")] * 4

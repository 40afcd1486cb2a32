"""The gate of SwiGLU in plain torch: the equation, the contract. test_rowwise_gpu.py has the kernels."""

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.ops.swiglu import swiglu, which_impl


def test_in_float32_it_is_bitwise_torchs():
    h = torch.randn(3, 5, 130, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gate, value = h.chunk(2, dim=-1)
    want, got = F.silu(gate) * value, swiglu(h)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(a, h, torch.ones_like(a))[0] for a in (got, want)))
    assert which_impl(h) == ("reference", "fused cannot run: it needs a CUDA device, the tensors are on cpu")


def test_gradients_are_the_derivatives_and_what_the_docstring_says():
    h = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, h)
    da = torch.randn(4, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad(swiglu(h), h, da)
    gate, value = h.detach().chunk(2, dim=-1)
    p = gate.sigmoid()
    torch.testing.assert_close(got, torch.cat((da * value * p * (1 + gate * (1 - p)), da * gate * p), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_it_is_computed_in_float32_or_wider_and_keeps_its_dtype(dtype):
    h = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, value = (h.double() if dtype == torch.float64 else h.float()).chunk(2, dim=-1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swiglu(h), (F.silu(gate) * value).to(dtype))


def test_the_compiler_sees_plain_torch():
    h = torch.randn(3, 8)
    assert torch.equal(torch.compile(swiglu, backend="aot_eager", fullgraph=True)(h), swiglu(h))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2,), (2, 0, 6)])
def test_any_shape(shape):
    h = torch.ones(shape, requires_grad=True)
    a = swiglu(h)
    assert a.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.autograd.grad(a, h, a)[0].shape == shape


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(h=torch.zeros(())), r"h must be \(..., 2H\) and real; got shape \(\), torch.float32"),
        (dict(h=torch.zeros(2, 3)), r"h must be \(..., 2H\) .* got shape \(2, 3\)"),
        (dict(h=torch.zeros(2, 4, dtype=torch.long)), "h must be .* torch.int64"),
        (dict(h=torch.zeros(2, 4), impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(h=torch.zeros(2, 4), impl="fused"), "impl='fused' cannot run here: it needs a CUDA device"),
    ],
)
def test_bad_input_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        swiglu(**given)

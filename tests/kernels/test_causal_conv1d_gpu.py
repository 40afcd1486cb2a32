"""The convolution's Triton kernels: under the interpreter, compiled for absent GPUs, and on a GPU (`gpu`).

Truth is the plain equation in float64; the budget four times what plain torch makes of it in the dtype of the inputs.
"""


import pytest
import torch

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)


def test_interpreted_kernels_match_the_equation(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_conv.py")
    assert len(rows) == 11 and all(r["same"] for r in rows)
    for r in rows:
        for name, error in r["ours"].items():
            assert error <= 4 * r["torch"][name] + 1e-7, (r["case"], name, error)


def test_kernels_compile_without_spills(script):
    rows = script("compile_scan.py", "90", "conv")
    assert len(rows) == (2 if script.short else 4) and all(r["stack"] == 0 for r in rows), rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "length, width, taps, documents",
    [
        (1, 130, 4, True), (2, 130, 4, True), (257, 130, 4, True), (257, 130, 4, False), (63, 1030, 4, False),
        (1000, 64, 3, True), (129, 520, 2, False), (65, 7, 1, True),
    ],
)  # fmt: skip
def test_real_kernels_match_the_equation(length, width, taps, documents, dtype):
    from seqmix_kernels.ops.causal_conv1d.op import causal_conv1d
    from seqmix_kernels.ops.causal_conv1d.reference import reference

    r = torch.Generator("cuda").manual_seed(length)
    shapes = (2, length, 2 * width), (width, taps), (width,), (2, taps - 1, width)
    given = [torch.randn(s, generator=r, device="cuda").to(dtype) for s in shapes]
    given[0] = given[0][..., :width]  # half of a projection
    seq = (torch.arange(length, device="cuda") // 50).repeat(2, 1) if documents else None
    dy, dfinal = (torch.randn(2, n, width, generator=r, device="cuda").to(dtype) for n in (length, taps - 1))

    def run(f, cast):
        ts = [t.detach().to(cast).requires_grad_() for t in given]
        y, final = f(ts[0], ts[1], ts[2], "silu", ts[3], seq)
        grads = torch.autograd.grad((y, final), ts, (dy.to(cast), dfinal.to(cast)), allow_unused=True)
        return [y, final, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, ts, strict=True))]

    want, theirs = run(reference, torch.float64), run(reference, dtype)
    ours, again = (run(lambda *a: causal_conv1d(*a, impl="fused"), dtype) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    for true, torchs, got in zip(want, theirs, ours, strict=True):
        scale = true.norm().clamp_min(1e-30)
        assert (got.double() - true).norm() / scale <= 4 * (torchs.double() - true).norm() / scale + 1e-7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_offsets_beyond_32_bits():
    """The second row lies past 2^31 elements of a view; so do the last channels of a transposed one."""
    from seqmix_kernels.ops.causal_conv1d.op import causal_conv1d

    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB")
    r = torch.Generator("cuda").manual_seed(0)
    base = torch.zeros((1 << 31) + (1 << 16), dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(64, 4, generator=r, device="cuda")
    for shape, strides in (((2, 32, 64), (1 << 31, 64, 1)), ((1, 32, 64), (0, 1, ((1 << 31) + 60_000) // 63))):
        x = base.as_strided(shape, strides)
        x.copy_(torch.randn(shape, generator=r, device="cuda"))
        results = []
        for given in (x, x.contiguous()):
            leaf = given.detach().requires_grad_()
            y, _ = causal_conv1d(leaf, weight, None, "silu", impl="fused")
            results.append((y, *torch.autograd.grad(y.float().square().sum(), leaf)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

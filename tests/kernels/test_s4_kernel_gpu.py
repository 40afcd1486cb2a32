"""The Triton kernels of S4 and of the long convolution: under the interpreter, compiled for absent GPUs, and on a GPU (`gpu`).

Truth is plain torch in float64; the budget four times what plain torch makes of it in the dtype of the inputs.
"""


import pytest
import torch

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)


def relative(value, truth):
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()  # at one step some gradients are 0


def within(ours, plain):
    return all(a <= 4 * b + 2e-6 for a, b in zip(ours, plain, strict=True))


def test_interpreted_kernels_match_plain_torch(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_s4.py")
    assert len(rows) == (12 if script.short else 20)
    for r in rows:
        assert r["same"] and within(r["ours"], r["torch"]), r


def test_kernels_compile_without_spills(script):
    rows = script("compile_s4.py", "90")
    assert {r["kernel"] for r in rows} >= {"s4d_fwd_kernel", "s4d_bwd_kernel", "dplr_sums_kernel", "dplr_bwd_kernel"}
    for r in rows:  # sine and cosine in float64 have a table for huge arguments on the stack
        assert r["stack"] == 0 or r["kernel"] in ("nodes_kernel", "s4d_prepare_kernel", "s4d_finish_kernel"), r


@pytest.mark.gpu
@pytest.mark.parametrize("width, modes, length", [(64, 32, 2048), (5, 3, 7), (3, 40, 1000), (2, 128, 4097), (1, 1, 1)])
def test_real_kernels_match_plain_torch(width, modes, length):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from seqmix_kernels.ops.s4_kernel import fused, torch_forms

    r = torch.Generator("cuda").manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=r, device="cuda")  # noqa: E731
    lam = torch.stack((-0.05 * normal(width, modes).abs() - 1e-3, 5 * normal(width, modes)), -1).double()
    g = normal(width, length)
    for kind, weights in (("s4d", normal(width, modes, 2)), ("dplr", normal(width, modes, 8))):

        def run(module, cast):
            w = weights.to(cast)  # noqa: B023
            forward, backward = (getattr(module, f"{kind}_{way}") for way in ("forward", "backward"))  # noqa: B023
            return [forward(lam, w, length), *backward(g.to(cast), lam, w, length)]

        ours, again = run(fused, torch.float32), run(fused, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
        truth = run(torch_forms, torch.float64)
        errors = [
            [relative(v, t) for v, t in zip(values, truth, strict=True)]
            for values in (ours, run(torch_forms, torch.float32))
        ]
        assert within(*errors), (kind, errors)


@pytest.mark.gpu
@pytest.mark.parametrize("width, sets, modes, length", [(64, 1, 32, 2048), (6, 3, 3, 7), (3, 3, 40, 1000), (2, 1, 128, 300)])
@pytest.mark.parametrize("kind", ["s4d", "dplr"])
def test_real_layer_kernels_match_plain_torch(kind, width, sets, modes, length):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from seqmix_kernels.ops.s4_kernel import dplr_layer_kernel, s4d_layer_kernel

    r = torch.Generator("cuda").manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=r, device="cuda")  # noqa: E731
    PB = (normal(sets, modes, 2), normal(sets, modes, 2)) if kind == "dplr" else ()
    given = normal(width) / 2 - 4, normal(sets, modes) / 2, 10 * normal(sets, modes), *PB, normal(width, modes, 2)
    op, g = dplr_layer_kernel if kind == "dplr" else s4d_layer_kernel, normal(width, length)

    def run(impl, cast):
        leaves = [t.clone().to(cast).requires_grad_() for t in given]
        K = op(*leaves, length, impl=impl)
        return [K.detach(), *torch.autograd.grad(K, leaves, g.to(cast))]

    ours, again = run("fused", torch.float32), run("fused", torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    truth = run("torch", torch.float64)
    errors = [
        [relative(v, t) for v, t in zip(values, truth, strict=True)]
        for values in (ours, run("torch", torch.float32))
    ]
    assert within(*errors), errors


@pytest.mark.gpu
# torch's word where a transform of length 1 is the first that autograd's thread asks of the GPU; it then goes on
@pytest.mark.filterwarnings("ignore:Attempting to run cuFFT:UserWarning")
@pytest.mark.parametrize("activation, gated", [(None, False), ("gelu", False), ("silu", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch, length, width, taps", [(1, 1, 3, 1), (2, 1021, 70, 100), (3, 2048, 64, 2048)])
def test_real_convolution_matches_plain_torch(batch, length, width, taps, dtype, activation, gated):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from seqmix_kernels.ops.fft_conv import fft_conv

    r = torch.Generator("cuda").manual_seed(length)
    normal = lambda *shape: torch.randn(*shape, generator=r, device="cuda")  # noqa: E731
    u, gate, dy = (normal(batch, width, length).mT.to(dtype) for _ in range(3))
    given = u, normal(width, taps), normal(width), gate if gated else None

    def run(impl, wide):
        leaves = [t if t is None else t.detach().to(torch.float64 if wide else t.dtype).requires_grad_() for t in given]
        y = fft_conv(*leaves[:3], activation, leaves[3], impl)
        return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype))]

    truth = run("torch", True)
    errors = [
        [relative(v, t) for v, t in zip(run(impl, False), truth, strict=True)]
        for impl in ("fused", "torch")
    ]
    assert within(*errors), errors

"""The convolution's Triton kernels: under the interpreter, compiled for absent GPUs, and on a GPU (`gpu`).

Truth is the plain equation in float64; the budget four times what plain torch makes of it in the dtype of the inputs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)


def script(name, *args):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, Path(__file__).with_name(name), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_interpreted_kernels_match_the_equation():
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_conv.py")
    assert len(rows) == 9 and all(r["same"] for r in rows)
    for r in rows:
        for name, error in r["ours"].items():
            assert error <= 4 * r["torch"][name] + 1e-7, (r["case"], name, error)


def test_kernels_compile_without_spills():
    rows = script("compile_scan.py", "90", "conv")
    assert len(rows) == 4 and all(r["stack"] == 0 for r in rows), rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 2, 63, 257])
def test_real_kernels_match_the_equation(length, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from seqmix_kernels.causal_conv1d.op import causal_conv1d
    from seqmix_kernels.causal_conv1d.reference import reference

    r = torch.Generator("cuda").manual_seed(length)
    shapes = (2, length, 130), (130, 4), (130,), (2, 3, 130)
    given = [torch.randn(s, generator=r, device="cuda").to(dtype) for s in shapes]
    seq = (torch.arange(length, device="cuda") // 50).repeat(2, 1)
    dy, dfinal = (torch.randn(s, generator=r, device="cuda").to(dtype) for s in (shapes[0], shapes[3]))

    def run(f, cast):
        ts = [t.detach().to(cast).requires_grad_() for t in given]
        y, final = f(ts[0], ts[1], ts[2], "silu", ts[3], seq)
        return [y, final, *torch.autograd.grad((y, final), ts, (dy.to(cast), dfinal.to(cast)))]

    want, theirs = run(reference, torch.float64), run(reference, dtype)
    ours = run(lambda *a: causal_conv1d(*a, impl="fused"), dtype)
    for true, torchs, got in zip(want, theirs, ours, strict=True):
        scale = true.norm().clamp_min(1e-30)
        assert (got.double() - true).norm() / scale <= 4 * (torchs.double() - true).norm() / scale + 1e-7

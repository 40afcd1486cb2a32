"""The fused step: under Triton's interpreter, compiled for an absent GPU, and on a GPU (`gpu`), also in a CUDA graph.

Truth is the equation in float64; the budget four times what plain torch makes of it in the dtype of the inputs.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from seqmix_kernels.ops.mamba_step import mamba_step

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, (row, name)


def test_interpreted_kernels_match_the_equation(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_step.py")
    assert len(rows) == 7
    for row in rows:
        within(row)


def test_kernels_compile_without_spills(script):
    rows = script("compile_step.py", "90")
    assert len(rows) == (3 if script.short else 10) and all(row["stack"] == 0 for row in rows), rows


@pytest.fixture(scope="module")
def step():
    """The functions of interpret_step.py, for the real kernels."""
    spec = importlib.util.spec_from_file_location("interpret_step", Path(__file__).with_name("interpret_step.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "sizes, discretization",
    [
        ((1, 768, 1536, 16, 48, 4, False), "euler"),
        ((64, 768, 1536, 16, 48, 4, False), "euler"),
        ((3, 75, 150, 5, 3, 2, True), "zoh"),
        ((7, 75, 150, 5, 3, 2, True), "zoh"),
        ((2, 5, 7, 1, 1, 1, True), "euler"),
        ((33, 75, 150, 5, 3, 2, True), "zoh"),
        ((16, 50, 100, 256, 7, 4, True), "euler"),
        ((2, 50, 100, 256, 7, 4, True), "zoh"),
        ((1, 2560, 5120, 16, 160, 4, False), "euler"),
    ],
)
def test_real_kernels_match_the_equation(step, sizes, discretization, dtype):
    within(step.errors(step.make(*sizes), dtype, discretization, "cuda"))


@pytest.mark.gpu
@on_gpu
def test_a_graph_replays_the_step(step):
    for batch in (2, 8, 20):
        made = step.make(batch, 100, 200, 16, 12, 4, True)
        given = {k: t.to("cuda", torch.float32 if k in step.OWN else torch.bfloat16) for k, t in made.items()}
        inputs = torch.randn(6, batch, 100, device="cuda").bfloat16()
        plain, wanted = dict(given), []
        for u in inputs:
            out, plain["conv_state"], plain["ssm_state"] = mamba_step(**(plain | {"u": u}), impl="fused")
            wanted.append(out)
        held = {k: t.clone() for k, t in given.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, *states = mamba_step(**held, impl="fused", in_place=True)
        assert states[0] is held["conv_state"] and states[1] is held["ssm_state"]
        for u, exact in zip(inputs, wanted, strict=True):
            held["u"].copy_(u)
            graph.replay()
            assert torch.equal(out, exact)
        assert torch.equal(held["ssm_state"], plain["ssm_state"])

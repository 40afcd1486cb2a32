"""The fused step: under Triton's interpreter, compiled for an absent GPU, and on a GPU (`gpu`), also in a CUDA graph.

Truth is the equation in float64; the budget four times what plain torch makes of it in the dtype of the inputs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqmix_kernels.mamba_step import mamba_step

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def script(name, *args):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, Path(__file__).with_name(name), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, (row, name)


def test_interpreted_kernels_match_the_equation():
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_step.py")
    assert len(rows) == 4
    for row in rows:
        within(row)


def test_kernels_compile_without_spills():
    rows = script("compile_step.py", "90")
    assert len(rows) == 4 and all(row["stack"] == 0 and row["registers"] <= 128 for row in rows), rows


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
        ((1, 1536, 16, 48, 4, True), "euler"),
        ((64, 1536, 16, 48, 4, True), "euler"),
        ((3, 150, 5, 3, 2, False), "zoh"),
        ((2, 7, 1, 1, 1, True), "euler"),
        ((2, 100, 256, 7, 4, True), "zoh"),
        ((5, 5000, 16, 160, 4, True), "euler"),
    ],
)
def test_real_kernels_match_the_equation(step, sizes, discretization, dtype):
    within(step.errors(step.make(*sizes), dtype, discretization, "cuda"))


@pytest.mark.gpu
@on_gpu
def test_a_graph_replays_the_step(step):
    wide = ("ssm_state", "dt_bias", "A_log", "D")
    made = step.make(4, 200, 16, 12, 4, True)
    given = {k: t.to("cuda", torch.float32 if k in wide else torch.bfloat16) for k, t in made.items()}
    inputs = torch.randn(6, 2, 4, 200, device="cuda").bfloat16()

    def one(tensors, xz):
        return mamba_step(**(tensors | {"x": xz[0], "z": xz[1]}))

    plain, outputs = dict(given), []
    for xz in inputs:
        y, plain["conv_state"], plain["ssm_state"] = one(plain, xz)
        outputs.append(y)
    held = {k: t.clone() for k, t in given.items()}
    buffer = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, conv_state, ssm_state = one(held, buffer)
        held["conv_state"].copy_(conv_state)
        held["ssm_state"].copy_(ssm_state)
    for xz, wanted in zip(inputs, outputs, strict=True):
        buffer.copy_(xz)
        graph.replay()
        assert torch.equal(y, wanted)
    assert torch.equal(held["ssm_state"], plain["ssm_state"])

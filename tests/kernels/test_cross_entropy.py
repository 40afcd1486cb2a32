"""The loss of each token: its kernels against the equation in float64, its contract."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.cross_entropy import cross_entropy, which_impl

HERE = Path(__file__).parent


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, row


def test_interpreted_kernels_match_the_equation():
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, HERE / "interpret_loss.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 5
    for row in rows:
        within(row)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sizes", [(7, 50277, "bfloat16"), (300, 1000, "float32"), (5, 8193, "float16"), (1, 1, "float32")])
def test_real_kernels_match_the_equation(sizes):
    spec = importlib.util.spec_from_file_location("interpret_loss", HERE / "interpret_loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    within(module.case(*sizes, device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_extreme_logits_and_no_class():
    big = torch.tensor([[1e4, -1e4, 0.0], [-float("inf"), 0.0, 1.0], [float("nan"), 0.0, 0.0]], device="cuda")
    losses = cross_entropy(big, torch.tensor([1, 2, 0], device="cuda"), impl="fused")
    first, second, third = losses.tolist()
    assert first == 2e4 and second == pytest.approx(0.3132617) and math.isnan(third)
    assert cross_entropy(big, torch.tensor([7, -1, -100], device="cuda"), impl="fused").isnan().tolist() == [True, True, False]


def test_it_is_torchs_loss():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 9, generator=g).bfloat16(), torch.tensor([0, 8, -100, 3, 3, 1])
    got = cross_entropy(logits, targets)
    assert got.dtype == torch.float32 and got[2] == 0
    torch.testing.assert_close(got, F.cross_entropy(logits.float(), targets, reduction="none"))
    assert torch.equal(cross_entropy(logits, targets.int()), got)
    assert cross_entropy(logits[3:], targets[3:], ignore_index=3)[:2].tolist() == [0, 0]
    assert which_impl(logits)[0] == "reference"


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(logits=torch.zeros(2, 3, 4)), r"logits must be \(T, V\)"),
        (dict(logits=torch.zeros(3, 4, dtype=torch.long)), "real"),
        (dict(targets=torch.zeros(4, dtype=torch.long)), r"targets must be \(3,\) integers"),
        (dict(targets=torch.zeros(3)), "torch.float32"),
        (dict(targets=torch.zeros(3, dtype=torch.bool)), "torch.bool"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: (it needs a CUDA device|Triton cannot be imported)"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(**(dict(logits=torch.zeros(3, 4), targets=torch.zeros(3, dtype=torch.long)) | change))

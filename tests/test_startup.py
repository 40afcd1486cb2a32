"""What is settled before torch is imported: how OpenMP waits, and what Lightning does not import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seqmix.startup import POLICIES

ROOT = Path(__file__).parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in POLICIES}
    line = [sys.executable, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=clean | environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--cfg", "job"],
        ["-m", "seqmix.bench", "--cfg"],
        ["-m", "pytest", "-s", "--collect-only", "tests/test_metrics.py"],
    ],
)
def test_the_openmp_that_torch_loads_waits_by_sleeping(arguments):
    told = run(*arguments, OMP_DISPLAY_ENV="verbose").stderr  # by the OpenMP runtime, when it is loaded
    assert "GOMP_SPINCOUNT = '1000'" in told or "KMP_BLOCKTIME='0'" in told


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_the_user_has_set_stays_the_only_one(policy):
    code = f"import os, sys, seqmix.startup; assert 'torch' not in sys.modules; print([os.environ.get(p) for p in {POLICIES}])"
    assert run("-c", code, **{policy: "7"}).stdout.strip() == str(["7" if name == policy else None for name in POLICIES])


def test_what_the_quick_import_of_lightning_leaves_out_is_there_when_it_is_used():
    run(
        "-c",
        """
import sys
import seqmix.quick_lightning
import lightning as L, torch, torchmetrics
from lightning.pytorch.utilities.compile import OptimizedModule
from lightning.pytorch.utilities.model_summary import ModelSummary

left_out = {"torchmetrics.functional", "torch._dynamo", "torch.utils.flop_counter", "torchmetrics.utilities.plot"}
assert not left_out & sys.modules.keys()
plain = torch.nn.Linear(2, 2)
assert not isinstance(plain, OptimizedModule) and not left_out & sys.modules.keys()
assert isinstance(torch.compile(plain, backend="eager"), OptimizedModule)
assert torch.compiler.disable(len)([1]) == 1

module = L.LightningModule()
module.part, module.example_input_array, module.forward = plain, torch.ones(1, 2), lambda x: module.part(x)
assert ModelSummary(module).total_flops == 8

assert torchmetrics.Metric is sys.modules["torchmetrics.metric"].Metric and "torchmetrics.functional" not in sys.modules
assert torchmetrics.classification.MulticlassAccuracy(3)(torch.tensor([0, 1]), torch.tensor([0, 2])) > 0
mean = torchmetrics.MeanMetric()
mean.update(3.0)
assert mean.compute() == 3 and isinstance(mean, torchmetrics.Metric) and "torchmetrics.functional" in sys.modules
""",
    )

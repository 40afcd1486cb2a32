"""What every kernel test shares: memory that betrays an unwritten or overrun result, and a derived error budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from extent import SHORT

GUARD = 64  # elements before and after every tensor made by torch.empty


@pytest.fixture(scope="session")
def script(request):
    """script(name, *arguments): the JSON lines that a script of this folder prints, in a process of its own, where Triton's
    interpreter is on only if the script asks for it. Where slow tests are left out, or SHORT is set, it runs a third of its
    cases (extent.py) and `script.short` is true."""
    short = "not slow" in request.config.getoption("markexpr") or SHORT
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}

    def run(name, *arguments):
        command = [sys.executable, Path(__file__).with_name(name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env | ({"SHORT": "1"} if short else {}))
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    run.short = short
    return run


@pytest.fixture
def poisoned(monkeypatch):
    """Uninitialised memory is NaN, with guard zones around it that are checked at the end."""
    made = []

    def poison(make):
        def empty(*args, **kwargs):
            plain = make(*args, **kwargs)
            if type(plain) is not torch.Tensor or not plain.is_floating_point() or not plain.is_contiguous():
                return plain
            base = torch.full((plain.numel() + 2 * GUARD,), float("nan"), dtype=plain.dtype, device=plain.device)
            base[:GUARD] = base[-GUARD:] = 12345.0
            made.append(base)
            return base[GUARD : GUARD + plain.numel()].view(plain.shape)

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    yield made
    monkeypatch.undo()
    assert made, "nothing of ours was allocated: the test tests nothing"
    for base in made:
        wanted = torch.tensor(12345.0, dtype=base.dtype, device=base.device)
        assert (base[:GUARD] == wanted).all() and (base[-GUARD:] == wanted).all(), "memory past a tensor was overwritten"


@pytest.fixture(scope="session")
def assert_no_worse():
    """Our largest error, against float64, is within `factor` of torch's own in the same dtype plus its rounding unit."""

    def check(ours: dict, same_dtype: dict, truth: dict, factor: float = 4.0):
        assert ours.keys() == truth.keys()
        for name, exact in truth.items():
            assert ours[name].shape == exact.shape, name
            if not exact.numel():
                continue
            assert ours[name].isfinite().all(), name
            size = exact.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            error, budget = ((given[name].double() - exact).abs().max() / size for given in (ours, same_dtype))
            budget = factor * (budget + torch.finfo(ours[name].dtype).eps)
            budget *= 2 if exact.numel() < 8 else 1  # so few draws of torch's error can be lucky ones
            assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"

    return check

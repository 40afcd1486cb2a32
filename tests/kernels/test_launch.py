"""The launcher that remembers what was compiled: it must compile again for whatever a kernel is specialised on."""

import pytest
import torch

from seqmix_kernels import launch as module


class Kernel:
    """Stands for a Triton kernel (x, n, BLOCK, FLAG): notes compilations, and what a compiled one is called with."""

    arg_names = ("x", "n", "BLOCK", "FLAG")

    def __init__(self):
        self.compiled, self.calls = [], []

    def __getitem__(self, grid):
        def call(*args, **given):
            self.compiled.append((grid, args, given))
            return Compiled(self.calls, len(self.compiled))

        return call


class Compiled:
    launch_metadata = None

    def __init__(self, calls, number):
        self.calls, self.number = calls, number

    def __getitem__(self, grid):
        return lambda *values: self.calls.append((self.number, grid, values))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def go(kernel, x, n=5, grid=(3,), options=(("num_warps", 4),), **constants):
    # not in the kernel's order: it is the launcher that has to know it
    module.launch(kernel, grid, (x, n), {"FLAG": True, "BLOCK": 64} | constants, dict(options))


def test_a_like_call_goes_to_what_was_compiled(kernel):
    x, other = torch.zeros(8), torch.zeros(8)
    go(kernel, x)
    assert kernel.compiled == [((3,), (x, 5), {"FLAG": True, "BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True})]
    go(kernel, other, grid=(2, 7))
    assert kernel.calls == [(1, (2, 7, 1), (other.data_ptr(), 5, 64, True))] and len(kernel.compiled) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(8, dtype=torch.bfloat16)}, {"x": torch.zeros(9)[1:]}, {"n": 16}, {"BLOCK": 32}, {"FLAG": False},
        {"options": (("num_warps", 8),)}, {"options": (("num_warps", 4), ("maxnreg", 128))},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
def test_another_kind_of_call_is_compiled_anew(kernel, change):
    go(kernel, torch.zeros(8))
    for _ in range(2):
        go(kernel, **({"x": torch.zeros(8)} | change))
    assert len(kernel.compiled) == 2, "what differs was launched as if it were the same"


def test_the_memory_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    for n in range(10):
        go(kernel, torch.zeros(8), n=n)
    assert len(module._compiled) <= 3

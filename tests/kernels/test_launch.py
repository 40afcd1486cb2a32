"""The launcher that remembers what was compiled: it must compile again for whatever a kernel is specialised on."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
module = pytest.importorskip("seqmix_kernels.launch")


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
    function, packed_metadata = "function", "packed"

    def __init__(self, calls, number):
        self.calls, self.number = calls, number

    def __getitem__(self, grid):
        return lambda *values: self.calls.append((self.number, grid, values, "by Triton"))

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values):
        assert (stream, function, packed, metadata, enter, leave) == (7, "function", "packed", None, None, None)
        self.calls.append((self.number, (x, y, z), values))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(triton.runtime, "driver", driver)
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


@pytest.mark.parametrize("end", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_the_launches(kernel, monkeypatch, end):
    """Triton calls its hooks: in a chain, as it has them, or one in the chain's place."""
    x = torch.zeros(8)
    go(kernel, x)
    chain = getattr(triton.knobs.runtime, end)
    chain.add(print)
    go(kernel, x)
    chain.remove(print)
    go(kernel, x)
    with monkeypatch.context() as m:
        m.setattr(triton.knobs.runtime, end, print)
        go(kernel, x)
        m.setattr(triton.knobs.runtime, end, None)
        go(kernel, x)
    assert [call[3:] for call in kernel.calls] == [("by Triton",), (), ("by Triton",), ()]


def test_the_memory_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    for n in range(10):
        go(kernel, torch.zeros(8), n=n)
    assert len(module._compiled) <= 3

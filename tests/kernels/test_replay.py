"""What is repeated must be what the function would do, for other tensors that look alike and for no others."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")
launch = pytest.importorskip("seqmix_kernels.launch")
module = pytest.importorskip("seqmix_kernels.replay")


class Kernel:
    """a * scale + b into out, by the numbers' addresses: (a, b, out, n, SCALE), as Triton would have it compiled."""

    arg_names = ("a", "b", "out", "n", "SCALE")
    launch_metadata, function, packed_metadata = None, None, None

    def __init__(self):
        self.through_triton = 0

    def __getitem__(self, grid):
        def call(*args, SCALE=None, **_):
            if SCALE is None:  # the compiled one, by its numbers
                self.through_triton += 1
            else:
                args = *[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args], SCALE
            self.run(*grid, 7, None, None, None, None, None, *args)
            return self

        return call

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, a, b, out, n, scale):
        assert stream == 7
        a, b, out = ((ctypes.c_float * n).from_address(p) for p in (a, b, out))
        for i in range(n):
            out[i] = a[i] * scale + b[i]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(module, "_known", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    return Kernel()


class Call:
    """(2 a + b, scale (2 a + b) + a): an own result, scratch, a launch at an offset into scratch. Counts how often it runs."""

    def __init__(self, kernel):
        self.kernel, self.count, self.extra = kernel, 0, None

    def __call__(self, a, b, c, scale):
        self.count += 1
        n = a.numel()
        first, second = a.new_empty(n), a.new_empty(1, n, dtype=torch.float32)
        scratch = a.new_empty(3, n)
        if self.extra is not None:
            self.extra(scratch)
        for given, to, by in (((a, b), scratch[1], 2), ((scratch[1], a), second, scale), ((a, b), first, 2)):
            launch.launch(self.kernel, (1, 1, 1), (*given, to, n), {"SCALE": by}, {"num_warps": 1})
        return first, second

    def go(self, a, b, scale=3, c=None):
        first, second = module.replay(self, (a, b, c), (scale,))
        assert torch.equal(first, 2 * a + b) and torch.equal(second[0], scale * (2 * a + b) + a)


def numbers(n=5, seed=0):
    return torch.randint(-9, 9, (2, n), generator=torch.Generator().manual_seed(seed)).float().clone().unbind(0)


def fresh(*tensors):
    return [t.clone() for t in tensors]


def test_the_third_call_is_repeated_with_its_own_tensors(kernel):
    call = Call(kernel)
    for seed in range(5):
        call.go(*fresh(*numbers(seed=seed)))
    assert call.count == 2, "the first as it is, the second noted"


def test_a_call_that_differs_is_worked_out_anew(kernel):
    call = Call(kernel)
    a, b = fresh(*numbers())
    for _ in range(4):
        call.go(a, b)
    count = call.count
    wide = torch.zeros(10)
    wide[::2] = a
    shifted = torch.zeros(9)[1:6].copy_(a)
    for change in ((a, b, 4), (*fresh(*numbers(6)), 3), (a, b, 3, torch.ones(1)), (shifted, b, 3)):
        call.go(*change)
        count += 1
        assert call.count == count


def test_one_tensor_given_twice_does_not_stand_for_two(kernel):
    call = Call(kernel)
    a, b = fresh(*numbers())
    for _ in range(3):
        call.go(a, a)
    for _ in range(3):
        call.go(a, b)


def test_an_empty_tensor_may_stand_twice(kernel):
    """As the scan's backward is given its gate, where there is nothing to keep for it."""

    class Two(Call):
        def __call__(self, a, b, c, d, scale):
            return super().__call__(a, b, c, scale)

    call, empty = Two(kernel), torch.empty(0)
    for seed in range(4):
        a, b = fresh(*numbers(seed=seed))
        first, _ = module.replay(call, (a, b, empty, empty), (3,))
        assert torch.equal(first, 2 * a + b)
    assert call.count == 2


@pytest.mark.parametrize("extra", [torch.Tensor.zero_, torch.clone, lambda t: t[0].copy_(t[1])])
def test_what_torch_computes_is_never_left_out(kernel, extra):
    call = Call(kernel)
    call.extra = extra
    for _ in range(4):
        call.go(*fresh(*numbers()))
    assert call.count == 4


def test_a_launch_compiled_while_it_is_noted_is_noted(kernel):
    call = Call(kernel)
    for seed in range(4):
        if seed == 1:
            launch._compiled.clear()
        call.go(*fresh(*numbers(seed=seed)))
    assert call.count == 2


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_who_watches_sees_all_of_it(kernel):
    call = Call(kernel)
    a, b = fresh(*numbers())
    for _ in range(3):
        call.go(a, b)
    with Watching():
        call.go(a, b)
    assert call.count == 3 and kernel.through_triton == 0
    triton.knobs.runtime.launch_enter_hook.add(print)
    try:
        call.go(a, b)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(print)
    assert call.count == 4 and kernel.through_triton == 3
    call.go(a, b)
    assert call.count == 4


def test_the_memory_of_calls_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    for scale in range(10):
        Call(kernel).go(*numbers(), scale)
    assert len(module._known) <= 3

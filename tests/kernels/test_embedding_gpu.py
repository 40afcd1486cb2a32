"""The embedding on a GPU: no worse than plain torch in the same dtype, whatever the tokens; the same bits twice and in a CUDA
graph; few kernels."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from seqmix_kernels.ops.embedding import embedding, which_impl
from seqmix_kernels.ops.embedding.bench import tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# T, V, D, and the kernels of the forward and the backward; None: as many as torch.sort has
SHAPES = {
    (2304, 16, 64): (1, 2),
    (4096, 16, 64): (1, 2),
    (262144, 16, 64): (1, 2),
    (20000, 32, 200): (1, 2),
    (4096, 33, 64): (1, 3),
    (4096, 256, 128): (1, 3),
    (16384, 50277, 768): (1, None),
    (16384, 50277, 128): (1, None),
    (32, 50277, 768): (1, 3),
    (8193, 131072, 65): (1, None),
    (1, 16, 64): (1, 2),
}


@pytest.fixture(scope="module")
def real():
    """The functions of interpret_embedding.py, for the real kernels."""
    spec = importlib.util.spec_from_file_location("interpret_embedding", Path(__file__).with_name("interpret_embedding.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def within(row):
    assert row["ours"] <= 4 * row["torch"] + 2e-7, row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one", "ends"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_no_worse_than_plain_torchs(real, shape, kind, dtype):
    within(real.case(*shape, dtype, kind, None, device="cuda"))


@pytest.mark.parametrize("ranked", [0, 8192])
def test_the_interpreters_cases(real, poisoned, monkeypatch, ranked):
    from seqmix_kernels.ops.embedding import fused

    monkeypatch.setattr(fused, "RANKED", ranked)
    monkeypatch.setattr(fused, "SHARES", 256)
    for case in real.CASES:
        within(real.case(*case, device="cuda"))


@pytest.mark.parametrize("V", [5, 32, 33, 1000, 2**15 + 7])
def test_the_laws_of_strides_of_tokens_that_are_none_and_of_one_backward(real, V):
    real.laws(V, "cuda")


def test_keys_of_32_bits(real, monkeypatch):
    from seqmix_kernels.ops.embedding import fused

    monkeypatch.setattr(fused, "key_type", fused.key_type)  # put back at the end
    for row in real.wide_keys("cuda"):
        within(row)


def launches(call):
    """How many kernels, copies and fills a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


def step_of(shape):
    """A forward and backward of the shape, and the tokens that it reads."""
    T, V, D = shape
    weight, dy = torch.randn(V, D, device="cuda", requires_grad=True), torch.randn(T, D, device="cuda")
    tokens = tokens_of("zipf", T, V, "cuda")

    def step():
        y = embedding(tokens, weight)
        return y.detach(), *torch.autograd.grad(y, weight, dy)

    assert which_impl(weight)[0] == "fused"
    return step, tokens


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twice_and_in_a_cuda_graph_it_gives_the_same_bits(shape):
    step, tokens = step_of(shape)
    assert all(map(torch.equal, step(), step()))
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kind in ("uniform", "one"):  # other tokens than the captured ones
        tokens.copy_(tokens_of(kind, *shape[:2], "cuda", seed=1))
        graph.replay()
        assert all(map(torch.equal, captured, step()))


@pytest.mark.parametrize("shape", [shape for shape, (_, backward) in SHAPES.items() if backward], ids=str)
def test_it_is_few_kernels(shape):
    step, _ = step_of(shape)
    assert launches(step) == sum(SHAPES[shape])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    for shape in SHAPES:
        step, _ = step_of(shape)
        step()
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits():
    """A table, and a gradient, of more than 2^31 elements: the last rows are read and written where they are."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    D = 2**15
    weight = torch.zeros(2**16 + 5, D, dtype=torch.bfloat16, device="cuda")
    weight[-5:] = torch.randn(5, D, device="cuda")
    tokens = torch.zeros(2**16 + 45, dtype=torch.int64, device="cuda")
    tokens[-5:] = len(weight) - 1 - torch.arange(5, device="cuda")
    weight.requires_grad_()
    y = embedding(tokens, weight)
    assert torch.equal(y[-5:], weight[-5:].flip(0))
    (dweight,) = torch.autograd.grad(y, weight, y.detach())
    assert torch.equal(dweight[-5:], weight[-5:]) and not dweight[:-5].any()

"""The losses of each token on a GPU: no worse than plain torch in the same dtype, the same bits twice and in a CUDA graph, and
with one tensor of logits."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from seqmix_kernels.ops.cross_entropy import cross_entropy, linear_cross_entropy, which_impl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = [(4096, 50277, 768), (262144, 16, 64), (2048, 256, 128)]  # T, V, D


def inputs(tokens, classes, width, dtype, scored=1.0):
    """x, weight, and targets, of which a fraction of about `scored` is scored."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, width, generator=g, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(classes, width, generator=g, device="cuda") * width**-0.5).requires_grad_()
    targets = torch.randint(classes, (tokens,), generator=g, device="cuda")
    return x, weight, targets.where(torch.rand(tokens, generator=g, device="cuda") < scored, -100)


def peak_mib(call):
    call()  # the workspaces of libraries are not counted
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


@pytest.fixture(scope="module")
def real():
    """The functions of interpret_loss.py, for the real kernels."""
    spec = importlib.util.spec_from_file_location("interpret_loss", Path(__file__).with_name("interpret_loss.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, (row, name)


@pytest.mark.parametrize("sizes", [(7, 50277, "bfloat16"), (300, 1000, "float32"), (5, 8193, "float16"), (1, 1, "float32")])
def test_the_loss_of_logits_matches_the_equation(real, sizes):
    within(real.case(*sizes, device="cuda"))


@pytest.mark.parametrize(
    "sizes",
    [
        (300, 2, 5, "float32"), (3000, 16, 8, "bfloat16"), (40, 77, 3, "float16"), (70, 1000, 96, "bfloat16"),
        (9, 8193, 40, "bfloat16"), (5, 1, 2, "float32"), (0, 77, 8, "bfloat16"), (0, 16, 8, "float32"),
    ],
)  # fmt: skip
def test_small_and_odd_sizes_match_the_equation(real, poisoned, sizes):
    within(real.linear_case(*sizes, device="cuda"))


@pytest.mark.parametrize("size", [2, 16, 77, 130, 9000])
def test_the_laws_of_ties_of_ignored_and_wrong_targets_and_of_one_backward(real, size):
    real.laws(size, tokens=700, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_no_worse_than_plain_torch(real, assert_no_worse, shape, dtype):
    given, names = real.linear_inputs(*shape, "cuda"), ("losses", "dx", "dweight")
    ours, theirs, true = (
        dict(zip(names, real.linear_run(impl, *given, cast), strict=True))
        for impl, cast in (("fused", dtype), ("reference", dtype), ("reference", torch.float64))
    )
    assert_no_worse(ours, theirs, true)


def call(shape, dtype=torch.bfloat16):
    """A forward and backward of the shape: a call that gives losses, right, ∂x and ∂weight, and its inputs."""
    x, weight, _ = given = inputs(*shape, dtype, scored=0.7)
    dlosses = torch.randn(len(x), device="cuda")

    def both():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            losses, right = linear_cross_entropy(*given)
        return losses.detach(), right, *torch.autograd.grad(losses, (x, weight), dlosses)

    assert which_impl(x)[0] == "fused"
    return both, given


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_and_in_a_cuda_graph_it_gives_the_same_bits(shape):
    both, _ = call(shape)
    first, second = both(), both()
    assert all(map(torch.equal, first, second))
    with torch.cuda.stream(torch.cuda.Stream()):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for t in captured:
        t.zero_()
    graph.replay()
    assert all(map(torch.equal, captured, first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_needs_one_tensor_of_logits(dtype):
    both, given = call(SHAPES[0], dtype)
    gradients = sum(t.nbytes for t in given[:2])
    logits = SHAPES[0][0] * SHAPES[0][1] * dtype.itemsize
    assert peak_mib(both) * 2**20 - gradients < 1.3 * logits


def test_without_gradients_nothing_is_kept():
    _, (x, weight, targets) = call(SHAPES[0])
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(x, weight, targets)
        before = torch.cuda.memory_allocated()
        losses, right = linear_cross_entropy(x, weight, targets)
        held = torch.cuda.memory_allocated() - before
    assert held <= 512 * sum(math.ceil(t.nbytes / 512) for t in (losses, right))


def test_more_logits_than_32_bits_count():
    """T V > 2^31: the last tokens are read and written where they are."""
    x, weight, targets = inputs(2**26 + 3, 33, 8, torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        losses, right = linear_cross_entropy(x, weight, targets)
        (dx,) = torch.autograd.grad(losses.sum(), x)
        tail = slice(-100, None)
        last = x[tail].detach().requires_grad_()
        want, wanted = linear_cross_entropy(last, weight, targets[tail])
        (true,) = torch.autograd.grad(want.sum(), last)
    torch.testing.assert_close(losses[tail], want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(dx[tail], true, rtol=3e-2, atol=3e-2)
    assert (right[tail] == wanted).float().mean() > 0.9


def test_extreme_logits_and_no_class():
    big = torch.tensor([[1e4, -1e4, 0.0], [-float("inf"), 0.0, 1.0], [float("nan"), 0.0, 0.0]], device="cuda")
    losses = cross_entropy(big, torch.tensor([1, 2, 0], device="cuda"), impl="fused")
    first, second, third = losses.tolist()
    assert first == 2e4 and second == pytest.approx(0.3132617) and math.isnan(third)
    assert cross_entropy(big, torch.tensor([7, -1, -100], device="cuda"), impl="fused").isnan().tolist() == [True, True, False]

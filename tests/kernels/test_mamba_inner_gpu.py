"""The Mamba node on a GPU: no worse than the composition in plain torch, and as lean as its README says."""

import pytest
import torch

from seqmix_kernels.ops.mamba_inner import LEVELS, bench, mamba_inner, saved_bytes
from seqmix_kernels.ops.mamba_inner.inner import Given

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def inputs(B, L, M, dtype):
    """The tensors of a call in training under autocast, by name."""
    g = torch.Generator("cuda").manual_seed(0)
    made = bench.inputs(lambda *shape: torch.randn(*shape, generator=g, device="cuda"), dtype, B, L, M)
    return {name: t.requires_grad_() for name, t in zip(bench.NAMES, made, strict=True)}


def memory(run, leaves: dict) -> tuple[int, int]:
    """Bytes requested of the allocator and held between forward and backward, without the output, and the peak above the
    inputs, gradients included."""

    def asked() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]  # before the allocator rounds up

    def both(after_forward=lambda: None):
        y = run(**leaves)
        after_forward()
        torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))
        return y.numel() * y.element_size()

    both()  # the workspaces of libraries are not counted
    before, held, seen = torch.cuda.memory_allocated(), asked(), []
    torch.cuda.reset_peak_memory_stats()
    output = both(lambda: seen.append(asked() - held))
    return seen[0] - output, torch.cuda.max_memory_allocated() - before


def run(tensors, dtype, **kwargs):
    """The outputs and gradients by name, in float64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    names = [name for name in Given._fields if name in tensors]
    leaves = {k: tensors[k].detach().to(dtype if k == "u" else wide).requires_grad_() for k in names}
    with torch.autocast("cuda", dtype, enabled=dtype not in (torch.float32, torch.float64)):
        results = mamba_inner(**leaves, **kwargs)
    g = torch.Generator("cuda").manual_seed(1)
    upstream = [torch.randn(t.shape, generator=g, device="cuda").to(t.dtype) for t in results]
    grads = torch.autograd.grad(results, list(leaves.values()), upstream)
    return {k: t.detach().double() for k, t in zip(["out", "conv_final", "ssm_final", *names], (*results, *grads), strict=True)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_node_is_no_worse_than_plain_torch(level, dtype):
    tensors = inputs(2, 333, 96, dtype)
    g = torch.Generator("cuda").manual_seed(2)
    tensors["conv_state"] = torch.randn(2, 3, 192, generator=g, device="cuda").to(dtype)
    tensors["ssm_state"] = torch.randn(2, 192, 16, generator=g, device="cuda")
    seq = (torch.arange(333, device="cuda") // 100).repeat(2, 1)
    ours = run(tensors, dtype, level=level, seq_idx=seq, scan="fused")
    theirs = run(tensors, dtype, level=0, seq_idx=seq, scan="sequential")
    for name, true in run(tensors, torch.float64, level=0, seq_idx=seq, scan="sequential").items():
        error, budget = ((got[name] - true).norm() / true.norm().clamp_min(1e-30) for got in (ours, theirs))
        assert error <= 4 * budget + 2e-6, (name, float(error), float(budget))


def test_gradients_are_the_same_bits_twice():
    tensors = inputs(2, 200, 64, torch.bfloat16)
    first, second = (run(tensors, torch.bfloat16, level=level) for level in (1, 1))
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("level", LEVELS)
def test_allocator_holds_what_is_documented(level):
    from seqmix_kernels.ops.selective_scan import fused

    B, L, M = 4, 1024, 768
    leaves = inputs(B, L, M, torch.bfloat16)

    def call(**tensors):
        with torch.autocast("cuda", torch.bfloat16):
            return mamba_inner(**tensors, level=level)[0]

    kept, peak = memory(call, leaves)
    wide = torch.empty(B, L, 2 * M, dtype=torch.bfloat16, device="cuda")
    A, states, z = torch.empty(2 * M, 16, device="cuda"), torch.empty(B, L, 1, 16, device="cuda"), wide
    specs = fused.saved_specs(wide, A, states, z, "euler", None, True)
    scan = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs) / wide.numel()
    u = M * 2  # an input: here it is there already
    documented = B * L * (saved_bytes(M, 2 * M, 16, M // 16, 2, level, scan) - u)
    state = B * (2 * M) * 16 * 4 + B * 3 * 2 * M * 2  # what the two final states hold until the backward
    assert documented <= kept <= documented + state, (kept - documented) / (B * L)
    if level == 2:  # everything of the forward is made once more, and nothing lives longer than it is used
        assert peak < B * L * 2 * M * 2 * 16


def test_peak_of_a_stack_falls_by_what_is_documented():
    B, L, M, layers = 4, 1024, 768, 12
    leaves, peaks = inputs(B, L, M, torch.bfloat16), []
    for level in (0, 2):

        def stack(u, level=level, **weights):
            for _ in range(layers):
                with torch.autocast("cuda", torch.bfloat16):
                    u = mamba_inner(u, **weights, level=level)[0]
            return u

        peaks.append(memory(stack, leaves)[1])
    per_token = [saved_bytes(M, 2 * M, 16, M // 16, 2, level, 1.0) for level in (0, 2)]
    # at its peak level 2 holds all of one layer that level 0 holds of every layer
    assert peaks[0] - peaks[1] >= 0.95 * (layers - 1) * B * L * (per_token[0] - per_token[1])


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch 2.11's inductor
def test_compiled_levels_keep_what_they_keep():
    """torch.compile sees one operator: what a level drops, its partitioner cannot decide to keep."""
    leaves = inputs(2, 512, 256, torch.bfloat16)
    kept = []
    for level in (0, 2):

        def call(level=level, **tensors):
            with torch.autocast("cuda", torch.bfloat16):
                return mamba_inner(**tensors, level=level)[0].sin()

        kept.append(memory(torch.compile(call, fullgraph=True), leaves)[0])
    assert kept[1] < 0.3 * kept[0]

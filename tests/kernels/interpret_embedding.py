"""Runs the embedding's kernels under Triton's interpreter, or on a GPU (argument: cuda): one JSON line of errors per case."""

import json
import os
import sys

import torch

from seqmix_kernels.ops.embedding import embedding
from seqmix_kernels.ops.embedding.bench import tokens_of

F32, BF16, F16 = "float32", "bfloat16", "float16"
# T, V, D, dtype; which tokens; whether torch sorts the keys where the rank kernel could
CASES = (
    (90, 16, 64, F32, "uniform", False),
    (600, 2, 5, F32, "one", False),  # more tiles than programs
    (40, 9, 16, BF16, "uniform", False),
    (100, 300, 5, F16, "zipf", False),
    (50, 200, 300, BF16, "ends", True),
    (17, 40, 1, F32, "uniform", True),
    (0, 40, 4, F32, "uniform", False),
    # from here on not in a short run
    (70, 32, 130, F16, "zipf", False),
    (70, 33, 64, F32, "uniform", False),
    (70, 77, 128, F32, "one", True),
    (100, 300, 5, F32, "zipf", True),
    (33, 40, 3, F32, "ends", False),
    (16, 64, 8, F32, "one", False),
    (1, 50, 70, F32, "uniform", False),
)


def case(T, V, D, dtype, kind, _, device="cpu"):
    """The relative errors of the gradient, ours and torch's in the same dtype, against float64; the rows are compared."""
    g = torch.Generator(device).manual_seed(T)
    weight, dy = (torch.randn(n, D, generator=g, device=device).to(getattr(torch, dtype)) for n in (V, T))
    tokens = tokens_of(kind, T, V, device)

    def gradient(impl, dtype=weight.dtype):
        leaf = weight.to(dtype).requires_grad_()
        y = embedding(tokens, leaf, impl=impl)
        assert torch.equal(y.detach(), leaf.detach()[tokens])
        (dweight,) = torch.autograd.grad(y, leaf, dy.to(dtype))
        assert dweight.dtype == dtype and dweight.shape == (V, D)
        return dweight

    true, theirs, ours = gradient("reference", torch.float64), gradient("reference"), gradient("fused")
    assert torch.equal(ours, gradient("fused")), "not the same twice"
    absent = torch.ones(V, dtype=torch.bool, device=device).index_fill_(0, tokens, False)
    assert (ours[absent] == 0).all()
    size = true.norm().clamp_min(1e-30)
    errors = {k: ((t.double() - true).norm() / size).item() for k, t in (("ours", ours), ("torch", theirs))}
    return {"case": f"{T} {V} {D} {dtype} {kind}"} | errors


def laws(V, device="cpu"):
    """What holds exactly, for a table of V > 3 rows: integers are added without rounding."""
    g = torch.Generator().manual_seed(V)
    integers = lambda *shape: torch.randint(-4, 5, shape, generator=g).float().to(device)  # noqa: E731
    weight, tokens = integers(V, 6).requires_grad_(), tokens_of("zipf", 60, V, device).view(3, 20)

    def gradient(tokens, dy, weight=weight):
        y = embedding(tokens, weight, impl="fused")
        assert torch.equal(y.detach(), weight.detach()[tokens])
        return torch.autograd.grad(y, weight, dy)[0]

    def true(tokens, dy):
        return torch.zeros(V, 6, device=device).index_add_(0, tokens.flatten(), dy.reshape(-1, 6))

    # strides of every argument, and of the gradient
    dy = integers(3, 20, 6)
    want = true(tokens, dy)
    assert torch.equal(gradient(tokens, dy), want)
    assert torch.equal(gradient(tokens.int(), dy), want)
    assert torch.equal(gradient(tokens.t(), dy.transpose(0, 1)), want)
    assert torch.equal(gradient(tokens[:, ::2], dy[:, ::2]), true(tokens[:, ::2], dy[:, ::2]))
    assert torch.equal(gradient(tokens[1], integers(20, 12)[:, ::2].zero_() + 1), true(tokens[1], dy.new_ones(20, 6)))
    assert torch.equal(gradient(tokens[0, ::3], dy[0, :7]), true(tokens[0, ::3], dy[0, :7]))
    for expanded in (dy[:, :1].expand(3, 20, 6), dy[0, 0].expand(3, 20, 6), dy.new_ones(()).expand(3, 20, 6)):
        assert torch.equal(gradient(tokens, expanded), true(tokens, expanded))
    for strided in (weight.detach().t().contiguous().t(), torch.cat((weight.detach(), weight.detach()), 1)[:, :6]):
        assert torch.equal(gradient(tokens, dy, strided.requires_grad_()), want)
    assert torch.equal(gradient(tokens[0, 0], dy[0, 0]), true(tokens[:1, 0], dy[0, :1]))  # no dimension
    # no columns: torch's own backward reads memory that is not its own there, on a GPU (torch 2.11)
    assert gradient(tokens, dy[..., :0], integers(V, 0).requires_grad_()).shape == (V, 0)

    # a token that is none: a row of NaN and no gradient, and nothing else changes
    odd = tokens.clone()
    odd[0, :6] = torch.tensor([V, -1, V + 2**16, 2**33 + 1, -(2**40), V - 2**16])
    known = (odd >= 0) & (odd < V)
    assert known.sum() == 54
    y = embedding(odd, weight, impl="fused")
    assert y[~known].isnan().all() and torch.equal(y[known], weight[odd[known]])
    assert torch.equal(torch.autograd.grad(y, weight, dy)[0], true(odd[known], dy[known]))

    # NaN and infinity stay in the row of their token
    broken = dy.clone()
    broken[1, 3], broken[2, 5] = float("nan"), float("inf")
    rows = torch.tensor([tokens[1, 3], tokens[2, 5]])
    got, others = gradient(tokens, broken), torch.ones(V, dtype=torch.bool).index_fill_(0, rows, False).to(device)
    assert not got[rows].isfinite().any() and torch.equal(got[others], want[others])

    # differentiable once
    y = embedding(tokens, weight, impl="fused")
    try:
        torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    except NotImplementedError as error:
        assert "embedding is differentiable once, not with create_graph=True; impl='reference' is" in str(error), error
    else:
        raise AssertionError("create_graph=True was not refused")

    # without a gradient nothing is kept; with one, the keys
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        with torch.no_grad():
            assert embedding(tokens, weight, impl="fused").grad_fn is None
        assert embedding(tokens, weight.detach(), impl="fused").grad_fn is None and not kept
        embedding(tokens, weight, impl="fused")
    assert [t.nbytes for t in kept] == [2 * tokens.numel()]


def wide_keys(device="cpu"):
    """Keys of 32 bits, which V = 2^16 needs, sorted by either way."""
    from seqmix_kernels.ops.embedding import fused

    assert [fused.key_type(rows)[0] for rows in (2**16 - 1, 2**16)] == [torch.int16, torch.int32]
    fused.key_type = lambda rows: (torch.int32, 0)
    for c in ((30, 40, 5, F32, "zipf", True), (30, 40, 5, F32, "zipf", False), (30, 8, 5, F32, "zipf", False)):
        yield case(*c, device=device)


if __name__ == "__main__":
    if "cuda" not in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    device = "cuda" if "cuda" in sys.argv else "cpu"
    from extent import some

    from seqmix_kernels.ops.embedding import fused

    for V in (5, 50):  # either kind of kernels
        laws(V, device)
    ranked, fused.SHARES = fused.RANKED, 256  # two rounds of 128 columns for what is one otherwise
    for c in some(CASES, 7):
        fused.RANKED = 0 if c[-1] else ranked
        print(json.dumps(case(*c, device=device)), flush=True)
    for row in wide_keys(device):
        print(json.dumps(row), flush=True)

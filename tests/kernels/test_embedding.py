"""The rows of tokens: the contract in plain torch; the kernels under Triton's interpreter, and compiled for an absent GPU.
test_embedding_gpu.py has the real kernels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.ops.embedding import embedding, which_impl

HERE = Path(__file__).parent


def test_interpreted_kernels_match_float64_and_keep_the_laws(script):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    rows = script("interpret_embedding.py")
    assert len(rows) == (10 if script.short else 17)
    for row in rows:
        # the interpreter truncates to bfloat16, where a GPU rounds
        assert row["ours"] <= 4 * row["torch"] + (2**-8 if "bfloat16" in row["case"] else 2e-7), row


def test_kernels_compile_without_spills_and_load_16_bytes_per_access(script):
    pytest.importorskip("triton")
    rows = script("compile_embedding.py", "90")
    assert len(rows) == (6 if script.short else 27) and all(row["stack"] == 0 for row in rows), rows
    for row in rows:
        V, D, _ = row["case"].split()
        if row["kernel"] == "one_hot_kernel" and int(V) <= 16:
            assert row["registers"] <= 65536 // (4 * 128), f"4 programs do not fit on a multiprocessor: {row}"
        if row["kernel"] in ("forward_kernel", "runs_kernel") and int(D) >= 128:
            assert row["ld"] == row["st"] == 4, f"not 16 bytes per access: {row}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_torchs_embedding(dtype):
    g = torch.Generator().manual_seed(0)
    weight, tokens = torch.randn(9, 5, generator=g).to(dtype).requires_grad_(), torch.randint(9, (2, 3, 4), generator=g)
    want = F.embedding(tokens, weight)
    (true,) = torch.autograd.grad(want.square().sum(), weight)
    for got in (embedding(tokens, weight), embedding(tokens.int(), weight)):
        assert torch.equal(got, want) and got.shape == (2, 3, 4, 5) and got.dtype == dtype
        assert torch.equal(torch.autograd.grad(got.square().sum(), weight)[0], true)
    assert which_impl(weight)[0] == "reference" and "fused cannot run: it needs a CUDA device" in which_impl(weight.float())[1]


def test_on_the_cpu_a_token_that_is_none_raises():
    for token in (-1, 4):
        with pytest.raises(IndexError, match="out of range"):
            embedding(torch.tensor([0, token]), torch.zeros(4, 2))


def test_it_compiles_without_a_graph_break():
    tokens, weight = torch.arange(6).view(2, 3), torch.randn(9, 5)
    assert torch.equal(torch.compile(embedding, fullgraph=True, backend="eager")(tokens, weight), weight[:6].view(2, 3, 5))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(tokens=torch.zeros(3)), "tokens must be int64 or int32 on cpu like weight; got torch.float32 on cpu"),
        (dict(tokens=torch.zeros(3, dtype=torch.bool)), "got torch.bool on cpu"),
        (dict(tokens=torch.zeros(3, dtype=torch.int16)), "got torch.int16 on cpu"),
        (dict(tokens=torch.zeros(3, dtype=torch.long, device="meta")), "got torch.int64 on meta"),
        (dict(weight=torch.zeros(4)), r"weight must be \(V, D\) and real; got shape \(4,\), torch.float32"),
        (dict(weight=torch.zeros(4, 2, 2)), r"got shape \(4, 2, 2\)"),
        (dict(weight=torch.zeros(4, 2, dtype=torch.long)), "real; got .* torch.int64"),
        (dict(weight=torch.zeros(4, 2, dtype=torch.complex64)), "real; got .* torch.complex64"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: it needs a CUDA device, the tensors are on cpu"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        embedding(**(dict(tokens=torch.zeros(3, dtype=torch.long), weight=torch.zeros(4, 2)) | change))


def test_more_rows_than_32_bits_number_are_left_to_torch():
    pytest.importorskip("triton")
    many = torch.zeros(1, 1).expand(2**31 - 1, 1)
    with pytest.raises(ValueError, match="cannot run here: it takes at most 2147483646 rows, not 2147483647"):
        embedding(torch.zeros(3, dtype=torch.long), many, impl="fused")

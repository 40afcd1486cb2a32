"""The losses of each token: their kernels against the equation in float64 (under Triton's interpreter), compiled for an absent
GPU; their contracts. test_cross_entropy_gpu.py has the real kernels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from seqmix_kernels.ops.cross_entropy import bench, cross_entropy, linear_cross_entropy, which_impl

HERE = Path(__file__).parent


def test_interpreted_kernels_match_the_equation(script):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    rows = script("interpret_loss.py")
    assert len(rows) == 13
    for row in rows:
        for name, error in row["ours"].items():
            rounded = row.get("unit", 0) if "bfloat16" in row["case"] else 2e-7  # the interpreter truncates to bfloat16
            assert error <= 4 * row["torch"][name] + rounded, (row, name)


def test_kernels_compile_without_spills(script):
    pytest.importorskip("triton")
    rows = script("compile_loss.py", "90")
    assert len(rows) == (2 if script.short else 12) and all(row["stack"] == 0 for row in rows), rows
    for row in rows:
        assert row["wide"] >= (2 if row["kernel"] == "gradient_kernel" else 1), f"not 16 bytes per access: {row}"


def test_it_is_torchs_loss():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 9, generator=g).bfloat16(), torch.tensor([0, 8, -100, 3, 3, 1])
    got = cross_entropy(logits, targets)
    assert got.dtype == torch.float32 and got[2] == 0
    torch.testing.assert_close(got, F.cross_entropy(logits.float(), targets, reduction="none"))
    assert torch.equal(cross_entropy(logits, targets.int()), got)
    assert cross_entropy(logits[3:], targets[3:], ignore_index=3)[:2].tolist() == [0, 0]
    assert which_impl(logits)[0] == "reference"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_torchs_loss_of_a_linear_layer(dtype):
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in ((40, 5), (9, 5)))
    targets = (x @ weight.t()).argmax(-1).where(torch.arange(40) % 3 > 0, 7)
    targets[::4] = -100
    losses, right = linear_cross_entropy(x, weight, targets)
    logits = F.linear(x, weight)
    wide = torch.promote_types(dtype, torch.float32)
    want = F.cross_entropy(logits.to(wide), targets, reduction="none")
    assert losses.dtype == wide and torch.equal(losses, want)
    assert torch.equal(right, (logits.argmax(-1) == targets) & (targets != -100)) and 0 < right.sum() < 30
    for got, true in zip(*(torch.autograd.grad(t.sum(), (x, weight)) for t in (losses, want)), strict=True):
        assert got.dtype == dtype and torch.equal(got, true)


def test_of_several_largest_logits_the_first_is_right_and_of_nan_none():
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0], [0.0, 2.0]])
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, float("nan")], [1.0, 0.0]])
    losses, right = linear_cross_entropy(x, weight, torch.tensor([0, 1, 1, 2, 0, 0]), ignore_index=-1)
    assert right.tolist() == [True, False, True, False, False, True] and losses[4].isnan()
    assert not linear_cross_entropy(x, weight, torch.zeros(6, dtype=torch.long), ignore_index=0)[1].any()


def test_autocast_casts_both_and_gradients_keep_their_dtypes():
    x, weight = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    targets = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        losses, _ = linear_cross_entropy(x, weight, targets)
        wide, _ = linear_cross_entropy(x.double(), weight.double(), targets)
    assert torch.equal(losses, linear_cross_entropy(x, weight.bfloat16(), targets)[0])
    assert wide.dtype == torch.float64 and torch.equal(wide, linear_cross_entropy(x.double(), weight.double(), targets)[0])
    assert [t.dtype for t in torch.autograd.grad(losses.sum(), (x, weight))] == [torch.bfloat16, torch.float32]


def test_it_compiles_without_a_graph_break():
    given = torch.randn(6, 5), torch.randn(9, 5), torch.arange(6)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    assert all(torch.equal(*pair) for pair in zip(compiled(*given), linear_cross_entropy(*given), strict=True))


def test_the_path_it_is_timed_against_computes_the_same():
    x, weight, targets = bench.linear_inputs(torch.randn, torch.float32, 30, 77, 8)
    targets[::3] = -100
    assert all(map(torch.allclose, bench.separate(x, weight, targets), linear_cross_entropy(x, weight, targets)))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(logits=torch.zeros(2, 3, 4)), r"logits must be \(T, V\)"),
        (dict(logits=torch.zeros(3, 4, dtype=torch.long)), "real"),
        (dict(targets=torch.zeros(4, dtype=torch.long)), r"targets must be \(3,\) integers"),
        (dict(targets=torch.zeros(3)), "torch.float32"),
        (dict(targets=torch.zeros(3, dtype=torch.bool)), "torch.bool"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: (it needs a CUDA device|Triton cannot be imported)"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(**(dict(logits=torch.zeros(3, 4), targets=torch.zeros(3, dtype=torch.long)) | change))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(x=torch.zeros(1, 3, 4)), r"x must be \(T, D\) and weight \(V, D\); got shapes \(1, 3, 4\) and \(5, 4\)"),
        (dict(weight=torch.zeros(5)), r"got shapes \(3, 4\) and \(5,\)"),
        (dict(weight=torch.zeros(4, 5)), r"got shapes \(3, 4\) and \(4, 5\)"),
        (dict(x=torch.zeros(3, 4, dtype=torch.int32)), "x and weight must be real and on one device; got torch.int32 on cpu"),
        (dict(weight=torch.zeros(5, 4, dtype=torch.complex64)), "and torch.complex64 on cpu"),
        (dict(weight=torch.zeros(5, 4, device="meta")), "on meta"),
        (dict(weight=torch.zeros(5, 4, dtype=torch.bfloat16)), "must share a dtype.*; got torch.float32 and torch.bfloat16"),
        (dict(targets=torch.zeros(4, dtype=torch.long)), r"targets must be \(3,\) integers on cpu like x; got shape \(4,\)"),
        (dict(targets=torch.zeros(3)), "torch.float32"),
        (dict(targets=torch.zeros(3, dtype=torch.bool)), "torch.bool"),
        (dict(targets=torch.zeros(3, dtype=torch.long, device="meta")), "on meta"),
        (dict(impl="quick"), "impl must be one of .* got 'quick'"),
        (dict(impl="fused"), "impl='fused' cannot run here: it needs a CUDA device, the tensors are on cpu"),
    ],
)
def test_bad_input_of_the_linear_loss_is_named(change, words):
    given = dict(x=torch.zeros(3, 4), weight=torch.zeros(5, 4), targets=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**(given | change))

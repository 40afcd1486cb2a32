"""The kernels of add_rms_norm and swiglu: under Triton's interpreter, compiled for an absent GPU, and on a GPU (`gpu`).

Truth is the equation in float64; the budget four times the error of plain torch in the same dtypes. The interpreter truncates
to bfloat16 where a GPU rounds, which doubles an error.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from seqmix_kernels.ops.add_rms_norm import add_rms_norm
from seqmix_kernels.ops.swiglu import swiglu

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)

HERE = Path(__file__).parent
TWICE = "is differentiable once, not with create_graph=True"


def cases():
    """The functions and cases of interpret_rowwise.py."""
    spec = importlib.util.spec_from_file_location("interpret_rowwise", HERE / "interpret_rowwise.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, (name, row)


def test_interpreted_kernels_match_the_equation(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    *rows, refusal = script("interpret_rowwise.py")
    assert len(rows) == (17 if script.short else 18)
    for row in rows:
        within(row)
    assert len(refusal["twice"]) == 2 and all(TWICE in words for words in refusal["twice"])


def test_kernels_compile_without_spills_and_load_several_elements_at_once(script):
    rows = script("compile_rowwise.py", "90")
    assert len(rows) == (4 if script.short else 16) and all(row["stack"] == 0 for row in rows), rows
    for row in rows:
        # rows of 770 and 2 x 172 start at multiples of 2 and 4 elements
        assert row["words"] == (2 if "770" in row["case"] or "172" in row["case"] else 4), row
        if row["kernel"] == "backward_kernel" and "8192" not in row["case"]:
            assert row["registers"] <= 65536 // (32 * 32), f"32 warps do not fit on a multiprocessor: {row}"


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = {  # of x, y and weight; autocast
    "autocast": ("float32", "bfloat16", "float32", "bfloat16"),
    "float32": ("float32", "float32", "float32", None),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16", None),
    "float16": ("float16", "float16", "float16", None),
}
GATES = [(16384, 4096), (2048, 344), (262144, 344), (2048, 688), (1, 688), (65, 130), (9, 4)]
NORMS = [(16384, 768), (262144, 64), (2048, 64), (2304, 64), (4096, 128), (8, 768), (1, 64), (33, 65), (257, 770), (9, 8192)]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_real_norms_match_the_equation(shape, dtypes):
    within(cases().norm_case(shape, *dtypes, "s n", "dense", device="cuda"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", GATES, ids=str)
def test_real_gates_match_the_equation(shape, dtype):
    within(cases().gate_case(shape, dtype, "dense", device="cuda"))


@pytest.mark.gpu
@on_gpu
def test_real_kernels_match_the_equation_in_the_interpreters_cases(poisoned):
    module = cases()
    for case in module.NORMS:
        within(module.norm_case(*case, device="cuda"))
    for case in module.GATES:
        within(module.gate_case(*case, device="cuda"))
    assert all(TWICE in words for words in module.second_derivatives("cuda"))


def steps():
    """A forward and backward of each operator by name, and its inputs."""
    g = torch.Generator("cuda").manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    x, y, weight = random(4096, 768), random(4096, 768).bfloat16(), random(768)
    ds, dn, h, da = random(4096, 768), random(4096, 768).bfloat16(), random(4096, 688).bfloat16(), random(4096, 344).bfloat16()

    def norm(*leaves):
        with torch.autocast("cuda", torch.bfloat16):
            s, n = add_rms_norm(*leaves, impl="fused")
        return s, n, *torch.autograd.grad((s, n), leaves, (ds, dn))

    def gate(h):
        a = swiglu(h, impl="fused")
        return a, *torch.autograd.grad(a, h, da)

    return {"norm": (norm, (x, y, weight)), "gate": (gate, (h,))}


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # of leaves made outside of the capture
@pytest.mark.parametrize("name", ["norm", "gate"])
def test_a_graph_replays_the_step_bitwise(name):
    step, inputs = steps()[name]
    leaves = [t.clone().requires_grad_() for t in inputs]
    with torch.cuda.stream(torch.cuda.Stream()):
        step(*leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(*leaves)
    for scale in (1, 3):  # other numbers than the captured ones
        with torch.no_grad():
            for leaf, t in zip(leaves, inputs, strict=True):
                leaf.copy_(scale * t)
        graph.replay()
        eager = step(*leaves)
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))


@pytest.mark.gpu
@on_gpu
def test_offsets_beyond_32_bits():
    """Rows of a view whose last one begins past 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    base = torch.zeros((1 << 31) + (1 << 16), dtype=torch.bfloat16, device="cuda")
    far = base.as_strided((3, 128), (1 << 30, 1))
    far.copy_(torch.randn(3, 128, device="cuda"))
    weight = torch.ones(128, device="cuda")
    for call in (lambda t: add_rms_norm(t, t, weight, impl="fused")[1], lambda t: swiglu(t, impl="fused")):
        results = []
        for given in (far, far.contiguous()):
            leaf = given.detach().requires_grad_()
            y = call(leaf)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), leaf)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

"""The fused step of S4 and S4D: under Triton's interpreter, compiled for an absent GPU, and on a GPU (`gpu`), also in a CUDA
graph and in a whole model.

Truth is the equation in float64 over twelve steps (three under the interpreter); the budget four times what plain torch makes
of it in float32.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from seqmix.decode import Decoder
from seqmix.mixers.s4 import S4
from seqmix.mixers.s4d import S4D
from seqmix.model import SequenceModel
from seqmix_kernels.ops.s4_step import gated_projection, s4_step

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def within(row):
    for name, error in row["ours"].items():
        assert error <= 4 * row["torch"][name] + 2e-7, (row, name)


def test_interpreted_kernels_match_the_equation(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    rows = script("interpret_s4_step.py")
    assert len(rows) == 17
    for row in rows:
        within(row)


def test_kernels_compile_without_spills(script):
    rows = script("compile_s4_step.py", "90")
    assert {row["kernel"] for row in rows} == {"step_kernel", "gated_kernel", "gated_rows_kernel", "gate_kernel"}
    assert len(rows) == (4 if script.short else 20) and all(row["stack"] == 0 for row in rows), rows


@pytest.fixture(scope="module")
def step():
    """The functions of interpret_s4_step.py, for the real kernels."""
    spec = importlib.util.spec_from_file_location("interpret_s4_step", Path(__file__).with_name("interpret_s4_step.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        (1, 768, 1, 32, "dplr"), (64, 768, 1, 32, "dplr"), (5, 45, 3, 127, "dplr"), (2, 7, 7, 1, "dplr"),
        (33, 30, 5, 5, "dplr"), (1, 768, 768, 32, "zoh"), (64, 768, 768, 32, "zoh"), (17, 300, 3, 5, "zoh"),
        (3, 129, 1, 1, "bilinear"), (5, 45, 3, 128, "bilinear"), (9, 50, 50, 256, "real zoh"), (2, 11, 1, 3, "real bilinear"),
    ],
)  # fmt: skip
def test_real_kernels_match_the_equation(step, case, dtype):
    within(step.errors(case, dtype, "cuda"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 768, 768), (4, 768, 768), (5, 768, 768), (64, 768, 768), (65, 768, 768), (33, 45, 17),
                                   (3, 45, 17), (2, 2560, 70), (20, 2560, 70)])  # fmt: skip
def test_real_projection_matches_the_equation(step, sizes, dtype):
    within(step.gated_errors(*sizes, dtype, "cuda"))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["dplr", "zoh"])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_a_graph_replays_the_step(step, kind, batch):
    us, x, made = step.make(batch, 100, 4, 16, kind)
    us, x, made = us.cuda(), x.cuda(), {k: t.cuda() if isinstance(t, torch.Tensor) else t for k, t in made.items()}
    W, b = torch.randn(2, 100, 100, device="cuda") / 10, torch.randn(2, 100, device="cuda")

    def both(u, x, in_place):
        y, x = s4_step(u, x, **made, impl="fused", in_place=in_place)
        return gated_projection(y, *W, *b, impl="fused"), x

    wanted, after = [], x
    for u in us:
        out, after = both(u, after, False)
        wanted.append(out)
    held, u = x.clone(), us[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, new = both(u, held, True)
    assert new is held
    for given, exact in zip(us, wanted, strict=True):
        u.copy_(given)
        graph.replay()
        assert torch.equal(out, exact)
    assert torch.equal(held, after)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("cls", [S4, S4D])
@pytest.mark.parametrize("batch", [2, 6])
def test_a_model_under_a_graph_draws_what_it_draws_without(cls, batch):
    """Steps from a prefilled state, and their logits those of the parallel form: float32."""
    torch.manual_seed(0)
    model = SequenceModel(50, 64, 2, lambda d_model: cls(d_model, 64)).cuda()
    prompt = torch.randint(50, (batch, 37), device="cuda")
    with torch.no_grad():
        logits, state = model.prefill_last(prompt, model.init_state(batch))
        plain, graphed = (Decoder(model, state, logits.argmax(-1)) for _ in range(2))
        graphed.capture(room=20)
        first = logits.argmax(-1)[:, None]
        drawn = [decoder.generate(12) for decoder in (plain, graphed)]
        assert torch.equal(*drawn)
        whole = model(torch.cat((prompt, first, drawn[0]), 1)[:, :-1])[:, -1]
    torch.testing.assert_close(graphed.logits, whole, rtol=2e-3, atol=2e-3)

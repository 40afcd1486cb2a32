"""The laws of the frame that every operator of seqmix_kernels declares itself on."""

import importlib
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import seqmix_kernels
from seqmix_kernels import frame
from seqmix_kernels.frame import CannotRun, Impl, Operator

FOLDERS = sorted(f.parent.name for f in Path(seqmix_kernels.__file__).parent.glob("ops/*/op.py"))
MODULES = [importlib.import_module(f"seqmix_kernels.ops.{name}.op") for name in FOLDERS]
OPERATORS = [module.OPERATOR for module in MODULES if hasattr(module, "OPERATOR")]
CPU = "it needs a CUDA device, the tensors are on cpu"


def made(*impls, **options):
    return Operator("nowhere.made", *(impls or (Impl("plain"), Impl("fused", "cuda", "GPU"))), fallback="plain", **options)


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def nothing_said():
    frame.say_once.cache_clear()
    yield
    frame.say_once.cache_clear()


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_every_operator_but_two_is_declared():
    """Attention chooses by measurement, and mamba_inner by its scan and its convolution."""
    assert set(FOLDERS) - {operator.name for operator in OPERATORS} == {"attention", "mamba_inner"}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_names_its_implementations_and_has_a_plain_one(operator):
    with pytest.raises(ValueError, match=f"impl must be one of auto, {', '.join(operator.impls)}; got 'quick'") as unknown:
        operator.choose("quick")
    assert not isinstance(unknown.value, CannotRun)
    plain = operator.impls[operator.fallback]
    assert plain.device is None and plain.limit is None, "the fallback must run everywhere"


def test_what_cannot_run_says_why_across_processes():
    with pytest.raises(CannotRun, match=r"^impl='fused' cannot run here: it needs a CUDA device") as refused:
        made().choose("fused", torch.zeros(1))
    assert isinstance(refused.value, ValueError) and refused.value.reason == CPU
    again = pickle.loads(pickle.dumps(refused.value))
    assert type(again) is CannotRun and str(again) == str(refused.value) and again.reason == CPU
    with pytest.raises(CannotRun, match=r"^scan='fused' cannot run here"):
        made().require("fused", torch.zeros(1), option="scan")


def test_auto_takes_the_first_that_can_run(monkeypatch):
    ready = {"first": None, "second": None}
    monkeypatch.setattr(frame, "not_ready", lambda device, module: ready[module.rpartition(".")[2]])
    operator = made(Impl("plain"), Impl("first", "cpu", "C"), Impl("second", "cpu", "other C"), Impl("fused", "cuda"))
    x = torch.zeros(1)
    assert operator.which_impl(x) == ("first", "C")
    ready["first"] = "no compiler"
    assert operator.which_impl(x) == ("second", "other C")
    ready["second"] = "no memory"
    assert operator.which_impl(x) == ("plain", "first cannot run: no compiler; second cannot run: no memory")
    wanted = "it takes float32, bfloat16 and float16, not torch.float64"
    assert operator.which_impl(x.double()) == ("plain", f"first cannot run: {wanted}; second cannot run: {wanted}")


def test_the_fallback_gives_its_own_reason_only_where_nothing_else_is_made_for_the_device(interpreter):
    assert made().which_impl(torch.zeros(1, device="meta")) == (
        "plain", "fused cannot run: Triton's interpreter is on and the tensors are not on the CPU"
    )  # fmt: skip
    operator = made(Impl("plain", says="plain torch"), Impl("fused", "cuda"), Impl("c", "cpu"))
    assert operator.which_impl(torch.zeros(1, device="meta")) == ("plain", "plain torch")
    assert operator.which_impl(torch.zeros(1, dtype=torch.int64))[1].startswith("c cannot run: it takes float32")


def test_what_decides_is_checked_in_one_order(interpreter):
    """Limits, plain tensors, device, dtype, Triton: what needs no import and no driver comes first."""

    def limit(x, taps):
        return f"it takes up to 4 taps, not {taps}" if taps > 4 else None

    operator = made(Impl("plain"), Impl("fused", "cuda", limit=limit, plain_tensors=True))
    with FakeTensorMode():
        fake = torch.empty(2, device="meta", dtype=torch.float64)
    for like, reason in (
        ((fake, 5), "it takes up to 4 taps, not 5"),
        ((fake, 4), "it takes plain tensors, not FakeTensor"),
        ((torch.zeros(1, device="meta"), 4), "Triton's interpreter is on and the tensors are not on the CPU"),
        ((torch.zeros(1).double(), 4), "it takes float32, bfloat16 and float16, not torch.float64"),
        ((torch.zeros(1), 4), "Triton cannot be imported (No module named 'nowhere')"),
    ):
        assert operator.why_not("fused", *like) == reason
    assert operator.why_not("plain", fake, 5) is None


def test_an_old_card_is_refused_and_asked_once(monkeypatch):
    asked = []
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (7, 5))
    frame._capability.cache_clear()
    for _ in range(2):
        assert frame.wrong_device("cuda", torch.device("cuda", 0)) == "it needs a GPU of compute capability 8.0 or later"
    assert len(asked) == 1
    frame._capability.cache_clear()


def test_a_choice_of_auto_is_said_once_and_a_slow_one_is_a_warning(caplog, nothing_said):
    x, text = torch.zeros(1), "made on cpu uses plain: fused cannot run: " + CPU
    with caplog.at_level(logging.INFO, "seqmix_kernels"):
        for _ in range(2):
            assert made().choose("auto", x) == "plain"
        made().choose("plain", x)  # asked for: nothing to say
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", text)]
        for _ in range(2):
            made(slow=True).choose("auto", x)
    assert [(r.levelname, r.getMessage()) for r in caplog.records[1:]] == [("WARNING", text)]


@pytest.mark.filterwarnings("ignore")
def test_under_compile_a_choice_is_a_constant_and_says_nothing(caplog, nothing_said):
    operator = made(compiled="it fuses")
    others = made(), made(double=("plain", "for checking"))

    def run(x):
        names = [o.choose("auto", x) for o in (operator, *others)]
        return x + len(names) if operator.which_impl(x) == ("plain", "it fuses") else x

    with caplog.at_level(logging.INFO, "seqmix_kernels"):
        assert torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 3
    assert not caplog.records


# ---- autocast -------------------------------------------------------------------------------------------------------


def test_autocast_casts_all_but_float64_and_is_off_inside():
    x = torch.ones(2, 2)
    assert frame.autocast_dtype(x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert frame.autocast_dtype(x) == torch.bfloat16 and frame.autocast_dtype(x.double()) is None
        with frame.autocast_off("cpu"):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


# ---- registered ops -------------------------------------------------------------------------------------------------


def _forward(x, w, where, scale, save):
    """y = scale x w, z = x @ x; it keeps x²."""
    return scale * x * (1 if w is None else w), x @ x, x * x if save else x.new_empty(0)


def _backward(dy, dz, x, w, where, kept, scale):
    assert torch.equal(kept, x * x)
    UNUSED.append(dz is None)  # instead of zeros that would have to be read
    dx = scale * dy * (1 if w is None else w)
    dx = dx if dz is None else dx + dz @ x.T + x.T @ dz
    return dx, x.new_empty(0) if w is None else scale * dy * x


UNUSED = []
INPUTS = "Tensor x, Tensor? w, Tensor where"


@pytest.fixture(scope="module")
def op():
    """A toy with everything that the frame handles: an optional tensor, an integer one, settings, two results, one kept."""
    frame.register(
        "toy_fwd", f"({INPUTS}, float scale, bool save, str impl) -> (Tensor y, Tensor z, Tensor kept)",
        lambda *args: _forward(*args[:-1]),
        lambda x, w, where, scale, save, _: tuple(x.new_empty(shape) for shape in (x.shape, x.shape, x.shape if save else 0)),
    )  # fmt: skip
    frame.register(
        "toy_bwd", f"(Tensor dy, Tensor? dz, {INPUTS}, Tensor kept, float scale, str impl) -> (Tensor dx, Tensor dw)",
        lambda *args: _backward(*args[:-1]),
        lambda dy, dz, x, w, *_: (x.new_empty(x.shape), x.new_empty(0 if w is None else w.shape)),
    )  # fmt: skip
    frame.register_gradient("toy", 3, 2, "the toy has no second derivative", saves=True)
    return torch.ops.seqmix.toy_fwd


def leaves():
    g = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)]


def test_a_registered_op_is_one(op):
    x, w = leaves()
    where = torch.zeros(3, dtype=torch.int64)
    for weight in (w, None):
        torch.library.opcheck(op.default, (x, weight, where, 2.0, True, "c"))
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(x), None, mode.from_tensor(where), 2.0, True, "c")
    assert all(isinstance(t, FakeTensor) for t in fake)
    on_meta = op(*(t.detach().to("meta") for t in (x, w, where)), 2.0, False, "c")
    assert [tuple(t.shape) for t in on_meta] == [(3, 3), (3, 3), (0,)] and on_meta[0].is_meta


def test_gradients_are_those_of_the_backward_whatever_is_used_or_given(op):
    where = torch.zeros(3, dtype=torch.int64)
    for used in ((0, 1), (0,), (1,)):
        for given in (True, False):
            x, w = leaves()
            found, exact = (
                op(x, w if given else None, where, 2.0, True, "c"),
                _forward(x, w if given else None, where, 2.0, True),
            )
            inputs = (x, w) if given and 0 in used else (x,)
            for got, want in zip(*(torch.autograd.grad(sum(t[i].sin().sum() for i in used), inputs) for t in (found, exact)),
                                 strict=True):  # fmt: skip
                torch.testing.assert_close(got, want)
            assert not found[2].requires_grad and UNUSED[-1] == (1 not in used)


def test_forward_and_backward_run_with_autocast_off_and_under_checkpointing(op):
    x, w = (t.detach().float().requires_grad_() for t in leaves())
    where = torch.zeros(3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        _, z, _ = torch.utils.checkpoint.checkpoint(op, x, w, where, 2.0, True, "c", use_reentrant=False)
        (dx,) = torch.autograd.grad(z.sum(), x)
    want = torch.ones_like(z) @ x.T + x.T @ torch.ones_like(z)
    torch.testing.assert_close(dx, want)
    assert torch.equal(z, x @ x)


def test_a_second_derivative_is_refused(op):
    x, w = leaves()
    y, *_ = op(x, w, torch.zeros(3, dtype=torch.int64), 2.0, True, "c")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="the toy has no second derivative"):
        dx.sum().backward()


def test_one_graph_under_compile_with_the_same_gradients(op):
    def loss(x, w, where):
        y, z, _ = op(x, w, where, 2.0, True, "c")
        return y.sin().sum() + z.sum()

    where = torch.zeros(3, dtype=torch.int64)
    x, w = leaves()
    eager = torch.autograd.grad(loss(x, w, where), (x, w))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w, where), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))

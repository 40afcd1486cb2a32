"""The attention operator on a CPU: the equation by hand, every implementation that runs here, and, with flash-attn-4 stood in
for, all that is around a backend. tests/kernels/test_attention_gpu.py runs the backends themselves."""

import contextlib
import functools
import math
import pickle
import sys
import types
from pathlib import Path

import pytest
import stand_in_fa4
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqmix_kernels.ops.attention import (
    IMPLS,
    Case,
    alibi_slopes,
    attention,
    attention_step,
    case_of,
    fa2,
    fa4,
    op,
    rotary_phases,
    rotate,
    which_impl,
)

F64 = dict(rtol=0, atol=1e-12)
ON_CPU = ("math", "flash")


def normal(*shape, dtype=torch.float64, seed=1, grad=False):
    t = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return t.requires_grad_(grad)


def qkv(B=2, L=9, S=None, H=4, H_kv=None, P=8, dtype=torch.float64, grad=False):
    sizes = ((L, H), (L if S is None else S, H if H_kv is None else H_kv), (L if S is None else S, H if H_kv is None else H_kv))
    return [normal(B, n, h, P, dtype=dtype, seed=i, grad=grad) for i, (n, h) in enumerate(sizes)]


def by_hand(q, k, v, window=None, slopes=None, seq_idx=None, lengths=None):
    """One row, one head, one query at a time, and only the keys that it sees."""
    B, L, H, P = q.shape
    S, shared = k.shape[1], q.shape[2] // k.shape[2]
    y = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            w = window[h] if isinstance(window, (tuple, list)) else window
            for i in range(L):
                t = (S if lengths is None else int(lengths[b])) - L + i
                first = 0 if w is None else max(0, t - w + 1)
                while seq_idx is not None and any(seq_idx[b, s] != seq_idx[b, t] for s in range(first, t)):
                    first += 1
                if t < first:
                    continue
                keys, values = k[b, first : t + 1, h // shared], v[b, first : t + 1, h // shared]
                scores = keys @ q[b, i, h] / math.sqrt(P)
                if slopes is not None:
                    scores = scores - slopes[h] * (t - torch.arange(first, t + 1))
                y[b, i, h] = scores.softmax(0) @ values
    return y


INDEX = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 0, 7], [3] * 9])
LENGTHS = torch.tensor([5, 12], dtype=torch.int32)
OPTIONS = {
    "plain": ({}, {}),
    "cache": (dict(L=3, S=12), {}),
    "one query": (dict(L=1, S=12), {}),
    "shared heads": (dict(H_kv=2), {}),
    "one key head, one query": (dict(L=1, S=12, H_kv=1), {}),
    "window": ({}, dict(window=3)),
    "window of one": ({}, dict(window=1)),
    "windows that differ": (dict(H_kv=2), dict(window=[1, None, 4, None])),
    "ALiBi": (dict(H_kv=2), dict(slopes=alibi_slopes(4))),
    "ALiBi over a cache": (dict(L=3, S=12), dict(slopes=alibi_slopes(4))),
    "documents": ({}, dict(seq_idx=INDEX)),
    "documents and window": ({}, dict(seq_idx=INDEX, window=2)),
    "lengths": (dict(L=3, S=14), dict(lengths=LENGTHS)),
    "lengths, one query": (dict(L=1, S=14, H_kv=2), dict(lengths=LENGTHS, window=4)),
    "head of 3": (dict(P=3), {}),
}
over_options = pytest.mark.parametrize("option", OPTIONS)


@over_options
@pytest.mark.parametrize("impl", ON_CPU)
def test_the_equation(option, impl):
    sizes, told = OPTIONS[option]
    args = qkv(**sizes)
    torch.testing.assert_close(attention(*args, **told, impl=impl), by_hand(*args, **told), **F64)


def gradients(args, run, dy):
    leaves = [t.detach().clone().requires_grad_() for t in args]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@over_options
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_in_the_budget_of_the_dtype(option, dtype, assert_no_worse):
    """In 16 bits torch's own error is that of the equation with its weights rounded, as a kernel rounds them."""
    sizes, told = OPTIONS[option]
    args = qkv(**sizes, dtype=dtype)
    dy = normal(*args[0].shape, dtype=dtype, seed=9)
    names = ("y", "dq", "dk", "dv")
    truth = gradients([t.double() for t in args], functools.partial(attention, **told, impl="math"), dy.double())
    ours = gradients(args, functools.partial(attention, **told, impl="flash"), dy)
    plain = gradients(args, functools.partial(attention, **told, impl="math"), dy)
    if option == "window of one":  # of one key the weight is 1, whatever q and k
        assert all((g == 0).all() for g in truth[1:3]) and all(g.abs().max() < 1e-2 for g in ours[1:3])
        names, truth, ours, plain = ("y", "dv"), truth[::3], ours[::3], plain[::3]
    assert_no_worse(*(dict(zip(names, values, strict=True)) for values in (ours, plain, truth)))


def test_math_has_every_derivative():
    args = qkv(B=1, L=4, S=5, H=2, H_kv=1, P=2, grad=True)
    run = functools.partial(attention, window=(2, None), slopes=(0.5, 0.25), impl="math")
    assert torch.autograd.gradcheck(run, args) and torch.autograd.gradgradcheck(run, args)


# -- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ON_CPU)
def test_b01_the_corner_is_the_last_key(impl):
    v, zero = torch.arange(4.0).view(1, 4, 1, 1), torch.zeros(1, 4, 1, 1)
    assert attention(zero[:, :1], zero, v, impl=impl).flatten().tolist() == [1.5]
    assert attention(zero[:, :2], zero, v, impl=impl).flatten().tolist() == [1.0, 1.5]
    assert attention(zero, zero, v, impl=impl).flatten().tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("impl", ON_CPU)
def test_b03_a_row_that_sees_nothing_is_zero_and_so_are_its_gradients(impl):
    args = qkv(L=3, S=4, dtype=torch.float32, grad=True)
    y = attention(*args, lengths=torch.tensor([4, 0], dtype=torch.int32), impl=impl)
    grads = torch.autograd.grad(y.square().sum(), args)
    assert (y[0] != 0).all() and (y[1] == 0).all()
    for g in grads:
        assert g.isfinite().all() and (g[1] == 0).all() and g[0].any()


def test_b04_what_cannot_run_is_an_error_with_its_reason():
    args = qkv(dtype=torch.float32)
    for impl, words in (
        ("fa4", r"flash-attn-4 \(the extra `gpu`: pip install -e '.\[gpu\]'\) needs an NVIDIA GPU, q is on the CPU"),
        ("fa2", "it needs an NVIDIA GPU, q is on the CPU"),
        ("cudnn", "it needs an NVIDIA GPU, q is on the CPU"),
        ("efficient", "it needs an NVIDIA GPU, q is on the CPU"),
    ):
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot run here: {words}"):
            attention(*args, impl=impl)
    with pytest.raises(ValueError, match=r"impl must be one of auto, fa4, .*; got 'fast'"):
        attention(*args, impl="fast")
    with pytest.raises(ValueError, match="on a CPU it has no dropout"):
        attention(*args, impl="flash", dropout=0.1)


@pytest.mark.parametrize(
    "capability, changed, impl, words",
    [
        ((9, 0), dict(dtype=torch.float32), "fa4", "computes in bfloat16 and float16, q is float32"),
        ((9, 0), dict(dtype=torch.float32), "flash", "computes in bfloat16 and float16, q is float32"),
        ((9, 0), dict(dtype=torch.float64), "efficient", "float32, bfloat16 and float16, q is float64"),
        ((7, 5), {}, "fa4", "needs compute capability 9.0 for gradients, this GPU has 7.5"),
        ((8, 0), {}, "fa4", "needs compute capability 9.0 for gradients, this GPU has 8.0"),
        ((7, 5), dict(train=False), "fa4", "needs compute capability 8.0, this GPU has 7.5"),
        ((7, 5), {}, "flash", "needs compute capability 8.0, this GPU has 7.5"),
        ((9, 0), dict(head_dim=264), "fa4", "takes heads of at most 256 on this GPU, these are 264 wide"),
        ((10, 0), dict(head_dim=136), "fa4", "takes heads of at most 128 on this GPU, these are 136 wide"),
        ((9, 0), dict(head_dim=136), "cudnn", "at most 128 wide, these are 136"),
        ((9, 0), dict(dropout=True), "fa4", "no dropout"),
        ((9, 0), dict(windowed=True), "cudnn", "takes no window"),
        ((9, 0), dict(packed=True), "cudnn", "takes no seq_idx"),
        ((9, 0), dict(square=False), "cudnn", "takes no keys before the queries"),
        ((9, 0), dict(cached=True), "flash", "takes no lengths"),
        ((9, 0), {}, "fa4", r"the extra `gpu`: pip install -e '.\[gpu\]'\) cannot be imported"),
        ((9, 0), {}, "fa2", "flash-attn package"),
    ],
)
def test_reasons_on_cards_that_are_not_here(monkeypatch, capability, changed, impl, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for backend in (fa2, fa4):
        backend._missing.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    case = Case(torch.device("cuda"), torch.bfloat16, 64, 1, train=True)._replace(**changed)
    with pytest.raises(ValueError, match=words):
        op._choose(case, impl)
    for backend in (fa2, fa4):
        backend._missing.cache_clear()


def test_a_choice_holds_for_one_setting_of_deterministic_algorithms(monkeypatch):
    """cuDNN's backward has no order: where an order is asked for, it is refused, also where it was the fastest before."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(op.probe, "check", lambda run, case: None)
    monkeypatch.setattr(op.probe, "milliseconds", lambda run, case: 1.0 if run.args[0] == "cudnn" else 2.0)
    monkeypatch.setattr(op, "_tried", {})
    monkeypatch.setattr(op, "_handed", {})
    op._decide_once.cache_clear()
    case = Case(torch.device("cuda"), torch.bfloat16, 64, 1, train=True)
    assert which_impl(case)[0] == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        name, reason = which_impl(case)
        with pytest.raises(ValueError, match="impl='cudnn' cannot run here: it is not deterministic"):
            op._choose(case, "cudnn")
        op.take_choices({key: ("cudnn", "in another process") for key in op.tried_choices()})
        op._decide_once.cache_clear()
        assert which_impl(case)[0] == name
    finally:
        torch.use_deterministic_algorithms(False)
        op._decide_once.cache_clear()
    assert name == "flash" and "cudnn: it is not deterministic" in reason


def test_auto_on_a_cpu_says_why_not_faster(caplog):
    op._decide_once.cache_clear()
    with caplog.at_level("INFO", "seqmix_kernels"):
        case = case_of(*qkv(dtype=torch.float32))
        name, reason = which_impl(case)
        attention(*qkv(dtype=torch.float32))
    assert name == "flash" and "fa4: flash-attn-4 (the extra `gpu`" in reason
    assert [r.getMessage() for r in caplog.records] == [f"attention in float32 on cpu uses flash: {reason}"]  # once
    assert which_impl(case_of(*qkv()))[0] == "math"
    assert which_impl(case_of(*qkv(dtype=torch.float32), dropout=0.1))[0] == "math"


def test_auto_on_a_gpu_takes_the_fastest_that_is_right(monkeypatch):
    """A clock that lies, and backends that fail or are wrong: the choice and its reasons."""
    speeds = {"fa4": 1.04, "fa2": None, "cudnn": 1.0, "flash": 0.5, "efficient": 3.0}

    def checked(run, case):
        if run.args[0] == wrong:
            raise ArithmeticError("dq is off by 3.0e-01 of its norm, 1.6e-02 is allowed")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    wrong = "flash"
    monkeypatch.setattr(op.probe, "check", checked)
    monkeypatch.setattr(op.probe, "milliseconds", lambda run, case: speeds[run.args[0]])
    monkeypatch.setattr(op, "why_not", lambda impl, case: "not installed" if impl == "fa2" else None)
    case = Case(torch.device("cuda"), torch.bfloat16, 64, 1, train=True)
    name, reason = op._decide(case)
    assert name == "fa4"  # within 5 % of cudnn, and before it
    assert "fastest of fa4 1.040, cudnn 1.000, efficient 3.000 ms" in reason
    assert "fa2: not installed" in reason and "flash: failed its probe (ArithmeticError: dq is off" in reason
    speeds["fa4"] = 1.06
    assert op._decide(case)[0] == "cudnn"
    small = case._replace(large=False)
    name, reason = op._decide(small)  # by no clock
    assert name == "efficient" and "fa4: slow to launch" in reason and "flash: failed its probe" in reason
    wrong = None
    assert op._decide(small)[0] == "flash"

    def broken(run, case):
        raise AssertionError

    monkeypatch.setattr(op.probe, "check", broken)
    name, reason = op._decide(case)
    assert name == "math" and reason.startswith("nothing else can run here") and "efficient: failed its probe" in reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        op._decide(case)


def test_a_pass_without_numbers_is_chosen_for_by_real_ones(monkeypatch):
    """Under FakeTensorMode the probe runs on tensors that have numbers; where there is no GPU, it does not run."""
    case = Case(torch.device("cuda"), torch.bfloat16, 64, 1, train=True)
    if not torch.cuda.is_available():
        with FakeTensorMode():
            q, k, v = (torch.empty(2, 9, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            name, reason = which_impl(case_of(q, k, v))
        assert name == "math" and "no GPU here" in reason
    for name in ("device", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext() if _ else False)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(op, "why_not", lambda impl, case: None)
    monkeypatch.setattr(op.probe, "_compare", lambda run, case: seen.append(torch.ones(3, device="cpu").sum().item()))
    monkeypatch.setattr(op.probe, "_inputs", lambda *_: (None, None, None))
    monkeypatch.setattr(op.probe, "_time", lambda call: 1.0)
    seen = []
    with FakeTensorMode():
        name, _ = op._decide(case)
    assert name == "fa4" and seen == [3.0] * 5


def test_what_one_process_has_tried_another_need_not(monkeypatch):
    tried, card = [], "card A"

    def decide(case):
        tried.append(case)
        return "cudnn", "fastest of cudnn 1.000 ms"

    monkeypatch.setattr(op, "_decide", decide)
    monkeypatch.setattr(op, "why_not", lambda impl, case: refused)
    monkeypatch.setattr(op, "_tried", {})
    monkeypatch.setattr(op, "_handed", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case, refused = Case(torch.device("cuda", 0), torch.bfloat16, 64, 1, train=True), None

    def another_process(choices):
        op._decide_once.cache_clear()
        op._tried.clear()
        op._handed.clear()
        op.take_choices(pickle.loads(pickle.dumps(choices)))
        return which_impl(case)

    assert another_process({}) == which_impl(case) == ("cudnn", "fastest of cudnn 1.000 ms") and len(tried) == 1
    known = op.tried_choices()
    told = "cudnn", "fastest of cudnn 1.000 ms" + op.EARLIER
    assert another_process(known) == another_process(op.tried_choices()) == told and len(tried) == 1
    which_impl(case._replace(train=False))
    which_impl(case._replace(cached=True))
    assert len(tried) == 3 and [key[-1] for key in op.tried_choices()] == [case, case._replace(train=False)]
    card = "card B"
    assert another_process(known)[1] == "fastest of cudnn 1.000 ms" and len(tried) == 4, "another card is tried"
    card, refused = "card A", "not installed here"
    assert another_process(known)[1] == "fastest of cudnn 1.000 ms" and len(tried) == 5, "what cannot run here is not taken"
    op._decide_once.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changed", [{}, {"windowed": True}, {"packed": True}, {"square": False}, {"train": False}], ids=str)
def test_the_numeric_probe_tells_right_from_wrong(dtype, changed):
    case = Case(torch.device("cpu"), dtype, 32, 2, train=True)._replace(**changed)
    op.probe._compare(functools.partial(attention, impl="flash"), case)

    def fewer_keys(q, k, v, window, *rest):
        return attention(q, k, v, 60 if window is None else tuple(w - 1 for w in window), *rest, impl="flash")

    def quarter_gradient(q, k, v, *rest):
        y = attention(q, k, v, *rest, impl="flash")
        return 0.75 * y.detach() + 0.25 * y

    for wrong, words in ((fewer_keys, "y is off"), (quarter_gradient, "dq is off by 7.5e-01")):
        if wrong is quarter_gradient and not case.train:
            continue
        with pytest.raises(ArithmeticError, match=words):
            op.probe._compare(wrong, case)


def test_b06_any_head_size():
    for P in (1, 3, 24, 257):
        args = qkv(P=P, L=5)
        torch.testing.assert_close(attention(*args, impl="flash"), by_hand(*args), **F64)


def test_b07_neighbouring_query_heads_share_a_key_head():
    q, k, v = qkv(L=5, H=8, H_kv=2, P=4)
    y = attention(q, k, v)
    wide = [t.repeat_interleave(4, dim=2) for t in (k, v)]
    torch.testing.assert_close(y, attention(q, *wide), **F64)
    assert (y - attention(q, *(t.repeat(1, 1, 4, 1) for t in (k, v)))).abs().max() > 0.1


@pytest.mark.parametrize("impl", ON_CPU)
def test_b11_any_strides(impl):
    """Views of a fused projection, heads before time, a value expanded over heads, an axis that is not dense."""
    fused = normal(2, 9, 3, 4, 8)
    wanted = attention(*(t.contiguous() for t in fused.unbind(2)), impl=impl)
    torch.testing.assert_close(attention(*fused.unbind(2), impl=impl), wanted, **F64)
    q, k, v = fused.unbind(2)
    shuffled = [t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for t in (q, k, v)]
    assert all(t.stride(-1) != 1 for t in shuffled)
    torch.testing.assert_close(attention(*shuffled, impl=impl), wanted, **F64)
    one = v[:, :, :1].expand(-1, -1, 4, -1)
    torch.testing.assert_close(attention(q, k, one, impl=impl), attention(q, k, one.contiguous(), impl=impl), **F64)


def test_dropout_keeps_the_mean():
    q, k, v = (t.expand(20_000, -1, -1, -1) for t in qkv(B=1, L=6, H=1, P=2))
    torch.manual_seed(0)
    dropped = attention(q, k, v, dropout=0.3)
    torch.testing.assert_close(dropped.mean(0), attention(q[:1], k[:1], v[:1])[0], rtol=0, atol=0.05)
    assert not torch.equal(dropped[0], dropped[1])


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(16)[:2] == (2**-0.5, 2**-1.0)
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert alibi_slopes(1) == (2**-8,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("H, P", [(8, 64), (12, 40)])
def test_alibi_columns_are_the_bias(dtype, H, P):
    """Their product, in float32, is slope (s - S + 1) / scale to 24 bits, also past 65536 keys."""
    S, slopes = 70_001, alibi_slopes(H)
    q, k = op._with_alibi(torch.zeros(1, 1, H, P, dtype=dtype), torch.zeros(1, S, 1, P, dtype=dtype), slopes, P**-0.5)
    assert q.isfinite().all() and k.isfinite().all()
    made = (q[0, 0].double() @ k[0, :, 0].double().T) * P**-0.5  # (H, S)
    wanted = torch.tensor(slopes).double()[:, None] * torch.arange(-S + 1, 1)
    low = 2.0**-19 if dtype == torch.float16 else 2.0**-23  # float16 has no numbers as small as the last bits
    torch.testing.assert_close(made, wanted, rtol=low, atol=1e-12)


def test_nothing_in_nothing_out():
    for sizes in (dict(L=0), dict(B=0), dict(L=0, S=4)):
        args = qkv(**sizes, dtype=torch.float32, grad=True)
        y = attention(*args)
        assert y.shape == args[0].shape
        for t, g in zip(args, torch.autograd.grad(y.sum(), args), strict=True):
            assert torch.equal(g, torch.zeros_like(t))
        k = args[1].detach().requires_grad_()  # it alone needs one
        (g,) = torch.autograd.grad(attention(args[0].detach(), k, args[2].detach()).sum(), k)
        assert torch.equal(g, torch.zeros_like(k))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(q=normal(2, 9, 8)), r"q must be \(B, L, H, P\)"),
        (dict(k=normal(2, 9, 4, 7)), "k and v must be"),
        (dict(v=normal(2, 9, 3, 8)), "k and v must be"),
        (dict(k=normal(2, 9, 3, 8), v=normal(2, 9, 3, 8)), "heads of k must divide those of q; got 3 and 4"),
        (dict(k=normal(2, 8, 4, 8), v=normal(2, 8, 4, 8)), "L = 9 and S = 8"),
        (dict(k=normal(2, 9, 4, 8, dtype=torch.float32)), "k must be torch.float64 like q; got torch.float32"),
        (dict(q=torch.ones(2, 9, 4, 8, dtype=torch.int64)), "got torch.int64"),
        (dict(window=2.0), "window must be a positive integer.*got 2.0"),
        (dict(window=0), "window must be a positive integer.*got 0"),
        (dict(window=(3, 3)), "for each of 4 heads; got"),
        (dict(slopes=(0.5,)), "slopes must be 4 finite numbers"),
        (dict(slopes=(0.5, -1.0, 0.0, 0.0)), "at least 0"),
        (dict(seq_idx=torch.zeros(2, 8, dtype=torch.long)), r"seq_idx must be \(B, L\) = \(2, 9\); got \(2, 8\)"),
        (dict(seq_idx=torch.zeros(2, 9)), "integers; got torch.float32"),
        (dict(seq_idx=INDEX, lengths=LENGTHS), "without lengths"),
        (dict(lengths=torch.tensor([9, 9])), r"lengths must be \(2,\) of int32"),
        (dict(dropout=1.0), r"dropout must lie in \[0, 1\); got 1.0"),
        (dict(k=torch.empty(2, 9, 4, 8, dtype=torch.float64, device="meta")), "k must be on cpu like q; got meta"),
    ],
)
def test_bad_input_is_named(change, words):
    given = dict(zip("qkv", qkv(), strict=True)) | change
    with pytest.raises(ValueError, match=words):
        attention(**given)


# -- around a backend that is not here --------------------------------------------------------------------------------


@pytest.fixture
def fa4_stood_in(monkeypatch):
    monkeypatch.setattr(fa4, "_interface", lambda: stand_in_fa4)
    monkeypatch.setattr(fa4, "why_not", lambda case: None)


@over_options
def test_fa4_is_called_right(option, fa4_stood_in):
    sizes, told = OPTIONS[option]
    args = qkv(**sizes)
    y = attention(*args, **told, impl="fa4")
    torch.testing.assert_close(y, by_hand(*args, **told), **F64)
    if "lengths" in told:
        return
    dy = normal(*args[0].shape, seed=9)
    want, got = (gradients(args, functools.partial(attention, **told, impl=impl), dy) for impl in ("math", "fa4"))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, **F64)


def test_fa4_is_a_registered_operator(fa4_stood_in):
    q, k, v = qkv(L=5, H_kv=2, dtype=torch.float32, grad=True)
    torch.library.opcheck(torch.ops.seqmix.fa4_fwd.default, (q, k, v, None, None, 0.3, None, None))
    flat = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    torch.library.opcheck(torch.ops.seqmix.fa4_fwd.default, (*flat, offsets, None, 0.3, 2, 5))
    torch.library.opcheck(torch.ops.seqmix.document_offsets.default, (INDEX,))
    assert torch.ops.seqmix.document_offsets(INDEX).tolist() == [0, 3, 5, 8, 9, 18]
    y = attention(q, k, v, impl="fa4")
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='impl="math" has one'):
        dq.sum().backward()


@pytest.mark.parametrize("option", ["plain", "windows that differ", "ALiBi", "documents", "lengths, one query"])
@pytest.mark.parametrize("impl", ["flash", "fa4"])
def test_one_graph_under_torch_compile(option, impl, fa4_stood_in):
    sizes, told = OPTIONS[option]
    args = qkv(**sizes, dtype=torch.float32)
    run = functools.partial(attention, **told, impl=impl)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    if impl == "fa4" and "lengths" in told:
        return torch.testing.assert_close(compiled(*args), run(*args))
    dy = normal(*args[0].shape, dtype=torch.float32, seed=9)
    for a, b in zip(gradients(args, run, dy), gradients(args, compiled, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("keys", [{}, {"slopes": alibi_slopes(4)}], ids=["plain", "ALiBi"])
def test_one_graph_for_many_lengths(keys):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(functools.partial(attention, **keys), backend=backend, fullgraph=True)
    for L in (17, 40, 99):
        args = qkv(L=L, dtype=torch.float32)
        for t in args:
            torch._dynamo.mark_dynamic(t, 1)
        torch.testing.assert_close(run(*args), attention(*args, **keys))
    assert len(graphs) == 1


@pytest.mark.parametrize("seq_idx", [None, INDEX])
def test_fa2_is_called_by_the_names_of_its_arguments(monkeypatch, seq_idx):
    """flash-attn cannot be built here: a package with its two functions' signatures stands in."""
    seen = []

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        seen.append((dropout_p, softmax_scale, causal, window_size, deterministic))
        return attention(q, k, v, window_size[0] + 1, impl="math")

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k and (max_seqlen_q, max_seqlen_k) == (9, 9)
        seen.append((dropout_p, softmax_scale, causal, window_size, deterministic))
        index = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)[None]
        return attention(q[None], k[None], v[None], window_size[0] + 1, seq_idx=index, impl="math")[0]

    package = types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(fa2, "why_not", lambda case: None)
    args = qkv()
    y = attention(*args, window=4, seq_idx=seq_idx, impl="fa2")
    torch.testing.assert_close(y, by_hand(*args, window=4, seq_idx=seq_idx), **F64)
    assert seen == [(0.0, 8**-0.5, True, (3, 0), False)]


# -- one token against a cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows, slopes", [(None, None), ((3, None, 1, 5), None), (None, alibi_slopes(4))])
@pytest.mark.parametrize("rotary", [0, 4, 8])
def test_a_step_is_attention_over_what_is_cached(rotary, windows, slopes):
    q, k, v = qkv(L=7, H_kv=2)
    phases = rotary_phases(torch.arange(7), rotary, 100.0, 1.5, q.dtype)
    turned = (q, k) if rotary == 0 else (rotate(q, *phases), rotate(k, *phases))
    want = attention(*turned, v, windows, slopes)
    caches = torch.zeros(2, 2, 10, 8).double(), torch.zeros(2, 2, 10, 8).double()
    for t in range(7):
        length = torch.full((2,), t, dtype=torch.int32)
        y, after = attention_step(q[:, t], k[:, t], v[:, t], *caches, length, rotary, 100.0, 1.5, windows, slopes)
        torch.testing.assert_close(y, want[:, t], **F64)
        assert after.tolist() == [t + 1, t + 1] and length.tolist() == [t, t]
    torch.testing.assert_close(caches[0][:, :, :7].transpose(1, 2), turned[1], **F64)
    assert not caches[0][:, :, 7:].any()
    with pytest.raises(ValueError, match="impl='fused' cannot run here: it needs a CUDA device, the tensors are on cpu"):
        attention_step(q[:, 0], k[:, 0], v[:, 0], *caches, length, impl="fused")


def test_the_fused_step_under_the_interpreter(script):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    *rows, past = script("interpret_attention_step.py")
    assert len(rows) == 7 and past["nan"] and past["same"] and past["other"]
    for row in rows:
        assert row["y"] < max(4 * row["eps"], 1e-6) and row["written"] < 4 * max(row["eps"], 1e-6), row
        assert row["spare_untouched"] and row["after"], row


def test_the_fused_rotation_under_the_interpreter(script):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4")
    rows = script("interpret_rotary.py")
    assert len(rows) == 4
    for row in rows:
        assert row["error"] < 4 * max(row["eps"], 1000 / 1.5 * 2.0**-24 if "1000" in row["case"] else 0), row


def test_the_fused_kernels_compile_for_hopper_without_spilling(script):
    """STACK is the table of the cosine's range reduction, of arguments past 10^5; without rotation there is none."""
    pytest.importorskip("triton")
    *rows, forward, backward = script("compile_attention_step.py")
    for row in (forward, backward):
        assert row["registers"] <= 128 and row["stack"] <= 48, row
    assert len(rows) == 5
    for row in rows:
        assert row["registers"] <= 168 and row["stack"] <= (48 if row["rotary"] else 0), row
        assert row["async_copies"] and row["shared"] <= 100_000, row


def test_impls_are_all_named_in_the_readme():
    text = (Path(op.__file__).parent / "README.md").read_text()
    assert all(f"`{name}`" in text for name in IMPLS)

"""The fused scan's kernels: under Triton's interpreter and compiled for absent GPUs here, and the real thing (`gpu`).

Truth is the plain recurrence in float64. The budget is what plain torch makes of the same inputs in their dtype, times a
factor: 4, for another order of summation and exp2 in place of exp. 16-bit inputs add the rounding of the saved states,
2^-15 of the channel's largest, which reaches dA and ddt_bias (the interpreter truncates to bfloat16: one more bit).
"""

import functools
import math
import operator
import types
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and not torch.cuda.is_available():
    pytest.skip("the interpreter of Triton 3.6 fails with numpy 2.4", allow_module_level=True)


def within(ours, torch_errors, saved16, truncated=False):
    bad = {}
    for name, error in ours.items():
        budget = 4 * torch_errors[name] + 2.0**-22
        if name == "dA":  # summed over steps one by one, where torch halves: up to a thousand of them here
            budget += 2.0**-20
        if truncated:
            budget += 2.0**-8
        if saved16 and name in ("dA", "ddt_bias"):
            budget += 3 * 2.0**-15
        if not error <= budget:
            bad[name] = (error, budget)
    return bad


@pytest.fixture(scope="module")
def interpreted(script):
    if torch.cuda.is_available():
        pytest.skip("the real kernels run here")
    return script("interpret_scan.py")


def test_interpreted_kernels_match_the_equation(interpreted, script):
    rows = [r for r in interpreted if "ours" in r]
    assert len(rows) == (16 if script.short else 28)
    bad = {r["case"]: b for r in rows if (b := within(r["ours"], r["torch"], "float16" in r["case"], "bfloat16" in r["case"]))}
    assert not bad
    assert all(r["same"] for r in rows)


def test_a_nan_stays_a_nan_and_in_its_row(interpreted):
    row = next(r for r in interpreted if r["case"] == "nan")
    assert row["y"] and row["final"] and row["clean"]


def test_an_empty_sequence_hands_the_state_through(interpreted):
    rows = [r for r in interpreted if r["case"].startswith("empty")]
    assert len(rows) == 2 and all(r["zero"] and r["through"] and r["shapes"] for r in rows)


def in_torch(module, *names):
    """Functions of a kernel module as torch would run them: no interpreter knows Gluon."""
    around = {k: getattr(v, "value", v) for k, v in vars(module).items()}
    around["gl"] = types.SimpleNamespace(where=torch.where, abs=torch.abs)
    for name in names:
        around[name] = types.FunctionType(getattr(module, name).fn.__code__, around)
    return [around[name] for name in names]


@pytest.mark.parametrize("fine", [True, False])
def test_zero_order_hold_near_and_far_from_zero(fine):
    from seqmix_kernels.ops.selective_scan import gluon_helpers, reference

    _, held, held_slope = in_torch(gluon_helpers, "series", "held", "held_slope")
    r = torch.Generator().manual_seed(0)
    delta = torch.cat(
        [0.1 * torch.rand(3000, generator=r), 3 * torch.rand(1000, generator=r), torch.tensor([0.0, 1e-30, 1e-6])]
    )
    A = torch.tensor([0.0, 1e-38, -1e-4, 0.5, *range(-16, 0)])[:, None] * gluon_helpers.LOG2E.value
    v = delta * A
    got, slope = held_slope(v, v.exp2(), delta, 1 / A, fine)
    assert torch.equal(got, held(v, v.exp2(), delta, 1 / A, fine))
    u = (v.double() * math.log(2)).requires_grad_()
    phi = reference.phi(u)
    dphi = torch.autograd.grad(phi.sum(), u)[0] * math.log(2)
    # 2^-24 of the exponential, against |u| / 1 and |u| / 2 where the series ends, and the series itself
    near = (gluon_helpers.NEAR_FINE if fine else gluon_helpers.NEAR).value * math.log(2)
    for ours, true, bound in ((got, phi, 2**-23 / near), (slope, delta * dphi, 2**-21 / near**2)):
        wanted = delta * true.detach()
        assert torch.all((ours - wanted).abs() <= bound * wanted.abs() + 1e-37)


def test_segments_fill_the_sms_evenly(monkeypatch):
    from seqmix_kernels.ops.selective_scan import fused

    monkeypatch.setattr(fused, "SMS", 132)
    # 384 CTAs in 264 places; 256; 192, of which four times as many are three full waves; 1024, nearly four; too short
    shapes = (8, 2048, 3072), (8, 4096, 2048), (4, 4096, 3072), (32, 2048, 2048), (8, 1024, 3072)
    assert [fused.even_segments(*shape, True) for shape in shapes] == [2, 1, 4, 1, 1]
    # Euler: three per SM as they are; two at most, and half as many on most SMs otherwise; two or one, then three halves; ...
    assert [fused.even_segments(*shape, False) for shape in shapes] == [1, 1, 2, 1, 1]


def test_ctas_are_narrow_where_the_busiest_sm_then_has_fewer_warps(monkeypatch):
    from seqmix_kernels.ops.selective_scan import fused

    monkeypatch.setattr(fused, "SMS", 132)
    # 192 wide CTAs or 384 narrow ones: 8 warps or 6; 320: 12 or 10; 384: 12 either way; 128: 4 either way; 64: 4 or 2;
    # 400 do not run at once; half of a wide one would be empty
    shapes = (8, 1536), (20, 1024), (8, 3072), (64, 128), (32, 128), (400, 64), (132, 32)
    assert [fused.block_for(*shape) for shape in shapes] == [32, 32, 64, 64, 32, 64, 32]
    x = torch.empty(8, 2048, 1536)
    monkeypatch.setattr(fused, "gluon_why_not", lambda x, groups: None)
    assert fused.plan(x, 1, "euler") == fused.Plan(True, 1, 2, 32, 64)
    assert fused.plan(x[:, :1024], 1, "euler") == fused.Plan(True, 1, 1, 32, 32), "too short to be split"
    assert fused.plan(x, 1, "zoh") == fused.Plan(True, 1, 4, 32, 64), "split, the backward has enough CTAs"
    assert fused.plan(x[:2], 1, "euler")[3:] == (64, 64, None)


@pytest.mark.parametrize("block", [32, 64])
def test_shared_memory_has_no_bank_conflicts(block):
    """Eight lanes that move 16 bytes each, or sixteen with 8, touch every bank at most once."""
    from seqmix_kernels.ops.selective_scan import gluon_helpers as gk

    def free(layout, lanes, size):
        """lanes: what each accesses first, coordinates without the rows of a tile; size in words."""
        words = []
        for at in lanes:
            # the offset whose bases' xor is `at`: the layouts are small enough to try all
            found = [
                o for o in range(1 << len(layout.offset_bases))
                if [functools.reduce(operator.xor, (b[i] for k, b in enumerate(layout.offset_bases) if o >> k & 1), 0)
                    for i in range(len(at))] == list(at)
            ]  # fmt: skip
            words += range(found[0], found[0] + size)
        return len({w % 32 for w in words}) == len(words)

    own = block // 8  # channels of a thread in a tile, whose lanes of a row are eight
    pairs, rows, states = gk.pair_shared(block), gk.row_shared(block), gk.state_shared(block)
    assert all(free(pairs, [(lane * own + c, 0) for lane in range(8)], 4) for c in range(0, own, 2))
    assert all(free(rows, [(lane * own + c,) for lane in range(8)], 4) for c in range(0, own, 4))
    for warp in range(0, block, 16):
        assert free(pairs, [(warp + lane, 0) for lane in range(16)], 2)  # the steps of the forward
        assert free(pairs, [(warp + 2 * lane, 0) for lane in range(8)], 4)  # of the backward
        assert free(rows, [(warp + 2 * lane,) for lane in range(8)], 2)
        assert all(free(states, [(lane % 4 * 4, warp + c + lane // 4 * 2) for lane in range(8)], 4) for c in (0, 1, 4, 8, 12))


@pytest.mark.parametrize(("groups", "channels", "wide"), [(1, 5, 6), (3, 5, 8)])
def test_padded_channels_change_nothing(groups, channels, wide):
    import scan_errors

    from seqmix_kernels.ops.selective_scan import fused, reference

    pad = fused._Pad(groups, channels, wide)
    args = [t.double() for t in scan_errors.inputs(2, 9, groups * channels, 3, groups, torch.float32, device="cpu")]
    dy, dfinal = args[0].flip(1), args[8].flip(2)

    def run(args, dy, dfinal):
        return scan_errors.gradients(args, lambda t: reference.sequential(*t[:8], True, "zoh", t[8]), dy, dfinal)

    x, dt, A, B, C, D, z, bias, state = args
    padded = [pad(x), pad(dt), pad(A, -2), B, C, pad(D), pad(z, value=1.0), pad(bias), pad(state, -2)]
    assert padded[0].shape == (2, 9, groups * wide) and padded[2].shape == (groups * wide, 3)
    got = run(padded, pad(dy), pad(dfinal, -2))
    for i, (ours, true) in enumerate(zip(got, run(args, dy, dfinal), strict=True)):
        if i not in (5, 6):  # dB, dC
            ours = pad.cut(ours, -2 if i in (1, 4, 10) else -1)
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "gluon"])
def test_kernels_compile_for_hopper_without_spills(script, kind):
    rows = script("compile_scan.py", "90", kind)
    others = {"carry_kernel"} if kind == "gluon" else {"reduce_bc_kernel", "finish_kernel"}
    assert {r["kernel"] for r in rows} == {"fwd_kernel", "bwd_kernel"} | others
    for r in rows:
        # the Gluon kernels hold to 168 registers (255 in float32): a few bytes of a tile's go to the stack, in the backward
        # never of a step's (the forward has its 32 steps in one loop over tiles)
        allowed = 0 if kind == "plain" else 240
        assert r["stack"] <= allowed and r["shared"] <= 76_800, r
        assert r["in_loop"] == 0 or r["kernel"] == "fwd_kernel", r


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "allowed"), [("plain", 0), ("gluon", 192)])
def test_kernels_compile_for_ampere_and_blackwell(script, kind, allowed):
    for arch in ("80", "100"):
        rows = [r for r in script("compile_scan.py", arch, kind, "first") if r["kernel"] in ("fwd_kernel", "bwd_kernel")]
        assert len(rows) == (2 if kind == "plain" or script.short else 8)
        assert all(r["in_loop"] == 0 for r in rows if r["kernel"] == "bwd_kernel")
        assert all(r["stack"] <= allowed and r["shared"] <= 99 * 1024 for r in rows)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def scan():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import scan_errors

    from seqmix_kernels.ops.selective_scan import fused

    kept = fused.SMS
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN: what is not written shows
    yield scan_errors, fused
    torch.use_deterministic_algorithms(False)
    fused.SMS = kept


GPU_CASES = [
    (2, 127, 128, 16, 1, torch.bfloat16, ()),
    (1, 65, 100, 13, 1, torch.float16, ("z",)),
    (1, 65, 64, 4, 1, torch.float16, ()),
    (2, 64, 72, 16, 1, torch.float32, ()),
    (2, 63, 128, 16, 2, torch.float32, ("D", "dt_bias", "initial_state")),
    (1, 100, 7, 3, 1, torch.bfloat16, ()),
    (2, 33, 24, 33, 2, torch.float32, ()),
    (2, 70, 96, 33, 1, torch.float32, ()),
    (2, 100, 128, 64, 2, torch.bfloat16, ()),
    (1, 50, 64, 40, 1, torch.float16, ("z", "initial_state")),
    (1, 40, 16, 256, 1, torch.bfloat16, ()),
    (1, 1, 7, 1, 1, torch.float32, ()),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_real_kernels_match_the_equation(scan, case):
    bench, fused = scan
    args = bench.inputs(*case)
    hows = [(fused.Plan(False), 0)]
    if fused.gluon_why_not(args[0], case[4]) is None:
        hows += [(fused.Plan(True, 1, 1), 0), (fused.Plan(True, 3, 3), 132)]
        hows += [(fused.Plan(True, 1, 1, 32, 32), 132), (fused.Plan(True, 3, 3, 32, 64), 0)]
    for how, fused.SMS in hows:
        e = bench.errors(args, how)
        assert e.same and not within(e.ours, e.torch, args[0].dtype != torch.float32), how


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        (2, 127, 128, 16, 1, torch.bfloat16, ()),
        (1, 65, 71, 33, 1, torch.float16, ("z",)),
        (2, 64, 71, 16, 1, torch.float32, ()),
        (1, 100, 33, 16, 1, torch.bfloat16, ("initial_state", "D")),
        (2, 97, 140, 5, 2, torch.bfloat16, ()),
        (2, 70, 96, 33, 1, torch.float32, ()),
        (1, 1, 1, 16, 1, torch.bfloat16, ()),
        (2, 40, 1, 3, 1, torch.float32, ()),
    ],
    ids=str,
)
def test_zero_order_hold_and_padded_channels_in_gluon(scan, case):
    """Also where A is 0 and where it makes the state grow, with documents, split over L."""
    bench, fused = scan
    args = bench.inputs(*case)
    args[2][:, 0] = 0.0
    args[2][0] *= -0.1
    assert fused.gluon_why_not(args[0], case[4]) is None
    length = case[1]
    seq = (torch.arange(length, device="cuda") * 3 // length).repeat(case[0], 1)
    one, three = fused.Plan(True, 1, 1), fused.Plan(True, 3, 3)
    runs = [("zoh", None, one, 0), ("zoh", seq, three, 0), ("euler", seq, three, 132), ("euler", None, one, 0)]
    narrow_one, narrow_three = (how._replace(block=32, backward_block=32) for how in (one, three))
    runs += [("zoh", seq, narrow_one, 132), ("zoh", None, narrow_three, 0), ("euler", seq, narrow_one, 132)]
    for discretization, seq_idx, how, fused.SMS in runs:
        e = bench.errors(args, how, discretization=discretization, seq_idx=seq_idx)
        assert e.same and not within(e.ours, e.torch, args[0].dtype != torch.float32), (discretization, seq_idx, how)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(2, 500, 128, 16), (2, 333, 192, 5), (1, 256, 64, 40)], ids=str)
def test_partial_sums_in_the_gradients_memory(scan, case, monkeypatch):
    """A backward in pieces whose partial sums of dB and dC lie where dx and ddt are written later."""
    bench, fused = scan
    monkeypatch.setattr(fused, "PARTIALS", 0)
    for dtype in (torch.bfloat16, torch.float32):
        args = bench.inputs(*case, dtype=dtype)
        for segments, block in ((1, 64), (3, 64), (1, 32), (3, 32)):
            e = bench.errors(args, fused.Plan(True, segments, segments, 64, block))
            assert e.same and not within(e.ours, e.torch, dtype != torch.float32), (dtype, segments, block)


@pytest.mark.gpu
def test_a_gate_that_is_shut(scan):
    """Where z is 0 the output says nothing about what was gated, yet dz depends on it."""
    bench, fused = scan
    for zeros in (lambda z: z[:, 37:41].zero_(), lambda z: z[0, 20, 5].zero_(), torch.Tensor.zero_,
                  lambda z: z[:, :, 3].fill_(-200.0), lambda z: z.mul_(1e-7)):  # fmt: skip
        args = bench.inputs(2, 100, 168, 16)  # an odd number of narrow CTAs
        zeros(args[6])
        hows = [(fused.Plan(True, 1, 1), 0), (fused.Plan(True, 2, 2), 132), (fused.Plan(True, 1, 1, 32, 32), 132)]
        hows += [(fused.Plan(True, 2, 2, 32, 64), 0), (fused.Plan(True, 1, 1, 64, 32), 0)]  # marks of another width
        for how, fused.SMS in hows:
            e = bench.errors(args, how)
            assert e.same and not within(e.ours, e.torch, True), how


@pytest.mark.gpu
def test_documents_and_strides_on_the_gpu(scan):
    bench, fused = scan
    seq = torch.tensor([0] * 20 + [1] * 33 + [2] * 7, device="cuda").repeat(2, 1)
    for n in (16, 20):
        args = bench.inputs(2, 60, 64, n)
        hows = [(fused.Plan(True, 1, 1), 0), (fused.Plan(True, 2, 2), 132), (fused.Plan(False), 0)]
        hows += [(fused.Plan(True, 1, 1, 32, 32), 132), (fused.Plan(True, 2, 2, 32, 32), 0)]
        for how, fused.SMS in hows:
            e = bench.errors(args, how, seq_idx=seq)
            assert e.same and not within(e.ours, e.torch, True), (n, how)
    args = bench.inputs(2, 60, 40, 16)
    for kwargs in (dict(seq_idx=seq, discretization="zoh"), dict(softplus=False, chunk=16)):
        plain_dt = [t.abs() / 10 if i == 1 else None if i == 7 else t for i, t in enumerate(args)]
        e = bench.errors(plain_dt if "softplus" in kwargs else args, **kwargs)
        assert e.same and not within(e.ours, e.torch, True), kwargs
    for i in (0, 1, 6):
        wide = torch.full((2, 60, 81), float("nan"), dtype=args[i].dtype, device="cuda")
        wide[..., 3:43] = args[i]
        args[i] = wide[..., 3:43]
    e = bench.errors(args)
    assert e.same and not within(e.ours, e.torch, True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000])
def test_no_length_is_special_on_the_gpu(scan, length):
    bench, fused = scan
    for dtype in (torch.bfloat16, torch.float32):
        args = bench.inputs(2, length, 72, 16, dtype=dtype)
        for bias in (-4.6, 1.0):  # what a padded tail must not do depends on softplus(bias)
            args[7] = torch.full((72,), bias, device="cuda")
            hows = (fused.Plan(True, 1, 1), 0), (fused.Plan(True, 2, 2), 132), (fused.Plan(True, 1, 1, 32, 32), 132)
            for how, fused.SMS in hows:
                e = bench.errors(args, how)
                assert e.same and not within(e.ours, e.torch, dtype != torch.float32), (dtype, bias, how)


@pytest.mark.gpu
def test_not_a_number_stays_in_its_row_on_the_gpu(scan):
    bench, fused = scan
    hows = [fused.Plan(True, 1, 1), fused.Plan(True, 2, 2), fused.Plan(True, 1, 1, 32, 32), fused.Plan(False)]
    for i, name in ((0, "x"), (1, "dt"), (2, "A")):
        for how, width, rule in [(h, 64, "euler") for h in hows] + [(h, 63, "zoh") for h in hows]:
            args = bench.inputs(2, 80, width, 16)
            args[i][(0, 37, 5) if i < 2 else (5, 3)] = float("nan")
            y, final, *saved = fused.forward(*args, None, True, rule, None, how=how)
            bad = torch.zeros_like(y, dtype=torch.bool)
            bad[0 if i < 2 else slice(None), 37 if i < 2 else 0 :, 5] = True
            assert torch.equal(y.isnan(), bad), (name, how, rule)
            assert final[0, 5].isnan().any() and not final[1, 6:].isnan().any()
            dx = fused.backward(torch.ones_like(y), None, *args, None, y, *saved, True, rule, None, how=how)[0]
            assert not dx[1 if i < 2 else slice(None), :, 6:].isnan().any(), (name, how, rule)


AGAIN = [(2, 100, 128, 16), (1, 96, 64, 16, 1, torch.float32, ("D", "z", "dt_bias")), (1, 4096, 64, 16), (2, 63, 24, 20)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", AGAIN, ids=str)
@pytest.mark.parametrize("partials", [1 << 24, 0])
def test_calls_again_and_on_other_streams_give_the_same_bits(scan, case, partials, monkeypatch):
    """The launcher goes straight to what it remembers: on other tensors, another stream."""
    from seqmix_kernels.ops.selective_scan import selective_scan

    bench, fused = scan
    monkeypatch.setattr(fused, "PARTIALS", partials)
    without = (*(case[6] if len(case) > 6 else ()), "initial_state")
    inputs = [bench.inputs(*[*case, 1, torch.bfloat16][:6], without=without, seed=seed) for seed in range(3)]

    def run(args):
        leaves = [None if t is None else t.detach().requires_grad_() for t in args]
        y, final = selective_scan(*leaves[:8])
        return y, final, *torch.autograd.grad(y, [t for t in leaves if t is not None], args[0])

    wanted = [run(args) for args in inputs]
    for _ in range(3):
        for args, want in zip(inputs, wanted, strict=True):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = run(args)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_break_on_the_gpu(scan):
    from seqmix_kernels.ops.selective_scan import selective_scan

    bench, _ = scan
    torch.use_deterministic_algorithms(False)
    for width, rule in ((64, "euler"), (63, "zoh")):
        args = bench.inputs(2, 96, width, 16)
        dfinal = torch.ones(2, width, 16, device="cuda")

        def run(function, args=args, dfinal=dfinal, rule=rule):
            def call(given):
                return function(*given[:8], discretization=rule, initial_state=given[8])

            return bench.gradients(args, call, args[0], dfinal)

        compiled = torch.compile(selective_scan, fullgraph=True, backend="aot_eager")
        for eager, other in zip(run(selective_scan), run(compiled), strict=True):
            assert torch.equal(eager, other)
        leaves = [t.requires_grad_() for t in args]
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        op = torch.ops.seqmix.selective_scan_fwd.default
        torch.library.opcheck(op, (*leaves, None, True, rule, None, True, "fused"), test_utils=tests)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(scan):
    """The last row of a batch of 2^31 elements and more is what that row gives alone."""
    bench, fused = scan
    torch.use_deterministic_algorithms(False)
    fused.SMS = 0
    args = bench.inputs(66, 16384, 2048, 16, without=("initial_state",))
    for how in (fused.Plan(True, 1, 1), fused.Plan(False)):
        dy = args[0].flip(1)
        y, final, *saved = fused.forward(*args, None, True, "euler", None, how=how)
        got = fused.backward(dy, None, *args, None, y, *saved, True, "euler", None, how=how)
        row = [t[-1:] if t is not None and t.dim() > 2 else t for t in args]
        y1, final1, *saved1 = fused.forward(*row, None, True, "euler", None, how=how)
        want = fused.backward(dy[-1:], None, *row, None, y1, *saved1, True, "euler", None, how=how)
        assert torch.equal(y[-1:], y1) and torch.equal(final[-1:], final1)
        for i in (0, 1, 3, 4, 6):
            assert torch.equal(got[i][-1:], want[i]), i
        del y, saved, got

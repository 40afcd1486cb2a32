"""The Mamba node against the composition of its parts: values, all gradients, states; and what it saves."""

import pytest
import torch

from seqmix_kernels.ops.causal_conv1d import causal_conv1d
from seqmix_kernels.ops.mamba_inner import LEVELS, inner, mamba_inner, saved_bytes
from seqmix_kernels.ops.mamba_inner.inner import Given, Operators
from seqmix_kernels.ops.selective_scan import selective_scan
from seqmix_kernels.ops.selective_scan.op import why_not

SEQ = torch.tensor([[5, 5, 5, 5, 2, 2, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, -1, -1, 0, 0]])
OPTIONAL = ("in_bias", "conv_bias", "out_bias", "conv_state", "ssm_state")
over_levels = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture(scope="module", autouse=True)
def a_compiler():
    if reason := why_not("cpu", torch.zeros(1)):
        pytest.skip(reason)


def make(B=2, L=11, M=6, E=10, N=5, R=3, W=4, *, seed=0, without=()):
    """The tensors of a call in float64, products of unit size."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "u": (B, L, M), "in_proj": (2 * E, M), "in_bias": (2 * E,), "conv": (E, W), "conv_bias": (E,),
        "x_proj": (R + 2 * N, E), "dt_proj": (E, R), "dt_bias": (E,), "A_log": (E, N), "D": (E,), "out_proj": (M, E),
        "out_bias": (M,), "conv_state": (B, W - 1, E), "ssm_state": (B, E, N),
    }  # fmt: skip
    made = {k: torch.randn(*s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        made[name] /= made[name].shape[1] ** 0.5
    return {k: t for k, t in made.items() if k not in without}


def run(tensors, dtype=torch.float32, call=mamba_inner, **kwargs):
    """Results and gradients of a random weighting of all three."""
    leaves = {k: v.detach().to(dtype).clone().requires_grad_() for k, v in tensors.items()}
    results = call(**leaves, **kwargs)
    g = torch.Generator().manual_seed(7)
    loss = 0
    for t in results:
        loss = loss + (t * torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype)).double().sum()
    loss.backward()
    named = dict(zip(("out", "conv_final", "ssm_final"), (t.detach() for t in results), strict=True))
    return named | {f"d{k}": torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}


def plain_operators(discretization):
    """The parts in float64 with autograd's own gradients, in the place of the compiled ones."""

    def conv(x, weight, bias, state, seq_idx):
        return causal_conv1d(x, weight, bias, "silu", state, seq_idx, impl="reference")

    def scan(x, dt, A, B, C, D, z, dt_bias, state, seq_idx):
        kwargs = dict(discretization=discretization, initial_state=state, seq_idx=seq_idx, impl="sequential")
        return selective_scan(x, dt, A, B, C, D, z, dt_bias, **kwargs)

    def gradients(f, dy, dfinal, tensors):
        *tensors, seq_idx = tensors
        leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            y, final = f(*leaves, seq_idx)
        given = [t for t in leaves if t is not None]
        grads = iter(torch.autograd.grad((y, final), given, (dy, torch.zeros_like(final) if dfinal is None else dfinal)))
        return [y.new_empty(0) if t is None else next(grads) for t in leaves]

    return Operators(
        conv,
        lambda dy, dfinal, *tensors: gradients(conv, dy, dfinal, tensors),
        lambda *tensors, save: (*scan(*tensors), tensors[0].new_empty(0), tensors[0].new_empty(0)),
        lambda dy, dfinal, *tensors: gradients(scan, dy, dfinal, tensors[:-3]),
    )


@over_levels
@pytest.mark.parametrize("without, seq_idx", [((), SEQ), (OPTIONAL, None)])
def test_gradients_by_hand_are_autograds(level, without, seq_idx):
    """In float64, where a wrong formula cannot hide behind rounding."""
    tensors = make(without=without)
    kwargs = dict(seq_idx=seq_idx, discretization="zoh")
    want = run(tensors, torch.float64, level=0, scan="sequential", **kwargs)
    given = Given(*(tensors.get(name, seq_idx if name == "seq_idx" else None) for name in Given._fields))
    run_with = plain_operators("zoh")
    *results, saved = inner.forward(given, level, True, run_with)
    g = torch.Generator().manual_seed(7)
    upstream = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in results]
    grads = inner.backward(*upstream, given, saved, level, run_with)
    got = dict(zip(("out", "conv_final", "ssm_final"), results, strict=True))
    got |= {f"d{name}": grad for name, grad in zip(Given._fields, grads, strict=False) if grad is not None}
    assert got.keys() == want.keys()
    for name, exact in want.items():
        torch.testing.assert_close(got[name], exact, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@over_levels
@pytest.mark.parametrize(
    "sizes, kwargs",
    [
        ({}, dict(seq_idx=SEQ)),
        (dict(without=OPTIONAL), dict(discretization="zoh")),
        (dict(L=1, W=1, N=1, R=1), {}),
        (dict(L=2, W=3, without=("conv_state", "in_bias")), {}),
        (dict(B=1, L=70, E=33, M=16, N=16), {}),
    ],
)
def test_node_is_no_worse_than_the_composition(assert_no_worse, level, sizes, kwargs):
    tensors = make(**sizes)
    truth = run({k: v.float().double() for k, v in tensors.items()}, torch.float64, level=0, scan="sequential", **kwargs)
    same = run(tensors, level=0, scan="sequential", **kwargs)
    assert_no_worse(run(tensors, level=level, scan="cpu", **kwargs), same, truth)


@over_levels
def test_under_autocast(assert_no_worse, level):
    """bfloat16 between float32 parameters, as a trainer runs it."""
    tensors = {k: v.bfloat16().double() for k, v in make(B=2, L=40, M=16, E=32, N=8, R=2).items()}
    truth = run(tensors, torch.float64, level=0, scan="sequential")

    def low(**kwargs):
        def call(**leaves):
            with torch.autocast("cpu", torch.bfloat16):
                return mamba_inner(**leaves, **kwargs)

        return run(tensors, torch.float32, call)

    ours, same = low(level=level, scan="cpu"), low(level=0, scan="sequential")
    assert ours["out"].dtype == ours["conv_final"].dtype == torch.bfloat16 and ours["ssm_final"].dtype == torch.float32
    assert all(ours[f"d{k}"].dtype == torch.float32 for k in tensors)
    assert_no_worse(ours, same, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights(dtype):
    wide = ("dt_bias", "A_log", "D", "ssm_state")
    tensors = {k: v.to(dtype).double() for k, v in make(L=40, M=16, E=32, N=8).items()}
    truth = run(tensors, torch.float64, level=0, scan="sequential")
    leaves = {k: v.to(torch.float32 if k in wide else dtype).requires_grad_() for k, v in tensors.items()}
    out, _, final = mamba_inner(**leaves, scan="cpu")
    assert out.dtype == dtype and final.dtype == torch.float32
    assert (out.double() - truth["out"]).norm() < 0.03 * truth["out"].norm()
    (out.float().sum() + final.sum()).backward()
    assert all(v.grad.dtype == v.dtype and v.grad.isfinite().all() for v in leaves.values())


@over_levels
def test_no_steps_and_no_rows(level):
    for sizes in (dict(L=0), dict(B=0)):
        tensors = make(**sizes)
        got = run(tensors, level=level, scan="cpu")
        assert got["out"].shape == got["du"].shape == tensors["u"].shape
        for name in ("in_proj", "conv", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj", "out_bias"):
            assert (got[f"d{name}"] == 0).all(), name
        if "L" in sizes:  # the states pass through
            assert torch.equal(got["ssm_final"], tensors["ssm_state"].float())
            assert torch.equal(got["conv_final"], tensors["conv_state"].float())


def test_gradients_are_the_same_bits_at_every_level():
    tensors = make(B=1, L=70, E=33, M=16, N=16)
    first, *others = (run(tensors, level=level, scan="cpu") for level in (*LEVELS, 2))
    assert all(torch.equal(first[k], other[k]) for other in others for k in first)


def test_only_the_states_are_asked_for():
    tensors = make()
    truth = run(tensors, torch.float64, lambda **kw: (*mamba_inner(**kw, level=0, scan="sequential")[1:], kw["u"]))
    got = run(tensors, torch.float32, lambda **kw: (*mamba_inner(**kw, scan="cpu")[1:], kw["u"]))
    torch.testing.assert_close(got["dssm_state"].double(), truth["dssm_state"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got["du"].double(), truth["du"], rtol=1e-5, atol=1e-5)


# -- what is saved ----------------------------------------------------------------------------------------------------


def kept(call, *own):
    """Bytes that autograd keeps for a backward, each storage once, without those of `own`."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = call()
    for t in own:
        seen.pop(t.untyped_storage().data_ptr(), None)
    return sum(seen.values()), results


@over_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_saved_are_those_documented(level, dtype):
    B, L, M, E, N, R = 2, 64, 16, 32, 8, 2
    leaves = {k: v.float().requires_grad_() for k, v in make(B, L, M, E, N, R, without=OPTIONAL).items()}

    def call():
        u = leaves["u"] * 1.0  # made by the block before, as a norm's output is
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            return mamba_inner(u, **{k: v for k, v in leaves.items() if k != "u"}, level=level, scan="cpu")

    count, _ = kept(call, *leaves.values())
    exact = B * L * saved_bytes(M, E, N, R, dtype.itemsize, level, 4 * N / 32)  # a float32 state every 32 steps
    assert count == exact


def test_levels_save_less_and_less_than_the_composition():
    leaves = {k: v.float().requires_grad_() for k, v in make(2, 64, 16, 32, 8, 2, without=OPTIONAL).items()}
    node = [kept(lambda level=level: mamba_inner(**leaves, level=level, scan="cpu"), *leaves.values())[0] for level in LEVELS]

    def parts():  # the same kernels, one autograd node each
        from seqmix_kernels.ops.mamba_inner.reference import reference

        given = [leaves.get(name) for name in Given._fields]
        return reference(*given, "euler", "cpu")

    composed, _ = kept(parts, *leaves.values())
    assert composed >= node[0] > 1.4 * node[1] > 1.4 * node[2]


def test_a_scan_in_plain_torch_saves_its_inputs_alone():
    leaves = {k: v.float().requires_grad_() for k, v in make(without=OPTIONAL).items()}
    all_of_it, _ = kept(lambda: mamba_inner(**leaves, level=0, scan="sequential"), *leaves.values())
    lean, _ = kept(lambda: mamba_inner(**leaves, level=1, scan="sequential"), *leaves.values())
    assert lean == 0 < all_of_it
    first, second = (run(make(), torch.float64, level=level, scan="sequential") for level in (0, 2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_nothing_is_saved_without_a_gradient():
    tensors = {k: v.float() for k, v in make(without=OPTIONAL).items()}
    saved = torch.ops.seqmix.mamba_inner_fwd(
        *(tensors.get(name) for name in Given._fields), "euler", 0, False, "cpu"
    )[3:]
    assert all(t.numel() == 0 for t in saved)


# -- the registered op ------------------------------------------------------------------------------------------------


@over_levels
def test_registration(level):
    for without, seq_idx in (((), SEQ), (OPTIONAL, None)):
        leaves = {k: v.float().requires_grad_() for k, v in make(without=without).items()} | {"seq_idx": seq_idx}
        given = [leaves.get(name) for name in Given._fields]
        torch.library.opcheck(torch.ops.seqmix.mamba_inner_fwd.default, (*given, "euler", level, True, "cpu"))


@over_levels
def test_compiles_without_a_break(level):
    def step(**leaves):
        out, conv_state, ssm_state = mamba_inner(**leaves, level=level)
        return out.sin(), conv_state, ssm_state

    tensors = make()
    got = run(tensors, torch.float32, torch.compile(step, fullgraph=True, backend="aot_eager"))
    for name, plain in run(tensors, torch.float32, step).items():
        torch.testing.assert_close(got[name], plain, msg=lambda m, name=name: f"{name}: {m}")


def test_more_taps_than_the_kernel_takes():
    tensors = make(W=6)
    for scan in ("auto", "cpu"):
        got = run(tensors, scan=scan)
        for name, exact in run(tensors, torch.float64, scan="sequential", level=0).items():
            torch.testing.assert_close(got[name].double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(u=torch.zeros(2, 6)), "u must be .B, L, M."),
        (dict(in_proj=torch.zeros(10, 6)), r"in_proj must have shape \(20, 6\); got \(10, 6\)"),
        (dict(x_proj=torch.zeros(13, 9)), r"x_proj must have shape \(13, 10\)"),
        (dict(out_bias=torch.zeros(10)), r"out_bias must have shape \(6,\)"),
        (dict(conv=torch.zeros(10, 1, 4)), "conv must have two dimensions"),
        (dict(A_log=torch.zeros(10, 5).double()), "A_log must be torch.float32 where u is torch.float32"),
        (dict(out_proj=torch.zeros(6, 10).bfloat16()), "out_proj must be torch.float32 like u"),
        (dict(seq_idx=torch.zeros(2, 11)), "seq_idx must hold integers"),
        (dict(discretization="bilinear"), "discretization must be .* got 'bilinear'"),
        (dict(A_log=torch.zeros(10, 257), x_proj=torch.zeros(517, 10)), "A_log must have N from 1 to 256 .* got 257"),
        (dict(conv=torch.zeros(10, 0)), "conv must be .E, W., W at least 1"),
        (dict(level=3), "level must be one of 0, 1, 2; got 3"),
        (dict(scan="fused"), "scan='fused' cannot run here"),
        (dict(scan="magic"), "got 'magic'"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        mamba_inner(**({k: v.float() for k, v in make().items()} | change))

"""Attention on a GPU: every implementation against the equation in float64, the choice, torch.compile, CUDA graphs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from seqmix.channel_mixers import SwiGLU
from seqmix.decode import in_precision
from seqmix.mixers.attention import Attention
from seqmix.model import SequenceModel
from seqmix.state import tensors
from seqmix_kernels.frame import CannotRun
from seqmix_kernels.ops.attention import (
    IMPLS,
    alibi_slopes,
    attention,
    attention_step,
    case_of,
    rotate_queries_and_keys,
    which_impl,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),  # of CUTLASS, about itself
]
V = 64
# B, H, H_kv, P, C, rotary_dim, windows, slopes
STEPS = (
    (1, 12, 12, 64, 2304, 64, None, None),
    (64, 12, 12, 64, 512, 64, None, None),
    (3, 16, 2, 128, 1000, 128, None, None),
    (2, 6, 1, 24, 300, 8, None, None),
    (2, 2, 2, 256, 300, 256, None, None),
    (2, 4, 4, 64, 700, 0, (1, 2, None, None), None),
    (3, 4, 2, 64, 700, 64, (100,) * 4, None),
    (3, 4, 2, 64, 700, 0, None, (0.25, 0.0625, 0.5, 0.0)),
)


# title, (B, L, S, H, H_kv, P), dtype, further arguments of attention
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
CHECKS = (
    ("dense", (2, 333, 333, 4, 4, 64), bf16, {}),
    ("dense", (2, 128, 128, 4, 4, 128), fp16, {}),
    ("dense", (2, 333, 333, 4, 4, 64), fp32, {}),
    ("a cache before the queries", (2, 77, 500, 4, 4, 64), bf16, {}),
    ("one query", (2, 1, 500, 4, 2, 64), bf16, {}),
    ("shared heads", (2, 200, 200, 8, 2, 64), bf16, {}),
    ("window", (2, 333, 333, 4, 4, 64), bf16, {"window": 50}),
    ("windows that differ, shared heads", (2, 333, 400, 4, 2, 64), bf16, {"window": (3, None, 1, None)}),
    ("documents", (2, 333, 333, 4, 2, 64), bf16, {"seq_idx": (100, 101, 290)}),
    ("documents, window", (2, 333, 333, 4, 4, 64), bf16, {"seq_idx": (100, 101, 290), "window": 20}),
    ("ALiBi", (1, 1500, 1500, 8, 8, 64), bf16, {"slopes": alibi_slopes(8)}),
    ("ALiBi, 6 heads of 40", (1, 333, 700, 6, 3, 40), fp16, {"slopes": alibi_slopes(6)}),
    ("ALiBi", (1, 333, 333, 8, 8, 64), fp32, {"slopes": alibi_slopes(8)}),
    ("head of 20", (2, 100, 100, 2, 2, 20), bf16, {}),
    ("head of 1", (2, 100, 100, 2, 2, 1), bf16, {}),
    ("head of 48", (2, 200, 200, 2, 2, 48), bf16, {}),
    ("head of 80", (2, 200, 200, 4, 2, 80), bf16, {}),
    ("head of 160", (2, 200, 200, 2, 2, 160), bf16, {}),
    ("head of 192", (2, 200, 200, 2, 2, 192), bf16, {}),
    ("head of 200", (2, 200, 200, 2, 2, 200), bf16, {}),
    ("head of 256", (1, 200, 200, 2, 2, 256), bf16, {}),
    ("head of 257", (1, 100, 100, 1, 1, 257), bf16, {}),
    ("one token", (3, 1, 1, 2, 2, 64), bf16, {}),
    ("lengths", (3, 5, 512, 4, 2, 64), bf16, {"lengths": (300, 5, 0)}),
    ("lengths, one query", (3, 1, 512, 4, 2, 64), bf16, {"lengths": (512, 5, 1)}),
    ("lengths, one query, window", (2, 1, 512, 4, 4, 64), bf16, {"lengths": (300, 5), "window": 9}),
    ("lengths, one query, ALiBi", (2, 1, 512, 4, 4, 64), bf16, {"lengths": (300, 5), "slopes": alibi_slopes(4)}),
)


def errors(impl, sizes, dtype, told, seed=0):
    """||got - true|| / ||true|| of y, dq, dk, dv, where true is the equation in float64. q, k, v are views of one projection,
    and the last axis of y's gradient is not contiguous."""
    B, L, S, H, H_kv, P = sizes
    torch.manual_seed(seed)
    told = dict(told)
    if "lengths" in told:
        told["lengths"] = torch.tensor(told["lengths"], dtype=torch.int32, device="cuda")
    if "seq_idx" in told:  # where documents start, in the first row; the second row is one document
        starts = torch.zeros(B, L, dtype=torch.long, device="cuda")
        starts[0, list(told["seq_idx"])] = 1
        told["seq_idx"] = starts.cumsum(1)
    fused = torch.randn(B, S, H + 2 * H_kv, P, device="cuda", dtype=dtype)
    dy = torch.randn(B, L, P, H, device="cuda", dtype=dtype).transpose(2, 3)

    def run(fused, dy, impl):
        q, k, v = fused.split((H, H_kv, H_kv), dim=2)
        leaf = [t.detach().requires_grad_(impl != "fa4" or "lengths" not in told) for t in (q[:, S - L :], k, v)]
        y = attention(*leaf, **told, impl=impl)
        grads = torch.autograd.grad(y, leaf, dy) if y.requires_grad else ()
        return [y.detach(), *grads]

    want = run(fused.double(), dy.double(), "math")
    got = run(fused, dy, impl)
    pairs = zip(("y", "dq", "dk", "dv"), got, want, strict=False)
    least = 1e-2 * dy.double().norm()  # with one key the weight is 1, and dq and dk are 0
    return {name: ((a.double() - b).norm() / b.norm().maximum(least)).item() for name, a, b in pairs}


def budget(dtype) -> float:
    """Four rounding units; in float32 also the rounding of a bias of several hundred added to scores of size 1."""
    return max(4 * torch.finfo(dtype).eps, 5e-6)


@pytest.mark.parametrize("case", CHECKS, ids=lambda case: f"{case[0]} {str(case[2])[6:]}")
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_is_the_equation(case, impl):
    _, sizes, dtype, told = case
    try:
        found = errors(impl, sizes, dtype, told)
    except CannotRun:
        assert impl not in ("auto", "math")
        return
    assert all(error <= budget(dtype) for error in found.values()), found


def qkv(dtype=torch.bfloat16, L=64, P=64, grad=True):
    return [torch.randn(2, L, 4, P, device="cuda", dtype=dtype, requires_grad=grad) for _ in range(3)]


def test_auto_says_what_it_measured():
    for large in (False, True):
        name, reason = which_impl(case_of(*qkv())._replace(large=large))
        assert name in ("fa4", "fa2", "cudnn", "flash") and ("fastest of " if large else "launches dominate") in reason
        assert large or "fa4: " in reason
    assert which_impl(case_of(*qkv(torch.float32)))[0] == "efficient"
    assert "q is float32" in which_impl(case_of(*qkv(torch.float32)))[1]


@pytest.mark.parametrize("impl", ["fa4", "fa2", "cudnn", "flash"])
def test_float32_is_refused_with_the_reason(impl):
    with pytest.raises(ValueError, match=f"impl='{impl}' cannot run here: .*q is float32"):
        attention(*qkv(torch.float32), impl=impl)


@pytest.mark.parametrize("impl", ["auto", "fa4", "flash"])
def test_gradients_repeat_bitwise_where_determinism_is_asked_for(impl):
    leaves = qkv(L=1000)
    try:
        attention(*leaves, impl=impl)
    except ValueError as refused:
        return pytest.skip(str(refused))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(attention(*leaves, impl=impl).float().square().sum(), leaves) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b, c in zip(*runs, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_the_fused_step_is_the_equation(dtype, case):
    """What it writes and what it returns, with NaN in every slot behind the lengths."""
    B, H, H_kv, P, C, rotary, windows, slopes = case
    torch.manual_seed(0)
    lengths = torch.randint(C, (B,), dtype=torch.int32, device="cuda")
    lengths[0], lengths[-1] = C - 1, 0
    q, k, v = (torch.randn(B, h, P, device="cuda").to(dtype) for h in (H, H_kv, H_kv))
    caches = [torch.randn(B, H_kv, C, P, device="cuda").to(dtype) for _ in range(2)]
    exact = [t.double() for t in caches]
    for cache in caches:
        cache.masked_fill_((torch.arange(C, device="cuda") >= lengths[:, None])[:, None, :, None], float("nan"))
    told = (lengths, rotary, 10_000.0, 2.0, windows, slopes)
    want, _ = attention_step(q.double(), k.double(), v.double(), *exact, *told, impl="torch")
    got, after = attention_step(q, k, v, *caches, *told, impl="fused")
    assert torch.equal(after, lengths + 1)
    eps = torch.finfo(dtype).eps
    assert (got.double() - want).norm() <= 4 * max(eps, C * 2.0**-24) * want.norm()
    for cache, true in zip(caches, exact, strict=True):
        for b, n in enumerate(lengths.tolist()):
            phase = C * 2.0**-24  # the rounding of a float32 phase, in radians
            assert (cache[b, :, : n + 1].double() - true[b, :, : n + 1]).abs().max() <= 4 * max(eps, phase)
            assert cache[b, :, n + 1 :].isnan().all()


@pytest.mark.parametrize("impl", ["auto", "fa4", "cudnn", "flash"])
@torch.no_grad()
def test_nothing_is_copied_on_the_way(impl):
    """Of q, k, v as views of one projection the forward allocates y and a log-sum-exp, and no transposed copy."""
    q, k, v = torch.randn(4, 2048, 3, 8, 64, device="cuda", dtype=torch.bfloat16).unbind(2)
    try:
        y = attention(q, k, v, impl=impl)
    except ValueError as refused:
        return pytest.skip(str(refused))
    assert y.is_contiguous()
    size = y.numel() * 2
    del y
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, v, impl=impl)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width, P, ragged", [(64, 64, False), (32, 64, True), (128, 128, False), (6, 20, True)])
def test_the_fused_rotation_is_the_plain_one(dtype, width, P, ragged):
    torch.manual_seed(0)
    qkv = torch.randn(3, 77, 16, P, device="cuda").to(dtype)
    at = torch.arange(77, device="cuda") + (torch.tensor([[0], [500], [9]], device="cuda") if ragged else 5)
    outs = []
    for exact in (False, True):
        leaf = (qkv.double() if exact else qkv).detach().requires_grad_()  # float64 takes plain torch
        q, k = rotate_queries_and_keys(leaf[:, :, :12], 8, at, width, 10_000.0, 2.0)
        weights = torch.randn(q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(q.dtype)
        (grad,) = torch.autograd.grad((q * weights).sum() + k.square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        outs.append([t.detach().double() for t in (q, k, grad, second)])
        if not exact:
            assert q.is_contiguous() and k.is_contiguous() and "rotate" in type(q.grad_fn).__name__.lower()
    for a, b in zip(*outs, strict=True):
        assert (a - b).norm() <= 4 * max(torch.finfo(dtype).eps, 600 * 2.0**-24) * b.norm()


def test_the_rotation_of_one_position_reads_gradients_of_any_strides():
    """torch calls a tensor contiguous whatever the stride of an axis of length 1, and the gradient of a cache has another."""
    qk = torch.randn(3, 1, 6, 32, device="cuda")
    at = torch.tensor([7], device="cuda")
    grads = []
    for exact in (False, True):
        leaf = (qk.double() if exact else qk).detach().requires_grad_()
        q, k = rotate_queries_and_keys(leaf, 4, at, 32, 10_000.0, 1.0)
        weights = torch.linspace(-1, 1, k.numel(), device="cuda", dtype=k.dtype).view(3, 2, 1, 32).transpose(1, 2)
        assert weights.is_contiguous() and weights.stride(1) != weights.stride(0)
        grads.append(torch.autograd.grad((q.sum() + (k * weights).sum()), leaf)[0].double())
    assert (grads[0] - grads[1]).norm() <= 1e-5 * grads[1].norm()


def test_a_fused_step_is_not_taken_where_a_gradient_is_wanted():
    q, k, v = (torch.randn(2, h, 32, device="cuda") for h in (4, 2, 2))
    caches = [torch.randn(2, 2, 64, 32, device="cuda") for _ in range(2)]
    length = torch.tensor([3, 9], dtype=torch.int32, device="cuda")
    q.requires_grad_()
    with pytest.raises(ValueError, match="it has no gradient"):
        attention_step(q, k, v, *caches, length, impl="fused")
    (got,) = torch.autograd.grad(attention_step(q, k, v, *(c.clone() for c in caches), length)[0].square().sum(), q)
    exact = q.detach().double().requires_grad_()
    y, _ = attention_step(exact, k.double(), v.double(), *(c.double() for c in caches), length)
    (want,) = torch.autograd.grad(y.square().sum(), exact)
    assert (got - want).norm() <= 1e-4 * want.norm()


def model(**keys):
    torch.manual_seed(0)
    mixer = partial(Attention, n_heads=4, **keys)
    return SequenceModel(V, 256, 2, mixer, partial(SwiGLU, expand=2)).cuda()


OPTIONS = [{}, {"positions": "alibi"}, {"positions": "hard_alibi"}, {"window": 33}, {"n_kv_heads": 2, "qk_norm": True}]


@pytest.mark.parametrize("keys", OPTIONS, ids=str)
def test_a_compiled_step_is_the_eager_one(keys):
    net, tokens = model(**keys), torch.randint(V, (2, 300), device="cuda")

    def loss(tokens):
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(net(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    grads = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        net.zero_grad()
        run(tokens).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


@pytest.mark.parametrize("keys", OPTIONS, ids=str)
@torch.inference_mode()
def test_decoding_under_a_cuda_graph_is_decoding(keys):
    """As the README of the op tells it: a warm-up step, one capture, then a replay a token; the state's tensors stay put."""
    net, tokens = in_precision(model(**keys).eval(), torch.bfloat16), torch.randint(V, (3, 160), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        eager, outs, state, other = decode_twice(net, tokens)
    for a, b in zip(eager, outs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * a.abs().max().item())
    torch.testing.assert_close(state[0].length, other[0].length)


def decode_twice(net, tokens):
    """60 tokens a row, rows of three lengths: eagerly, and by 49 replays with eager steps before and after."""
    _, state = net.prefill(tokens[:, :100], net.init_state(3))
    state = tuple(block._replace(length=block.length - torch.tensor([0, 7, 50], device="cuda").int()) for block in state)
    eager, after = [], state
    for token in tokens[:, 100:].unbind(1):
        logits, after = net.step(token, after)
        eager.append(logits)

    token = tokens[:, 100].clone()
    logits, static = net.step(token, state)  # makes the buffers its own, and warms up
    outs = [logits]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, new = net.step(token, static)
        for old, moved in zip(tensors(static), tensors(new), strict=True):
            if old.data_ptr() != moved.data_ptr():
                old.copy_(moved)
    addresses = [t.data_ptr() for t in tensors(static)]
    for t in range(101, 150):
        token.copy_(tokens[:, t])
        graph.replay()
        outs.append(out.clone())
    assert [t.data_ptr() for t in tensors(static)] == addresses
    for t in range(150, 160):  # and on without it
        logits, static = net.step(tokens[:, t], static)
        outs.append(logits)
    return eager, outs, after, static


@torch.inference_mode()
def test_documents_in_a_row_are_documents_alone():
    mixer = model().blocks[0].mixer.bfloat16().eval()
    x = torch.randn(1, 300, 256, device="cuda", dtype=torch.bfloat16)
    index = torch.zeros(1, 300, dtype=torch.long, device="cuda")
    index[:, 70:200], index[:, 200:] = 1, 5
    packed = mixer(x, index)
    for piece in ((0, 70), (70, 200), (200, 300)):
        alone = mixer(x[:, slice(*piece)])
        torch.testing.assert_close(packed[:, slice(*piece)], alone, rtol=0, atol=0.02 * alone.abs().max().item())

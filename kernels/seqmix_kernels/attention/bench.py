"""Times attention on this GPU, through the public operator and with the backends called directly.

    python -m seqmix_kernels.attention.bench [first] [check] [speed] [choice] [options] [step]

check    relative error of y, dq, dk, dv against the equation in float64, for every implementation and option that it supports
speed    the shapes of H200.md, forward and forward + backward: every backend called as its documentation says, the public
         operator, and the operator's time over the fastest of them
choice   what "auto" selects in a dozen cases, and why
step     one token of B rows against their caches, fused and in plain torch; keys and values are read at the given fraction of
         the GPU's copy speed (4.27 TB/s)
options  a window, documents, shared heads, ALiBi, hard-ALiBi, uneven heads: the operator with each implementation that
         supports them
first    seconds of the first call in this process, by part
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from . import fa4, op
from .op import alibi_slopes, attention
from .step import attention_step

# B, L, H, P
SHAPES = ((8, 2048, 24, 64), (8, 4096, 16, 64), (1, 65536, 12, 64), (64, 4096, 1, 64), (8, 4096, 16, 128))


def inputs(B, L, H, P, H_kv=None, dtype=torch.bfloat16, grad=True):
    """q, k, v and the gradient of y."""
    heads = (H, *(H if H_kv is None else H_kv,) * 2)
    qkv = [torch.randn(B, L, h, P, device="cuda", dtype=dtype, requires_grad=grad) for h in heads]
    return qkv, torch.randn(B, L, H, P, device="cuda", dtype=dtype)


def ms(run, qkv, dy=None) -> float:
    """Median of do_bench, 25 ms of warm-up and 200 ms of repeats; with dy the backward is run too."""

    def both():
        for t in qkv:
            t.grad = None
        run(*qkv).backward(dy)

    if dy is not None:
        return do_bench(both, warmup=25, rep=200, return_mode="median")
    with torch.no_grad():
        return do_bench(lambda: run(*qkv), warmup=25, rep=200, return_mode="median")


def peers():
    """The backends, called directly on (B, L, H, P)."""

    def sdpa(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            return y.transpose(1, 2)

        return run

    found = {"flash": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if fa4.missing() is None:
        from flash_attn.cute import flash_attn_func

        found["fa4"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]
    return found


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


def check():
    bad = 0
    for title, sizes, dtype, told in CHECKS:
        for impl in op.IMPLS:
            try:
                e = errors(impl, sizes, dtype, told)
            except ValueError as refused:
                print(f"{title:34s} {str(dtype)[6:]:9s} {impl:10s} refused: {str(refused)[:90]}", flush=True)
                continue
            except Exception as error:
                failed = f"FAILED {type(error).__name__}: {str(error)[:300]}"
                print(f"{title:34s} {str(dtype)[6:]:9s} {impl:10s} {failed}", flush=True)
                bad += 1
                continue
            wrong = not all(x <= budget(dtype) for x in e.values())
            bad += wrong
            shown = " ".join(f"{k}={v:.1e}" for k, v in e.items())
            print(f"{title:34s} {str(dtype)[6:]:9s} {impl:10s} {shown} {'WRONG' if wrong else ''}", flush=True)
    print(f"check: {bad} wrong", flush=True)


def speed():
    theirs = peers()
    print(f"| shape | | {' | '.join(theirs)} | ours | ours / best | took |", flush=True)
    for B, L, H, P in SHAPES:
        for what in ("fwd", "fwd+bwd"):
            qkv, dy = inputs(B, L, H, P, grad=what != "fwd")
            dy = None if what == "fwd" else dy
            times = {}
            for name, run in theirs.items():
                try:
                    times[name] = ms(run, qkv, dy)
                except Exception as error:
                    print(name, type(error).__name__, str(error)[:200], flush=True)
                    times[name] = float("inf")
            ours = ms(attention, qkv, dy)
            took = op.which_impl(op.case_of(*qkv))[0]
            cells = " | ".join(f"{t:.3f}" for t in times.values())
            shape = f"B{B} L{L} H{H} hd{P}"
            print(f"| {shape} | {what} | {cells} | {ours:.3f} | {ours / min(times.values()):.3f} | {took} |", flush=True)


def choice():
    for title, (B, L, H, P), keys in (
        ("training", (2, 64, 4, 64), {}),
        ("shared heads", (2, 64, 4, 64), {"H_kv": 1}),
        ("evaluation", (2, 64, 4, 64), {"grad": False}),
        ("head of 20", (2, 64, 4, 20), {}),
        ("head of 256", (2, 64, 4, 256), {}),
        ("float16", (2, 64, 4, 64), {"dtype": torch.float16}),
        ("float32", (2, 64, 4, 64), {"dtype": torch.float32}),
    ):
        case = op.case_of(*inputs(B, L, H, P, **keys)[0])
        for large in (False, True):
            told = ": ".join(op.which_impl(case._replace(large=large)))
            print(f"{title}, {'large' if large else 'small'}: {told}", flush=True)
    case = op.case_of(*inputs(2, 64, 4, 64)[0])._replace(large=True)
    for title, change in (("window", {"windowed": True}), ("documents", {"packed": True}), ("dropout", {"dropout": True})):
        print(f"{title}, large: {': '.join(op.which_impl(case._replace(**change)))}", flush=True)


def options():
    print("| B8 L4096 H16 hd64 | implementation | fwd | fwd+bwd |", flush=True)
    hard = (*range(1, 9), *(None,) * 8)
    documents = (torch.arange(4096, device="cuda") // 512).expand(8, 4096)
    for title, keys, more in (
        ("plain", {}, {}),
        ("window 512", {}, {"window": 512}),
        ("8 documents per row", {}, {"seq_idx": documents}),
        ("4 key heads", {"H_kv": 4}, {}),
        ("ALiBi", {}, {"slopes": alibi_slopes(16)}),
        ("hard-ALiBi, 8 of 16", {}, {"window": hard}),
        ("head of 60", {"P": 60}, {}),
    ):
        for impl in ("auto", "fa4", "flash", "efficient"):
            (q, k, v), dy = inputs(8, 4096, 16, **{"P": 64} | keys)
            run = lambda *qkv: attention(*qkv, **more, impl=impl)  # noqa: B023, E731
            try:
                forward, both = ms(run, (q, k, v)), ms(run, (q, k, v), dy)
            except Exception as error:
                print(f"| {title} | {impl} | {type(error).__name__}: {str(error)[:150]} |", flush=True)
                continue
            print(f"| {title} | {impl} | {forward:.3f} | {both:.3f} |", flush=True)


def step():
    print("| B | cached | H / H_kv | hd | fused ms | GB/s | of copy | torch ms |", flush=True)
    for B, n, H, H_kv, P in (
        (1, 2048, 12, 12, 64), (1, 32768, 12, 12, 64), (64, 2048, 12, 12, 64), (1, 131072, 32, 8, 128), (16, 8192, 32, 8, 128),
    ):  # fmt: skip
        q, k, v = (torch.randn(B, h, P, device="cuda", dtype=bf16) for h in (H, H_kv, H_kv))
        caches = [torch.randn(B, H_kv, n + 256, P, device="cuda", dtype=bf16) for _ in range(2)]
        length = torch.full((B,), n, dtype=torch.int32, device="cuda")
        times = []
        for impl in ("fused", "torch"):
            run = lambda: attention_step(q, k, v, *caches, length, P, impl=impl)  # noqa: B023, E731
            run()
            graph = torch.cuda.CUDAGraph()  # as in decoding; otherwise the host would be the bottleneck
            with torch.cuda.graph(graph):
                for _ in range(20):
                    run()
            times.append(do_bench(graph.replay, warmup=25, rep=100, return_mode="median") / 20)
        speed = 2 * B * H_kv * n * P * 2 / times[0] / 1e6
        cells = f"| {B} | {n} | {H} / {H_kv} | {P} | {times[0]:.4f} | {speed:.0f} | {speed / 4270:.2f} | {times[1]:.4f} |"
        print(cells, flush=True)


def first():
    qkv, dy = inputs(8, 2048, 12, 64)
    torch.cuda.synchronize()
    start = time.perf_counter()
    print(f"flash-attn-4: {fa4.missing() or 'imported'}; {time.perf_counter() - start:.1f} s", flush=True)
    attention(*qkv).backward(dy)
    torch.cuda.synchronize()
    print(f"first forward and backward, the import included: {time.perf_counter() - start:.1f} s", flush=True)
    print(op.which_impl(op.case_of(*qkv)), flush=True)


if __name__ == "__main__":
    from importlib import metadata

    import triton

    versions = {d.name: d.version for d in metadata.distributions() if d.name in ("flash-attn-4", "nvidia-cutlass-dsl")}
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}, {versions}")
    torch.manual_seed(0)
    for part in sys.argv[1:] or ("first", "check", "speed", "choice", "options", "step"):
        {"first": first, "check": check, "speed": speed, "choice": choice, "options": options, "step": step}[part]()

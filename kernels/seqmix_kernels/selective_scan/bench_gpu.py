"""Checks the fused scan on this GPU, then times it through the public operator and autograd.

    python -m seqmix_kernels.selective_scan.bench_gpu [check] [speed] [graph] [peer] [host] [states] [forms] [waves] [family]
                                                        [BxLxD]
    python -m seqmix_kernels.selective_scan.bench_gpu figure numbers_h200.jsonl family.svg

check   relative error of every output and gradient against the plain recurrence in float64 on this device
speed   six shapes of models, or those given (32x512x1536): medians of triton.testing.do_bench, peak MiB of one call above
        its inputs
graph   the same as a replayed CUDA graph of one call, without the host's time
peer    the same with mamba_ssm's CUDA kernel, if it is installed
host    us of host time per call, for a shape so small that the GPU waits, and the time of each part of a call
states  time against N
forms   both discretizations, an odd D, plain Triton and Gluon; other numbers of segments
waves   forward and backward with CTAs of 64 and of 32 channels, split or not, prefetching or not: checked, then timed as
        CUDA graphs; one JSON line each, for the shapes below or those given
family  every implementation, and naive loops, against L: one JSON line per point (also on a CPU)
figure  draws those lines
"""

import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.testing import do_bench

from ..graph_timing import graph_milliseconds
from . import bench, fused, op, reference

BANDWIDTH = 4.27e12  # bytes/s of a device-to-device copy on an H200, measured
SFU_CLOCK = 1.96e9  # of its SMs under this load, measured by Nsight Compute; 16 exponentials per clock per SM
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state")
SHAPES = ((8, 2048, 3072), (8, 4096, 2048), (64, 4096, 128), (32, 512, 1536), (1, 65536, 1536), (1, 131072, 2048))
WAVES = ((8, 2048, 1536), (2, 8192, 1536), (8, 512, 128), (32, 72, 128), (64, 4096, 128), (8, 2048, 3072), (32, 512, 1536),
         (1, 65536, 1536))  # fmt: skip
COMPARED = 2, 128, 192  # shape for the comparison with float64, before WAVES are timed
# B, L, D, N, G, dtype, options left out
CASES = (
    (2, 512, 128, 16, 1, torch.bfloat16, ()),
    (2, 333, 192, 16, 1, torch.bfloat16, ("initial_state",)),
    (3, 65, 100, 13, 1, torch.float16, ("z",)),
    (2, 97, 72, 16, 1, torch.float32, ()),
    (2, 64, 128, 16, 2, torch.float32, ("D", "dt_bias")),
    (1, 200, 64, 5, 1, torch.bfloat16, ()),
    (2, 100, 24, 33, 2, torch.float32, ()),
    (1, 130, 16, 256, 1, torch.bfloat16, ()),
    (1, 1, 7, 1, 1, torch.float32, ()),
)

PADDED = ((40, 16, 1, torch.float32), (71, 16, 1, torch.bfloat16), (71, 33, 1, torch.float16), (140, 16, 2, torch.float32))


def inputs(batch, length, width, n, groups=1, dtype=torch.bfloat16, without=(), seed=0, device="cuda"):
    """x, dt, A, B, C, D, z, dt_bias, initial_state as in a trained model: delta about 0.02, A = -1..-N."""
    r = torch.Generator(device).manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=r, device=device, dtype=torch.float32).to(dtype)

    wide, narrow = (batch, length, width), (batch, length, groups, n)
    A = -torch.arange(1, n + 1, device=device, dtype=torch.float32).repeat(width, 1)
    f32 = torch.float32
    values = (
        normal(*wide), normal(*wide), A, normal(*narrow), normal(*narrow), normal(width, dtype=f32), normal(*wide),
        normal(width, dtype=f32) - 4, normal(batch, width, n, dtype=f32),
    )  # fmt: skip
    return [None if name in without else v for name, v in zip(NAMES, values, strict=True)]


def gradients(args, run, dy, dfinal):
    """The outputs of `run` and the gradients of all args, given those of the outputs."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in args]
    y, final = run(leaves)
    given = [t for t in leaves if t is not None]
    return [y.detach(), final.detach(), *torch.autograd.grad((y, final), given, (dy, dfinal))]


class Errors(NamedTuple):
    """||got - true|| / ||true|| by name, of the fused scan and of plain torch on the same inputs; and whether two runs
    agreed."""

    ours: dict
    torch: dict
    same: bool


def errors(args, how=None, softplus=True, discretization="euler", seq_idx=None, chunk=None, dy=None):
    """Errors against the plain recurrence in float64, on the device of args. dy: the output's gradient, random if None."""
    x, A = args[0], args[2]
    r = torch.Generator(x.device).manual_seed(1)
    random = torch.randn(x.shape, generator=r, device=x.device).to(x.dtype)
    dy = random if dy is None else dy
    dfinal = torch.randn(x.shape[0], *A.shape, generator=r, device=x.device)

    def plain(t):
        return reference.sequential(*t[:8], softplus, discretization, t[8], seq_idx)

    want = gradients([None if t is None else t.double() for t in args], plain, dy.double(), dfinal.double())
    theirs = gradients(args, plain, dy, dfinal)
    settings = (softplus, discretization, chunk)
    y, final, *saved = fused.forward(*args, seq_idx, *settings, how=how)
    runs = [
        fused.backward(dy, dfinal, *args, seq_idx, y, *saved, *settings, how=how) for _ in range(2)
    ]
    got = [y, final, *(g for g, t in zip(runs[0], args, strict=True) if t is not None)]
    names = ["y", "final", *("d" + name for name, t in zip(NAMES, args, strict=True) if t is not None)]

    def relative(values):
        return {
            k: ((v.double() - w).norm() / w.norm().clamp_min(1e-30)).item()
            for k, v, w in zip(names, values, want, strict=True)
        }

    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return Errors(relative(got), relative(theirs), same)


def report(title, e: Errors):
    """One line: the worst value against plain torch, then all."""
    worst = max(e.ours, key=lambda k: e.ours[k] / max(e.torch[k], 1e-9) if e.ours[k] == e.ours[k] else 1e9)
    print(f"{title:64s} {'' if e.same else 'TWO RUNS DIFFER '}worst {worst} {e.ours[worst]:.1e} torch {e.torch[worst]:.1e}"
          " | " + " ".join(f"{k}={v:.0e}" for k, v in e.ours.items()), flush=True)  # fmt: skip


def check():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: unwritten elements show
    few = fused.SMS
    for batch, length, width, n, groups, dtype, without in CASES:
        args = inputs(batch, length, width, n, groups, dtype, without)
        title = f"B{batch} L{length} D{width} N{n} G{groups} {str(dtype)[6:]}"
        report(title + " plain", errors(args, fused.Plan(False)))
        if fused.gluon_why_not(args[0], groups) is not None:
            continue
        for segments in (1, 3):
            for fused.SMS in (0, few):  # the two forms of the backward
                how = fused.Plan(True, segments, segments)
                report(f"{title} segments {segments} few {fused.SMS > 0}", errors(args, how))
    for fused.SMS in (0, few):
        report(f"chunk 16 few {fused.SMS > 0}", errors(inputs(2, 333, 192, 16), fused.Plan(True, 2, 2), chunk=16))
    fused.SMS = few
    seq = torch.tensor([0] * 30 + [1] * 70 + [2] * 20, device="cuda").repeat(2, 1)
    report("seq_idx", errors(inputs(2, 120, 40, 16), seq_idx=seq))
    for case in PADDED:
        check_padded(*case)
    report("zoh plain", errors(inputs(2, 120, 40, 16), fused.Plan(False), seq_idx=seq, discretization="zoh"))
    torch.use_deterministic_algorithms(False)


def check_padded(width, n, groups, dtype):
    """Zero-order hold and channels that are padded, an A of 0, documents."""
    few = fused.SMS
    args = inputs(2, 120, width, n, groups, dtype)
    args[2][:, 0] = 0.0
    seq = torch.tensor([0] * 30 + [1] * 70 + [2] * 20, device="cuda").repeat(2, 1)
    for rule in ("zoh", "euler"):
        for segments, fused.SMS in ((1, 0), (3, few)):
            e = errors(args, fused.Plan(True, segments, segments), discretization=rule, seq_idx=seq)
            report(f"{rule} D{width} N{n} G{groups} {str(dtype)[6:]} segments {segments} few {fused.SMS > 0}", e)


def calls(args, how=None, chunk=None, rule="euler"):
    """Forward and forward + backward as functions of nothing, through the operator and autograd; with `how` without it."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in args]
    given = [t for t in leaves if t is not None]
    dy = torch.randn_like(args[0])

    def forward():
        if how is not None:
            return fused.forward(*args, None, True, rule, chunk, False, how)[0]
        with torch.no_grad():
            return op.selective_scan(*args[:8], discretization=rule, initial_state=args[8], chunk=chunk, impl="fused")[0]

    def both():
        if how is not None:
            y, _, *saved = fused.forward(*args, None, True, rule, chunk, True, how)
            grads = fused.backward(dy, None, *args, None, y, *saved, True, rule, chunk, how)
            return y, grads
        y, _ = op.selective_scan(*leaves[:8], discretization=rule, initial_state=leaves[8], chunk=chunk, impl="fused")
        return y, torch.autograd.grad(y, given, dy)

    return forward, both


def measure(args, how=None, chunk=None, rule="euler"):
    """Medians in ms of forward and forward + backward, and peak MiB above the inputs of each."""
    return [timed(f) for f in calls(args, how, chunk, rule)]


def timed(f):
    """Median in ms of 150 ms of calls after 20 ms of warm-up, and the peak MiB that one call allocates."""
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    keep = f()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del keep
    return do_bench(f, warmup=20, rep=150, return_mode="median"), peak


def line(name, args, how=None, chunk=None, rule="euler"):
    (f, fp), (t, tp) = measure(args, how, chunk, rule)
    print(f"{name:44s} fwd {f:7.3f} ms {fp:6.0f} MiB   fwd+bwd {t:8.3f} ms {tp:6.0f} MiB   {floors(args, f, t)}", flush=True)


def floors(args, forward_ms, both_ms):
    """The times that memory and the special-function units alone would take, and their fractions of the measured time. Forward:
    x, dt, z read and y written once; one exponential per state. Backward: those, dy and the three gradients, twice the
    exponentials."""
    x, A = args[0], args[2]
    clock = SFU_CLOCK * torch.cuda.get_device_properties(x.device).multi_processor_count * 16
    one = x.numel() * x.element_size() / BANDWIDTH * 1e3  # ms to move a tensor like x
    wide = 3 + (args[6] is not None)
    exp = x.numel() * A.shape[1] / clock * 1e3
    rows = (("fwd", forward_ms, wide * one, exp), ("fwd+bwd", both_ms, (3 * wide - 1) * one, 3 * exp))
    return "; ".join(f"{n}: HBM {h:.3f} ({h / t:.0%}), exp {e:.3f} ({e / t:.0%})" for n, t, h, e in rows)


def speed(shapes=SHAPES):
    for shape in shapes:
        args = inputs(*shape, 16, without=("initial_state",))
        for chunk in (None, 16):  # the default, and twice as many saved states
            line(f"B{shape[0]} L{shape[1]} D{shape[2]} N16 chunk {chunk}", args, chunk=chunk)


def graph(shapes=SHAPES):
    for shape in shapes:
        times = []
        for f in calls(inputs(*shape, 16, without=("initial_state",))):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                f()
            torch.cuda.current_stream().wait_stream(side)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                f()
            times.append(do_bench(captured.replay, warmup=20, rep=150, return_mode="median"))
            del captured
        print("CUDA graph B{} L{} D{} N16   ".format(*shape) + "fwd {:7.3f} ms   fwd+bwd {:8.3f} ms".format(*times), flush=True)


def peer(shapes=SHAPES):
    try:
        import mamba_ssm
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError as missing:
        print(f"peer: {missing}")
        return
    for shape in shapes:
        x, dt, A, B, C, D, z, bias, _ = inputs(*shape, 16, without=("initial_state",))
        # its layout: (B, D, L), (B, N, L)
        args = [t.transpose(1, 2).contiguous() for t in (x, dt)] + [A]
        args += [t[:, :, 0].transpose(1, 2).contiguous() for t in (B, C)]
        args += [D, z.transpose(1, 2).contiguous(), bias]
        leaves = [t.detach().requires_grad_() for t in args]
        dy = torch.randn_like(args[0])

        def forward(args=args):
            with torch.no_grad():
                return selective_scan_fn(*args[:5], args[5], z=args[6], delta_bias=args[7], delta_softplus=True)

        def both(leaves=leaves, dy=dy):
            y = selective_scan_fn(*leaves[:5], leaves[5], z=leaves[6], delta_bias=leaves[7], delta_softplus=True)
            return y, torch.autograd.grad(y, leaves, dy)

        (f, fp), (t, tp) = timed(forward), timed(both)
        name = f"mamba_ssm {mamba_ssm.__version__} B{shape[0]} L{shape[1]} D{shape[2]}"
        print(f"{name:44s} fwd {f:7.3f} ms {fp:6.0f} MiB   fwd+bwd {t:8.3f} ms {tp:6.0f} MiB", flush=True)


def family(lengths=(16, 64, 256, 1024, 4096, 16384, 65536, 131072), n=16, most=1000.0):
    """B1, no options: forward + backward of all variants; bfloat16 and D1536 on a GPU, float32 and D64 on a CPU. A point
    that would take over `most` ms is skipped."""
    cuda = torch.cuda.is_available()
    device, dtype, width = ("cuda", torch.bfloat16, 1536) if cuda else ("cpu", torch.float32, 64)
    last = {}
    for length in lengths:
        for name in (*bench.LOOPS, *op.IMPLS[1:]):
            shape = [1, length, width, n]
            if name in op.IMPLS and op.why_not(name, torch.empty(1, dtype=dtype, device=device)):
                continue
            row = {"variant": name, "length": length} | bench.conditions(shape, dtype, device)
            before_length, before_ms = last.get(name, (length, 0.0))
            expected = before_ms * length / before_length
            if expected > most or expected != expected:
                print(json.dumps(row | {"status": "skipped", "expected_ms": expected}), flush=True)
                continue
            try:
                # on a CPU each in its own process, because memory is measured per process
                row |= (bench.measure if cuda else bench.alone)(name, shape, dtype, device, 0.3)
                last[name] = length, row["fwd_bwd_ms"]
            except (torch.cuda.OutOfMemoryError, MemoryError):
                row["status"] = "out of memory"
                last[name] = length, float("nan")
            if cuda:
                torch.cuda.empty_cache()
            print(json.dumps(row), flush=True)


def figure(source, target):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(text) for text in Path(source).read_text().splitlines() if '"length"' in text]
    drawn, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name in dict.fromkeys(r["variant"] for r in rows):
        mine = [r for r in rows if r["variant"] == name and "fwd_bwd_ms" in r]
        for axis, key in zip(axes, ("fwd_bwd_ms", "peak_mib"), strict=True):
            shown = [r for r in mine if r[key] > 0.05]  # smaller values are within the noise of a process's memory
            axis.plot([r["length"] for r in shown], [r[key] for r in shown], marker="o", markersize=3, label=name)
    kind = "resident" if rows[0]["dtype"] == "float32" else "allocated"
    for axis, title in zip(axes, ("forward + backward, ms", f"peak {kind} above the inputs, MiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="L", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    about = rows[0]
    drawn.suptitle(f"Selective scan, {about['device']}, {about['shape'].replace('L16 ', '')}, {about['dtype']}, "
                   f"{about['threads']} threads, torch {about['torch']}", fontsize=10)  # fmt: skip
    drawn.savefig(target)


def states():
    for n in (4, 16, 64, 128, 256):
        line(f"B8 L2048 D1024 N{n}", inputs(8, 2048, 1024, n, without=("initial_state",)))


def forms():
    for width in (3072, 3071):
        args = inputs(8, 2048, width, 16, without=("initial_state",))
        for rule in ("euler", "zoh"):
            line(f"gluon B8 L2048 D{width} {rule}", args, rule=rule)
            line(f"plain B8 L2048 D{width} {rule}", args, fused.Plan(False), rule=rule)
    line("gluon B8 L2048 D3072, no autograd", inputs(8, 2048, 3072, 16, without=("initial_state",)), fused.Plan(True))
    for length, width, counts in ((131072, 2048, (12, 24, 36, 48, 64)), (65536, 1536, (16, 32, 48, 64))):
        args = inputs(1, length, width, 16, without=("initial_state",))
        for segments in counts:
            line(f"B1 L{length} D{width} segments {segments}", args, fused.Plan(True, segments, segments))


def alternatives(x):
    """(pass, plan): ways to launch the forward, then the backward, with the other pass as in `fused.plan`."""
    chosen = fused.plan(x, 1, "euler")
    counts = [n for n in (1, 2, 3, 4) if x.shape[1] >= 32 * n]
    for block in (fused.BLOCK, fused.NARROW):
        for n in sorted({*counts, chosen.segments}):
            yield "forward", chosen._replace(segments=n, block=block)
        for n in sorted({*counts, chosen.backward}):
            for ahead in (True, False):
                yield "backward", chosen._replace(backward=n, backward_block=block, ahead=ahead)


def compared(shape):
    """Runs, and so compiles, each alternative once: the largest relative error of its outputs, against float64, or where that
    takes too long against CTAs of 64 channels and no split."""
    args = inputs(*shape, 16, without=("initial_state",))
    dy = torch.randn(args[0].shape, generator=torch.Generator(args[0].device).manual_seed(1), device=args[0].device).to(args[0])
    want, rows = None, []
    for name, how in [("both", fused.Plan(True)), *alternatives(args[0])]:
        if shape == COMPARED:
            e = errors(args, how)
            wrong = {k: v for k, v in e.ours.items() if not v <= 4 * e.torch[k] + 2e-4}
            rows.append({"shape": shape, "pass": name, "how": how, "of float64": max(e.ours.values()), "wrong": wrong})
            continue
        y, _, *saved = fused.forward(*args, None, True, "euler", None, how=how)
        got = [y, *(g for g in fused.backward(dy, None, *args, None, y, *saved, True, "euler", None, how=how) if g.numel())]
        want = want or got
        off = [((g.float() - w.float()).norm() / w.float().norm()).item() for g, w in zip(got, want, strict=True)]
        rows.append({"shape": shape, "pass": name, "how": how, "of wide": max(off), "wrong": [v for v in off if not v < 5e-3]})
    return rows


def waves(shapes=WAVES):
    # one process per shape compiles in parallel; this process finds the results on disk
    with ProcessPoolExecutor(len(shapes) + 1, multiprocessing.get_context("spawn")) as pool:
        rows = [row for made in pool.map(compared, [COMPARED, *shapes]) for row in made]
    for row in rows:
        if row["wrong"]:
            print(json.dumps(row), flush=True)
    print(json.dumps({"compared": len(rows), "wrong": sum(bool(r["wrong"]) for r in rows)}), flush=True)
    for shape in shapes:
        args = inputs(*shape, 16, without=("initial_state",))
        chosen, dy = fused.plan(args[0], 1, "euler"), torch.randn_like(args[0])
        before = chosen._replace(block=fused.BLOCK, backward_block=fused.BLOCK)
        for name, how in [("both, the plan", chosen), ("both, CTAs of 64 channels", before), *alternatives(args[0])]:

            def forward(how=how, args=args):
                return fused.forward(*args, None, True, "euler", None, how=how)

            y, _, *saved = forward()

            def backward(y=y, saved=saved, how=how, args=args, dy=dy):
                return fused.backward(dy, None, *args, None, y, *saved, True, "euler", None, how=how)

            def both(forward=forward, backward=backward):
                y, _, *saved = forward()
                return backward(y, saved)

            call = {"forward": forward, "backward": backward}.get(name, both)
            ms = graph_milliseconds(call, 7, 4 if shape[1] < 65536 else 1)
            row = {"shape": "B{} L{} D{}".format(*shape), "pass": name, "ms": round(ms, 4)}
            if name == "forward":
                row |= {"channels": how.block, "segments": how.segments}
            if name == "backward":
                row |= {"channels": how.backward_block, "segments": how.backward, "ahead": how.ahead}
            print(json.dumps(row), flush=True)


def first():
    args = inputs(2, 256, 256, 16, without=("initial_state",))
    start = time.perf_counter()
    gradients(args, lambda t: op.selective_scan(*t[:8], impl="fused"), torch.ones_like(args[0]),
              torch.zeros(2, 256, 16, device="cuda"))  # fmt: skip
    torch.cuda.synchronize()
    print(f"first forward + backward: {time.perf_counter() - start:.1f} s")


def host(shape=(1, 64, 64), count=200):
    """us of host time per call: medians over 9 times `count` calls, without synchronization."""
    args = inputs(*shape, 16, without=("initial_state",))
    forward, both = calls(args)
    leaves = [None if t is None else t.detach().requires_grad_() for t in args]
    settings = (None, True, "euler", None)
    y, _, *saved = fused.forward(*args, *settings)
    dy, given = torch.randn_like(y), [t for t in leaves if t is not None]

    class Nothing(torch.autograd.Function):
        """Autograd's own part of such a call."""

        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return y.detach(), y.detach()

        @staticmethod
        def backward(ctx, *_):
            return ctx.saved_tensors

    def one_thread():
        """Runs outside autograd's thread for the device, which excludes the time to wake it and its cold caches."""
        with torch.autograd.set_multithreading_enabled(False):
            return both()

    parts = {
        "forward": forward,
        "forward + backward": both,
        "forward that saves": lambda: op.selective_scan(*leaves[:8], impl="fused"),
        "fused.forward": lambda: fused.forward(*args, *settings),
        "fused.backward": lambda: fused.backward(dy, None, *args, None, y, *saved, *settings[1:]),
        "autograd alone": lambda: torch.autograd.grad(Nothing.apply(*leaves)[0], given, dy),
        "both in one thread": one_thread,
        "new_empty": lambda: y.new_empty(2, 64, 64),
    }
    for name, call in parts.items():
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count * 1e6)
        print("host B{} L{} D{} N16   ".format(*shape) + f"{name:20s} {statistics.median(times[1:]):7.1f} us", flush=True)


def main(parts):
    if parts and parts[0] == "figure":
        return figure(*parts[1:])
    shapes = [tuple(map(int, part.split("x"))) for part in parts if part[0].isdigit()]
    parts = [part for part in parts if not part[0].isdigit()]
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
        torch.zeros(1, device="cuda")
        first()
    for part in parts or ("check", "speed"):
        PARTS[part](shapes) if shapes and part in ("speed", "graph", "peer", "waves") else PARTS[part]()
    return None


PARTS = {
    "check": check, "speed": speed, "graph": graph, "peer": peer, "host": host, "states": states, "forms": forms,
    "waves": waves, "family": family,
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

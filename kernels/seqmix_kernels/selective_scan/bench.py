"""Times forward + backward of every implementation, and of naive loops, at one shape.

    python -m seqmix_kernels.selective_scan.bench
    python -m seqmix_kernels.selective_scan.bench --shape 8 2048 3072 16 --dtype bfloat16 --only naive,chunked,fused

The variants run one after the other, each in its own process, so that peaks are separate: on a CPU the growth of the
process's peak resident size (VmHWM, reset before; otherwise ru_maxrss) over one forward + backward, on a GPU torch's
peak of allocated memory, both above the inputs and including the gradients. Times are medians over at least three calls
after a warm-up, by wall clock on a CPU and CUDA events on a GPU. It prints a table, then one JSON line per variant.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from .op import IMPLS, selective_scan, why_not


def naive(x, dt, A, B, C):
    """The exponential inside the loop over steps."""
    h, ys = A.new_zeros(x.shape[0], *A.shape), []
    B, C = B[:, :, 0], C[:, :, 0].to(A.dtype)
    for x_t, dt_t, B_t, C_t in zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        h = torch.exp(dt_t.unsqueeze(2) * A) * h + (dt_t * x_t).unsqueeze(2) * B_t.unsqueeze(1)
        ys.append((h @ C_t.unsqueeze(2)).squeeze(2))
    return torch.stack(ys, 1).to(x.dtype)


def naive_precomputed(x, dt, A, B, C):
    """Decays and inputs of all steps first, then the loop, then all outputs."""
    decay = torch.exp(dt.unsqueeze(3) * A)  # (B, L, D, N)
    b = (dt * x).unsqueeze(3) * B
    h, states = A.new_zeros(x.shape[0], *A.shape), []
    for decay_t, b_t in zip(decay.unbind(1), b.unbind(1), strict=True):
        h = decay_t * h + b_t
        states.append(h)
    return (torch.stack(states, 1) @ C[:, :, 0].to(A.dtype).unsqueeze(3)).squeeze(3).to(x.dtype)


LOOPS = {"naive": naive, "naive_precomputed": naive_precomputed}


def inputs(batch, length, width, n, dtype, device, seed=0):
    """x, dt (a positive step), A, B, C: the inputs of all variants, without the options that only the operator has."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    x, B, C = normal(batch, length, width), normal(batch, length, 1, n), normal(batch, length, 1, n)
    dt = torch.nn.functional.softplus(normal(batch, length, width) - 4)
    A = -torch.arange(1.0, n + 1, device=device).repeat(width, 1)
    return [t.requires_grad_() for t in (x.to(dtype), dt.to(dtype), A, B.to(dtype), C.to(dtype))]


def step(variant: str, leaves: list[torch.Tensor], dy: torch.Tensor | None):
    """One forward, and the backward if dy is given."""
    if variant in LOOPS:
        y = LOOPS[variant](*leaves)
    else:
        y, _ = selective_scan(*leaves, dt_softplus=False, impl=variant)
    if dy is not None:
        torch.autograd.grad(y, leaves, dy)


def milliseconds(call, device: str, seconds: float) -> tuple[float, int]:
    """Median and count of timed calls, at least three."""
    call()
    times = []
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), len(times)


def measure(variant: str, shape: list[int], dtype: torch.dtype, device: str, seconds: float) -> dict:
    """One variant, in this process."""
    small = inputs(1, 4, 16, shape[3], dtype, device)
    step(variant, small, torch.ones_like(small[0]))  # so that libraries, threads and compilers do not count in the peak
    leaves = inputs(*shape, dtype, device)
    dy = torch.randn_like(leaves[0])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(variant, leaves, dy)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        before = _resident_mib(lower_the_mark=True)
        step(variant, leaves, dy)
        peak = _resident_mib() - before
    with torch.no_grad():
        forward, _ = milliseconds(lambda: step(variant, leaves, None), device, seconds / 2)
    both, count = milliseconds(lambda: step(variant, leaves, dy), device, seconds)
    return {"variant": variant, "inference_ms": forward, "fwd_bwd_ms": both, "calls": count, "peak_mib": peak}


def alone(variant: str, shape: list[int], dtype: torch.dtype, device: str, seconds: float) -> dict:
    """`measure` in its own process, so that its peak is separate. A failure raises RuntimeError with the last line of
    stderr."""
    settings = ["--shape", *map(str, shape), "--dtype", str(dtype).removeprefix("torch."), "--device", device]
    child = [sys.executable, "-m", "seqmix_kernels.selective_scan.bench", *settings, "--seconds", str(seconds)]
    done = subprocess.run([*child, "--child", variant], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["killed"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _resident_mib(lower_the_mark: bool = False) -> float:
    """The process's peak resident size so far; with lower_the_mark it is first reset to the current size, if Linux allows."""
    if lower_the_mark and os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM, which ru_maxrss would not show
    if Path("/proc/self/status").exists():
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM")) / 2**10  # kB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # kB


def conditions(shape, dtype, device: str) -> dict:
    """The conditions of a measurement."""
    where = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    found = {"shape": "B{} L{} D{} N{}".format(*shape), "dtype": str(dtype).removeprefix("torch."), "device": where}
    return found | {"threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.selective_scan.bench", description=__doc__)
    parser.add_argument("--shape", nargs=4, type=int, default=[4, 1024, 256, 16], metavar=("B", "L", "D", "N"))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", help="variants, separated by commas")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each variant is timed at least")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    if args.child:
        print(json.dumps(measure(args.child, args.shape, dtype, args.device, args.seconds)))
        return
    probe = torch.empty(1, dtype=dtype, device=args.device)
    names = args.only.split(",") if args.only else [*LOOPS, *(i for i in IMPLS[1:] if why_not(i, probe) is None)]
    about = conditions(args.shape, dtype, args.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'variant':<18}{'inference ms':>14}{'fwd+bwd ms':>13}{'calls':>7}{'peak MiB':>10}{'faster':>9}{'memory':>9}")
    rows = []
    for name in names:
        try:
            row = alone(name, args.shape, dtype, args.device, args.seconds)
        except RuntimeError as failed:
            print(f"{name:<18}failed: {failed}")
            continue
        rows.append(row)
        # relative to the fastest loop measured so far in this run
        loops = [r for r in rows if r["variant"] in LOOPS]
        if loops:
            best = min(loops, key=lambda r: r["fwd_bwd_ms"])
            row["times_faster"] = best["fwd_bwd_ms"] / row["fwd_bwd_ms"]
            row["of_its_memory"] = row["peak_mib"] / best["peak_mib"]
        ratios = f"{row['times_faster']:>8.1f}x{row['of_its_memory']:>9.3f}" if loops else ""
        print(f"{name:<18}{row['inference_ms']:>14.3f}{row['fwd_bwd_ms']:>13.3f}{row['calls']:>7}"
              f"{row['peak_mib']:>10.1f}{ratios}", flush=True)  # fmt: skip
    for row in rows:
        print(json.dumps(about | row))


if __name__ == "__main__":
    main()

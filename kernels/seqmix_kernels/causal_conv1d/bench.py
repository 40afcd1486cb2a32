"""Times the convolution with SiLU through its public operator, forward and forward + backward, beside torch's own.

    python -m seqmix_kernels.causal_conv1d.bench [--shapes 8x2048x3072,...] [--dtype bfloat16] [--taps 4] [--count 50]

torch: F.conv1d over D groups, cut to L steps, and F.silu, on x transposed (the layout that the projections around it leave)
and on x stored as torch wants it, (B, D, L). Medians of CUDA-event timings with the L2 cache flushed between calls; peak MiB
of one forward + backward above its inputs; the least that memory allows is 2 tensors forward and 5 for both.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

from .op import IMPLS, causal_conv1d, why_not


def torchs(x, weight, bias):
    """(B, D, L) in and out."""
    return F.silu(F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[2]])


VARIANTS = {
    "torch": lambda x, w, b: torchs(x.transpose(1, 2), w, b).transpose(1, 2),
    "torch, (B, D, L)": torchs,
    **{impl: lambda x, w, b, impl=impl: causal_conv1d(x, w, b, "silu", impl=impl)[0] for impl in IMPLS[1:]},
}


def milliseconds(call, count: int) -> float:
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times = []
    for i in range(count + 3):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(variant: str, batch: int, length: int, width: int, taps: int, dtype: torch.dtype, count: int) -> dict:
    g = torch.Generator("cuda").manual_seed(0)
    shape = (batch, width, length) if "(B, D, L)" in variant else (batch, length, width)
    x, dy = (torch.randn(shape, generator=g, device="cuda").to(dtype) for _ in range(2))
    weight, bias = torch.randn(width, taps, generator=g, device="cuda"), torch.randn(width, generator=g, device="cuda")
    if "torch" in variant:
        weight, bias = weight.to(dtype), bias.to(dtype)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    run = VARIANTS[variant]

    def both():
        torch.autograd.grad(run(*leaves), leaves, dy)

    both()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.no_grad():
        forward = milliseconds(lambda: run(*leaves), count)
    return {"variant": variant, "fwd_ms": forward, "fwd_bwd_ms": milliseconds(both, count), "peak_mib": peak}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.causal_conv1d.bench", description=__doc__)
    parser.add_argument("--shapes", default="8x2048x3072,8x2048x1536,64x4096x128,1x65536x1536")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--taps", type=int, default=4)
    parser.add_argument("--count", type=int, default=50)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype, "taps": args.taps}
    for shape in args.shapes.split(","):
        batch, length, width = map(int, shape.split("x"))
        probe = torch.empty(1, 1, width, dtype=dtype, device="cuda"), torch.empty(width, args.taps, device="cuda")
        for variant in VARIANTS:
            if variant in IMPLS and why_not(variant, *probe):
                continue
            row = measure(variant, batch, length, width, args.taps, dtype, args.count)
            print(json.dumps(about | {"B": batch, "L": length, "D": width} | row), flush=True)


if __name__ == "__main__":
    main()

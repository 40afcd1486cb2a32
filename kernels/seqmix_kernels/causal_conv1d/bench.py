"""Times the convolution with SiLU through its public operator, forward and forward + backward, and torch's own convolution.

    python -m seqmix_kernels.causal_conv1d.bench [--shapes 8x2048x3072,...] [--dtype bfloat16] [--taps 4] [--count 20]

torch: F.conv1d over D groups, cut to L steps, and F.silu, on x transposed (the layout of the projections around it)
and on x stored in torch's layout, (B, D, L). Times are of the GPU alone, by CUDA graphs (../graph_timing.py); eager_ms is a
forward + backward launched by the host; peak is the MiB of one forward + backward above its inputs. floor: the time to move 2
tensors forward and 5 for both at the GPU's measured bandwidth.
"""

import argparse
import json

import torch
import torch.nn.functional as F

from ..graph_timing import eager_milliseconds, graph_milliseconds, memory_bandwidth
from .op import IMPLS, causal_conv1d, why_not


def torchs(x, weight, bias):
    """(B, D, L) in and out."""
    return F.silu(F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=len(weight))[..., : x.shape[2]])


VARIANTS = {
    "torch": lambda x, w, b: torchs(x.transpose(1, 2), w, b).transpose(1, 2),
    "torch, (B, D, L)": torchs,
    **{impl: lambda x, w, b, impl=impl: causal_conv1d(x, w, b, "silu", impl=impl)[0] for impl in IMPLS[1:]},
}


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
        forward = graph_milliseconds(lambda: run(*leaves), count)
    return {"variant": variant, "fwd_ms": forward, "fwd_bwd_ms": graph_milliseconds(both, count),
            "eager_ms": eager_milliseconds(both, count), "peak_mib": peak}  # fmt: skip


def floor(batch: int, length: int, width: int, dtype: torch.dtype) -> dict:
    ms = batch * length * width * dtype.itemsize / memory_bandwidth() * 1e3  # to move one tensor
    return {"variant": "floor", "fwd_ms": 2 * ms, "fwd_bwd_ms": 5 * ms}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.causal_conv1d.bench", description=__doc__)
    parser.add_argument("--shapes", default="8x2048x3072,8x2048x1536,64x4096x128,1x65536x1536")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--taps", type=int, default=4)
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype, "taps": args.taps}
    for shape in args.shapes.split(","):
        batch, length, width = map(int, shape.split("x"))
        probe = torch.empty(1, 1, width, dtype=dtype, device="cuda"), torch.empty(width, args.taps, device="cuda")
        where = about | {"B": batch, "L": length, "D": width}
        print(json.dumps(where | floor(batch, length, width, dtype)), flush=True)
        for variant in VARIANTS:
            if variant in IMPLS and why_not(variant, *probe):
                continue
            row = measure(variant, batch, length, width, args.taps, dtype, args.count)
            print(json.dumps(where | row), flush=True)


if __name__ == "__main__":
    main()

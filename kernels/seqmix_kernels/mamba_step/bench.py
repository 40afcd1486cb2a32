"""Times one step of a stack of Mamba blocks under a CUDA graph: the fused step and plain torch.

    python -m seqmix_kernels.mamba_step.bench [--batches 1,2,4,8,64,256] [--d-model 768] [--layers 24] [--dtype bfloat16]

E = 2M, N = 16, R = M/16, four taps. Every layer has its own weights and states, so that they come from memory and not from
the cache, as in a model. Times are microseconds per layer (../graph_timing.py); floor: the time to move weights once and
states twice at the GPU's measured bandwidth.
"""

import argparse
import json

import torch

from ..graph_timing import graph_milliseconds, memory_bandwidth
from .op import mamba_step


def layer(batch: int, d_model: int, dtype: torch.dtype, g: torch.Generator) -> dict:
    width, n, rank, taps = 2 * d_model, 16, max(1, d_model // 16), 4

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, device="cuda") * scale

    return {
        "in_proj": normal(2 * width, d_model, scale=d_model**-0.5).to(dtype), "conv": normal(width, taps, scale=0.5),
        "x_proj": normal(rank + 2 * n, width, scale=width**-0.5).to(dtype),
        "dt_proj": normal(width, rank, scale=rank**-0.5).to(dtype), "dt_bias": normal(width) - 4,
        "A_log": torch.arange(1.0, n + 1, device="cuda").log().repeat(width, 1), "D": torch.ones(width, device="cuda"),
        "out_proj": normal(d_model, width, scale=width**-0.5).to(dtype), "conv_bias": normal(width, scale=0.1),
        "conv_state": normal(batch, taps - 1, width).to(dtype), "ssm_state": normal(batch, width, n),
    }  # fmt: skip


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.mamba_step.bench", description=__doc__)
    parser.add_argument("--batches", default="1,2,4,8,64,256")
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    dtype, bandwidth = getattr(torch, args.dtype), memory_bandwidth()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype, "M": args.d_model}
    for batch in map(int, args.batches.split(",")):
        g = torch.Generator("cuda").manual_seed(0)
        layers = [layer(batch, args.d_model, dtype, g) for _ in range(args.layers)]
        u = torch.randn(batch, args.d_model, generator=g, device="cuda").to(dtype)
        states = [t.numel() * t.element_size() for name, t in layers[0].items() if "state" in name]
        weights = [t.numel() * t.element_size() for name, t in layers[0].items() if "state" not in name]
        row = {"batch": batch, "floor_us": 1e6 * (sum(weights) + 2 * sum(states)) / bandwidth}
        for impl in ("fused", "reference"):

            def stack(impl=impl, u=u, layers=layers):
                for tensors in layers:
                    u, _, _ = mamba_step(u, **tensors, impl=impl)

            row[f"{impl}_us"] = 1e3 * graph_milliseconds(stack, calls=1) / args.layers
        print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()

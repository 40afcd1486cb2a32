"""Times the Mamba node at each level and the composition of the same kernels, and measures the memory of each.

    python -m seqmix_kernels.mamba_inner.bench [--shapes 8x2048x768,...] [--dtype bfloat16] [--count 15]

A shape is B x L x M; E = 2M, N = 16, R = M/16, four taps. Times are of the GPU alone, by CUDA graphs (../graph_timing.py);
eager_ms is a forward + backward launched by the host. kept: bytes per token that are held between forward and backward,
without the output; peak: MiB of one forward + backward above the inputs.
"""

import argparse
import json

import torch

from ..graph_timing import eager_milliseconds, graph_milliseconds
from .inner import Given
from .op import LEVELS, mamba_inner
from .reference import reference


def inputs(batch: int, length: int, d_model: int, dtype: torch.dtype, device: str = "cuda") -> dict:
    """The tensors of a call in training under autocast: u in `dtype`, parameters in float32."""
    width, n, rank, taps = 2 * d_model, 16, max(1, d_model // 16), 4
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, device=device) * scale

    made = {
        "u": normal(batch, length, d_model).to(dtype), "in_proj": normal(2 * width, d_model, scale=d_model**-0.5),
        "conv": normal(width, taps, scale=0.5), "conv_bias": normal(width, scale=0.1),
        "x_proj": normal(rank + 2 * n, width, scale=width**-0.5), "dt_proj": normal(width, rank, scale=rank**-0.5),
        "dt_bias": normal(width) - 4, "A_log": torch.arange(1.0, n + 1, device=device).log().repeat(width, 1),
        "D": torch.ones(width, device=device), "out_proj": normal(d_model, width, scale=width**-0.5),
    }  # fmt: skip
    return {name: t.requires_grad_() for name, t in made.items()}


def variants(dtype: torch.dtype) -> dict:
    def composed(**tensors):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            return reference(*(tensors.get(name) for name in Given._fields), "euler", "auto")[0]

    def node(level):
        def run(**tensors):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                return mamba_inner(**tensors, level=level)[0]

        return run

    return {"composition": composed} | {f"level {level}": node(level) for level in LEVELS}


def memory(run, leaves: dict) -> tuple[int, int]:
    """Bytes requested of the allocator and held between forward and backward, without the output, and the peak above the
    inputs, gradients included."""

    def asked() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]  # before the allocator rounds up

    def both(after_forward=lambda: None):
        y = run(**leaves)
        after_forward()
        torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))
        return y.numel() * y.element_size()

    both()  # the workspaces of libraries are not counted
    before, held, seen = torch.cuda.memory_allocated(), asked(), []
    torch.cuda.reset_peak_memory_stats()
    output = both(lambda: seen.append(asked() - held))
    return seen[0] - output, torch.cuda.max_memory_allocated() - before


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.mamba_inner.bench", description=__doc__)
    parser.add_argument("--shapes", default="8x2048x768,8x2048x1536,1x65536x768")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--count", type=int, default=15)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype}
    for shape in args.shapes.split(","):
        batch, length, d_model = map(int, shape.split("x"))
        leaves = inputs(batch, length, d_model, dtype)
        for name, run in variants(dtype).items():
            kept, peak = memory(run, leaves)
            dy = torch.randn_like(leaves["u"])

            def both(run=run, dy=dy, leaves=leaves):
                torch.autograd.grad(run(**leaves), list(leaves.values()), dy)

            with torch.no_grad():
                forward = graph_milliseconds(lambda run=run, leaves=leaves: run(**leaves), args.count, 4)
            row = {"B": batch, "L": length, "M": d_model, "variant": name, "fwd_ms": forward,
                   "fwd_bwd_ms": graph_milliseconds(both, args.count, 4),
                   "eager_ms": eager_milliseconds(both, args.count), "kept_bytes_a_token": kept / (batch * length),
                   "peak_mib": peak / 2**20}  # fmt: skip
            print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()

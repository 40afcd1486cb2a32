"""Times the gate of SwiGLU, and plain torch, by CUDA graphs; one JSON line per shape and implementation.

    python -m seqmix_kernels.swiglu.bench [--shapes 16384x4096,...] [--dtype bfloat16] [--count 20]

A shape is that of h, rows x 2H. torch: silu and product in h's dtype. *_of_copy: the time of a copy of the same bytes over the
measured time. The bytes are h and the result in the forward, h and both gradients in the backward. It can exceed 1 where these
fit into the L2 cache.
"""

import argparse
import json

import torch
import torch.nn.functional as F

from ..graph_timing import beside_copy, memory_bandwidth
from .op import IMPLS, swiglu


def torchs(h: torch.Tensor) -> torch.Tensor:
    gate, value = h.chunk(2, dim=-1)
    return F.silu(gate) * value


VARIANTS = {"torch": torchs} | {impl: lambda h, impl=impl: swiglu(h, impl) for impl in IMPLS[1:]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.swiglu.bench", description=__doc__)
    parser.add_argument("--shapes", default="16384x4096,2048x344,262144x344,2048x688,262144x688")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args(argv)
    dtype, bandwidth = getattr(torch, args.dtype), memory_bandwidth()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype}
    for shape in args.shapes.split(","):
        rows, width = map(int, shape.split("x"))
        h = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
        da = torch.randn(rows, width // 2, device="cuda").to(dtype)
        half = da.numel() * da.element_size()
        for name, run in VARIANTS.items():
            times = beside_copy(run, [h], [da], (3 * half, 8 * half), bandwidth, args.count)
            print(json.dumps(about | {"rows": rows, "2H": width, "variant": name} | times), flush=True)


if __name__ == "__main__":
    main()

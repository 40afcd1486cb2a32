"""Times the residual addition and its norm, and plain torch, by CUDA graphs; one JSON line per shape and implementation.

    python -m seqmix_kernels.add_rms_norm.bench [--shapes 16384x768,...] [--dtype bfloat16] [--count 20]

A shape is rows x D. x and the weight are in float32, y and n in the dtype, as under autocast. *_of_copy: the time of a copy of
the same bytes over the measured time. The bytes are x, y, s, n in the forward and s, ∂s, ∂n, ∂x, ∂y in the backward. It can
exceed 1 where these fit into the L2 cache.
"""

import argparse
import json

import torch

from ..graph_timing import beside_copy, memory_bandwidth
from .op import IMPLS, add_rms_norm


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m seqmix_kernels.add_rms_norm.bench", description=__doc__)
    parser.add_argument("--shapes", default="16384x768,262144x64,2048x64,2304x64,4096x128,8x768,1x64")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args(argv)
    dtype, bandwidth = getattr(torch, args.dtype), memory_bandwidth()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": args.dtype}
    for shape in args.shapes.split(","):
        rows, D = map(int, shape.split("x"))
        x, ds, y, dn = (torch.randn(rows, D, device="cuda") for _ in range(4))
        leaves = [t.requires_grad_() for t in (x, y.to(dtype), torch.ones(D, device="cuda"))]
        wide, narrow = 4 * rows * D, dtype.itemsize * rows * D
        moved = 2 * wide + 2 * narrow, 5 * wide + 4 * narrow
        for impl in IMPLS[1:]:

            def run(x, y, weight, impl=impl):
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    return add_rms_norm(x, y, weight, impl=impl)

            times = beside_copy(run, leaves, [ds, dn.to(dtype)], moved, bandwidth, args.count)
            print(json.dumps(about | {"rows": rows, "D": D, "impl": impl} | times), flush=True)


if __name__ == "__main__":
    main()

"""Compiles the kernels of the fused step for a GPU that is not there; one JSON line each on what came out.

    python tests/kernels/compile_step.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels.mamba_step import fused

CASES = [  # B, E, N, R, W, dtype, discretization
    ("130m", 64, 1536, 16, 48, 4, torch.bfloat16, "euler"),
    ("odd float32 zoh", 2, 90, 12, 3, 3, torch.float32, "zoh"),
]


def main(arch):
    for name, batch, width, n, rank, taps, dtype, discretization in CASES:
        xz = torch.zeros(batch, 2 * width, dtype=dtype)
        weights = (torch.zeros(width, taps), torch.zeros(width), torch.zeros(rank + 2 * n, width), torch.zeros(width, rank))
        own = (torch.zeros(width), torch.zeros(width, n), torch.zeros(width))
        states = torch.zeros(batch, taps - 1, width, dtype=dtype), torch.zeros(batch, width, n)
        given = (*xz.chunk(2, 1), *states, *(t.to(dtype) for t in weights), *own, discretization)
        for kernel, args, meta in record([fused], lambda given=given: fused.step(*given)):
            row = {"arch": arch, "case": name, "kernel": kernel.__name__} | report(build(kernel, args, meta, arch))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

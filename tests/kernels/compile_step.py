"""Compiles the kernels of the fused step for a GPU that is not there; one JSON line each on what came out.

    python tests/kernels/compile_step.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels.ops.mamba_step import fused

CASES = [  # B, M, E, N, R, W, dtype, discretization
    ("130m", 1, 768, 1536, 16, 48, 4, torch.bfloat16, "euler"),
    ("130m, some rows", 8, 768, 1536, 16, 48, 4, torch.bfloat16, "euler"),
    ("130m, many rows", 64, 768, 1536, 16, 48, 4, torch.bfloat16, "euler"),
    ("odd float32 zoh", 2, 45, 90, 12, 3, 3, torch.float32, "zoh"),
]


def main(arch):
    fused.programmatic = lambda device: arch >= 90  # the tensors are on the CPU
    for name, batch, d_model, width, n, rank, taps, dtype, discretization in CASES:
        zeros = lambda *shape, dtype=dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
        given = (
            zeros(batch, d_model), zeros(2 * width, d_model), zeros(2 * width), zeros(width, taps), zeros(width),
            zeros(rank + 2 * n, width), zeros(width, rank), torch.zeros(width), torch.zeros(width, n), torch.zeros(width),
            zeros(d_model, width), zeros(d_model), zeros(batch, taps - 1, width), torch.zeros(batch, width, n),
            discretization, dtype,
        )  # fmt: skip
        for kernel, args, meta in record([fused], lambda given=given: fused.step(*given)):
            row = {"arch": arch, "case": name, "kernel": kernel.__name__} | report(build(kernel, args, meta, arch))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

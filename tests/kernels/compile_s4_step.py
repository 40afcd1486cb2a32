"""Compiles the kernels of the fused step of S4 and S4D for a GPU that is not there; one JSON line each on what came out.

python tests/kernels/compile_s4_step.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels.ops.s4_step import fused

CASES = [  # B, E, n, M, parts, P?, dtype, method
    ("s4 130m", 1, 768, 1, 32, 2, True, torch.bfloat16, "bilinear"),
    ("s4 130m, some rows", 16, 768, 1, 32, 2, True, torch.bfloat16, "bilinear"),
    ("s4 130m, many rows", 64, 768, 1, 32, 2, True, torch.bfloat16, "bilinear"),
    ("s4d 130m", 1, 768, 768, 32, 2, False, torch.bfloat16, "zoh"),
    ("s4d 130m, many rows", 64, 768, 768, 32, 2, False, torch.bfloat16, "zoh"),
    ("s4d 130m, very many rows", 300, 768, 768, 32, 2, False, torch.bfloat16, "zoh"),
    ("s4, weights in float32", 32, 768, 1, 32, 2, True, torch.float16, "bilinear"),
    ("odd, many states", 40, 45, 3, 127, 2, True, torch.float32, "bilinear"),
    ("odd, real", 40, 45, 3, 250, 1, False, torch.float16, "zoh"),
    ("odd, bilinear", 4, 45, 3, 3, 2, False, torch.float32, "bilinear"),
]


def main(arch):
    fused.programmatic = lambda device: arch >= 90  # the tensors are on the CPU
    for name, batch, width, sets, modes, parts, low_rank, dtype, method in CASES:
        A, P, C = torch.zeros(sets, modes), torch.zeros(sets, modes, 2) if low_rank else None, torch.zeros(width, modes, parts)
        u, x, D = torch.zeros(batch, width, dtype=dtype), torch.zeros(batch, width, modes, parts), torch.zeros(width)
        W, b = torch.zeros(width, width, dtype=torch.float32 if "float32" in name else dtype), torch.zeros(width)

        def call(given=(u, x, D, A, A if parts == 2 else None, P, P, C, D, method, "gelu", dtype), gated=(u, W, b, W, b)):
            fused.step(*given)
            fused.gated(*gated)

        for kernel, args, meta in record([fused], call):
            row = {"arch": arch, "case": name, "kernel": kernel.__name__} | report(build(kernel, args, meta, arch))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

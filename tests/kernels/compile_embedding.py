"""Compiles the kernels of the embedding for a GPU that is not there; one JSON line each on what came out.

python tests/kernels/compile_embedding.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels import fused_rowwise
from seqmix_kernels.ops.embedding import fused

CASES = [  # T, V, D, dtype
    (100, 256, 128, "float32"), (100, 16, 64, "float32"), (100, 16, 64, "bfloat16"), (100, 32, 128, "float32"),
    (100, 32, 70, "float16"), (100, 50277, 768, "float32"), (100, 50277, 768, "bfloat16"), (9000, 70000, 64, "float32"),
]  # fmt: skip


def main(arch):
    for T, V, D, dtype in CASES:
        tokens, weight = torch.zeros(T, dtype=torch.int64), torch.zeros(V, D, dtype=getattr(torch, dtype))

        def call(tokens=tokens, weight=weight):
            y, keys = fused.forward(tokens, weight, True)
            fused.backward(y, keys, len(weight))

        for kernel, args, meta in record([fused, fused_rowwise], call):
            compiled = build(kernel, args, meta, arch)
            ptx = compiled.asm["ptx"]
            row = {"case": f"{V} {D} {dtype}", "kernel": kernel.__name__} | report(compiled)
            wide = {way: max([n for n in (4, 2) if f"{way}.global.v{n}.b32" in ptx], default=1) for way in ("ld", "st")}
            print(json.dumps(row | wide), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

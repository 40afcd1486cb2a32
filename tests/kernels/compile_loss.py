"""Compiles the kernels of the loss for a GPU that is not there; one JSON line each on what came out.

    python tests/kernels/compile_loss.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels.ops.cross_entropy import fused

CASES = [(2, "bfloat16"), (16, "bfloat16"), (77, "float32"), (256, "bfloat16"), (5000, "float16"), (50277, "bfloat16")]


def main(arch):
    for classes, dtype in CASES:
        rows = fused.padded(torch.zeros(classes, 1), getattr(torch, dtype))
        logits, targets = torch.zeros(3, len(rows), dtype=rows.dtype), torch.zeros(3, dtype=torch.int64)

        def call(logits=logits, targets=targets, classes=classes):
            losses, log_sums, _ = fused.forward(logits, targets, -100, classes)
            fused.backward(losses, logits, targets, log_sums, -100, classes, out=logits)

        for kernel, args, meta in record([fused], call):
            compiled = build(kernel, args, meta, arch)
            row = {"arch": arch, "V": classes, "dtype": dtype, "kernel": kernel.__name__} | report(compiled)
            # loads and stores of 16 bytes
            print(json.dumps(row | {"wide": compiled.asm["ptx"].count("global.v4.b32")}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Compiles the kernels of add_rms_norm and swiglu for a GPU that is not there; one JSON line each on what came out.

python tests/kernels/compile_rowwise.py 90
"""

import json
import sys

import torch
from compile_scan import build, record, report

from seqmix_kernels import fused_rowwise
from seqmix_kernels.ops.add_rms_norm import fused as norm
from seqmix_kernels.ops.swiglu import fused as gate

F32, BF16 = torch.float32, torch.bfloat16


def calls():
    """The name of a case, the module of its kernels, and what launches them."""
    for D, dtype in ((64, BF16), (768, BF16), (768, F32), (770, BF16), (8192, F32)):

        def both(D=D, dtype=dtype):
            s, n, r = norm.forward(torch.zeros(4, D), torch.zeros(4, D, dtype=dtype), torch.zeros(D), 1e-5, dtype)
            norm.backward(s, n, s, torch.zeros(D), r, dtype, True)

        yield f"norm {D} {dtype}", norm, both
    for H in (172, 2048):
        h = torch.zeros(4, 2 * H, dtype=BF16)
        yield f"gate {H}", gate, lambda h=h: gate.backward(gate.forward(h), h)


def main(arch):
    for case, module, call in calls():
        for kernel, args, meta in record([module, fused_rowwise], call):
            if kernel.__name__ == "sum_kernel" and "768" not in case:
                continue
            compiled = build(kernel, args, meta, arch)
            wide = [words for words in (4, 2) if f"ld.global.v{words}.b32" in compiled.asm["ptx"]]
            row = {"case": case, "kernel": kernel.__name__, "words": max(wide, default=1)}
            print(json.dumps(row | report(compiled)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

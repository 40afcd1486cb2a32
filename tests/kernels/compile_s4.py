"""Compiles the kernels of S4 and of the long convolution for a GPU that is not there; one JSON line each on what came out.

    python tests/kernels/compile_s4.py 90

The launchers run on CPU tensors with every kernel replaced by a recorder (compile_scan.py). In a process of its own:
interpreted kernels cannot be compiled.
"""

import json
import sys

import torch
from compile_scan import TYPES, build, record, report

from seqmix_kernels.ops.fft_conv import fused as conv
from seqmix_kernels.ops.s4_kernel import fused as s4

TYPES[torch.float64] = "fp64"


def s4d():
    log_a, c = torch.full((4, 32, 2), -0.01, dtype=torch.float64), torch.zeros(4, 32, 2)
    s4.s4d_backward(s4.s4d_forward(log_a, c, 16384), log_a, c, 16384)


def dplr():
    lam, w = torch.full((4, 32, 2), -0.01, dtype=torch.float64), torch.zeros(4, 32, 8)
    s4.dplr_backward(s4.dplr_forward(lam, w, 16384), lam, w, 16384)


def layers():
    """With two sets of modes for four channels."""
    log_dt, A, P, C = torch.zeros(4), torch.zeros(2, 32), torch.zeros(2, 32, 2), torch.zeros(4, 32, 2)
    s4.s4d_layer_backward(s4.s4d_layer_forward(log_dt, A, A, C, 512), log_dt, A, A, C, 512)
    given = log_dt, A, A, P, P, C, 512
    s4.dplr_layer_backward(s4.dplr_layer_forward(*given), *given)


def fft_conv():
    for dtype, gated, activation in ((torch.bfloat16, False, "gelu"), (torch.float32, True, "silu")):
        u = torch.zeros(2, 96, 64, dtype=dtype)
        given = u, torch.zeros(64, 96), torch.zeros(64), u.clone() if gated else None
        y, p = conv.forward(*given, activation)
        conv.backward(y, *given, p, activation)


def main(arch: int):
    for call, modules in ((s4d, [s4.tk]), (dplr, [s4.tk]), (layers, [s4.tk]), (fft_conv, [conv.tk])):
        seen = set()
        for kernel, args, meta in record(modules, call):
            types = (str(a.dtype) for a in args if isinstance(a, torch.Tensor))
            key = kernel.__name__, *types, *map(str, sorted(meta.items()))
            if key in seen:
                continue
            seen.add(key)
            row = {"arch": arch, "kernel": kernel.__name__, "meta": dict(meta)}
            print(json.dumps(row | report(build(kernel, args, meta, arch))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

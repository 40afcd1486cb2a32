"""Runs the Triton convolution under Triton's interpreter and prints one JSON line a case: errors beside torch's own."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from seqmix_kernels.ops.causal_conv1d import fused
from seqmix_kernels.ops.causal_conv1d.reference import reference

CASES = [  # B, L, D, W, dtype, silu, what is given
    (2, 1, 3, 4, "float32", True, "bias state"),
    (2, 2, 130, 4, "float32", True, "bias state"),
    (1, 17, 5, 4, "float32", True, "bias state seq"),
    (2, 16, 4, 3, "float32", False, "state"),
    (1, 19, 4, 2, "float32", True, "bias seq"),
    (1, 9, 4, 1, "float32", True, "bias state"),
    (1, 3, 4, 4, "float32", False, "bias state seq"),
    (1, 43, 4, 4, "float32", True, ""),
    (1, 43, 4, 4, "float32", True, "bias state seq"),
    (1, 30, 4, 6, "float32", True, "bias state"),
    (1, 20, 4, 4, "float16", True, "bias state"),
]


def case(batch, length, width, taps, dtype, silu, given):
    r = torch.Generator().manual_seed(length * taps)
    dtype = getattr(torch, dtype)

    def normal(*shape):
        return torch.randn(*shape, generator=r).to(dtype)

    leaves = [
        normal(batch, length, 2 * width)[..., ::2], normal(width, taps), normal(width) if "bias" in given else None,
        normal(batch, taps - 1, width) if "state" in given else None,
    ]  # fmt: skip
    seq = torch.randint(0, 2, (batch, length), generator=r) if "seq" in given else None  # numbers come again
    dy, dfinal = normal(batch, width, length).transpose(1, 2), normal(batch, taps - 1, width)

    def plain(cast):
        ts = [None if t is None else t.detach().to(cast).requires_grad_() for t in leaves]
        y, final = reference(ts[0], ts[1], ts[2], "silu" if silu else None, ts[3], seq)
        some = [t for t in ts if t is not None]
        grads = torch.autograd.grad((y, final), some, (dy.to(cast), dfinal.to(cast)), allow_unused=True)
        return [y, final, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, some, strict=True))]

    y, final = fused.forward(*leaves, seq, silu)
    runs = [fused.backward(dy, dfinal, *leaves, seq, silu) for _ in range(2)]
    got = [y, final, *(g for g, t in zip(runs[0], leaves, strict=True) if t is not None)]
    names = ["y", "final"] + [n for n, t in zip(("dx", "dweight", "dbias", "dstate"), leaves, strict=True) if t is not None]

    def errors(values):
        return {
            n: ((v.double() - w).norm() / w.norm().clamp_min(1e-30)).item()
            for n, v, w in zip(names, values, plain(torch.float64), strict=True)
        }

    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return {"ours": errors(got), "torch": errors(plain(dtype)), "same": same}


if __name__ == "__main__":
    fused.BLOCK, fused.SPAN, fused.BWD_SPAN = 64, 8, 16  # several programs along both axes, in little time
    for c in CASES:
        print(json.dumps({"case": str(c)} | case(*c)), flush=True)

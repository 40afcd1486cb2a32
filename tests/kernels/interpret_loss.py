"""Runs the fused loss under Triton's interpreter, or on a GPU (argument: cuda); one JSON line a case: errors beside torch's."""

import json
import os
import sys

import torch

from seqmix_kernels.cross_entropy import cross_entropy

CASES = [(5, 7, "float32"), (3, 300, "float32"), (4, 9000, "float16"), (1, 1, "float32"), (0, 5, "float32")]


def case(tokens, size, dtype, device="cpu"):
    g = torch.Generator().manual_seed(size)
    dtype = getattr(torch, dtype)
    wide = (3 * torch.randn(size + 3, tokens, generator=g)).to(device, dtype)
    targets = torch.randint(size, (tokens,), generator=g).to(device)
    targets[1::4] = -100
    dlosses = torch.randn(tokens, generator=g).to(device)

    def run(impl, cast):
        logits = wide.detach().to(cast).t()[:, :size].requires_grad_()  # strided, as the slice of a padded head
        losses = cross_entropy(logits, targets, impl=impl)
        return losses, torch.autograd.grad(losses, logits, dlosses.to(losses.dtype))[0]

    true, theirs, ours = run("reference", torch.float64), run("reference", dtype), run("fused", dtype)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]

    def norms(got):
        pairs = zip(("losses", "dlogits"), got, true, strict=True)
        return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in pairs}

    return {"case": f"{tokens} {size} {dtype}", "ours": norms(ours), "torch": norms(theirs)}


if __name__ == "__main__":
    if "cuda" not in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    for c in CASES:
        print(json.dumps(case(*c)), flush=True)

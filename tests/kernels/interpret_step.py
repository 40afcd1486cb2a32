"""Runs the fused step under Triton's interpreter and prints one JSON line a case: errors beside torch's own."""

import json
import os

import torch

from seqmix_kernels.mamba_step import mamba_step

CASES = [  # B, E, N, R, W, dtype, discretization, conv bias
    (2, 10, 5, 3, 4, "float32", "euler", True),
    (1, 150, 16, 4, 4, "float32", "zoh", False),
    (1, 7, 1, 1, 1, "float32", "euler", True),
    (2, 70, 16, 6, 2, "float16", "euler", True),
]


def make(batch, width, n, rank, taps, bias):
    """The tensors of a step in float64."""
    g = torch.Generator().manual_seed(width)
    shapes = {
        "x": (batch, width), "z": (batch, width), "conv_state": (batch, taps - 1, width), "ssm_state": (batch, width, n),
        "conv": (width, taps), "x_proj": (rank + 2 * n, width), "dt_proj": (width, rank), "dt_bias": (width,),
        "A_log": (width, n), "D": (width,), "conv_bias": (width,),
    }  # fmt: skip
    made = {k: torch.randn(*s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    made["x_proj"] /= width**0.5
    made["dt_proj"] /= rank**0.5
    return made if bias else made | {"conv_bias": None}


def errors(tensors, dtype, discretization, device="cpu"):
    """Norms of the errors of the fused step and of torch's in this dtype, against float64."""
    wide = ("ssm_state", "dt_bias", "A_log", "D")
    low = {k: None if t is None else t.to(device, torch.float32 if k in wide else dtype) for k, t in tensors.items()}
    low["x"], low["z"] = torch.cat((low["x"], low["z"]), 1).chunk(2, 1)  # as a projection leaves them
    given = {k: None if t is None else t.clone() for k, t in low.items()}
    kwargs = {"discretization": discretization}
    true = mamba_step(**{k: None if t is None else t.double() for k, t in low.items()}, **kwargs, impl="reference")
    theirs, ours = (mamba_step(**low, **kwargs, impl=impl) for impl in ("reference", "fused"))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert all(t is None or torch.equal(t, low[k]) for k, t in given.items()), "an input was overwritten"

    def norms(got):
        names = ("y", "conv_state", "ssm_state")
        pairs = zip(names, got, true, strict=True)
        return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in pairs}

    return {"ours": norms(ours), "torch": norms(theirs)}


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    for *sizes, dtype, discretization, bias in CASES:
        row = errors(make(*sizes, bias), getattr(torch, dtype), discretization)
        print(json.dumps({"case": f"{sizes} {dtype} {discretization}"} | row), flush=True)

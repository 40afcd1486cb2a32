"""Runs the fused step under Triton's interpreter and prints one JSON line a case: errors beside torch's own."""

import json
import os

import torch

from seqmix_kernels.ops.mamba_step import mamba_step

CASES = [  # B, M, E, N, R, W, dtype, discretization, biases
    (2, 6, 10, 5, 3, 4, "float32", "euler", True),
    (1, 70, 150, 16, 4, 4, "float32", "zoh", False),
    (5, 6, 7, 1, 1, 1, "float32", "euler", True),  # more rows than FEW
    (2, 30, 70, 16, 6, 2, "float16", "euler", True),
    (6, 30, 70, 16, 6, 4, "float16", "euler", False),
    (18, 30, 140, 5, 6, 4, "float32", "euler", True),  # more than ROWS
    (16, 20, 40, 16, 2, 3, "float16", "zoh", False),
]
ORDER = ("u", "in_proj", "in_bias", "conv", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj", "out_bias",
         "conv_state", "ssm_state")  # fmt: skip
OWN = ("ssm_state", "dt_bias", "A_log", "D")  # float32 beside 16 bits


def make(batch, d_model, width, n, rank, taps, biases):
    """The tensors of a step in float64."""
    g = torch.Generator().manual_seed(width)
    shapes = {
        "u": (batch, d_model), "in_proj": (2 * width, d_model), "conv": (width, taps), "x_proj": (rank + 2 * n, width),
        "dt_proj": (width, rank), "dt_bias": (width,), "A_log": (width, n), "D": (width,), "out_proj": (d_model, width),
        "conv_state": (batch, taps - 1, width), "ssm_state": (batch, width, n), "in_bias": (2 * width,),
        "conv_bias": (width,), "out_bias": (d_model,),
    }  # fmt: skip
    made = {k: torch.randn(*s, generator=g, dtype=torch.float64) for k, s in shapes.items()}
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        made[name] /= made[name].shape[1] ** 0.5
    return made if biases else {k: t for k, t in made.items() if "bias" not in k or k == "dt_bias"}


def errors(tensors, dtype, discretization, device="cpu"):
    """Norms of the errors of the fused step and of torch's in this dtype, against float64."""
    low = {k: t.to(device, torch.float32 if k in OWN else dtype) for k, t in tensors.items()}
    given = {k: t.clone() for k, t in low.items()}
    kwargs = {"discretization": discretization}
    true = mamba_step(**{k: t.double() for k, t in low.items()}, **kwargs, impl="reference")
    theirs, ours = (mamba_step(**low, **kwargs, impl=impl) for impl in ("reference", "fused"))
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert all(torch.equal(t, low[k]) for k, t in given.items()), "an input was overwritten"
    over = mamba_step(**given, **kwargs, impl="fused", in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(over, ours, strict=True)), "not the same in place"
    assert over[1] is given["conv_state"] and over[2] is given["ssm_state"]

    def norms(got):
        names = ("out", "conv_state", "ssm_state")
        pairs = zip(names, got, true, strict=True)
        return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in pairs}

    return {"ours": norms(ours), "torch": norms(theirs)}


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    for batch in (2, 5):
        given = make(batch, 6, 10, 5, 3, 4, True)
        tensors = [given[name].float() for name in ORDER]
        args = (*tensors, "euler", torch.bfloat16)
        torch.library.opcheck(torch.ops.seqmix.mamba_step.default, args, test_utils=("test_schema", "test_faketensor"))
    for *sizes, dtype, discretization, biases in CASES:
        row = errors(make(*sizes, biases), getattr(torch, dtype), discretization)
        print(json.dumps({"case": f"{sizes} {dtype} {discretization} {biases}"} | row), flush=True)

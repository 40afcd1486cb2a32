"""Runs the fused step of S4 and S4D under Triton's interpreter and prints one JSON line a case: errors beside torch's own."""

import json
import math
import os

import torch

from seqmix_kernels.ops.s4_step import gated_projection, s4_step

CASES = [  # B, E, n, M, kind, dtype
    (2, 6, 3, 5, "dplr", "float32"),
    (1, 7, 1, 32, "dplr", "float32"),
    (5, 3, 1, 128, "dplr", "float32"),
    (33, 4, 4, 2, "dplr", "float32"),
    (2, 6, 6, 5, "zoh", "float32"),
    (9, 9, 1, 32, "zoh", "float16"),
    (2, 150, 75, 1, "zoh", "float32"),
    (3, 2, 2, 7, "bilinear", "float32"),
    (2, 3, 3, 256, "real zoh", "float32"),
    (4, 5, 1, 3, "real bilinear", "float16"),
]
STEPS = 12
GATED = [(1, 30, 30, "float32"), (3, 40, 7, "float16"), (6, 33, 50, "float32"), (2, 1100, 5, "float32"),
         (6, 150, 20, "float16"), (33, 33, 50, "float16"), (65, 16, 3, "float16")]  # B, E, O  # fmt: skip


def make(batch, width, sets, modes, kind):
    """Tokens (STEPS, B, E) and a layer's parameters, Δ log-uniform in [1e-3, 1e-1]."""
    g = torch.Generator().manual_seed(width + modes)
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    parts = 1 if "real" in kind else 2
    made = {
        "log_dt": math.log(1e-3) + math.log(100) * torch.rand(width, generator=g),
        "log_decay": normal(sets, modes) - 0.7,
        "imag": None if parts == 1 else math.pi * torch.arange(modes) + normal(sets, modes),
        "C": normal(width, modes, parts), "D": normal(width),
    }  # fmt: skip
    if kind == "dplr":
        made |= {name: normal(sets, modes, 2) * modes**0.5 for name in "PB"}
    else:
        made["method"] = kind.split()[-1]
    return normal(STEPS, batch, width), normal(batch, width, modes, parts), made


def walk(us, x, made, **how):
    """y of every step, and the last state."""
    ys = []
    for u in us:
        y, x = s4_step(u, x, **made, **how)
        ys.append(y)
    return torch.stack(ys), x


def errors(case, dtype, device="cpu"):
    """Norms of the errors of the fused step and of torch's in this dtype, against float64, over STEPS steps."""
    us, x, made = make(*case)
    place = lambda t: t.to(device) if isinstance(t, torch.Tensor) else t  # noqa: E731
    us, x, made = us.to(device, dtype), x.to(device), {k: place(t) for k, t in made.items()}
    wide = {k: t.double() if isinstance(t, torch.Tensor) else t for k, t in made.items()}
    true = walk(us.double(), x.double(), wide, impl="reference")
    given = x.clone()
    ours, theirs = (walk(us, x, made, impl=impl) for impl in ("fused", "reference"))
    assert torch.equal(x, given), "the state given was overwritten"
    assert [t.dtype for t in ours] == [t.dtype for t in theirs] == [dtype, torch.float32]
    again = walk(us, given, made, impl="fused", in_place=True)
    assert again[1] is given
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "not the same again, in place"
    return compare(("y", "x"), ours, theirs, true)


def gated_errors(batch, width, outputs, dtype, device="cpu"):
    g = torch.Generator().manual_seed(width)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)  # noqa: E731
    given = normal(batch, width), normal(outputs, width) * width**-0.5, normal(outputs, width) * width**-0.5
    given = *given, normal(outputs), normal(outputs)
    true = gated_projection(*(t.double() for t in given), impl="reference")
    ours, theirs = (gated_projection(*given, impl=impl) for impl in ("fused", "reference"))
    assert ours.dtype == theirs.dtype == dtype
    return compare(("out",), (ours,), (theirs,), (true,))


def compare(names, ours, theirs, true):
    def norms(got):
        pairs = zip(names, got, true, strict=True)
        return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in pairs}

    return {"ours": norms(ours), "torch": norms(theirs)}


def opcheck():
    us, x, made = make(2, 6, 3, 5, "dplr")
    parameters = (made.get(k) for k in ("log_dt", "log_decay", "imag", "P", "B", "C", "D"))
    args = us[0], x, *parameters, "bilinear", "gelu", torch.bfloat16
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.seqmix.s4_step.default, args, test_utils=tests)
    weights = torch.randn(4, 6), torch.randn(4), torch.randn(4, 6), None
    torch.library.opcheck(torch.ops.seqmix.gated_projection.default, (us[0], *weights), test_utils=tests)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    STEPS = 3  # a case of twelve takes up to twelve seconds here
    opcheck()
    for *case, dtype in CASES:
        print(json.dumps({"case": f"{case} {dtype}"} | errors(case, getattr(torch, dtype))), flush=True)
    for *case, dtype in GATED:
        print(json.dumps({"case": f"gated {case} {dtype}"} | gated_errors(*case, getattr(torch, dtype))), flush=True)

"""Runs add_rms_norm and swiglu under Triton's interpreter, for test_rowwise_gpu.py, which also runs the cases on a GPU.

One JSON line per case: the relative errors of the kernels and of plain torch in the same dtypes, against float64.
"""

import json
import os

import torch

from seqmix_kernels.ops.add_rms_norm import add_rms_norm
from seqmix_kernels.ops.swiglu import swiglu

F32, BF16, F16 = "float32", "bfloat16", "float16"
# shape, dtypes of x, y and weight, autocast; which gradients arrive; layout of x and y
NORMS = (
    ((5, 64), F32, F32, F32, None, "s n", "dense"),
    ((3, 50, 33), F32, F16, F32, F16, "s n", "dense"),  # more tiles than programs
    ((2, 7, 770), F32, BF16, F32, BF16, "s n", "slice"),
    ((9, 65), F16, F16, F16, None, "s n", "transposed"),
    ((6, 24), BF16, BF16, BF16, None, "s n", "dense"),
    ((2, 3, 48), F32, None, F16, None, "s n", "last"),
    ((4, 40), F32, F16, F32, F16, "n", "dense"),
    ((4, 40), F32, F32, F32, None, "s", "dense"),
    ((4, 40), F32, None, F32, None, "n", "transposed"),
    ((1, 1), F32, F32, F32, None, "s n", "dense"),
    ((3, 0, 5), F32, F32, F32, None, "s n", "dense"),
    ((2, 8192), F32, F32, F32, None, "s n", "dense"),  # six seconds: not in a short run
)
# shape of h, dtype, layout
GATES = (
    ((5, 344), F32, "dense"),
    ((2, 3, 258), F16, "slice"),
    ((40, 10), F32, "transposed"),
    ((7, 688), BF16, "dense"),
    ((2, 2), F32, "dense"),
    ((0, 4), F32, "dense"),
)


def laid_out(random, shape, dtype, layout, device):
    """Numbers of this shape; of a model's residual stream, a slice of wider rows, a transposed tensor or the last steps."""
    if layout == "slice":
        return random(*shape[:-1], shape[-1] + 6).to(device, dtype)[..., : shape[-1]]
    if layout == "transposed":
        return random(*shape[:-2], shape[-1], shape[-2]).to(device, dtype).transpose(-1, -2)
    if layout == "last":
        return random(*shape[:-1], 3, shape[-1]).to(device, dtype)[..., -1, :]
    return random(*shape).to(device, dtype)


def compared(case, names, run):
    """run: (implementation, in float64?) -> the results and gradients by those names."""
    true, theirs, ours, again = run("reference", True), run("reference", False), run("fused", False), run("fused", False)
    assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs], case
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), f"{case}: not the same twice"

    def errors(got):
        pairs = zip(names, got, true, strict=True)
        return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in pairs}

    return {"case": case, "ours": errors(ours), "torch": errors(theirs)}


def norm_case(shape, x_dtype, y_dtype, w_dtype, autocast, arriving, layout, device="cpu"):
    g = torch.Generator().manual_seed(sum(shape))
    random = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    kinds = [None if name is None else getattr(torch, name) for name in (x_dtype, y_dtype, w_dtype)]
    given = [None if k is None else laid_out(random, shape, k, layout, device) for k in kinds[:2]]
    given.append((1 + 0.3 * random(shape[-1])).to(device, kinds[2]))
    upstream = {name: random(*shape).to(device) for name in ("s", "n")}

    def run(impl, exact):
        leaves = [None if t is None else (t.double() if exact else t.detach()).requires_grad_() for t in given]
        kind = getattr(torch, autocast or F32)
        with torch.autocast(device, kind if autocast else torch.bfloat16, enabled=autocast is not None):
            results = dict(zip(("s", "n"), add_rms_norm(*leaves, impl=impl), strict=True))
        # as float32 numbers in every run, that float64 has the same ones
        low = {k: upstream[k].to(n_dtype if k == "n" else kinds[0]) for k in arriving.split()}
        grads = torch.autograd.grad(
            [results[k] for k in low], [t for t in leaves if t is not None], [low[k].to(results[k].dtype) for k in low],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        return *(t.detach() for t in results.values()), *grads

    n_dtype = kinds[2] if autocast is None else getattr(torch, autocast)
    names = ["s", "n", "dx", *(["dy"] if y_dtype else []), "dweight"]
    return compared(f"{shape} {x_dtype} {y_dtype} {w_dtype} {autocast} {arriving} {layout}", names, run)


def gate_case(shape, dtype, layout, device="cpu"):
    g = torch.Generator().manual_seed(sum(shape))
    random = lambda *shape: 3 * torch.randn(*shape, generator=g)  # noqa: E731
    h = laid_out(random, shape, getattr(torch, dtype), layout, device)
    da = laid_out(random, (*shape[:-1], shape[-1] // 2), h.dtype, layout, device)

    def run(impl, exact):
        leaf = (h.double() if exact else h.detach()).requires_grad_()
        a = swiglu(leaf, impl=impl)
        return a.detach(), *torch.autograd.grad(a, leaf, da.to(a.dtype))

    return compared(f"{shape} {dtype} {layout}", ("a", "dh"), run)


def second_derivatives(device="cpu"):
    """What the operators say when they are differentiated twice."""
    said = []
    for call in (lambda t: add_rms_norm(t, t, t[0], impl="fused")[1], lambda t: swiglu(t, impl="fused")):
        leaf = torch.ones(2, 4, device=device, requires_grad=True)
        try:
            torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        except NotImplementedError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    from extent import some

    for case in some(NORMS, -1):
        print(json.dumps(norm_case(*case)), flush=True)
    for case in GATES:
        print(json.dumps(gate_case(*case)), flush=True)
    print(json.dumps({"twice": second_derivatives()}), flush=True)

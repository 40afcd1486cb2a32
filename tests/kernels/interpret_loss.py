"""Runs the fused losses under Triton's interpreter, or on a GPU (argument: cuda): one JSON line of errors per case."""

import json
import math
import os
import sys

import torch

from seqmix_kernels.ops.cross_entropy import cross_entropy, linear_cross_entropy

CASES = [(5, 7, "float32"), (3, 300, "float32"), (4, 9000, "float16"), (1, 1, "float32"), (0, 5, "float32")]
LINEAR = [
    (300, 2, 5, "float32"), (150, 16, 8, "float16"), (40, 77, 3, "float32"), (20, 130, 9, "float32"), (20, 130, 9, "bfloat16"),
    (3, 8200, 4, "float16"), (5, 1, 2, "float32"), (0, 16, 3, "float32"),
]  # fmt: skip


def norms(names, got, true):
    return {k: ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for k, a, b in zip(names, got, true, strict=True)}


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
    names = ("losses", "dlogits")
    return {"case": f"{tokens} {size} {dtype}"} | {k: norms(names, v, true) for k, v in (("ours", ours), ("torch", theirs))}


def linear_inputs(tokens, size, width, device="cpu", seed=0):
    """x with strides, weight, targets of which every fourth is ignored, and the gradients of the losses; float32."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    targets = torch.randint(size, (tokens,), generator=g, device=device)
    targets[1::4] = -100
    return normal(width, tokens + 1).t()[1:], 3 * normal(size, width) * width**-0.5, targets, normal(tokens)


def linear_run(impl, x, weight, targets, dlosses, dtype):
    """losses, ∂x and ∂weight under autocast to a 16-bit dtype, where x comes in it and the weight in float32."""
    cast = dtype.itemsize == 2
    x, weight = (t.detach().to(torch.float32 if cast and t is weight else dtype).requires_grad_() for t in (x, weight))
    with torch.autocast(x.device.type, dtype if cast else torch.bfloat16, enabled=cast):
        losses, right = linear_cross_entropy(x, weight, targets, impl=impl)
    assert right.dtype == torch.bool and not right.requires_grad and not (right & (targets == -100)).any()
    grads = torch.autograd.grad(losses, (x, weight), dlosses.to(losses.dtype))
    assert [(t.dtype, t.shape) for t in grads] == [(t.dtype, t.shape) for t in (x, weight)]
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    return losses, *grads


def linear_case(tokens, size, width, dtype, device="cpu"):
    given, dtype = linear_inputs(tokens, size, width, device), getattr(torch, dtype)
    true, theirs, ours = (
        linear_run(impl, *given, cast) for impl, cast in (("reference", torch.float64), ("reference", dtype), ("fused", dtype))
    )
    names = ("losses", "dx", "dweight")
    row = {"case": f"{tokens} {size} {width} {dtype}", "unit": torch.finfo(dtype).eps}
    return row | {k: norms(names, v, true) for k, v in (("ours", ours), ("torch", theirs))}


def raises(words, call):
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {words}")


def laws(size, tokens=40, device="cpu"):
    """With weight = I the logits are x, exactly, and so are their gradients."""
    g = torch.Generator().manual_seed(size)
    x = torch.randint(-2, 3, (tokens, size), generator=g).float().to(device)  # many largest logits: the first counts
    weight, targets = torch.eye(size, device=device, requires_grad=True), x.argmax(1)
    targets[::2] = torch.randint(size, (tokens,), generator=g).to(device)[::2]
    targets[3::7] = -100
    x[1, targets[1]] = 5
    x.requires_grad_()
    scored = targets != -100

    def run(impl, dlosses, targets=targets, x=x):
        losses, right = linear_cross_entropy(x, weight, targets, impl=impl)
        return losses.detach(), right, torch.autograd.grad(losses, x, dlosses)[0]

    # one number for all tokens; and the gradient of a token that is not scored counts for nothing, whatever it is
    quarter = torch.tensor(0.25, device=device).expand(tokens)
    want, wanted, true = run("reference", quarter)
    for dlosses in (quarter, quarter.where(scored, math.nan)):
        losses, right, d = run("fused", dlosses)
        torch.testing.assert_close(losses, want)
        torch.testing.assert_close(d, true)
        assert torch.equal(right, wanted) and right[1] and (d[~scored] == 0).all() and (losses[~scored] == 0).all()

    # the same number more or less in each logit changes nothing
    losses, right, d = run("fused", quarter, x=(x.detach() - 200).requires_grad_())
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(d, true, rtol=1e-4, atol=1e-4)
    assert torch.equal(right, wanted)

    # another ignored index, one that is a class
    losses, right = linear_cross_entropy(x, weight, targets.clamp(min=0).int(), ignore_index=0, impl="fused")
    assert (losses[targets <= 0] == 0).all() and not right[targets <= 0].any()

    # targets that are no class, and logits that are no numbers, make their own token's numbers NaN and no other's
    odd, broken = targets.clone(), x.detach().clone()
    odd[:5] = torch.tensor([size, -1, 2**40, size + 10**6, -(2**33)])
    broken[5, odd[5]] = math.nan
    losses, right, d = run("fused", quarter, odd, broken.requires_grad_())
    assert losses[:6].isnan().all() and not right[:6].any() and d[:6].isnan().all()
    torch.testing.assert_close(losses[6:], want[6:])
    torch.testing.assert_close(d[6:], true[6:])
    assert torch.equal(right[6:], wanted[6:])

    spoilt = weight.detach().clone()
    spoilt[-1] = math.nan
    losses, right = linear_cross_entropy(x, spoilt, targets, impl="fused")
    assert torch.equal(losses.isnan(), scored) and not right.any()

    # one backward, of the gradients that are wanted
    losses, _ = linear_cross_entropy(x, weight, targets, impl="fused")
    both = torch.autograd.grad(losses.sum(), (x, weight), retain_graph=True)
    raises("can run backward once", lambda: torch.autograd.grad(losses.sum(), weight))
    for i, leaf in enumerate((x, weight)):
        pair = [t if t is leaf else t.detach() for t in (x, weight)]
        (alone,) = torch.autograd.grad(linear_cross_entropy(*pair, targets, impl="fused")[0].sum(), leaf)
        assert torch.equal(alone, both[i])
    losses, _ = linear_cross_entropy(x, weight, targets, impl="fused")
    raises("create_graph=True", lambda: torch.autograd.grad(losses.sum(), x, create_graph=True))
    losses = cross_entropy(x, targets, impl="fused")
    raises("create_graph=True", lambda: torch.autograd.grad(losses.sum(), x, create_graph=True))

    # nothing is kept where no gradient is wanted
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t), torch.no_grad():
        losses, _ = linear_cross_entropy(x, weight, targets, impl="fused")
    assert not kept and losses.grad_fn is None


if __name__ == "__main__":
    if "cuda" not in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are made, at their first use
    device = "cuda" if "cuda" in sys.argv else "cpu"
    for size in (3, 16, 77, 130):
        laws(size, device=device)
    for c in CASES:
        print(json.dumps(case(*c, device=device)), flush=True)
    for c in LINEAR:
        print(json.dumps(linear_case(*c, device=device)), flush=True)

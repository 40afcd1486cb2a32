"""Runs the Triton kernels of S4 and of the long convolution under Triton's interpreter; one JSON line a case: errors beside
plain torch's own in the same dtype, both against float64."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from seqmix_kernels.ops.fft_conv import fused as conv
from seqmix_kernels.ops.fft_conv import torch_forms as conv_torch
from seqmix_kernels.ops.s4_kernel import dplr_layer_kernel, fused, s4d_layer_kernel, torch_forms


def generator(seed):
    r = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=r)


FORMS = [(fused, torch.float32)] * 2 + [(torch_forms, torch.float32), (torch_forms, torch.float64)]


def compare(ours, again, plain, truth):
    def errors(values):
        return [((v.double() - t).norm() / t.norm().clamp_min(1e-30)).item() for v, t in zip(values, truth, strict=True)]

    same = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    return {"ours": errors(ours), "torch": errors(plain), "same": same}


def modes(normal, width, count):
    return torch.stack((-0.05 * normal(width, count).abs() - 1e-3, 5 * normal(width, count)), -1).double()


def s4d(batch, width, count, length):
    normal = generator(length)
    log_a, c, g = modes(normal, width, count), normal(*batch, width, count, 2), normal(*batch, width, length)

    def run(module, cast):
        t = c.to(cast)
        return [module.s4d_forward(log_a, t, length), *module.s4d_backward(g.to(cast), log_a, t, length)]

    return [run(*how) for how in FORMS]


def dplr(width, count, length, multiprocessors):
    normal = generator(length)
    lam, w, g = modes(normal, width, count), normal(width, count, 8), normal(width, length)
    fused.SMS = multiprocessors  # 0: one span of frequencies; many: added up

    def run(module, cast):
        t = w.to(cast)
        return [module.dplr_forward(lam, t, length), *module.dplr_backward(g.to(cast), lam, t, length)]

    return [run(*how) for how in FORMS]


def layer(kind, width, sets, count, length):
    """From the parameters on, in float32 beside float64."""
    normal = generator(length)
    A = normal(sets, count), 10 * normal(sets, count)
    PB = (normal(sets, count, 2), normal(sets, count, 2)) if kind == "dplr" else ()
    given, g = (normal(width) / 2 - 4, *A, *PB, normal(width, count, 2)), normal(width, length)
    op = dplr_layer_kernel if kind == "dplr" else s4d_layer_kernel

    def run(impl, cast):
        leaves = [t.clone().to(cast).requires_grad_() for t in given]
        K = op(*leaves, length, impl=impl)
        return [K.detach(), *torch.autograd.grad(K, leaves, g.to(cast))]

    return [run(*how) for how in [("fused", torch.float32)] * 2 + [("torch", torch.float32), ("torch", torch.float64)]]


def fft_conv(batch, length, width, taps, activation, gated, dtype, workspace):
    normal, dtype = generator(length), getattr(torch, dtype)
    u, dy = normal(batch, length, 2 * width)[..., ::2].to(dtype), normal(batch, width, length).mT.to(dtype)
    given = u, normal(width, taps), normal(width), normal(batch, width, length).mT.to(dtype) if gated else None
    conv.WORKSPACE = workspace  # small: channels in slices

    def run(module, cast):
        ts = [t if t is None or cast is None else t.to(cast) for t in given]
        y, p = module.forward(*ts, activation)
        return [y, *module.backward(dy.to(y.dtype), *ts, p, activation)]

    return run(conv, None), run(conv, None), run(conv_torch, None), run(conv_torch, torch.float64)


CASES = [
    (s4d, (), 2, 5, 7),
    (s4d, (3,), 2, 33, 100),
    (s4d, (), 1, 16, 20_000),
    (dplr, 2, 5, 7, 132),
    (dplr, 1, 33, 128, 0),
    (dplr, 2, 3, 1, 132),
    (layer, "s4d", 4, 2, 5, 7),
    (layer, "dplr", 4, 2, 5, 7),
    (fft_conv, 1, 1, 1, 1, "gelu", False, "float32", 1 << 28),
    (fft_conv, 2, 7, 3, 7, "silu", True, "float32", 1 << 28),
    (fft_conv, 2, 67, 70, 20, "gelu", True, "float32", 1 << 17),
    (fft_conv, 2, 64, 40, 64, None, True, "float16", 1 << 28),
    # from here on not in a short run
    (s4d, (), 3, 4, 2),
    (s4d, (), 2, 32, 300),
    (dplr, 2, 32, 100, 132),
    (dplr, 1, 4, 2, 132),
    (layer, "s4d", 3, 1, 33, 40),
    (layer, "dplr", 2, 2, 3, 1),
    (layer, "dplr", 3, 1, 33, 22),
    (fft_conv, 1, 300, 33, 300, None, False, "float32", 1 << 28),
]

if __name__ == "__main__":
    from extent import some

    for f, *args in some(CASES, 12):
        print(json.dumps({"case": f"{f.__name__} {args}"} | compare(*f(*args))), flush=True)

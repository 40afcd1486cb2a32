"""The benchmarks of one token of S4 and S4D and of the gated projection after it: see ../../benchmark.py. M: pairs of modes."""

import torch

from ...benchmark import Op, Work
from .op import IMPLS, gated_projection, s4_step


def of(low_rank):
    def inputs(normal, dtype, B, E, M):
        n = 1 if low_rank else E  # sets of modes, as the mixers have them
        imag = torch.pi * torch.arange(M, device=normal(1).device).repeat(n, 1).float()
        own = normal(E).sigmoid() * 4.6 - 6.9, torch.full_like(imag, -0.69), imag, normal(E, M, 2), normal(E)
        pairs = (normal(n, M, 2), normal(n, M, 2)) if low_rank else ()
        return normal(B, E).to(dtype), normal(B, E, M, 2), *own, *pairs

    def work(size, B, E, M):
        parameters = 4 * (2 * E + 2 * E * M + (1 if low_rank else E) * M * (6 if low_rank else 2))
        return Work(parameters + B * E * (2 * 2 * M * 4 + 2 * size), B * E * M * (36 if low_rank else 20)), None

    return Op(IMPLS, inputs, lambda impl, *t: s4_step(*t, impl=impl)[0], check, work, SHAPES)


def check(tensors, y):
    return y, s4_step(*(t.double() for t in tensors), impl="reference")[0]


def projection_inputs(normal, dtype, B, E):
    weights = (normal(E, E) * E**-0.5 for _ in range(2))
    return tuple(t.to(dtype) for t in (normal(B, E), *weights, normal(E), normal(E)))


def projection(impl, y, gate_proj, out_proj, gate_bias, out_bias):
    weights = {"gate_proj": gate_proj, "out_proj": out_proj, "gate_bias": gate_bias, "out_bias": out_bias}
    return gated_projection(y, **weights, impl=impl)


def projection_work(size, B, E):
    return Work((2 * E * E + 2 * E + 2 * B * E) * size, 4 * B * E * E, B * E), None


SHAPES = {"cuda": ("B1 E768 M32 bfloat16", "B64 E768 M32 bfloat16"), "cpu": ("B8 E128 M32 float32",)}
OPS = {
    "s4_step": of(low_rank=True),
    "s4d_step": of(low_rank=False),
    "gated_projection": Op(
        IMPLS, projection_inputs, projection,
        lambda tensors, y: (y, projection("reference", *(t.double() for t in tensors))),
        projection_work, {"cuda": ("B1 E768 bfloat16", "B64 E768 bfloat16"), "cpu": ("B8 E128 float32",)},
    ),
}  # fmt: skip

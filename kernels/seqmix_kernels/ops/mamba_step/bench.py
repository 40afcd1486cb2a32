"""The benchmark of one token of a Mamba block: see ../../benchmark.py.

E channels in a model of width E/2; rank E/32, four taps.
"""

import torch

from ...benchmark import Op, Work
from .op import IMPLS, mamba_step

NAMES = ("u", "in_proj", "conv", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj", "conv_state", "ssm_state")


def inputs(normal, dtype, B, E, N):
    M, R = E // 2, E // 32

    def weight(rows, columns):
        return (normal(rows, columns) * columns**-0.5).to(dtype)

    A_log = torch.arange(1.0, N + 1, device=normal(1).device).log().repeat(E, 1)
    products = weight(2 * E, M), normal(E, 4), weight(R + 2 * N, E), weight(E, R)
    states = normal(B, 3, E).to(dtype), normal(B, E, N)
    return normal(B, M).to(dtype), *products, normal(E) - 4, A_log, normal(E), weight(M, E), *states


def run(impl, *tensors):
    return mamba_step(**dict(zip(NAMES, tensors, strict=True)), impl=impl)[0]


def check(tensors, y):
    return y, run("reference", *(t.double() for t in tensors))


def work(size, B, E, N):
    M, R = E // 2, E // 32
    weights = E * (2 * M + R + 2 * N + R + M)
    states = B * E * (2 * N * 4 + 2 * 3 * size)
    return Work(weights * size + E * (N + 6) * 4 + states + 2 * B * M * size, 2 * B * weights, B * E * N), None


SHAPES = {"cuda": ("B1 E1536 N16 bfloat16", "B64 E1536 N16 bfloat16"), "cpu": ("B8 E128 N16 float32",)}
OPS = {"mamba_step": Op(IMPLS, inputs, run, check, work, SHAPES)}

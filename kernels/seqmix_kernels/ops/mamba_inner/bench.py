"""The benchmark of the Mamba node at each level: see ../../benchmark.py. M is the model's width.

E = 2M, N = 16, R = M/16, four taps. composition: the same kernels one after another, with autograd's own saved tensors.
"""

import torch

from ...benchmark import PIECE, Op, Work
from .inner import Given
from .op import LEVELS, mamba_inner
from .reference import reference

NAMES = ("u", "in_proj", "conv", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj")
N = 16


def inputs(normal, dtype, B, L, M):
    """As in training under autocast: u in `dtype`, parameters in float32."""
    E, R = 2 * M, max(1, M // 16)

    def weight(rows, columns):
        return normal(rows, columns) * columns**-0.5

    A_log = torch.arange(1.0, N + 1, device=normal(1).device).log().repeat(E, 1)
    around = normal(B, L, M).to(dtype), weight(2 * E, M), 0.5 * normal(E, 4), 0.1 * normal(E)
    return *around, weight(R + 2 * N, E), weight(E, R), normal(E) - 4, A_log, torch.ones_like(A_log[:, 0]), weight(M, E)


def run(impl, *tensors):
    given, dtype = dict(zip(NAMES, tensors, strict=True)), tensors[0].dtype
    with torch.autocast(tensors[0].device.type, dtype, enabled=dtype.itemsize == 2):
        if impl == "composition":
            return reference(*(given.get(name) for name in Given._fields), "euler", "auto")[0]
        return mamba_inner(**given, level=int(impl.removeprefix("level_")))[0]


def check(tensors, y):
    u, *parameters = (t.double() for t in tensors)
    return y[:1, :PIECE], mamba_inner(u[:1, :PIECE], **dict(zip(NAMES[1:], parameters, strict=True)), scan="sequential")[0]


def work(size, B, L, M):
    E, R, T = 2 * M, max(1, M // 16), B * L
    weights = E * (2 * M + R + 2 * N + R + M)
    flops, exponentials = 2 * T * weights, T * E * N
    return (
        Work(2 * T * M * size + 4 * weights, flops, exponentials),
        Work(4 * T * M * size + 8 * weights, 3 * flops, 2 * exponentials),
    )


SHAPES = {"cuda": ("B8 L2048 M768 bfloat16",), "cpu": ("B2 L512 M64 float32",)}
OPS = {"mamba_inner": Op(("composition", *(f"level_{n}" for n in LEVELS)), inputs, run, check, work, SHAPES)}

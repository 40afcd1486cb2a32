"""The benchmark of the long convolution: see ../../benchmark.py. As many taps as steps."""

import torch

from ...benchmark import PIECE, Op, Work
from .op import IMPLS, fft_conv


def inputs(normal, dtype, B, L, D):
    kernel = normal(D, L) * 0.9 ** torch.arange(L, device=normal(1).device).clamp(max=500)
    return normal(B, L, D).to(dtype), kernel, normal(D)


def check(tensors, y):
    u, kernel, D = (t.double() for t in tensors)
    want = fft_conv(u[:1, :PIECE, :PIECE], kernel[:PIECE, :PIECE], D[:PIECE], impl="reference")
    return y[:1, :PIECE, :PIECE], want


def work(size, B, L, D):
    wide, taps = B * L * D * size, 4 * L * D
    return Work(2 * wide + taps), Work(5 * wide + 3 * taps)


SHAPES = {"cuda": ("B8 L2048 D768 bfloat16",), "cpu": ("B2 L512 D128 float32",)}
OPS = {"fft_conv": Op(IMPLS, inputs, lambda impl, *t: fft_conv(*t, impl=impl), check, work, SHAPES)}

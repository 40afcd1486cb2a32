"""The benchmark of the residual addition and its norm: see ../../benchmark.py. x is in float32, as a residual stream is."""

from ...benchmark import PIECE, Op, Work
from .op import IMPLS, add_rms_norm


def inputs(normal, dtype, B, L, D):
    return normal(B, L, D), normal(B, L, D).to(dtype), normal(D).to(dtype)


def check(tensors, n):
    x, y, weight = (t.double() for t in tensors)
    return n[:1, :PIECE], add_rms_norm(x[:1, :PIECE], y[:1, :PIECE], weight, impl="reference")[1]


def work(size, B, L, D):
    once = B * L * D * (8 + 2 * size)  # x, s, y, n
    return Work(once), Work(2 * once)  # backward: s and the gradients of x, y, n


SHAPES = {"cuda": ("B8 L2048 D768 bfloat16",), "cpu": ("B2 L512 D128 float32",)}
OPS = {"add_rms_norm": Op(IMPLS, inputs, lambda impl, *t: add_rms_norm(*t, impl=impl)[1], check, work, SHAPES)}

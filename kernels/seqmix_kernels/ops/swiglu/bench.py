"""The benchmark of SwiGLU's gate: see ../../benchmark.py. H: half the width of its input. torch: in the input's dtype."""

import torch.nn.functional as F

from ...benchmark import PIECE, Op, Peer, Work
from .op import IMPLS, swiglu


def inputs(normal, dtype, B, L, H):
    return (normal(B, L, 2 * H).to(dtype),)


def check(tensors, a):
    return a[:1, :PIECE], swiglu(tensors[0][:1, :PIECE].double(), impl="reference")


def work(size, B, L, H):
    numbers = B * L * H
    return Work(3 * numbers * size, 0, numbers), Work(8 * numbers * size, 0, 2 * numbers)


def torchs(h):
    gate, value = h.chunk(2, dim=-1)
    return F.silu(gate) * value


SHAPES = {"cuda": ("B8 L2048 H2048 bfloat16",), "cpu": ("B2 L512 H344 float32",)}
OPS = {"swiglu": Op(IMPLS, inputs, lambda impl, h: swiglu(h, impl=impl), check, work, SHAPES, {"torch": Peer(torchs)})}

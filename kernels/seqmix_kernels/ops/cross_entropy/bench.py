"""The benchmarks of the two losses: see ../../benchmark.py. L tokens, V classes, M the width of the hidden states.

torch: each operation stores another tensor of logits.
"""

import torch
import torch.nn.functional as F

from ...benchmark import PIECE, Op, Peer, Work
from .op import IMPLS, cross_entropy, linear_cross_entropy


def inputs(normal, dtype, L, V):
    return normal(L, V).to(dtype), torch.arange(L, device=normal(1).device) % V


def check(tensors, losses):
    logits, targets = (t[:PIECE] for t in tensors)
    return losses[:PIECE], cross_entropy(logits.double(), targets, impl="reference")


def work(size, L, V):
    return Work(L * V * size, 0, L * V), Work(3 * L * V * size, 0, 2 * L * V)


def linear_inputs(normal, dtype, L, V, M):
    return normal(L, M).to(dtype), normal(V, M).to(dtype) * M**-0.5, torch.arange(L, device=normal(1).device) % V


def linear_check(tensors, losses):
    x, weight, targets = tensors
    want, _ = linear_cross_entropy(x[:PIECE].double(), weight.double(), targets[:PIECE], impl="reference")
    return losses[:PIECE], want


def linear_work(size, L, V, M):
    given, flops = (L + V) * M * size, 2 * L * V * M
    # three products, not four: keeping the logits for the backward takes less time than computing them again
    return Work(given, flops, L * V), Work(3 * given, 3 * flops, 2 * L * V)


def separate(x, weight, targets):
    """Losses, and whether the largest logit is the target's, by one operation after another."""
    classes = len(weight)
    rows = F.pad(weight, (0, 0, 0, -classes % 64)) if classes % 8 else weight
    logits = F.linear(x, rows)[..., :classes]
    return cross_entropy(logits, targets), (logits.argmax(-1) == targets) & (targets != -100)


SHAPES = {"cuda": ("L16384 V50277 bfloat16",), "cpu": ("L512 V1000 float32",)}
LINEAR = {"cuda": ("L16384 V50277 M768 bfloat16",), "cpu": ("L512 V1000 M128 float32",)}
PEERS = {"torch": Peer(lambda *t: separate(*t)[0])}
OPS = {
    "cross_entropy": Op(IMPLS, inputs, lambda impl, *t: cross_entropy(*t, impl=impl), check, work, SHAPES),
    "linear_cross_entropy": Op(
        IMPLS, linear_inputs, lambda impl, *t: linear_cross_entropy(*t, impl=impl)[0], linear_check, linear_work, LINEAR, PEERS
    ),
}

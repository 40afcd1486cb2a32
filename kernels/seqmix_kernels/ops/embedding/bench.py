"""The benchmarks of the embedding: see ../../benchmark.py. A table of V rows of width M.

Tokens are uniform; zipf: token v about as often as 1 / v, as in natural text; one: all equal.
"""

import torch

from ...benchmark import PIECE, Op, Work
from .op import IMPLS, embedding


def tokens_of(kind, T, V, device="cuda", seed=0):
    """T tokens of V, as the module's docstring says; "ends": only the first and the last token occur."""
    random = torch.rand(T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = {"uniform": V * random, "zipf": V**random - 1, "one": V // 2 + 0 * random, "ends": (V - 1) * (random > 0.3)}
    return values[kind].long().clamp(max=V - 1).to(device)


def check(tensors, y):
    tokens, weight = tensors
    return y[:1, :PIECE], embedding(tokens[:1, :PIECE], weight.double(), impl="reference")


def of(kind, shapes):
    def inputs(normal, dtype, B, L, V, M):
        weight = normal(V, M).to(dtype)
        return tokens_of(kind, B * L, V, weight.device).view(B, L), weight

    def work(size, B, L, V, M):
        T = B * L
        once = 8 * T + (T + (1 if kind == "one" else min(T, V))) * M * size  # each row that can occur is read
        return Work(once), Work(once + (T + V) * M * size)

    return Op(IMPLS, inputs, lambda impl, *t: embedding(*t, impl=impl), check, work, shapes)


SHAPES = {
    "cuda": ("B8 L2048 V50277 M768 float32", "B64 L4096 V16 M64 float32"),
    "cpu": ("B2 L512 V1000 M128 float32",),
}
OPS = {"embedding": of("uniform", SHAPES), "embedding_zipf": of("zipf", {}), "embedding_one": of("one", {})}

"""The word problem of a finite group: multiply all elements so far (Merrill, Petty & Sabharwal 2024, arXiv 2404.08819, §5).

For a group that is not solvable (A5, S5) the problem is complete for NC1, which a state space with fixed or diagonal decays in
a constant number of layers cannot express; for the cyclic group Z60 it can.
"""

import itertools
import math
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import Batch, Task, one_of, whole

GROUPS = {"s5": 120, "a5": 60, "z60": 60}  # and their orders


@dataclass(eq=False, repr=False)
class WordProblem(Task):
    """Random elements of a group; at each of them the model must say the product of all so far.

    Row 0 of group=a5, seq_len=8 (seed 0):

        inputs  8 47 54 27 5  57 13 32
        targets 8 36 22 18 30 5  20 36
        loss    ^ ^  ^  ^  ^  ^  ^  ^

    Elements are numbered in the lexicographic order of the permutations of 0..4 (a5: of the even ones), so 0 is the identity.
    The product g1 g2 applies g1 first. z60 adds modulo 60.

    The paper trains on a million rows of a length k from 6 to 20 and asks for the least number of layers that reaches 99 %.

    Args (the others are those of `Task`):
        group: "s5", "a5" or "z60".
        seq_len: length of the whole row.
    """

    seq_len: int = 20
    _: KW_ONLY
    group: str = "a5"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("seq_len", self.seq_len, 1)
        n = self.vocab_size = GROUPS[one_of("group", self.group, tuple(GROUPS))]
        self.vocabulary = {"size": n, "group": self.group}
        self.chance_token_accuracy = 1 / n
        self.chance_sequence_accuracy = float(n) ** -self.seq_len
        self.answer_bits = math.log2(n)

    def definition(self) -> dict:
        return {"task": "word_problem", "group": self.group, "seq_len": self.seq_len}

    def cells(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        n, L = self.vocab_size, self.seq_len
        inputs = rng.integers(self.row_keys(split, index), L, n, stream=0)  # (B, L)
        products, table, reach = inputs, multiplication(self.group, inputs.device), 1
        while reach < L:  # products of the last 1, 2, 4, ... elements: multiplication is associative
            longer = table[products[:, :-reach], products[:, reach:]]
            products = torch.cat((products[:, :reach], longer), 1)
            reach *= 2
        return Batch(inputs, products)


@lru_cache(maxsize=8)
def multiplication(group: str, device: torch.device) -> Tensor:
    """The products g1 g2 of a group of GROUPS. (n, n) int64: row g1, column g2."""
    if group == "z60":
        element = torch.arange(60)
        return ((element[:, None] + element) % 60).to(device)
    elements = [p for p in itertools.permutations(range(5)) if group == "s5" or _even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return torch.tensor([[number[tuple(b[x] for x in a)] for b in elements] for a in elements], device=device)


def _even(p: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0

"""Associative recall with one query (Fu et al. 2023, arXiv 2212.14052, §3; Poli et al. 2023, arXiv 2302.10866, §4.1)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, whole

VALUES, KEYS, QUERY = range(3)  # random streams of a row


@dataclass(eq=False, repr=False)
class AssocRecall(Task):
    """Pairs of a key and its value, then one of the keys again: the model must say its value.

    Row 0 of n_keys=4, n_values=4, seq_len=11 (seed 0): letters keys, numbers values

        inputs  k3 v3 k3 v3 k1 v3 k3 v3 k2 v2 k3
        targets                               v3
        loss                                  ^

    Each row maps every key to a random value. The keys of the pairs are drawn with replacement, so a pair may occur several
    times, and the key that is asked for is that of a pair drawn uniformly. H3's table has 10 keys and 10 values at
    20 pairs, Hyena's 15 and 15 at lengths up to 131,072; their code (safari) draws rows once, and uses the test rows for
    validation, too.

    Args (the others are those of `Task`):
        n_keys, n_values: numbers of ids.
        seq_len: length of the whole row, odd: (seq_len - 1) / 2 pairs and the key.
    """

    n_keys: int = 10
    n_values: int = 10
    seq_len: int = 41

    def __post_init__(self) -> None:
        super().__post_init__()
        n, m = whole("n_keys", self.n_keys, 1), whole("n_values", self.n_values, 2)
        if whole("seq_len", self.seq_len, 3) % 2 == 0:
            raise ValueError(f"seq_len={self.seq_len} is even: pairs and one key make an odd number")
        self.vocab_size = n + m
        self.vocabulary = {"size": n + m, "keys": [0, n], "values": [n, m]}
        self.chance_token_accuracy = self.chance_sequence_accuracy = 1 / m
        self.answer_bits = min(n, self.seq_len // 2) * math.log2(m)  # the values of all keys that may have been seen

    def definition(self) -> dict:
        return {"task": "assoc_recall", "n_keys": self.n_keys, "n_values": self.n_values, "seq_len": self.seq_len}

    def cells(self, ids: list[int]) -> list[str]:
        return [f"k{i}" if i < self.n_keys else f"v{i - self.n_keys}" for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        keys, pairs = self.row_keys(split, index), self.seq_len // 2
        value_of = rng.integers(keys, self.n_keys, self.n_values, VALUES) + self.n_keys  # (B, n_keys)
        asked = rng.integers(keys, pairs, self.n_keys, KEYS)  # (B, pairs)
        query = asked.gather(1, rng.integers(keys, 1, pairs, QUERY))  # (B, 1)
        told = torch.stack((asked, value_of.gather(1, asked)), 2).flatten(1)  # (B, 2 pairs)
        inputs = torch.cat((told, query), 1)  # (B, L)
        targets = torch.full_like(inputs, IGNORE)  # (B, L)
        targets[:, -1:] = value_of.gather(1, query)
        return Batch(inputs, targets)

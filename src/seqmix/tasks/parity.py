"""Parity of a bit string (Delétang et al. 2023, arXiv 2207.02098, table 1; Grazzi et al. 2024, arXiv 2411.12537, table 3).

One bit of state suffices, but it must flip: a state space whose decays lie in [0, 1] cannot do this at every length.
"""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, one_of, whole

BITS, LENGTH = range(2)  # random streams of a row
PAD = 2


@dataclass(eq=False, repr=False)
class Parity(Task):
    """Random bits; at the last of them the model must say whether the number of ones is odd.

    Row 0 and 1 of min_len=3, seq_len=12 (seed 0): · padding, after the string, which a causal model does not see in time

        inputs  010111101011
        targets            0
        loss               ^

        inputs  101·········
        targets   0
        loss      ^

    Grazzi et al. train on lengths 3 to 40 and test on 40 to 256, scoring the last bit; Delétang et al. train on 1 to 40 and
    test up to 500. score="every" asks for the parity so far at every bit.

    Args (the others are those of `Task`):
        min_len: the shortest string; lengths are uniform from min_len to seq_len.
        seq_len: length of the longest string, and of the row.
        score: "last" or "every" bit.
    """

    min_len: int = 3
    seq_len: int = 40
    _: KW_ONLY
    score: str = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole("min_len", self.min_len, 1) > whole("seq_len", self.seq_len, 1):
            raise ValueError(f"min_len={self.min_len} > seq_len={self.seq_len}")
        one_of("score", self.score, ("last", "every"))
        self.vocab_size = 3
        self.vocabulary = {"size": 3, "bits": [0, 2], "padding": PAD}
        self.chance_token_accuracy = 0.5
        lengths = range(self.min_len, self.seq_len + 1)
        every = sum(0.5**n for n in lengths) / len(lengths)
        self.chance_sequence_accuracy = 0.5 if self.score == "last" else every
        self.answer_bits = 1.0

    def definition(self) -> dict:
        return {"task": "parity", "min_len": self.min_len, "seq_len": self.seq_len, "score": self.score}

    def cells(self, ids: list[int]) -> list[str]:
        return ["01·"[i] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        L, keys = self.seq_len, self.row_keys(split, index)
        bits = rng.integers(keys, L, 2, BITS)  # (B, L)
        length = rng.integers(keys, 1, L - self.min_len + 1, LENGTH) + self.min_len  # (B, 1)
        at = torch.arange(L, device=keys.device)  # (L,)
        scored = at == length - 1 if self.score == "last" else at < length  # (B, L)
        return Batch(bits.masked_fill(at >= length, PAD), (bits.cumsum(1) % 2).masked_fill(~scored, IGNORE))

"""Copying a string token by token, as a language model does (Jelassi et al. 2024, "Repeat After Me", arXiv 2402.01032, §4)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, symbol_names, whole

LETTERS, LENGTH = range(2)  # random streams of a row
SPECIAL = "<|>·"  # begin, separator, end, padding; in the order of their ids, which follow the letters


@dataclass(eq=False, repr=False)
class CopyAR(Task):
    """A string, a separator, and the string again, of which each token is predicted from those before it.

    Row 0 and 1 of n_symbols=6, min_len=6, seq_len=16 (seed 0): < begin, | separator, > end, · padding

        inputs  <cfa|cfa>·······
        targets     cfa>
        loss        ^^^^

        inputs  <fa|fa>·········
        targets    fa>
        loss       ^^^

    Unlike in `copy`, the answer is among the inputs, so a model that finds the place of the last letter in the string can go on
    from there. eval.lengths scores it with its own answers as inputs, too (free running). The paper packs several strings in a
    context of 220 tokens and trains on lengths up to 300 or 50; here a row is one string.

    Args (the others are those of `Task`):
        n_symbols: number of letters, drawn uniformly (the paper's code: 26).
        min_len, seq_len: lengths of the shortest and of the longest row, even: begin, string, separator, string. The string has
            (min_len - 2) / 2 to (seq_len - 2) / 2 letters, each number as likely.
    """

    n_symbols: int = 26
    min_len: int = 4
    seq_len: int = 102

    def __post_init__(self) -> None:
        super().__post_init__()
        n, L = whole("n_symbols", self.n_symbols, 2), whole("seq_len", self.seq_len, 4)
        if whole("min_len", self.min_len, 4) > L:
            raise ValueError(f"min_len={self.min_len} > seq_len={L}")
        for key in ("min_len", "seq_len"):
            if getattr(self, key) % 2:
                raise ValueError(f"{key}={getattr(self, key)} is odd: begin, string, separator and string are an even number")
        self.shortest, self.longest = (self.min_len - 2) // 2, (L - 2) // 2  # strings
        self.vocab_size = n + len(SPECIAL)
        self.vocabulary = {"size": self.vocab_size, "symbols": [0, n], "specials": SPECIAL}
        self._names = [*symbol_names(n), *SPECIAL]
        lengths = range(self.shortest, self.longest + 1)
        # the best guess knows the position alone: the targets M + 1..2M are letters, target 2M + 1 is the end
        letter = [sum(M < t <= 2 * M for M in lengths) for t in range(L)]
        ends = [sum(t == 2 * M + 1 for M in lengths) for t in range(L)]
        right = sum(max(a / n, b) for a, b in zip(letter, ends, strict=True))
        self.chance_token_accuracy = right / (sum(letter) + sum(ends))
        self.chance_sequence_accuracy = float(n) ** -self.shortest / len(lengths)  # of a guess that fits the shortest strings
        self.answer_bits = sum(lengths) / len(lengths) * math.log2(n)  # of a string of mean length

    answers_are_inputs = True

    def definition(self) -> dict:
        return {"task": "copy_ar"} | {name: getattr(self, name) for name in ("n_symbols", "min_len", "seq_len")}

    def cells(self, ids: list[int]) -> list[str]:
        return [self._names[i] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        n, L, keys = self.n_symbols, self.seq_len, self.row_keys(split, index)
        begin, separator, end, padding = range(n, n + 4)
        letters = rng.integers(keys, self.longest, n, LETTERS)  # (B, longest)
        M = rng.integers(keys, 1, self.longest - self.shortest + 1, LENGTH) + self.shortest  # (B, 1)
        at = torch.arange(L + 1, device=keys.device).expand(len(keys), -1)  # (B, L + 1)
        letter = torch.where(at <= M, at - 1, at - M - 2)  # of the first, of the second string
        row = letters.gather(1, letter.clamp(0, self.longest - 1))  # (B, L + 1)
        row = torch.where(at == 0, begin, row)
        row = torch.where(at == M + 1, separator, row)
        row = torch.where(at == 2 * M + 2, end, row)
        row = torch.where(at > 2 * M + 2, padding, row)
        scored = (at > M + 1) & (at <= 2 * M + 2)
        return Batch(row[:, :-1], torch.where(scored, row, IGNORE)[:, 1:])

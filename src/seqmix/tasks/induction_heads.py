"""Induction heads: say again what followed the trigger (Olsson et al. 2022, arXiv 2209.11895; Gu & Dao 2023, §4.1.2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, symbol_names, whole

SYMBOLS, PLACE = range(2)  # random streams of a row


@dataclass(eq=False, repr=False)
class InductionHeads(Task):
    """Random symbols with a trigger somewhere among them; it comes again at the end, and the symbol after it is asked for.

    Row 0 of n_symbols=6, seq_len=16 (seed 0): letters symbols, | trigger

        inputs  cfadf|bcdaffaab|
        targets                b
        loss                   ^

    The trigger's first place is uniform over 0..seq_len - 3. The Mamba paper trains at seq_len=256 with 16 ids, of which one
    is the trigger here (the paper does not say), and tests at lengths up to 2^20: eval.lengths. H3's code (Fu et al. 2023,
    arXiv 2212.14052) has seq_len=30, 18 symbols, a trigger and an unused id, and scores every position.

    Args (the others are those of `Task`):
        n_symbols: number of ids besides the trigger.
        seq_len: length of the whole row.
    """

    n_symbols: int = 15
    seq_len: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        n = whole("n_symbols", self.n_symbols, 2)
        whole("seq_len", self.seq_len, 3)
        self.vocab_size = n + 1
        self.vocabulary = {"size": n + 1, "symbols": [0, n], "trigger": n}
        self._names = [*symbol_names(n), "|"]
        self.chance_token_accuracy = self.chance_sequence_accuracy = 1 / n
        self.answer_bits = math.log2(n)

    def definition(self) -> dict:
        return {"task": "induction_heads", "n_symbols": self.n_symbols, "seq_len": self.seq_len}

    def cells(self, ids: list[int]) -> list[str]:
        return [self._names[i] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        L, keys = self.seq_len, self.row_keys(split, index)
        inputs = rng.integers(keys, L, self.n_symbols, SYMBOLS)  # (B, L)
        place = rng.integers(keys, 1, L - 2, PLACE)  # (B, 1)
        targets = torch.full_like(inputs, IGNORE)  # (B, L)
        targets[:, -1:] = inputs.gather(1, place + 1)
        inputs.scatter_(1, place, self.n_symbols)
        inputs[:, -1] = self.n_symbols
        return Batch(inputs, targets)

"""Copying after a fixed delay (Arjovsky, Shah & Bengio 2016, arXiv 1511.06464, section 4.1; Gu et al. 2022's S4 code).

Each token has the same distance from its answer in every row, so a fixed, time-invariant filter that is long enough
solves the task. It tests memory, not selection.
"""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, one_of, symbol_names, whole


@dataclass(eq=False, repr=False)
class Copy(Task):
    """M tokens, a delay of blanks, and then the tokens again. Only the answer is scored.

    Row 0 of n_tokens=4, n_symbols=6, seq_len=16 (seed 0): · blank, letters symbols, | marker

        inputs  cfad········||||
        targets             cfad
        loss                ^^^^

    The same with variant="markers" (< begins the row, | asks for the answer) and variant="delay" (no markers: each
    output is the token M steps before, until the end of the row):

        inputs  <cfad······|····
        targets             cfad
        loss                ^^^^

        inputs  cfadfdbcdaffaaba
        targets     cfadfdbcdaff
        loss        ^^^^^^^^^^^^

        variant   row, of seq_len in all                                            ids
        s4        M tokens, seq_len - 2M blanks, M markers                          blank, symbols, marker
        markers   begin, M tokens, seq_len - 2M - 2 blanks, marker, M blanks        blank, symbols, begin, marker
        delay     seq_len tokens; output t is token t - M, scored where t >= M      symbols

    The S4 paper's code has n_tokens=1024, n_symbols=62, seq_len=2048 (no blanks).

    Args (the others are those of `Task`):
        n_tokens: M, tokens to remember.
        n_symbols: number of ids that they are drawn from, uniformly.
        seq_len: length of the whole row.
        variant: "s4", "markers" or "delay".
    """

    n_tokens: int = 8
    n_symbols: int = 14
    seq_len: int = 72
    _: KW_ONLY
    variant: str = "s4"

    def __post_init__(self) -> None:
        super().__post_init__()
        M, n, L = whole("n_tokens", self.n_tokens, 1), whole("n_symbols", self.n_symbols, 2), whole("seq_len", self.seq_len, 1)
        variant = one_of("variant", self.variant, ("s4", "markers", "delay"))
        least = {"s4": 2 * M, "markers": 2 * M + 2, "delay": M + 1}[variant]
        if L < least:
            raise ValueError(f"seq_len={L} < {least}, the length that n_tokens={M} needs with variant={variant}")

        names = {"s4": ["·", *symbol_names(n), "|"], "markers": ["·", *symbol_names(n), "<", "|"]}
        self._names = names.get(variant, symbol_names(n))
        self.first_symbol = 0 if variant == "delay" else 1
        self.vocab_size = len(self._names)
        self.vocabulary = {
            "size": self.vocab_size,
            "symbols": [self.first_symbol, n],  # first id, how many
            "specials": {"s4": "blank, marker", "markers": "blank, begin, marker", "delay": ""}[variant],
        }
        answer = L - M if variant == "delay" else M
        self.chance_token_accuracy = 1 / n
        self.chance_sequence_accuracy = float(n) ** -answer
        self.answer_bits = M * math.log2(n)  # delay: this much must be held at any time

    def definition(self) -> dict:
        return {
            "task": "copy",
            "variant": self.variant,
            "n_tokens": self.n_tokens,
            "n_symbols": self.n_symbols,
            "seq_len": self.seq_len,
        }

    def cells(self, ids: list[int]) -> list[str]:
        return [self._names[i] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        B, M, L = len(index), self.n_tokens, self.seq_len
        drawn = L if self.variant == "delay" else M
        tokens = (
            rng.integers(self.row_keys(split, index), drawn, self.n_symbols, stream=0) + self.first_symbol
        )  # (B, M)
        targets = index.new_full((B, L), IGNORE)  # (B, L)
        if self.variant == "delay":
            targets[:, M:] = tokens[:, : L - M]
            return Batch(tokens, targets)

        targets[:, L - M :] = tokens
        inputs = torch.zeros_like(targets)  # (B, L)
        last = self.vocab_size - 1
        if self.variant == "s4":
            inputs[:, :M] = tokens
            inputs[:, L - M :] = last
        else:
            inputs[:, 0] = last - 1
            inputs[:, 1 : M + 1] = tokens
            inputs[:, L - M - 1] = last
        return Batch(inputs, targets)

"""Copying after a fixed delay (Arjovsky, Shah & Bengio 2016, arXiv 1511.06464, section 4.1; Gu et al. 2022's S4 code).

Each token has the same distance from its answer in every row, so a fixed, time-invariant filter that is long enough
solves the task. It tests memory, not selection.
"""

import math

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, one_of, symbol_names, whole


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

    def __init__(
        self,
        n_tokens: int = 8,
        n_symbols: int = 14,
        seq_len: int = 72,
        *,
        variant: str = "s4",
        batch_size: int = 32,
        eval_batch_size: int = 256,
        eval_samples: int = 2048,
        seed: int = 0,
        eval_seed: int = 1234,
        train_samples: int | None = None,
        num_workers: int = 0,
        make_on: str = "device",
    ):
        super().__init__(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            eval_samples=eval_samples,
            seed=seed,
            eval_seed=eval_seed,
            train_samples=train_samples,
            num_workers=num_workers,
            make_on=make_on,
        )
        M = self.n_tokens = whole("n_tokens", n_tokens, 1)
        n = self.n_symbols = whole("n_symbols", n_symbols, 2)
        L = self.seq_len = whole("seq_len", seq_len, 1)
        self.variant = one_of("variant", variant, ("s4", "markers", "delay"))
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

"""Selective copying: pick the data tokens out of the noise, in order (Gu & Dao 2023, arXiv 2312.00752, section 4.1.1).

Unlike in plain copying the gaps differ from row to row, so no fixed, time-invariant filter can solve the task: whether a
model keeps a token must depend on the token.
"""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, LETTERS, Batch, Task, one_of, symbol_names, whole

SYMBOLS, PLACES, NOISE = range(3)  # random streams of a row


@dataclass(eq=False, repr=False)
class SelectiveCopy(Task):
    """M tokens lie among noise; after the marker the model must output them in order. Only the answer is scored.

    Row 0 of n_tokens=4, n_symbols=6, seq_len=16 (seed 0): · noise, letters symbols, | marker

        inputs  ····cf·····a·d··||||
        targets                 cfad
        loss                    ^^^^

    The three sources define the task differently:

        variant   seq_len counts       tokens lie                                  query                 row length
        mamba     noise and tokens     anywhere, every subset as likely            M markers             seq_len + M
        s4        noise only           anywhere, every subset as likely            M markers             seq_len + 2M
        mad       the whole row        each noise token before a random token,     one marker, M noise   seq_len
                                       so the last one before the query is data

    The order of ids is noise, symbols, marker in mamba and s4, and symbols, noise, marker in mad. The Mamba paper states
    neither what the query is nor whether its 16 ids include a marker: 16 ids with a marker are n_symbols=14, as in s4 and
    mad-lab, and 16 ids without one are n_symbols=15, marker=none. The paper's size is seq_len=4096, n_tokens=16; mad-lab's
    is 256 and 16.

    Args (the others are those of `Task`):
        n_tokens: M, data tokens per row.
        n_symbols: number of data ids that they are drawn from, uniformly.
        seq_len: length, which counts what the table shows.
        n_noise: number of noise ids. 1 is a blank; more are random distractors, which differ from data only by their ids.
        marker: "repeat" over the whole answer (s4), "once" and then noise (mad-lab), or "none": the model must count.
            "auto" is the variant's own.
        variant: "mamba", "s4" or "mad".
    """

    n_tokens: int = 8
    n_symbols: int = 14
    seq_len: int = 64
    _: KW_ONLY
    n_noise: int = 1
    marker: str = "auto"
    variant: str = "mamba"

    def __post_init__(self) -> None:
        super().__post_init__()
        M, n = whole("n_tokens", self.n_tokens, 1), whole("n_symbols", self.n_symbols, 2)
        seq_len, n_noise = whole("seq_len", self.seq_len, 1), whole("n_noise", self.n_noise, 1)
        variant = one_of("variant", self.variant, ("mamba", "s4", "mad"))
        if one_of("marker", self.marker, ("auto", "repeat", "once", "none")) == "auto":
            self.marker = "once" if variant == "mad" else "repeat"

        query = M + (self.marker == "once")
        self.span = {"mamba": seq_len, "s4": seq_len + M, "mad": seq_len - query}[variant]  # positions before the query
        if M > self.span:
            room = f" ({self.span} positions before the query)" if variant == "mad" else ""
            raise ValueError(f"n_tokens={M} > seq_len={seq_len}{room}: there is no room for the tokens")
        self.seq_len = self.span + query

        self.first_noise, self.first_symbol = (n, 0) if variant == "mad" else (0, n_noise)
        self.marker_id = n + n_noise  # not an id if there is no marker
        self.vocab_size = n + n_noise + (self.marker != "none")
        self.vocabulary = {
            "size": self.vocab_size,
            "noise": [self.first_noise, n_noise],  # first id, how many
            "symbols": [self.first_symbol, n],
            "marker": None if self.marker == "none" else self.marker_id,
        }
        noise = ["·"] if n_noise == 1 else [str(i) if n <= len(LETTERS) else f"~{i}" for i in range(n_noise)]
        self._names = [*symbol_names(n), *noise] if variant == "mad" else [*noise, *symbol_names(n)]
        self._names += ["|"] * (self.marker != "none")
        self.chance_token_accuracy = 1 / n
        self.chance_sequence_accuracy = n**-M
        self.answer_bits = M * math.log2(n)

    def definition(self) -> dict:
        return {
            "task": "selective_copy",
            "variant": self.variant,
            "n_tokens": self.n_tokens,
            "n_symbols": self.n_symbols,
            "n_noise": self.n_noise,
            "marker": self.marker,
            "span": self.span,
        }

    def cells(self, ids: list[int]) -> list[str]:
        return [self._names[i] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        B, M, S, L = len(index), self.n_tokens, self.span, self.seq_len
        keys = self.row_keys(split, index)
        tokens = rng.integers(keys, M, self.n_symbols, SYMBOLS) + self.first_symbol  # (B, M)

        inputs = index.new_full((B, L), self.first_noise)  # (B, L)
        if self.n_noise > 1:
            inputs[:, :S] += rng.integers(keys, S, self.n_noise, NOISE)
        inputs.scatter_(1, self._places(keys), tokens)
        if self.marker == "repeat":
            inputs[:, S:] = self.marker_id
        elif self.marker == "once":
            inputs[:, S] = self.marker_id

        targets = index.new_full((B, L), IGNORE)  # (B, L)
        targets[:, L - M :] = tokens
        return Batch(inputs, targets)

    def _places(self, keys: Tensor) -> Tensor:
        """The positions of the tokens, ascending. (B,) keys to (B, M) int64."""
        M, S = self.n_tokens, self.span
        if self.variant != "mad":
            return rng.subset(keys, M, S, PLACES)
        before = rng.integers(keys, S - M, M, PLACES).sort(1).values  # (B, S - M): the token after each noise token
        order = torch.arange(M, device=keys.device).expand(len(keys), M)  # (B, M)
        return order + torch.searchsorted(before, order.contiguous(), right=True)

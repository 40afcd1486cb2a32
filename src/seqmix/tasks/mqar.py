"""Multi-query associative recall, MQAR (Arora et al. 2023, arXiv 2312.04927, §3 and appendix E, as in zoology's code)."""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, one_of, whole

KEYS, VALUES, GAPS, FILLER = range(4)  # random streams of a row


@dataclass(eq=False, repr=False)
class MQAR(Task):
    """Pairs of a key and a value, then every key once more, somewhere in the rest of the row: its value is asked for there.

    Row 0 of vocab_size=16, n_pairs=2, seq_len=16, filler=zero (seed 0): 0 filler, 1..7 keys, 8..15 values

        inputs  6 12 7 13 7  0 0 0 6  0 0 0 0 0 0 0
        targets           13       12
        loss              ^        ^

    Keys are different within a row, values too. Queries stand at even distances 2g from the end of the pairs, with
    P(g) ~ (g + 1)^(alpha - 1), drawn one after another without replacement. With alpha = 0.01, the paper's, most queries come
    early; alpha = 1 spreads them evenly. filler="random" puts uniformly random ids between the queries (zoology's default),
    "zero" the id 0 (figure 2 of the paper).

    The paper's cells (seq_len, n_pairs) are (64, 4), (128, 8), (256, 16), (512, 64) at vocab_size=8192.

    Args (the others are those of `Task`):
        vocab_size: V; keys are 1..V/2 - 1 and values V/2..V - 1.
        n_pairs: pairs per row, and queries.
        seq_len: length of the whole row.
        alpha: of the power law of the gaps.
        filler: "random" or "zero".
    """

    vocab_size: int = 8192
    n_pairs: int = 8
    seq_len: int = 128
    _: KW_ONLY
    alpha: float = 0.01
    filler: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        V, n, L = whole("vocab_size", self.vocab_size, 4), whole("n_pairs", self.n_pairs, 1), whole("seq_len", self.seq_len, 1)
        one_of("filler", self.filler, ("random", "zero"))
        if V % 2:
            raise ValueError(f"vocab_size={V} is odd: half of the ids are values")
        if n > V // 2 - 1:
            raise ValueError(f"n_pairs={n} > {V // 2 - 1}, the number of keys that vocab_size={V} has")
        if (L - 2 * n) // 2 < n:
            raise ValueError(f"seq_len={L} < {4 * n}, which n_pairs={n} pairs and as many queries at even distances need")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha!r} is not positive")
        self.vocabulary = {"size": V, "keys": [1, V // 2 - 1], "values": [V // 2, V // 2]}
        self.chance_token_accuracy = 2 / V
        self.chance_sequence_accuracy = (2 / V) ** n
        self.answer_bits = n * math.log2(V // 2)  # of the values; which key has which takes more

    def definition(self) -> dict:
        settings = ("vocab_size", "n_pairs", "seq_len", "alpha", "filler")
        return {"task": "mqar"} | {name: getattr(self, name) for name in settings}

    def cells(self, ids: list[int]) -> list[str]:
        return [str(i) for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        V, n, L, keys = self.vocab_size, self.n_pairs, self.seq_len, self.row_keys(split, index)
        asked = rng.distinct(keys, n, V // 2 - 1, KEYS) + 1  # (B, n)
        values = rng.distinct(keys, n, V // 2, VALUES) + V // 2  # (B, n)
        places = 2 * n + 2 * self._gaps(keys)  # (B, n)
        rest = rng.integers(keys, L - 2 * n, V, FILLER) if self.filler == "random" else keys.new_zeros(len(keys), L - 2 * n)
        inputs = torch.cat((torch.stack((asked, values), 2).flatten(1), rest), 1)  # (B, L)
        targets = torch.full_like(inputs, IGNORE)  # (B, L)
        return Batch(inputs.scatter(1, places, asked), targets.scatter(1, places, values))

    def _gaps(self, keys: Tensor) -> Tensor:
        """g of each pair's query. (B,) to (B, n) int64.

        Numbers drawn without replacement are the first arrivals of exponential clocks with rates P(g)."""
        space = (self.seq_len - 2 * self.n_pairs) // 2
        uniform = (rng.bits(keys, space, GAPS) + 1).double() / 2.0**63  # (B, space) in (0, 1]
        rate = torch.arange(1, space + 1, device=keys.device).double() ** (self.alpha - 1)  # (space,)
        return (-uniform.log() / rate).argsort(dim=1, stable=True)[:, : self.n_pairs]

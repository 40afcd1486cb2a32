"""Modular arithmetic without brackets (Delétang et al. 2023, arXiv 2207.02098; Grazzi et al. 2024, arXiv 2411.12537)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seqmix.tasks import rng
from seqmix.tasks.base import IGNORE, Batch, Task, whole

NUMBERS, OPERATORS, LENGTH = range(3)  # random streams of a row
SIGNS = "+-*=·"  # in the order of their ids, which follow the numbers


@dataclass(eq=False, repr=False)
class ModularArithmetic(Task):
    """Numbers below `modulus` joined by +, - and *; at the equals sign the model must say the value, * before + and -.

    Row 0 and 1 of modulus=5, min_len=8, seq_len=12 (seed 0): · padding

        inputs  3-2+4-2-0=··
        targets          3
        loss             ^

        inputs  4+3+3*3=····
        targets        1
        loss           ^

    Delétang et al. train on lengths 1 to 40 and test up to 500; Grazzi et al. train on 3 to 40 and test on 40 to 256, both
    with modulus 5.

    Args (the others are those of `Task`):
        modulus: m; the numbers are 0..m - 1.
        min_len: length of the shortest expression with its equals sign; even, and so are all: n numbers, n - 1 operators.
        seq_len: length of the longest, and of the row; even.
    """

    modulus: int = 5
    min_len: int = 4
    seq_len: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        m = whole("modulus", self.modulus, 2)
        if whole("min_len", self.min_len, 2) > whole("seq_len", self.seq_len, 2):
            raise ValueError(f"min_len={self.min_len} > seq_len={self.seq_len}")
        for name in ("min_len", "seq_len"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name}={getattr(self, name)} is odd: n numbers, n - 1 operators and = are 2n tokens")
        self.vocab_size = m + len(SIGNS)
        self.vocabulary = {"size": self.vocab_size, "numbers": [0, m], "signs": SIGNS}
        self.chance_token_accuracy = self.chance_sequence_accuracy = self._chance()
        self.answer_bits = math.log2(m) * 2  # the sum so far and the product that is still open

    def _chance(self) -> float:
        """The frequency of the most frequent value: 0, because a product is 0 more often than anything else.

        By recursion over the numbers of an expression, on the joint distribution of the sum and of the open product."""
        m, totals = self.modulus, []
        state = {(0, a): 1 / m for a in range(m)}
        for n in range(1, self.seq_len // 2 + 1):
            if 2 * n >= self.min_len:
                totals.append([sum(p for (s, o), p in state.items() if (s + o) % m == value) for value in range(m)])
            after: dict[tuple[int, int], float] = {}
            for (s, o), p in state.items():
                for a in range(m):
                    for key in (((s + o) % m, a), ((s + o) % m, -a % m), (s, o * a % m)):
                        after[key] = after.get(key, 0.0) + p / (3 * m)
            state = after
        return max(map(sum, zip(*totals, strict=True))) / len(totals)

    def definition(self) -> dict:
        settings = ("modulus", "min_len", "seq_len")
        return {"task": "modular_arithmetic"} | {name: getattr(self, name) for name in settings}

    def cells(self, ids: list[int]) -> list[str]:
        return [str(i) if i < self.modulus else SIGNS[i - self.modulus] for i in ids]

    def sample(self, split: str, index: Tensor) -> Batch:
        m, L, keys = self.modulus, self.seq_len, self.row_keys(split, index)
        most = L // 2
        numbers = rng.integers(keys, most, m, NUMBERS)  # (B, n)
        signs = rng.integers(keys, most, 3, OPERATORS)  # (B, n): what stands after each number
        count = rng.integers(keys, 1, most - self.min_len // 2 + 1, LENGTH) + self.min_len // 2  # (B, 1)
        at = torch.arange(most, device=keys.device)  # (n,)
        last = at == count - 1  # (B, n)
        after = torch.where(last, 3, signs)
        inputs = torch.stack((numbers, after + m), 2).masked_fill((at >= count)[..., None], m + 4).flatten(1)  # (B, L)
        targets = torch.stack((torch.full_like(numbers, IGNORE), self._values(numbers, signs)), 2)  # (B, n, 2)
        return Batch(inputs, targets.masked_fill(~last[..., None], IGNORE).flatten(1))

    def _values(self, numbers: Tensor, signs: Tensor) -> Tensor:
        """The value of the first 1, 2, ... numbers. (B, n) twice to (B, n)."""
        total, product = torch.zeros_like(numbers[:, 0]), numbers[:, 0]  # (B,): what is summed, the product that is open
        values = [product]
        for number, sign in zip(numbers.unbind(1)[1:], signs.unbind(1)[:-1], strict=True):
            times = sign == 2
            total = torch.where(times, total, total + product)
            product = torch.where(times, product * number % self.modulus, torch.where(sign == 1, -number, number))
            values.append(total + product)
        return torch.stack(values, 1) % self.modulus

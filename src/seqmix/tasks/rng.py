"""Random numbers that are a pure function of (seed, split, row, column): a hash of a counter, no state.

    key(row)       = m(m(split·2^62 + row) + m(seed))
    bits(row, col) = m(key(row) + m(stream·2^32 + col))       m: the finaliser of splitmix64

So each row is the same wherever and in whatever order the rows are made. m is a bijection of the 64-bit integers, hence
under one seed no two rows of any split share a key. All arithmetic is int64 that wraps, and gives the same bits on the
CPU and on CUDA. The finaliser is variant 13 of Stafford's search, as in Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, section 2. It is not meant for cryptography.
"""

import torch
from torch import Tensor

SPLITS = ("train", "val", "test")
WORD = 1 << 64
GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd: spreads neighbouring counters apart
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(word: int) -> int:
    """The int64 that has the low 64 bits of `word`."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser m, after a step of GAMMA so that 0 is no fixed point. int64 of any shape to the same shape."""
    x = x * signed(GAMMA) + signed(GAMMA)
    x = (x ^ shift(x, 30)) * signed(FIRST)
    x = (x ^ shift(x, 27)) * signed(SECOND)
    return x ^ shift(x, 31)


def row_keys(seed: int, split: str, index: Tensor) -> Tensor:
    """A key for each row. index: (B,) int64 in [0, 2^62), on any device. Returns (B,) int64 on that device."""
    salt = mix(torch.tensor(signed(seed))).item()  # on the CPU, so that .item() waits for no device
    return mix(mix(index + signed(SPLITS.index(split) << 62)) + salt)


def bits(keys: Tensor, n: int, stream: int) -> Tensor:
    """n non-negative words of 63 random bits for each key; each `stream` gives other words. (B,) to (B, n) int64."""
    columns = mix(torch.arange(n, device=keys.device) + (stream << 32))
    return shift(mix(keys[:, None] + columns), 1)  # (B, n)


def integers(keys: Tensor, n: int, high: int, stream: int) -> Tensor:
    """n integers for each key, uniform in [0, high) up to a bias of high / 2^63. (B,) to (B, n) int64."""
    return bits(keys, n, stream) % high


def distinct(keys: Tensor, k: int, n: int, stream: int) -> Tensor:
    """For each key k different numbers of 0..n-1, in random order. (B,) to (B, k) int64."""
    low = max(1, (n - 1).bit_length())
    # The low bits are the number itself, so no two tickets are equal and every sort, stable or not, gives the same order.
    tickets = (bits(keys, n, stream) >> low << low) + torch.arange(n, device=keys.device)  # (B, n)
    return tickets.sort(1).values[:, :k] & ((1 << low) - 1)


def subset(keys: Tensor, k: int, n: int, stream: int) -> Tensor:
    """For each key k of the n numbers 0..n-1, ascending; all subsets are equally likely. (B,) to (B, k) int64."""
    return distinct(keys, k, n, stream).sort(1).values


def permutation(seed: int, n: int, turn: int) -> Tensor:
    """The turn-th shuffle of 0..n-1, on the CPU. (n,) int64."""
    key = mix(torch.tensor([turn]) + mix(torch.tensor([signed(seed)])))
    return bits(key, n, stream=0)[0].argsort(stable=True)

"""The long causal convolution by zero-padded real FFT in plain torch, with a hand-written backward.

The product of two transforms of length n is a circular convolution, so a piece of T inputs and K taps needs
n >= T + K - 1: with a smaller n its end would wrap around and the future would reach the past. Where K is much shorter
than L the input is cut into pieces, and the part of each output beyond its piece is added to the next (overlap-add).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import activate


def fft_length(least: int) -> int:
    """The least of 2^k, 3·2^k, 5·2^k, 9·2^k and 15·2^k that is >= `least`: lengths for which any FFT library is fast."""
    return min(m << max(0, (-(-least // m) - 1).bit_length()) for m in (1, 3, 5, 9, 15))


def pieces(length: int, taps: int) -> tuple[int, int]:
    """T, the number of inputs per piece, and n, the length of its transforms. There is one piece unless the taps are few."""
    if 4 * taps > length:
        return length, fft_length(length + taps - 1)
    n = fft_length(max(4 * taps, 1024))  # at least three quarters of each transform are input
    return n - taps + 1, n


def cut(u: Tensor, T: int) -> Tensor:
    """(B, D, L) -> (B, D, pieces, T), zeros at the end."""
    rows = -(-u.shape[-1] // T)
    return (F.pad(u, (0, rows * T - u.shape[-1])) if rows * T > u.shape[-1] else u).unflatten(-1, (rows, T))


def linear(u: Tensor, kernel: Tensor) -> Tensor:
    """The full convolution, u (B, D, L), kernel (D, K) -> (B, D, L + K - 1)."""
    L, K = u.shape[-1], kernel.shape[-1]
    T, n = pieces(L, K)
    # without n irfft would assume an even length
    y = torch.fft.irfft(torch.fft.rfft(cut(u, T), n) * torch.fft.rfft(kernel, n)[:, None], n)  # (B, D, pieces, n)
    if y.shape[2] == 1:
        return y[..., 0, : L + K - 1]
    here, beyond = y[..., :T], y[..., T : T + K - 1]
    beyond = F.pad(beyond, (0, T - K + 1, 1, 0)).flatten(-2)  # T >= K - 1: a piece overlaps only the next one
    return (F.pad(here, (0, 0, 0, 1)).flatten(-2) + beyond)[..., : L + K - 1]


def forward(u, kernel, D, gate, activation: str | None) -> tuple[Tensor, Tensor]:
    """y (B, L, D), and p before the activation in u's dtype; (0,) where the backward needs none."""
    acc, L = torch.promote_types(u.dtype, torch.float32), u.shape[1]
    wide = u.to(acc)
    p = linear(wide.mT, kernel.to(acc))[..., :L].mT.contiguous()
    if p._is_view():  # of the longer result, but an op's output must not share memory
        p = p.clone()
    if D is not None:
        p.addcmul_(D.to(acc), wide)
    if activation is None and gate is None:
        return p.to(u.dtype), u.new_empty(0)
    y = activate(p, activation)
    if gate is not None:
        y = y * gate.to(acc)
    return y.to(u.dtype), p.to(u.dtype)


def backward(dy, u, kernel, D, gate, p, activation: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du, dkernel, dD, dgate; (0,) for what was not given. Both transforms are recomputed, not saved."""
    acc, L, K = torch.promote_types(u.dtype, torch.float32), u.shape[1], kernel.shape[1]
    none = u.new_empty(0, dtype=acc)
    wide, g, dgate, dD = u.to(acc), dy.to(acc), none, none
    if gate is not None:
        dgate = (g * activate(p.to(acc), activation)).to(gate.dtype).contiguous()
        g = g * gate.to(acc)
    if activation == "gelu":
        g = torch.ops.aten.gelu_backward(g, p.to(acc))
    elif activation == "silu":
        g = torch.ops.aten.silu_backward(g, p.to(acc))
    T, n = pieces(L, K)
    inputs = cut(wide.mT, T)
    # a piece of T inputs affects T + K - 1 outputs, from its first step on
    rows, seen = inputs.shape[2], g.mT[:, :, None]  # (B, D, pieces, T + K - 1)
    if rows > 1:
        seen = F.pad(g.mT, (0, rows * T + K - 1 - L)).unfold(-1, T + K - 1, T)
    gf = torch.fft.rfft(seen, n)
    kf = torch.fft.rfft(kernel.to(acc), n)[:, None]
    du = torch.fft.irfft(gf * kf.conj(), n)[..., :T].flatten(-2)[..., :L].mT
    du = du.clone(memory_format=torch.contiguous_format)
    gf.mul_(torch.fft.rfft(inputs, n).conj_physical_())
    dkernel = torch.fft.irfft(gf.sum((0, 2)), n)[:, :K]
    if D is not None:
        du.addcmul_(D.to(acc), g)
        dD = (g * wide).sum((0, 1)).to(D.dtype)
    return du.to(u.dtype), dkernel.to(kernel.dtype).clone(memory_format=torch.contiguous_format), dD, dgate

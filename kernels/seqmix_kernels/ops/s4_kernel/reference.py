"""The kernels as their equations state them, in plain torch with autograd: every power and fraction is stored in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .modes import dense, row, truncated


def s4d(log_a: Tensor, c: Tensor, length: int) -> Tensor:
    """K_l = Re Σ_n c_n exp(l log ā_n). log_a (D, M, 2), c (..., D, M, 2) -> (..., D, L); memory O(D M L)."""
    l = torch.arange(length, device=c.device, dtype=log_a.dtype)
    powers = torch.view_as_complex(log_a.contiguous())[..., None].mul(l).exp()  # (D, M, L)
    c = torch.view_as_complex(c.contiguous())
    return torch.einsum("...dm,dml->...dl", c, powers.to(c.dtype)).real


def recurrence(lam: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int) -> Tensor:
    """K_l = C Ā^l B̄ one tap at a time, from dense matrices. (D, M, 2) each -> (D, L)."""
    A_bar, x = dense(lam, P, B)
    x, taps = x[..., None], []
    for _ in range(length):
        taps.append((row(C.to(x.dtype))[:, None] @ x)[:, 0, 0])
        x = A_bar @ x
    return torch.stack(taps, -1).to(C.dtype)


def dplr(lam: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int) -> Tensor:
    """K from its generating function at the roots of unity (Gu, Goel & Ré 2022, §3.2, C.3). (D, M, 2) each -> (D, L).

    It uses complex tensors and the paper's form, and stores each fraction, memory O(D N L). The limit at ω = -1, where 2/(1+ω)
    and z are infinite, is a special case.
    """
    wide = torch.complex128 if C.dtype == torch.float64 else torch.complex64

    def whole(x: Tensor) -> Tensor:  # (D, M, 2) -> (D, N), including the conjugates
        x = torch.view_as_complex(x.double().contiguous())
        return torch.cat((x, x.conj()), -1).to(wide)

    C = truncated(lam, P, B, C, length)
    lam, P, B, C = map(whole, (lam, P, B, C))
    k = torch.arange(length // 2 + 1, device=C.device, dtype=torch.float64)
    half = torch.polar(torch.ones_like(k), -math.pi * k / length)  # √ω
    z = torch.complex(torch.zeros_like(k), 2 * torch.tan(math.pi * k / length)).to(wide)  # 2 (1-ω)/(1+ω) = 2i tan(θ/2)
    fractions = 1 / (z - lam[..., None])  # (D, N, F)
    r00, r01, r10, r11 = (torch.einsum("dn,dnf->df", v, fractions) for v in (C * B, C * P, P.conj() * B, P.conj() * P))
    spectrum = (1 / (half * half.real)).to(wide) * (r00 - r01 * r10 / (1 + r11))  # 2/(1+ω) = 1/(√ω cos(θ/2))
    if length % 2 == 0:
        spectrum = torch.cat((spectrum[:, :-1], (C * B).sum(-1, keepdim=True) / 2), -1)
    return torch.fft.irfft(spectrum, length)

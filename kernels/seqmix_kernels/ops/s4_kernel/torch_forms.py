"""The kernels in plain torch without an (L, N) array, with a hand-written backward; README.md has the derivations.

s4d    l = iQ + j:  Σ_n c_n ā_n^l = Σ_n (c_n ā_n^{iQ}) ā_n^j is a product of two small matrices.
dplr   the sums over modes are matrix products, too: a conjugate pair has a common denominator and real weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIECE = 1 << 24  # elements of (D, frequencies, M) per block
CPU_PIECE = 1 << 17  # small enough for the cache


# ---- S4D ------------------------------------------------------------------------------------------------------------


def powers(log_a: Tensor, count: int, stride: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ā^(stride k), k < count: real and imaginary parts, (D, M, count). Angles are computed in log_a's precision."""
    k = torch.arange(count, device=log_a.device, dtype=log_a.dtype) * stride
    size, angle = (log_a[..., 0, None] * k).exp(), log_a[..., 1, None] * k
    return (size * angle.cos()).to(dtype), (size * angle.sin()).to(dtype)


def split(length: int) -> tuple[int, int]:
    """Q and the number of rows of Q that cover the length."""
    Q = max(1, math.isqrt(length))
    return Q, -(-length // Q)


def s4d_forward(log_a: Tensor, c: Tensor, length: int) -> Tensor:
    Q, rows = split(length)
    inner = torch.cat(powers(log_a, Q, 1, c.dtype), -2)  # (D, 2M, Q)
    re, im = powers(log_a, rows, Q, c.dtype)  # (D, M, rows)
    cr, ci = c[..., 0, None], c[..., 1, None]
    outer = torch.cat((cr * re - ci * im, -cr * im - ci * re), -2)  # (..., D, 2M, rows): Re and -Im of c ā^{iQ}
    return (outer.transpose(-1, -2) @ inner).flatten(-2)[..., :length].contiguous()


def s4d_backward(dK: Tensor, log_a: Tensor, c: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """From S = Σ_l dK_l ā^l and T = Σ_l l dK_l ā^l: ∂c = conj(S), ∂log ā = conj(c T), as pairs."""
    Q, rows = split(length)
    dK = torch.nn.functional.pad(dK, (0, rows * Q - length)).unflatten(-1, (rows, Q))  # (..., D, rows, Q)
    inner = torch.cat(powers(log_a, Q, 1, c.dtype), -2).transpose(-1, -2)  # (D, Q, 2M)
    j = torch.arange(Q, device=c.device, dtype=c.dtype)
    gr, gi = (dK @ inner).chunk(2, -1)  # (..., D, rows, M): one row's sum
    hr, hi = ((dK * j) @ inner).chunk(2, -1)
    first = (torch.arange(rows, device=c.device, dtype=c.dtype) * Q)[:, None]
    hr, hi = hr + first * gr, hi + first * gi
    re, im = (t.transpose(-1, -2) for t in powers(log_a, rows, Q, c.dtype))  # (D, rows, M)
    Sr, Si = ((re * x - im * y).sum(-2) for x, y in ((gr, gi), (gi, -gr)))  # Σ_i ā^{iQ} g: real, imaginary part
    Tr, Ti = ((re * x - im * y).sum(-2) for x, y in ((hr, hi), (hi, -hr)))
    cr, ci = c.unbind(-1)
    dlog = torch.stack((cr * Tr - ci * Ti, -cr * Ti - ci * Tr), -1)
    return dlog.sum_to_size(log_a.shape).to(log_a.dtype), torch.stack((Sr, -Si), -1)


# ---- DPLR -----------------------------------------------------------------------------------------------------------


def nodes(length: int, device: torch.device) -> Tensor:
    """Four float64 numbers per frequency k <= length/2, θ = 2πk/length: 2 tan(θ/2), cos(θ/2), sin(θ/2), a weight. (4, F).

    The weight is how often k occurs in the full spectrum. At ω = -1, θ = π, 2^60 and 2^-59 replace infinity and the inverse of
    its half, so that every product of the two has the value of the limit.
    """
    k = torch.arange(length // 2 + 1, device=device, dtype=torch.float64)
    half = math.pi / length * k
    tangent, cosine, sine, weight = 2 * half.tan(), half.cos(), half.sin(), torch.full_like(k, 2)
    weight[0] = 1
    if length % 2 == 0:
        tangent[-1], cosine[-1], sine[-1], weight[-1] = 2.0**60, 2.0**-59, 1, 1
    return torch.stack((tangent, cosine, sine, weight))


def fractions(lam: Tensor, node: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """κ = 1/((2is - λc)(2is - λ̄c)), real and imaginary part: (D, F, M) each.

    With y = 2s/c the denominator is c² (λr² - (y - λi)(y + λi)) - 4isc λr.
    """
    lr, li = (t[:, None] for t in lam.unbind(-1))  # (D, 1, M)
    y, c, s = (t[:, None] for t in node[:3])  # (F, 1)
    # y - Im λ is the distance to the pole: the parts of both beyond the dtype's precision take part in the subtraction
    y0, li0 = y.to(dtype), li.to(dtype)
    near = y0 - li0
    near += (y - y0.double()).to(dtype) - (li - li0.double()).to(dtype)
    near *= y0 + li0
    re = torch.sub(lr.square().to(dtype), near, out=near).mul_((c * c).to(dtype))
    im = (4 * s * c).to(dtype) * lr.to(dtype)  # minus the imaginary part
    scale = (re * re).addcmul_(im, im).reciprocal_()
    return re.mul_(scale), im.mul_(scale)


def weights(lam: Tensor, v: Tensor) -> Tensor:
    """v ρ + conj(v) ρ' of a pair = (i s a + c b) κ with real a = 4 Re v, b = -2 Re(v λ̄). v (..., 2) -> (..., 2)."""
    return torch.stack((4 * v[..., 0], -2 * (v * lam).sum(-1)), -1)


def combine(U: Tensor, W: Tensor, s: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """The four sums q = i s U + c W, and the quotients of Woodbury's formula: complex (4, ...), s and c (F,)."""
    q00, q01, q10, q11 = 1j * s * U + c * W
    left, right = q01 / (1 + c * q11), q10 / (1 + c * q11)
    return q00 - c * left * q10, left, right


def dplr_forward(lam: Tensor, w: Tensor, length: int) -> Tensor:
    """lam (D, M, 2) float64, w (D, M, 8): a of the four sums, then b, in the dtype of the computation -> K (D, length)."""
    spectrum = []
    for part in _parts(nodes(length, lam.device), lam):
        U, W = _sums(*fractions(lam, part, w.dtype), w)
        c, s = part[1:3].to(w.dtype)
        k, _, _ = combine(U, W, s, c)
        spectrum.append(torch.complex(c, s) * k)  # 1/√ω
    return torch.fft.irfft(torch.cat(spectrum, -1), length)


def dplr_backward(dK: Tensor, lam: Tensor, w: Tensor, length: int) -> tuple[Tensor, Tensor]:
    parts, gradient, dw = _parts(nodes(length, lam.device), lam), torch.fft.rfft(dK), torch.zeros_like(w)
    near, damp = (w.new_zeros(lam.shape[:2]) for _ in range(2))  # Σ c² Re ∂D, Σ s c Im ∂D
    for part, g in zip(parts, gradient.split(parts[0].shape[1], -1), strict=True):
        kr, ki = fractions(lam, part, w.dtype)
        U, W = _sums(kr, ki, w)
        c, s, weight = part[1:].to(w.dtype)
        g = g * torch.complex(c, -s) * (weight / length)  # (D, F): of the bracket after 1/√ω
        _, left, right = combine(U, W, s, c)
        dq = torch.stack((g, -(c * right).conj() * g, -(c * left).conj() * g, (c * c * left * right).conj() * g))
        dUW = torch.cat((-1j * s * dq, c * dq)).permute(1, 2, 0)  # (D, F, 8)
        dr, di = dUW.real.contiguous(), dUW.imag.contiguous()
        dw += (kr.mT @ dr).baddbmm_(ki.mT, di)
        hr, hi = dr @ w.mT, di @ w.mT  # (D, F, M): ∂κ
        # κ = 1/D, ∂D = -conj(κ²) ∂κ
        sr, si = (kr * kr).addcmul_(ki, ki, value=-1), (kr * ki).mul_(-2)
        near -= (c * c) @ (sr * hr).addcmul_(si, hi, value=-1)
        damp -= (s * c) @ sr.mul_(hi).addcmul_(si, hr)
    lr, li = lam.to(w.dtype).unbind(-1)
    return torch.stack((2 * lr * near - 4 * damp, 2 * li * near), -1).to(lam.dtype), dw


def _parts(node: Tensor, lam: Tensor) -> tuple[Tensor, ...]:
    """Blocks of frequencies with a bounded number of (D, F, M) elements."""
    elements = CPU_PIECE if lam.device.type == "cpu" else PIECE
    return node.split(max(1, elements // max(1, lam[..., 0].numel())), -1)


def _sums(kr: Tensor, ki: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_n κ a and Σ_n κ b for the four residues: complex, (4, D, F) each."""
    both = torch.complex(kr @ w, ki @ w).permute(2, 0, 1)  # (8, D, F)
    return both[:4], both[4:]

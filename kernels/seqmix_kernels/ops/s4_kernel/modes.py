"""From continuous parameters to discrete ones: (D, M)-sized, in float64, in plain torch with autograd.

Complex numbers are pairs of real ones, (..., 2). They are float64 because a mode is raised to the power L: an error of
6e-8 in its phase grows to 1e-3 after 16384 steps. There are so few of these numbers that float64 costs nothing.

    a diagonal system     log Ā, B̄                     `discretize`
    diagonal - rank one   A = Λ - P P*, includes Δ     `resolvent` (linear time), `dense` (matrices)
"""

from __future__ import annotations

import torch
from torch import Tensor


def times(x: Tensor, y: Tensor) -> Tensor:
    """x y of complex pairs (..., 2)."""
    (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
    return torch.stack((a * c - b * d, a * d + b * c), -1)


def conj(x: Tensor) -> Tensor:
    return torch.stack((x[..., 0], -x[..., 1]), -1)


def reciprocal(x: Tensor) -> Tensor:
    return conj(x) / x.square().sum(-1, keepdim=True)


def power(log_a: Tensor, exponent: Tensor | int) -> Tensor:
    """ā^exponent, (..., 2) as log_a; a real exponent, of a shape that broadcasts against log_a (..., 1)."""
    log_a = log_a * exponent
    return log_a[..., 0, None].exp() * torch.stack((log_a[..., 1].cos(), log_a[..., 1].sin()), -1)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 of pairs, without cancellation near 0."""
    re, im = x.unbind(-1)
    grown = torch.expm1(re)
    return torch.stack((grown * im.cos() - 2 * (im / 2).sin().square(), (1 + grown) * im.sin()), -1)


def discretize(dt: Tensor, A: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """log Ā and B̄ of the diagonal system x' = A x + u, sampled with step Δ.

        zoh        Ā = exp(ΔA),                   B̄ = (Ā - 1)/A      (u constant over a step)
        bilinear   Ā = (1 + ΔA/2)/(1 - ΔA/2),     B̄ = Δ/(1 - ΔA/2)   (trapezoid rule)

    Args:
        dt: (D,) positive.
        A: (n, M, 2) with Re A < 0; channel d uses spectrum d mod n; n divides D.
        method: "zoh" or "bilinear".

    Returns:
        log Ā and B̄, each (D, M, 2) float64; the imaginary part of log Ā is the phase of one step.
    """
    (n, _, _), width = A.shape, len(dt)
    A, dt = A.double(), dt.double().view(width // n, n, 1, 1)  # (D/n, n, 1, 1)
    re, im = (dt * A).unbind(-1)  # (D/n, n, M)
    if method == "zoh":
        log_a = torch.stack((re, im), -1)
        b = times(expm1(log_a), reciprocal(A).expand_as(log_a))
    else:
        if method != "bilinear":
            raise ValueError(f'method must be "zoh" or "bilinear"; got {method!r}')
        re, im = re / 2, im / 2
        size = (1 - re).square() + im.square()  # |1 - ΔA/2|²
        # log |Ā| with |1 + h|² = |1 - h|² + 4 Re h; at Ā = 0 it stays finite
        log_a = torch.stack(
            (torch.log1p((4 * re / size).clamp(min=-1 + 1e-15)) / 2, torch.atan2(2 * im, 1 - re.square() - im.square())), -1
        )
        b = dt * torch.stack((1 - re, im), -1) / size[..., None]
    return log_a.flatten(0, 1), b.flatten(0, 1)


def dplr_modes(log_dt: Tensor, log_decay: Tensor, imag: Tensor, P: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ΔΛ, √Δ P and Δ B, pairs (D, M, 2) float64, for Δ = exp(log_dt) (D,) and Λ = -exp(log_decay) + i imag (n, M).

    Channel d uses row d mod n of Λ, P and B.
    """
    dt = log_dt.double().exp().view(-1, len(imag), 1, 1)  # (D/n, n, 1, 1)
    A = torch.stack((-log_decay.double().exp(), imag.double()), -1)
    return tuple((scale * t.double()).flatten(0, 1) for scale, t in ((dt, A), (dt.sqrt(), P), (dt, B)))


def resolvent(x: Tensor, lam: Tensor, P: Tensor) -> Tensor:
    """(I - A/2)⁻¹ x with A = Λ - P P*, in O(M): Woodbury around the diagonal.

    x (..., D, M, 2), lam and P (D, M, 2): one mode per conjugate pair. So P* v is 2 Re Σ conj(P_n) v_n.
    The step of the bilinear rule is x + resolvent(A x + B u): `increment` below.
    """
    E = reciprocal(torch.stack((1 - lam[..., 0] / 2, -lam[..., 1] / 2), -1))  # (D, M, 2): (1 - λ/2)⁻¹
    EP = times(E, P)
    y = times(E, x)
    gain = pair_sum(P, y) / (2 + pair_sum(P, EP))  # ½ P*Ex / (1 + ½ P*EP)
    return y - gain[..., None, None] * EP


def increment(x: Tensor, lam: Tensor, P: Tensor, Bu: Tensor) -> Tensor:
    """Ā x + B̄ u - x, by the bilinear rule. Rounding errors scale with the change, not with the state."""
    return resolvent(times(lam, x) - pair_sum(P, x)[..., None, None] * P + Bu, lam, P)


def pair_sum(P: Tensor, x: Tensor) -> Tensor:
    """P* x = 2 Re Σ_n conj(P_n) x_n. (..., M, 2) -> (...)."""
    return 2 * (P * x).sum((-1, -2))


def real(x: Tensor) -> Tensor:
    """A vector of pairs as its real coordinates: (..., M, 2) -> (..., N), the real parts first. N = 2M."""
    return x.transpose(-1, -2).flatten(-2)


def dense(lam: Tensor, P: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Ā (D, N, N) and B̄ (D, N) by the bilinear rule, in the real coordinates of `real`. lam, P, B (D, M, 2).

    In these coordinates A = Λ - 2 p pᵀ with real p, and Ā = 2 (I - A/2)⁻¹ - I.
    """
    E = reciprocal(torch.stack((1 - lam[..., 0] / 2, -lam[..., 1] / 2), -1))
    left, right = real(times(E, P)), real(times(conj(E), P))  # E p and Eᵀ p (D, N)
    left = left * (-2 / (1 + (real(P) * left).sum(-1, keepdim=True)))  # so that Ā = 2 E - I + left rightᵀ
    re, im = torch.diag_embed(2 * E[..., 0] - 1), torch.diag_embed(2 * E[..., 1])
    block = torch.cat((torch.cat((re, -im), -1), torch.cat((im, re), -1)), -2)  # (D, N, N)
    B_bar = real(times(E, B)) + left / 2 * (right * real(B)).sum(-1, keepdim=True)
    return torch.baddbmm(block, left[:, :, None], right[:, None, :]), B_bar


def row(C: Tensor) -> Tensor:
    """The row of real numbers by which y = 2 Re Σ C_n x_n reads the coordinates of `real`: (..., M, 2) -> (..., N)."""
    return 2 * real(conj(C))


def truncated(lam: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int) -> Tensor:
    """C̃ = C (I - Ā^length), (D, M, 2), which truncates the geometric series of the kernel after `length` taps.

    The power is computed by squaring, in O(N³ log length); products with a row replace the last squarings.
    """
    X, _ = dense(lam, P, B)
    c = C.to(X.dtype)
    left = row(c)[:, None]  # (D, 1, N)
    while length >= 4:
        if length % 2:
            left = left @ X
        X, length = X @ X, length // 2
    for _ in range(length):
        left = left @ X
    left = left[:, 0].unflatten(-1, (2, -1)).transpose(-1, -2) / 2  # (D, M, 2)
    return c - conj(left)

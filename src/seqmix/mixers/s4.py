"""S4: a linear time-invariant state space whose state matrix is diagonal minus rank one, initialised with HiPPO-LegS.

    x'(τ) = A x(τ) + B u(τ),   y(τ) = 2 Re C x(τ) + D u(τ)      A = Λ - P P*, M modes, one of each conjugate pair
    x_t = Ā x_{t-1} + B̄ u_t,   Ā = (I - ΔA/2)⁻¹ (I + ΔA/2),  B̄ = (I - ΔA/2)⁻¹ Δ B        bilinear, with step Δ
    y = K * u + D u,           K_l = 2 Re C Ā^l B̄                a causal convolution, by FFT

Gu, Goel & Ré 2022, "Efficiently Modeling Long Sequences with Structured State Spaces" (S4), §3; P = Q, which keeps A
stable, from Goel, Gu, Donahue & Ré 2022, "It's Raw! Audio Generation with State-Space Models", §4.1. The layer around it
comes from s4d.py, the kernel from `seqmix_kernels.ops.s4_kernel`.

C is learned, not C̃ = C (I - Ā^L). So no parameter depends on a length, and convolution and recurrence share their parameters.
C̃ is computed for each length that is needed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from seqmix.mixers.s4d import StateSpace, hippo_legs
from seqmix_kernels.ops.fft_conv import fft_conv
from seqmix_kernels.ops.s4_kernel import dense, dplr_layer_kernel, dplr_modes, real, row


class S4(StateSpace):
    """S4 layer with d_state state numbers per channel, in d_state/2 conjugate pairs.

    n_ssm: number of different (A, B); channel d uses number d mod n_ssm; null for one per channel. impl: implementation of
    kernel and convolution (seqmix_kernels/ops/s4_kernel, fft_conv); all compute the same function. decode: implementation of a
    decoding step (seqmix_kernels/ops/s4_step). Δ starts log-uniform in [dt_min, dt_max]. max_lr: largest learning rate of A, B
    and Δ, which are not decayed; C has the model's own rate.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        n_ssm: int | None = 1,
        impl: str = "auto",
        decode: str = "auto",
        *,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        max_lr: float = 1e-3,
    ):
        if d_state < 2 or d_state % 2:
            raise ValueError(f"d_state must be positive and even, for conjugate pairs, got {d_state}")
        super().__init__(d_model, d_state, n_ssm, impl, decode, dt_min, dt_max, max_lr)
        A, P, B = hippo_legs(d_state)
        self.A_log_decay = self._spectrum(np.log(-A.real), max_lr)  # Re Λ = -exp(.): with -P P* A is always stable
        self.A_imag = self._spectrum(A.imag, max_lr)
        self.P = self._spectrum(np.stack((P.real, P.imag), -1), max_lr)
        self.B = self._spectrum(np.stack((B.real, B.imag), -1), max_lr)
        self.C = nn.Parameter(torch.randn(d_model, d_state // 2, 2, dtype=torch.float32) * 0.5**0.5)

    def kernel(self, length: int) -> Tensor:
        self.check_dt()
        return dplr_layer_kernel(*self._parameters_of_modes(), self.C, length, self.impl)

    def recurrence(self) -> tuple:
        return self.log_dt, self.A_log_decay, self.A_imag, self.C, self.D, self.P, self.B, "bilinear"

    def carry(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """In pieces: a convolution within each, and dense matrices that carry the state from one piece to the next.

        The lengths of pieces are powers of two, near √L and smaller for the remainder, so that doubling makes all matrices.
        """
        length, start = u.shape[1], 0
        top = min(length.bit_length() - 1, max(6, math.isqrt(length - 1).bit_length()))
        maps = self._maps(top, u.dtype)
        h, ys = real(x).transpose(0, 1), []  # (D, B, N)
        for level in range(top, -1, -1):
            count = (length - start) >> level  # at most one, below the top level
            if count:
                piece = u[:, start : start + (count << level)]
                y, h = self._pieces(piece.unflatten(1, (count, -1)), h, maps[level])
                ys.append(y)
            start += count << level
        x = h.transpose(0, 1).unflatten(-1, (2, -1)).transpose(-1, -2)
        return torch.cat(ys, 1), x.contiguous()

    def modes(self) -> tuple[Tensor, Tensor, Tensor]:
        """ΔΛ, √Δ P and Δ B as (real, imaginary) pairs (D, M, 2), float64."""
        self.check_dt()
        return dplr_modes(*self._parameters_of_modes())

    def _parameters_of_modes(self) -> tuple[Tensor, ...]:
        return self.log_dt, self.A_log_decay, self.A_imag, self.P, self.B

    def _maps(self, levels: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For pieces of q = 1, 2, 4, .. 2^levels steps: Ā^q, the map from q inputs to the state, the map from a state to q
        outputs, and the first q taps of K.

        (D, N, N), (D, N, q), (D, q, N) and (D, q). Computed in float64, because Ā^q is applied once per piece.
        """
        X, b = dense(*self.modes())
        c = row(self.C.double())[:, None]  # (D, 1, N)
        W, O, maps = b[..., None], c @ X, []
        for level in range(levels + 1):
            if level:
                W, O, X = torch.cat((X @ W, W), -1), torch.cat((O, O @ X), 1), X @ X
            taps = torch.cat((c, O[:, :-1]), 1) @ b[..., None]  # (D, q, 1)
            maps.append(tuple(t.to(dtype) for t in (X, W, O, taps[..., 0])))
        return maps

    def _pieces(self, u: Tensor, h: Tensor, maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """u (B, count, q, D), the state h (D, B, N) -> y without the skip (B, count · q, D), the state after."""
        X, W, O, taps = maps
        batch, count, q, width = u.shape
        y = fft_conv(u.flatten(0, 1), taps, impl=self.impl).unflatten(0, (batch, count))
        new = (u.permute(3, 0, 1, 2).flatten(1, 2) @ W.mT).unflatten(1, (batch, count))  # (D, B, count, N)
        before = []
        for added in new.unbind(2):
            before.append(h)
            h = h @ X.mT + added
        given = torch.stack(before, 2).flatten(1, 2) @ O.mT  # (D, B · count, q)
        return (y + given.view(width, batch, count, q).permute(1, 2, 3, 0)).flatten(1, 2), h

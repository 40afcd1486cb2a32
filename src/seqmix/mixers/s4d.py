"""S4D: a linear time-invariant state space with a diagonal, complex state matrix.

    x'(τ) = A x(τ) + B u(τ),   y(τ) = 2 Re C x(τ) + D u(τ)      M complex modes a channel, one of each conjugate pair
    x_t = Ā x_{t-1} + B̄ u_t,   y_t = 2 Re C x_t + D u_t         sampled with step Δ
    y = K * u + D u,           K_l = 2 Re Σ_n C_n Ā_n^l B̄_n     a causal convolution, by FFT

Gu, Gupta, Goel & Ré 2022, "On the Parameterization and Initialization of Diagonal State Space Models": sampling and
kernel in §3, spectra in §4. B is 1: K sees C B̄ alone. Around it S4's layer: GELU, then a gated linear unit.

Powers are never stored one by one. With l = iQ + j and Q ≈ √L,  Σ_n c_n Ā_n^l = Σ_n (c_n Ā_n^{iQ}) Ā_n^j  is a batched
matrix product of two small tables: L values cost O(M L) multiply-adds and O(M √L) memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmix.mixers.base import Mixer, no_weight_decay

INITS = ("lin", "inv", "legs", "real")
DISCRETIZATIONS = ("zoh", "bilinear")


class S4DState(NamedTuple):
    x: Tensor  # (B, D, M, 2) real and imaginary; (B, D, N, 1) where A is real. float32, or float64


class S4D(Mixer):
    """Diagonal state space layer with d_state numbers of state a channel: d_state/2 complex modes, or d_state real.

    init: the spectrum of A, lin | inv | legs | real (§4 of the paper). discretization: zoh | bilinear. Δ starts
    log-uniform in [dt_min, dt_max]. max_lr: the most that A and Δ are trained with, undecayed. Complex parameters are
    pairs of real ones, so that no cast drops their imaginary part.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        init: str = "lin",
        discretization: str = "zoh",
        *,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        max_lr: float = 1e-3,
    ):
        super().__init__()
        if init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
        if discretization not in DISCRETIZATIONS:
            raise ValueError(f"discretization must be one of {', '.join(DISCRETIZATIONS)}, got {discretization!r}")
        if d_state < 1 or (init != "real" and d_state % 2):
            raise ValueError(f"d_state must be positive, and even for conjugate pairs (init={init!r}), got {d_state}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"0 < dt_min <= dt_max is needed, got dt_min={dt_min!r} and dt_max={dt_max!r}")
        self.d_model, self.d_state, self.discretization = d_model, d_state, discretization
        self.is_real = init == "real"
        A = spectrum(init, d_state)  # (M,)
        M, parts = len(A), 1 if self.is_real else 2

        def per_channel(values: np.ndarray) -> nn.Parameter:
            values = torch.tensor(values.tolist(), dtype=torch.float32).expand(d_model, M).clone()  # (D, M)
            return no_weight_decay(nn.Parameter(values), max_lr=max_lr)

        log_dt = torch.empty(d_model, dtype=torch.float32).uniform_(math.log(dt_min), math.log(dt_max))
        self.log_dt = no_weight_decay(nn.Parameter(log_dt), max_lr=max_lr)
        self.A_log_decay = per_channel(np.log(-A.real))  # Re A = -exp(.): negative whatever is learned
        self.A_imag = None if self.is_real else per_channel(A.imag)
        self.C = nn.Parameter(torch.randn(d_model, M, parts, dtype=torch.float32) * parts**-0.5)
        self.D = no_weight_decay(nn.Parameter(torch.randn(d_model, dtype=torch.float32)))
        self.gate_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        for layer in (self.gate_proj, self.out_proj):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # the FFT has no bfloat16, and the spectrum needs float32
            u = x.to(self.D.dtype)
            log_A, B, C = self.discretize()
            y = self._convolve(u, log_A, C * B)
        return self._project(y, x)

    def init_state(self, batch: int) -> S4DState:
        return S4DState(self.C.new_zeros(batch, *self.C.shape))

    def step(self, x_t: Tensor, state: S4DState) -> tuple[Tensor, S4DState]:
        with torch.autocast(x_t.device.type, enabled=False):
            u = x_t.to(self.D.dtype)
            log_A, B, C = self.discretize()
            x = log_A.exp() * self._unpack(state.x) + B * u[..., None]  # (B, D, M)
            y = self._scale * (C * x).real.sum(-1) + self.D * u  # (B, D)
        return self._project(y, x_t), S4DState(self._pack(x))

    def prefill(self, x: Tensor, state: S4DState) -> tuple[Tensor, S4DState]:
        if x.shape[1] == 0:
            return x, state
        with torch.autocast(x.device.type, enabled=False):
            u = x.to(self.D.dtype)
            log_A, B, C = self.discretize()
            before = self._unpack(state.x)  # (B, D, M)
            y = self._convolve(u, log_A, C * B)
            y = y + self._scale * power_sum(C * log_A.exp() * before, log_A, u.shape[1]).transpose(1, 2)
            after = (log_A * u.shape[1]).exp() * before + B * decayed_sum(u.transpose(1, 2), log_A)
        return self._project(y, x), S4DState(self._pack(after))

    def discretize(self) -> tuple[Tensor, Tensor, Tensor]:
        """log Ā, B̄ and C, complex (D, M). Made anew at each call: an optimiser step would leave a kept copy stale."""
        decay = -self.A_log_decay.exp()
        A = torch.complex(decay, torch.zeros_like(decay) if self.A_imag is None else self.A_imag)
        dt = self.log_dt.exp()[:, None]
        if self.discretization == "zoh":
            return dt * A, torch.expm1(dt * A) / A, self._unpack(self.C)
        half = dt * A / 2
        return torch.log((1 + half) / (1 - half)), dt / (1 - half), self._unpack(self.C)

    def kernel(self, length: int) -> Tensor:
        """The convolution kernel K (D, length), without the skip D."""
        log_A, B, C = self.discretize()
        return self._scale * power_sum(C * B, log_A, length)

    @property
    def _scale(self) -> int:
        return 1 if self.is_real else 2  # a conjugate pair counts twice its real part

    def _convolve(self, u: Tensor, log_A: Tensor, CB: Tensor) -> Tensor:
        """u (B, L, D) -> K * u + D u (B, L, D)."""
        K = self._scale * power_sum(CB, log_A, u.shape[1])  # (D, L)
        return causal_convolution(u, K.t()) + self.D * u

    def _project(self, y: Tensor, x: Tensor) -> Tensor:
        y = F.gelu(y).to(x.dtype)
        return self.out_proj(y) * torch.sigmoid(self.gate_proj(y))

    def _unpack(self, pairs: Tensor) -> Tensor:
        real = pairs[..., 0]
        return torch.complex(real, torch.zeros_like(real) if self.is_real else pairs[..., 1])

    def _pack(self, x: Tensor) -> Tensor:
        return x.real[..., None] if self.is_real else torch.view_as_real(x)


def spectrum(init: str, d_state: int) -> np.ndarray:
    """A's eigenvalues, complex128: (d_state/2,), one of each conjugate pair; (d_state,) and real for `real`.

    lin   -½ + iπn                          inv    -½ + i N/π (N/(2n+1) - 1)
    legs  HiPPO-LegS less its rank one      real   -(n+1)
    """
    N = d_state
    n = np.arange(N // 2)
    if init == "lin":
        return -0.5 + 1j * np.pi * n
    if init == "inv":
        return -0.5 + 1j * N / np.pi * (N / (2 * n + 1) - 1)
    if init == "real":
        return -(np.arange(N) + 1.0) + 0j
    assert init == "legs", init
    # LegS is -½ I + S - P Pᵀ with P_n = √(n + ½) and S skew: the normal part has real part -½ and the spectrum of S.
    p = np.sqrt(np.arange(N) + 0.5)
    S = np.triu(np.outer(p, p), 1) - np.tril(np.outer(p, p), -1)
    frequency = np.linalg.eigvalsh(-1j * S)  # ascending, in pairs ±
    return -0.5 + 1j * frequency[N // 2 :]


def power_sum(c: Tensor, log_a: Tensor, length: int) -> Tensor:
    """Re Σ_n c_n a_n^l for l = 0..length-1. c complex (..., D, M), log_a complex (D, M) -> real (..., D, length)."""
    Q = max(1, math.isqrt(length))
    rows = -(-length // Q)
    inner = powers(log_a, Q, 1)  # (D, M, Q)
    outer = c[..., None] * powers(log_a, rows, Q)  # (..., D, M, rows)
    # Re of a complex product as one real product: [Re, -Im] · [Re; Im]
    left = torch.cat((outer.real, -outer.imag), dim=-2).transpose(-1, -2)  # (..., D, rows, 2M)
    right = torch.cat((inner.real, inner.imag), dim=-2)  # (D, 2M, Q)
    return (left @ right).flatten(-2)[..., :length]


def decayed_sum(u: Tensor, log_a: Tensor) -> Tensor:
    """Σ_l a_n^(L-1-l) u_l: the state after u, from zero. u real (B, D, L), log_a complex (D, M) -> (B, D, M)."""
    L = u.shape[-1]
    Q = max(1, math.isqrt(L))
    rows = -(-L // Q)
    u = F.pad(u, (rows * Q - L, 0)).unflatten(-1, (rows, Q))  # (B, D, rows, Q); zeros in front change nothing
    inner = powers(log_a, Q, 1).flip(-1).transpose(-1, -2)  # (D, Q, M)
    inner = torch.complex(u @ inner.real, u @ inner.imag)  # (B, D, rows, M)
    outer = powers(log_a, rows, Q).flip(-1).transpose(-1, -2)  # (D, rows, M)
    return (inner * outer).sum(-2)


def powers(log_a: Tensor, count: int, stride: int) -> Tensor:
    """a^(stride · k) for k = 0..count-1: (..., M) -> (..., M, count)."""
    k = torch.arange(count, device=log_a.device, dtype=log_a.real.dtype) * stride
    return (log_a[..., None] * k).exp()


def causal_convolution(u: Tensor, kernel: Tensor) -> Tensor:
    """y_t = Σ_{s<=t} kernel_{t-s} u_s, by FFT. u (B, L, D), kernel (L, D) -> (B, L, D), in u's float32 or float64.

    The product of two transforms is a circular convolution, so both are padded to at least 2L: at less, the end of u
    would wrap around to its beginning and the future would reach the past.
    """
    L = u.shape[1]
    n = fft_length(2 * L)
    spectrum = torch.fft.rfft(u, n, dim=1) * torch.fft.rfft(kernel, n, dim=0)
    return torch.fft.irfft(spectrum, n, dim=1)[:, :L]  # without n, irfft would take an odd length for an even one


def fft_length(least: int) -> int:
    """The least of 2^k, 3·2^k, 5·2^k, 9·2^k and 15·2^k that is >= `least`: lengths any FFT library is fast at."""
    return min(m << max(0, (-(-least // m) - 1).bit_length()) for m in (1, 3, 5, 9, 15))

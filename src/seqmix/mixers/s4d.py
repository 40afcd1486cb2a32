"""S4D: a linear time-invariant state space with a diagonal, complex state matrix; and what S4 (s4.py) shares with it.

    x'(τ) = A x(τ) + B u(τ),   y(τ) = 2 Re C x(τ) + D u(τ)      M complex modes per channel, one of each conjugate pair
    x_t = Ā x_{t-1} + B̄ u_t,   y_t = 2 Re C x_t + D u_t         sampled with step Δ
    y = K * u + D u,           K_l = 2 Re Σ_n C_n Ā_n^l B̄_n     a causal convolution, by FFT

Gu, Gupta, Goel & Ré 2022, "On the Parameterization and Initialization of Diagonal State Space Models": sampling and
kernel in §3, spectra in §4. B is 1, since K depends on C B̄ only. The layer around it is S4's: GELU, then a gated linear unit.
Kernel, convolution and the decoding step come from `seqmix_kernels`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from seqmix.mixers.base import Mixer, is_plain, no_weight_decay
from seqmix_kernels.frame import named
from seqmix_kernels.ops.fft_conv import fft_conv
from seqmix_kernels.ops.fft_conv import which_impl as which_convolution
from seqmix_kernels.ops.fft_conv import why_not as why_not_convolution
from seqmix_kernels.ops.s4_kernel import IMPLS, discretize, power, s4d_kernel, s4d_layer_kernel, times
from seqmix_kernels.ops.s4_kernel import which_impl as which_kernel
from seqmix_kernels.ops.s4_kernel import why_not as why_not_kernel
from seqmix_kernels.ops.s4_step import IMPLS as STEPS
from seqmix_kernels.ops.s4_step import gated_projection, s4_step
from seqmix_kernels.ops.s4_step import which_impl as which_step
from seqmix_kernels.ops.s4_step import why_not as why_not_step

INITS = ("lin", "inv", "legs", "real")
DISCRETIZATIONS = ("zoh", "bilinear")


class StateSpaceState(NamedTuple):
    x: Tensor  # (B, D, M, 2) real and imaginary; (B, D, N, 1) where A is real. float32, or float64


class StateSpace(Mixer):
    """The common parts of S4 and S4D: Δ, the skip D, the convolution with a kernel K, and the gate of the output.

    A subclass computes K in `kernel`, and the recurrent view in `recurrence` and `carry`. Complex parameters are pairs of
    real ones, (..., 2), so that no cast drops their imaginary part. Whatever is raised to a power is computed in float64, at
    each call, because an optimizer step would make a stored copy stale.
    """

    kernel_arguments = ("impl", "decode")

    def __init__(
        self,
        d_model: int,
        d_state: int,
        n_ssm: int | None,
        impl: str,
        decode: str,
        dt_min: float,
        dt_max: float,
        max_lr: float,
    ):
        super().__init__()
        n_ssm = d_model if n_ssm is None else n_ssm
        if n_ssm < 1 or d_model % n_ssm:
            raise ValueError(f"n_ssm must divide d_model={d_model}, got {n_ssm}")
        if impl not in IMPLS:
            raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
        if decode not in STEPS:
            raise ValueError(f"decode must be one of {', '.join(STEPS)}, got {decode!r}")
        if not 0 < dt_min <= dt_max < math.inf:
            raise ValueError(f"0 < dt_min <= dt_max < inf is needed, got dt_min={dt_min!r} and dt_max={dt_max!r}")
        self.d_model, self.d_state, self.n_ssm, self.impl, self.decode = d_model, d_state, n_ssm, impl, decode
        log_dt = torch.empty(d_model, dtype=torch.float32).uniform_(math.log(dt_min), math.log(dt_max))
        self.log_dt = no_weight_decay(nn.Parameter(log_dt), max_lr=max_lr)
        self.D = no_weight_decay(nn.Parameter(torch.randn(d_model, dtype=torch.float32)))
        self.gate_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        for layer in (self.gate_proj, self.out_proj):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
            nn.init.zeros_(layer.bias)

    def kernel(self, length: int) -> Tensor:
        """The convolution kernel K (D, length), without the skip D."""
        raise NotImplementedError

    def recurrence(self) -> tuple:
        """The arguments of `s4_step` after the token and the state."""
        raise NotImplementedError

    def carry(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """u (B, L, D) with L >= 1, the state before it -> y (B, L, D) without the skip, the state after it."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        K = self.kernel(max(1, x.shape[1]))  # (D, L); one tap if L = 0, for gradients of zeros
        return self._project(fft_conv(x, K, self.D, "gelu", impl=self.impl))

    def init_state(self, batch: int) -> StateSpaceState:
        return StateSpaceState(self.C.new_zeros(batch, *self.C.shape))

    def step(self, x_t: Tensor, state: StateSpaceState) -> tuple[Tensor, StateSpaceState]:
        self.check_dt()
        # during capture, update the state in place: replays need fixed addresses
        in_place = x_t.is_cuda and torch.cuda.is_current_stream_capturing()
        y, x = s4_step(x_t, state.x, *self.recurrence(), "gelu", self.decode, in_place)
        gate, out = self.gate_proj, self.out_proj
        if is_plain(gate) and is_plain(out):
            y = gated_projection(y, gate.weight, out.weight, gate.bias, out.bias, self.decode)
        else:
            y = self._project(y)
        return y, StateSpaceState(x)

    def prefill(self, x: Tensor, state: StateSpaceState) -> tuple[Tensor, StateSpaceState]:
        if x.shape[1] == 0:
            return self.forward(x), state
        with torch.autocast(x.device.type, enabled=False):
            u = x.to(self.D.dtype)
            y, after = self.carry(u, state.x)
            y = F.gelu(y + self.D * u).to(x.dtype)
        return self._project(y), StateSpaceState(after)

    def kernels_used(self, x: Tensor) -> dict[str, str]:
        c = torch.empty((), dtype=self.C.dtype, device=x.device)
        token = c if c.dtype == torch.float64 else x  # decoding has no gradient
        return {
            "s4_kernel": named(self.impl, which_kernel, why_not_kernel, c),
            "fft_conv": named(self.impl, which_convolution, why_not_convolution, x),
            "s4_step": named(self.decode, which_step, why_not_step, token, self.C[0].numel(), False),
        }

    def dt(self) -> Tensor:
        """Δ (D,), float64."""
        self.check_dt()
        return self.log_dt.double().exp()

    def check_dt(self) -> None:
        """ValueError if Δ is not finite. Only checked on the CPU: on a GPU the host would have to wait, and NonFiniteGuard
        finds it."""
        if self.log_dt.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(self.log_dt, FakeTensor):
            return
        good = self.log_dt.exp().isfinite()
        if not good.all():
            bad = (~good).nonzero().flatten().tolist()
            raise ValueError(f"Δ = exp(log_dt) is not finite in channels {bad}: log_dt = {self.log_dt[bad].tolist()}")

    def _spectrum(self, values: np.ndarray, max_lr: float) -> nn.Parameter:
        """A parameter with one copy of `values` for each of the n_ssm state spaces."""
        values = torch.tensor(values.tolist(), dtype=torch.float32)
        return no_weight_decay(nn.Parameter(values.expand(self.n_ssm, *values.shape).clone()), max_lr=max_lr)

    def _project(self, y: Tensor) -> Tensor:
        return self.out_proj(y) * torch.sigmoid(self.gate_proj(y))


class S4D(StateSpace):
    """Diagonal state space layer with d_state state numbers per channel: d_state/2 complex modes, or d_state real ones.

    init: the spectrum of A, lin | inv | legs | real (§4 of the paper). discretization: zoh | bilinear. n_ssm: number of
    spectra; channel d uses number d mod n_ssm; null for one per channel. impl: implementation of kernel and convolution
    (seqmix_kernels/ops/s4_kernel, fft_conv); all compute the same function. decode: implementation of a decoding step
    (seqmix_kernels/ops/s4_step). Δ starts log-uniform in [dt_min, dt_max]. max_lr: largest learning rate of A and Δ, which are
    not decayed.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        init: str = "lin",
        discretization: str = "zoh",
        n_ssm: int | None = None,
        impl: str = "auto",
        decode: str = "auto",
        *,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        max_lr: float = 1e-3,
    ):
        if init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
        if discretization not in DISCRETIZATIONS:
            raise ValueError(f"discretization must be one of {', '.join(DISCRETIZATIONS)}, got {discretization!r}")
        if d_state < 1 or (init != "real" and d_state % 2):
            raise ValueError(f"d_state must be positive, and even for conjugate pairs (init={init!r}), got {d_state}")
        super().__init__(d_model, d_state, n_ssm, impl, decode, dt_min, dt_max, max_lr)
        self.discretization, self.is_real = discretization, init == "real"
        A = spectrum(init, d_state)  # (M,)
        M, parts = len(A), 1 if self.is_real else 2
        self.A_log_decay = self._spectrum(np.log(-A.real), max_lr)  # Re A = -exp(.), which is always negative
        self.A_imag = None if self.is_real else self._spectrum(A.imag, max_lr)
        self.C = nn.Parameter(torch.randn(d_model, M, parts, dtype=torch.float32) * parts**-0.5)

    def kernel(self, length: int) -> Tensor:
        self.check_dt()
        parameters = self.log_dt, self.A_log_decay, self.A_imag, self.C
        return s4d_layer_kernel(*parameters, length, self.discretization, self.impl)

    def recurrence(self) -> tuple:
        return self.log_dt, self.A_log_decay, self.A_imag, self.C, self.D, None, None, self.discretization

    def carry(self, u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        log_A, B = self.discretize()
        length, x = u.shape[1], self._pairs(x).double()  # (B, D, M, 2)
        y = fft_conv(u, s4d_kernel(log_A, self._read(B), length, self.impl), impl=self.impl)
        y = y + s4d_kernel(log_A, self._read(times(power(log_A, 1), x)), length, self.impl).transpose(1, 2)
        new = times(B, decayed_sum(u.transpose(1, 2), log_A).double())
        after = (times(power(log_A, length), x) + new).to(u.dtype)
        return y, after[..., : self.C.shape[-1]].contiguous()

    def discretize(self) -> tuple[Tensor, Tensor]:
        """log Ā and B̄ as (real, imaginary) pairs (D, M, 2), float64."""
        decay = -self.A_log_decay.double().exp()
        A = torch.stack((decay, torch.zeros_like(decay) if self.is_real else self.A_imag.double()), -1)
        return discretize(self.dt(), A, self.discretization)

    def _read(self, x: Tensor) -> Tensor:
        """C x of each mode, doubled if the mode stands for a conjugate pair: (..., D, M, 2), in C's dtype."""
        return ((1 if self.is_real else 2) * times(self._pairs(self.C).to(x.dtype), x)).to(self.C.dtype)

    def _pairs(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 1)) if self.is_real else x


def spectrum(init: str, d_state: int) -> np.ndarray:
    """A's eigenvalues, complex128: (d_state/2,), one of each conjugate pair; (d_state,) and real for `real`.

    lin   -½ + iπn                          inv    -½ + i N/π (N/(2n+1) - 1)
    legs  Λ of HiPPO-LegS (`hippo_legs`)    real   -(n+1)
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
    return hippo_legs(N)[0]


def hippo_legs(d_state: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """HiPPO-LegS as diagonal minus rank one, A = Λ - P P*: Λ, P and B, (d_state/2,) complex128, one of each pair.

    With P_n = √(n + ½) the matrix is -½ I + S - P Pᵀ, S real and skew. S has an orthonormal basis of eigenvectors V,
    in conjugate pairs, in which Λ = -½ + its spectrum, P becomes V* P and B_n = √(2n + 1) becomes V* B.
    """
    n = np.arange(d_state)
    P = np.sqrt(n + 0.5)
    S = np.triu(np.outer(P, P), 1) - np.tril(np.outer(P, P), -1)
    frequency, V = np.linalg.eigh(-1j * S)  # ascending, in pairs ±
    frequency, V = frequency[d_state // 2 :], V[:, d_state // 2 :].conj().T
    return -0.5 + 1j * frequency, V @ P, V @ np.sqrt(2 * n + 1.0)


def decayed_sum(u: Tensor, log_a: Tensor) -> Tensor:
    """Σ_l a_n^(L-1-l) u_l: the state after u, from zero. u (B, D, L), log_a (D, M, 2) -> (B, D, M, 2) in u's dtype."""
    L = u.shape[-1]
    Q = max(1, math.isqrt(L))
    rows = -(-L // Q)
    u = F.pad(u, (rows * Q - L, 0)).unflatten(-1, (rows, Q))  # (B, D, rows, Q); leading zeros have no effect
    last = torch.arange(Q - 1, -1, -1, device=u.device, dtype=log_a.dtype)
    inner = power(log_a, last[:, None, None, None]).to(u.dtype).permute(1, 0, 2, 3)  # (D, Q, M, 2)
    inner = (u @ inner.flatten(-2)).unflatten(-1, (-1, 2))  # (B, D, rows, M, 2)
    last = Q * torch.arange(rows - 1, -1, -1, device=u.device, dtype=log_a.dtype)
    return times(inner, power(log_a, last[:, None, None, None]).to(u.dtype).transpose(0, 1)).sum(-3)

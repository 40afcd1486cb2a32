"""Mamba: a state space whose step size and projections are functions of the token.

    x, z    = W_in u_t                         two streams of E = expand · d_model channels
    x       = silu(conv(x))                    causal, depthwise, W taps
    δ, B, C = W_x x                            R, N and N numbers per token
    Δ       = softplus(W_Δ δ + b_Δ)            one step size per channel: large reads the token, small keeps the state
    h_t     = exp(Δ_t A) h_{t-1} + B̄_t x_t     N states per channel; B̄ = Δ B (euler) or (exp(ΔA) - 1)/A · B (zoh)
    y_t     = W_out ((C_t·h_t + D x_t) ∘ silu(z_t))

Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces": the block is figure 3, the recurrence
algorithm 2 (S6), the initialisation §3.6. The scan, the convolution, the whole block as one autograd node, and the fused
decoding step come from `seqmix_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqmix.mixers.base import Mixer, is_plain, no_weight_decay
from seqmix_kernels.frame import named
from seqmix_kernels.ops.causal_conv1d import causal_conv1d
from seqmix_kernels.ops.mamba_inner import LEVELS, mamba_inner, which_impls
from seqmix_kernels.ops.mamba_step import IMPLS as STEPS
from seqmix_kernels.ops.mamba_step import mamba_step, which_impl, why_not
from seqmix_kernels.ops.selective_scan import IMPLS, selective_scan
from seqmix_kernels.ops.selective_scan import which_impl as which_scan
from seqmix_kernels.ops.selective_scan import why_not as why_not_scan

DISCRETIZATIONS = ("euler", "zoh")
SOURCES = ("input", "fixed")  # of Δ, B and C
EIGEN_RANGES = ((0, 1), (-1, 1))


class MambaState(NamedTuple):
    conv: Tensor  # (B, W-1, E) the last inputs of the convolution, oldest first; step and prefill keep its dtype
    ssm: Tensor  # (B, E, N) float32, or float64


class Mamba(Mixer):
    """The whole Mamba block.

    d_state: N. d_conv: W. expand: E / d_model. dt_rank: R (null: d_model/16, rounded up). discretization: of B̄, euler
    or zoh. scan: implementation of the scan (seqmix_kernels/ops/selective_scan); all compute the same function.
    checkpoint_level: what training saves for the backward: 0 everything, 1 all but the convolution's output and Δ, 2 only the
    input (seqmix_kernels/ops/mamba_inner); the gradients are the same. decode: implementation of a decoding step
    (seqmix_kernels/ops/mamba_step).

    Switches between S4 and Mamba, for ablations (Gu & Dao 2023, tables 6, 7 and 8). With any of them the block calls its parts
    one by one, which is slower than `mamba_inner` and `mamba_step`; `kernels_used` says so.
        delta, B, C: "input", a function of the token, or "fixed": Δ = softplus(b_Δ), and B or C is a learnt (E, N).
        gate: whether y is multiplied by silu(z). conv: whether x goes through the convolution; silu(x) stays.
        norms: an RMSNorm each on δ, B and C (Jamba: Lieber et al. 2024, arXiv 2403.19887, §6.4).
        eigen_range: of exp(Δ A): [0, 1], or [-1, 1] for 2 exp(Δ A) - 1 (Grazzi et al. 2024, arXiv 2411.12537, §4.2), which
            only scans in plain torch compute.

    If a projection was replaced (by an adapter or a quantised layer) or has hooks, it is called as a module.

    Initially A = -(1..N) in every channel, D = 1, and softplus(b_Δ) is log-uniform in [dt_min, dt_max]. A fixed B is 1, and a
    fixed C is drawn from N(0, 1/N).
    """

    kernel_arguments = ("scan", "decode")

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2.0,
        dt_rank: int | None = None,
        discretization: str = "euler",
        scan: str = "auto",
        checkpoint_level: int = 0,
        decode: str = "auto",
        delta: str = "input",
        B: str = "input",
        C: str = "input",
        gate: bool = True,
        conv: bool = True,
        norms: bool = False,
        eigen_range: Sequence[float] = (0, 1),
        *,
        bias: bool = False,
        conv_bias: bool = True,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        dt_floor: float = 1e-4,
    ):
        super().__init__()
        d_inner = int(expand * d_model)
        dt_rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        if d_inner < 1:
            raise ValueError(f"expand · d_model must be at least 1, got expand={expand!r} and d_model={d_model}")
        if not 1 <= d_state <= 256:
            raise ValueError(f"d_state must lie in 1..256, got {d_state}")
        if d_conv < 1:
            raise ValueError(f"d_conv must be at least 1, got {d_conv}")
        if not 1 <= dt_rank <= d_inner:
            raise ValueError(f"dt_rank must lie in 1..expand · d_model = {d_inner}, got {dt_rank}")
        if discretization not in DISCRETIZATIONS:
            raise ValueError(f"discretization must be one of {', '.join(DISCRETIZATIONS)}, got {discretization!r}")
        if scan not in IMPLS:
            raise ValueError(f"scan must be one of {', '.join(IMPLS)}, got {scan!r}")
        if checkpoint_level not in LEVELS:
            raise ValueError(f"checkpoint_level must be one of {', '.join(map(str, LEVELS))}, got {checkpoint_level!r}")
        if decode not in STEPS:
            raise ValueError(f"decode must be one of {', '.join(STEPS)}, got {decode!r}")
        for name, source in (("delta", delta), ("B", B), ("C", C)):
            if source not in SOURCES:
                raise ValueError(f"{name} must be one of {', '.join(SOURCES)}, got {source!r}")
        if tuple(eigen_range) not in EIGEN_RANGES:
            raise ValueError(f"eigen_range must be [0, 1] or [-1, 1], got {eigen_range!r}")
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"0 < dt_min <= dt_max is needed, got dt_min={dt_min!r} and dt_max={dt_max!r}")
        self.d_model, self.d_inner, self.d_state, self.d_conv, self.dt_rank = d_model, d_inner, d_state, d_conv, dt_rank
        self.discretization, self.scan, self.checkpoint_level, self.decode = discretization, scan, checkpoint_level, decode
        self.signed, self.gate = tuple(eigen_range) == (-1, 1), gate
        widths = ((delta, dt_rank), (B, d_state), (C, d_state))
        self.from_input = [n if source == "input" else 0 for source, n in widths]  # numbers per token for δ, B, C
        self.block = self.from_input == [dt_rank, d_state, d_state] and gate and conv and not norms and not self.signed

        self.in_proj = nn.Linear(d_model, (1 + gate) * d_inner, bias=bias)
        # holds the weights, is not called
        self.conv = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner, bias=conv_bias) if conv else None
        self.x_proj = nn.Linear(d_inner, sum(self.from_input), bias=False) if any(self.from_input) else None
        self.dt_proj = None
        if delta == "input":
            self.dt_proj = nn.Linear(dt_rank, d_inner, bias=False)  # its bias is dt_bias, added inside the scan in float32
            nn.init.uniform_(self.dt_proj.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        dt = torch.empty(d_inner, dtype=torch.float32).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        self.dt_bias = no_weight_decay(nn.Parameter(inverse_softplus(dt.clamp(min=dt_floor))))
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(d_inner, 1)  # (E, N)
        self.A_log = no_weight_decay(nn.Parameter(A.log()))
        self.D = no_weight_decay(nn.Parameter(torch.ones(d_inner, dtype=torch.float32)))
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias)
        if B == "fixed":
            self.B = no_weight_decay(nn.Parameter(torch.ones(d_inner, d_state, dtype=torch.float32)))
        if C == "fixed":
            self.C = no_weight_decay(nn.Parameter(torch.randn(d_inner, d_state, dtype=torch.float32) * d_state**-0.5))
        scales = [no_weight_decay(nn.Parameter(torch.ones(n, dtype=torch.float32))) if n else None for n in self.from_input]
        self.norms = nn.ParameterList(scales) if norms else None  # None where there is nothing per token to normalise

    def forward(self, u: Tensor) -> Tensor:
        y, _ = self._run(u, None, None)
        return y

    def init_state(self, batch: int) -> MambaState:
        conv = self.in_proj.weight.new_zeros(batch, self.d_conv - 1 if self.conv is not None else 0, self.d_inner)
        return MambaState(conv, self.A_log.new_zeros(batch, self.d_inner, self.d_state))

    def prefill(self, u: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        y, after = self._run(u, *state)
        return y, after._replace(conv=after.conv.to(state.conv.dtype))

    def step(self, u_t: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
        if not self._plain():
            return super().step(u_t, state)
        y, *state = mamba_step(
            u_t, self.in_proj.weight, self.conv.weight[:, 0], self.x_proj.weight, self.dt_proj.weight, self.dt_bias,
            self.A_log, self.D, self.out_proj.weight, *state, self.in_proj.bias, self.conv.bias, self.out_proj.bias,
            self.discretization, self.decode,
            # during capture, update the state in place: replays need fixed addresses
            in_place=u_t.is_cuda and torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip
        return y, MambaState(*state)

    def kernels_used(self, u: Tensor) -> dict[str, str]:
        if not self.block:
            used = {"selective_scan": named(self.scan, which_scan, why_not_scan, u, self._rule())}
            return used | dict.fromkeys(("mamba_inner", "mamba_step"), "not used (the block is not Mamba's own)")
        # only the number of taps of `conv` is read; decoding has no gradient
        conv, needs_grad = torch.empty(self.d_inner, self.d_conv, device="meta"), False
        used = which_impls(u, conv, self.scan)
        used["mamba_step"] = named(self.decode, which_impl, why_not, u[:, 0], conv, needs_grad)
        if not self._plain():
            used |= dict.fromkeys(("mamba_inner", "mamba_step"), "not used (a projection is not a plain nn.Linear)")
        return used

    def _run(self, u: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None) -> tuple[Tensor, MambaState]:
        if self._plain():
            y, conv_state, ssm_state = mamba_inner(
                u, self.in_proj.weight, self.conv.weight[:, 0], self.x_proj.weight, self.dt_proj.weight, self.dt_bias,
                self.A_log, self.D, self.out_proj.weight, self.in_proj.bias, self.conv.bias, self.out_proj.bias,
                conv_state, ssm_state, None, self.discretization, self.checkpoint_level, self.scan,
            )  # fmt: skip
            return y, MambaState(conv_state, ssm_state)
        if self.checkpoint_level == 0 or not torch.is_grad_enabled():
            return self._compose(u, conv_state, ssm_state)
        return checkpoint(self._compose, u, conv_state, ssm_state, use_reentrant=False)

    def _plain(self) -> bool:
        return self.block and all(map(is_plain, (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)))

    def _rule(self) -> str:
        return f"{self.discretization}_signed" if self.signed else self.discretization

    def _compose(self, u: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None) -> tuple[Tensor, MambaState]:
        """Computes the same as `mamba_inner`, but calls each projection as a module; and every other block."""
        x, z = self.in_proj(u).chunk(2, dim=-1) if self.gate else (self.in_proj(u), None)  # (B, L, E) each
        if self.conv is None:
            x, conv_state = F.silu(x), x.new_empty(len(x), 0, self.d_inner)
        else:
            x, conv_state = causal_conv1d(x, self.conv.weight[:, 0], self.conv.bias, "silu", conv_state)
        made = x.new_empty(*x.shape[:2], 0) if self.x_proj is None else self.x_proj(x)
        dt, B, C = made.split(self.from_input, dim=-1)
        if self.norms is not None:
            dt, B, C = (_rms_norm(part, weight) for part, weight in zip((dt, B, C), self.norms, strict=True))
        dt = torch.zeros_like(x) if self.dt_proj is None else self.dt_proj(dt)  # (B, L, E)
        y, ssm_state = selective_scan(
            x, dt, -self.A_log.exp(), *self._groups(B, C), self.D, z, self.dt_bias,
            discretization=self._rule(), initial_state=ssm_state, impl=self.scan,
        )  # fmt: skip
        return self.out_proj(y), MambaState(conv_state, ssm_state)

    def _groups(self, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        """B and C as the scan takes them, (B, L, G, N): one group, or one per channel where one of them is fixed."""
        if all(self.from_input[1:]):
            return B.unsqueeze(2), C.unsqueeze(2)
        every = (*B.shape[:2], self.d_inner, self.d_state)
        B = B.unsqueeze(2) if self.from_input[1] else self.B.to(B.dtype)
        C = C.unsqueeze(2) if self.from_input[2] else self.C.to(C.dtype)
        return B.expand(every), C.expand(every)


def _rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=1e-5)


def inverse_softplus(y: Tensor) -> Tensor:
    """log(exp(y) - 1), in a form that neither overflows nor cancels."""
    return y + torch.log(-torch.expm1(-y))

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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqmix.mixers.base import Mixer, is_plain, no_weight_decay
from seqmix_kernels.frame import named
from seqmix_kernels.ops.causal_conv1d import causal_conv1d
from seqmix_kernels.ops.mamba_inner import LEVELS, mamba_inner, which_impls
from seqmix_kernels.ops.mamba_step import IMPLS as STEPS
from seqmix_kernels.ops.mamba_step import mamba_step, which_impl, why_not
from seqmix_kernels.ops.selective_scan import IMPLS, selective_scan

DISCRETIZATIONS = ("euler", "zoh")


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

    If a projection was replaced (by an adapter or a quantised layer) or has hooks, it is called as a module.

    Initially A = -(1..N) in every channel, D = 1, and softplus(b_Δ) is log-uniform in [dt_min, dt_max].
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
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"0 < dt_min <= dt_max is needed, got dt_min={dt_min!r} and dt_max={dt_max!r}")
        self.d_model, self.d_inner, self.d_state, self.d_conv, self.dt_rank = d_model, d_inner, d_state, d_conv, dt_rank
        self.discretization, self.scan, self.checkpoint_level, self.decode = discretization, scan, checkpoint_level, decode

        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias)
        self.conv = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner, bias=conv_bias)  # holds the weights, is not called
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner, bias=False)  # its bias is dt_bias, added inside the scan in float32
        nn.init.uniform_(self.dt_proj.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        dt = torch.empty(d_inner, dtype=torch.float32).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        self.dt_bias = no_weight_decay(nn.Parameter(inverse_softplus(dt.clamp(min=dt_floor))))
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(d_inner, 1)  # (E, N)
        self.A_log = no_weight_decay(nn.Parameter(A.log()))
        self.D = no_weight_decay(nn.Parameter(torch.ones(d_inner, dtype=torch.float32)))
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias)

    def forward(self, u: Tensor) -> Tensor:
        y, _ = self._run(u, None, None)
        return y

    def init_state(self, batch: int) -> MambaState:
        conv = self.in_proj.weight.new_zeros(batch, self.d_conv - 1, self.d_inner)
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
        return all(map(is_plain, (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)))

    def _compose(self, u: Tensor, conv_state: Tensor | None, ssm_state: Tensor | None) -> tuple[Tensor, MambaState]:
        """Computes the same as `mamba_inner`, but calls each projection as a module."""
        x, z = self.in_proj(u).chunk(2, dim=-1)  # (B, L, E) each
        x, conv_state = causal_conv1d(x, self.conv.weight[:, 0], self.conv.bias, "silu", conv_state)
        dt, B, C = self.x_proj(x).split((self.dt_rank, self.d_state, self.d_state), dim=-1)
        y, ssm_state = selective_scan(
            x, self.dt_proj(dt), -self.A_log.exp(), B.unsqueeze(2), C.unsqueeze(2), self.D, z, self.dt_bias,
            discretization=self.discretization, initial_state=ssm_state, impl=self.scan,
        )  # fmt: skip
        return self.out_proj(y), MambaState(conv_state, ssm_state)


def inverse_softplus(y: Tensor) -> Tensor:
    """log(exp(y) - 1), in a form that neither overflows nor cancels."""
    return y + torch.log(-torch.expm1(-y))

"""One step of a Mamba block between its outer projections, as the equations say it, with autograd for free.

    x       = silu(conv of x and the W-1 inputs before it)
    δ, B, C = W_x x
    Δ       = softplus(W_Δ δ + b_Δ)
    h       = exp(Δ A) h + B̄ x                 B̄ = Δ B (euler) or (exp(ΔA) - 1)/A · B (zoh)
    y       = (C·h + D x) ∘ silu(z)

Gu and Dao 2023, §3.2, algorithm 2 and figure 3. Everything between the two products is in float32, or float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    x, z, conv_state, ssm_state, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, discretization
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mamba_step`."""
    rank, n, wide = dt_proj.shape[1], A_log.shape[1], A_log.dtype
    window = torch.cat((conv_state.to(x.dtype), x[:, None]), dim=1)  # (B, W, E)
    sums = (window.to(wide) * conv.t()).sum(1)
    x = F.silu(sums if conv_bias is None else sums + conv_bias).to(x.dtype)
    dt, B, C = F.linear(x, x_proj).split((rank, n, n), dim=-1)
    dt = F.softplus(F.linear(dt, dt_proj).to(wide) + dt_bias)[..., None]  # (B, E, 1)
    x_wide, A = x.to(wide), -A_log.exp()
    B_bar = (dt if discretization == "euler" else torch.expm1(dt * A) / A) * B[:, None]  # (B, E, N)
    h = torch.exp(dt * A) * ssm_state + B_bar * x_wide[..., None]
    y = ((h * C[:, None]).sum(-1) + D * x_wide) * F.silu(z.to(wide))  # (B, E)
    return y.to(x.dtype), window[:, 1:], h

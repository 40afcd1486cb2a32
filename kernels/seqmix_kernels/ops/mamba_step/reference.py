"""One step of a Mamba block, as its equations state it; autograd computes the gradients.

    x, z    = W_in u
    x       = silu(conv of x and the W-1 inputs before it)
    δ, B, C = W_x x
    Δ       = softplus(W_Δ δ + b_Δ)
    h       = exp(Δ A) h + B̄ x                 B̄ = Δ B (euler) or (exp(ΔA) - 1)/A · B (zoh)
    out     = W_out ((C·h + D x) ∘ silu(z))

Gu and Dao 2023, §3.2, algorithm 2 and figure 3. The products are in u's dtype, everything between them in float32 or float64.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...product import linear
from ..selective_scan.reference import phi


def reference(
    u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state, ssm_state,
    discretization,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `mamba_step`."""
    rank, n, wide = dt_proj.shape[1], A_log.shape[1], A_log.dtype
    x, z = linear(u, in_proj, in_bias).chunk(2, dim=-1)  # (B, E) each
    window = torch.cat((conv_state.to(x.dtype), x[:, None]), dim=1)  # (B, W, E)
    sums = (window.to(wide) * conv.t()).sum(1)
    x = F.silu(sums if conv_bias is None else sums + conv_bias).to(x.dtype)
    dt, B, C = linear(x, x_proj).split((rank, n, n), dim=-1)
    dt = F.softplus(linear(dt, dt_proj).to(wide) + dt_bias)[..., None]  # (B, E, 1)
    x_wide, A = x.to(wide), -A_log.exp()
    B_bar = (dt if discretization == "euler" else dt * phi(dt * A)) * B[:, None]  # (B, E, N)
    h = torch.exp(dt * A) * ssm_state + B_bar * x_wide[..., None]
    y = ((h * C[:, None]).sum(-1) + D * x_wide) * F.silu(z.to(wide))  # (B, E)
    return linear(y.to(x.dtype), out_proj, out_bias), window[:, 1:].to(conv_state.dtype), h

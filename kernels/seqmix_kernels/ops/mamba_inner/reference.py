"""The inside of a Mamba block, as its equations state it; autograd computes the gradients.

    x, z    = W_in u                           two streams of E channels
    x       = silu(conv(x))
    δ, B, C = W_x x                            R, N and N numbers per step
    y       = scan(x, W_Δ δ, A, B, C) ∘ silu(z)
    out     = W_out y

Gu and Dao 2023, figure 3 and algorithm 2. The node in `inner.py` is tested against it; it also runs where the scan is in plain
torch.
"""

import torch.nn.functional as F
from torch import Tensor

from ..causal_conv1d import causal_conv1d
from ..selective_scan import selective_scan


def reference(
    u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state, ssm_state,
    seq_idx, discretization, scan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `mamba_inner`."""
    rank, n = dt_proj.shape[1], A_log.shape[1]
    x, z = F.linear(u, in_proj, in_bias).chunk(2, dim=-1)  # (B, L, E) each
    x, conv_state = causal_conv1d(x, conv, conv_bias, "silu", conv_state, seq_idx)
    dt, B, C = F.linear(x, x_proj).split((rank, n, n), dim=-1)
    y, ssm_state = selective_scan(
        x, F.linear(dt, dt_proj), -A_log.exp(), B.unsqueeze(2), C.unsqueeze(2), D, z, dt_bias,
        discretization=discretization, initial_state=ssm_state, seq_idx=seq_idx, impl=scan,
    )  # fmt: skip
    return F.linear(y, out_proj, out_bias), conv_state, ssm_state

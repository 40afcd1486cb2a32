"""One step of an S4 or S4D layer, as its equations state it; autograd computes the gradients.

    x = Ā x + B̄ u                              N/2 complex modes per channel, one per conjugate pair, or N real ones
    y = φ(2 Re C x + D u)                      φ none or GELU
    out = (W_o y + b_o) ∘ sigmoid(W_g y + b_g)

Parameters are discretised in float64, at every call; the step is in the dtype of the state. The change is added to the state,
x + (Ā - I) x + B̄ u: rounding errors scale with the change, and a slow mode keeps its time scale.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...product import linear
from ..s4_kernel import discretize, dplr_modes, expm1, increment, times


def discrete(log_dt, log_decay, imag, P, B, method: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `advance` needs of the parameters: Ā - 1 and B̄, pairs (E, M, 2); if P is given, ΔΛ, √Δ P and Δ B."""
    if P is not None:
        return tuple(t.to(dtype) for t in dplr_modes(log_dt, log_decay, imag, P, B))
    decay = -log_decay.double().exp()
    A = torch.stack((decay, torch.zeros_like(decay) if imag is None else imag.double()), -1)
    log_A, B_bar = discretize(log_dt.double().exp(), A, method)
    return expm1(log_A).to(dtype), B_bar.to(dtype)


def advance(u: Tensor, x: Tensor, C: Tensor, *discrete: Tensor) -> tuple[Tensor, Tensor]:
    """u (B, E), the state x (B, E, M, 2), or (B, E, N, 1) where A is real -> 2 Re C x (B, E), the state after."""
    if len(discrete) == 3:
        lam, P, B = discrete
        x = x + increment(x, lam, P, B * u[..., None, None])  # in O(N), by Woodbury's formula instead of the matrix Ā
        return 2 * times(C, x)[..., 0].sum(-1), x
    change, B_bar = discrete
    parts = C.shape[-1]
    if parts == 1:  # a real mode stands for itself
        change, B_bar = change[..., :1], B_bar[..., :1]
        x = x + (change * x + B_bar * u[..., None, None])
        return (C * x)[..., 0].sum(-1), x
    x = x + (times(change, x) + B_bar * u[..., None, None])
    return 2 * times(C, x)[..., 0].sum(-1), x


def reference(u, x, log_dt, log_decay, imag, P, B, C, D, method, activation, dtype) -> tuple[Tensor, Tensor]:
    """See `s4_step`; dtype is that of y."""
    u = u.to(D.dtype)
    y, x = advance(u, x, C, *discrete(log_dt, log_decay, imag, P, B, method, D.dtype))
    y = y + D * u
    return (F.gelu(y) if activation == "gelu" else y).to(dtype), x


def gated(y, gate_proj, gate_bias, out_proj, out_bias) -> Tensor:
    """See `gated_projection`."""
    return linear(y, out_proj, out_bias) * torch.sigmoid(linear(y, gate_proj, gate_bias))

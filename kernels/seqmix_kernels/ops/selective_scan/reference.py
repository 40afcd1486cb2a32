"""The selective scan as its equation states it: one step after the other, in plain torch; autograd computes the gradients.

    Δ_t = softplus(dt_t + dt_bias)
    h_t = exp(Δ_t A) h_{t-1} + B̄_t x_t        B̄_t = Δ_t B_t  (euler)   or   (exp(Δ_t A) - 1)/A · B_t  (zoh)
    y_t = (C_t · h_t + D x_t) · silu(z_t)

euler_signed and zoh_signed have 2 exp(Δ_t A) - 1 in place of exp(Δ_t A) in the second line, and the same B̄.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, §3.2 and algorithm 2. Every
faster form is tested against it. Depth L, work O(B L D N), and autograd saves several (B, L, D, N) tensors.

The implementations split the channels into groups: D = G · P, and (B, L, D, N) is written (B, L, G, P, N).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def phi(u: Tensor) -> Tensor:
    """(exp(u) - 1) / u, which is 1 at u = 0; its gradient is exact there, too."""
    small = u.abs() < 0.1  # ten terms have a relative error of 1e-18, below float64's rounding
    near = torch.where(small, u, 0.0)
    series = torch.ones_like(u)
    for k in range(12, 1, -1):  # 1 + u/2 (1 + u/3 (1 + u/4 ...
        series = 1 + near / k * series
    far = torch.where(small, 1.0, u)
    return torch.where(small, series, torch.expm1(far) / far)


def resets(seq_idx: Tensor | None) -> Tensor | None:
    """True where a new document starts, (B, L). Position 0 continues from the initial state, whatever its index."""
    if seq_idx is None:
        return None
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1 if seq_idx.shape[1] else 0, 0))


def discretise(x, dt, A, B, dt_bias, dt_softplus: bool, discretization: str, seq_idx) -> tuple[Tensor, Tensor]:
    """The decay ā_t and the input b̄_t = B̄_t x_t of h_t = ā_t h_{t-1} + b̄_t, both (B, L, G, P, N) in A's dtype."""
    batch, length, width = x.shape
    groups, n = B.shape[2:]
    grouped = (batch, length, groups, width // groups, 1)
    delta = dt.to(A.dtype)
    if dt_bias is not None:
        delta = delta + dt_bias
    if dt_softplus:
        delta = F.softplus(delta)
    delta = delta.reshape(grouped)
    u = delta * A.view(groups, -1, n)
    rule, _, signed = discretization.partition("_")
    step = delta if rule == "euler" else delta * phi(u)
    decay = torch.exp(u)
    if signed:
        decay = 2 * decay - 1
    new = resets(seq_idx)
    if new is not None:
        decay = decay.masked_fill(new.view(batch, length, 1, 1, 1), 0.0)
    return decay, step * x.to(A.dtype).reshape(grouped) * B.to(A.dtype).unsqueeze(3)


def read_out(h: Tensor, x: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """y (B, L, D) from all states h (B, L, G, P, N): C·h plus the skip D x, gated; in x's dtype."""
    y = (h * C.to(h.dtype).unsqueeze(3)).sum(-1).flatten(2)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return y.to(x.dtype)


def initial(initial_state: Tensor | None, b: Tensor) -> Tensor:
    """The state before the first step, (B, G, P, N); zeros where none is given."""
    shape = (b.shape[0], *b.shape[2:])
    return b.new_zeros(shape) if initial_state is None else initial_state.reshape(shape)


def sequential(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=True, discretization="euler", initial_state=None,
    seq_idx=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plain recurrence over unbound steps (indexing x[:, t] would make the backward O(L²)); see `selective_scan`."""
    decay, b = discretise(x, dt, A, B, dt_bias, dt_softplus, discretization, seq_idx)
    h = initial(initial_state, b)
    states = []
    for decay_t, b_t in zip(decay.unbind(1), b.unbind(1), strict=True):
        h = decay_t * h + b_t
        states.append(h)
    states = torch.stack(states, 1) if states else b
    return read_out(states, x, C, D, z), h.flatten(1, 2)

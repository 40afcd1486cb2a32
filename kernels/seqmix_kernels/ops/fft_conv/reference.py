"""The long causal convolution as its sum, in plain torch: y_t = act(Σ_{s<=t} k_{t-s} u_s + D u_t) ∘ gate."""

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(p: Tensor, activation: str | None) -> Tensor:
    return F.gelu(p) if activation == "gelu" else F.silu(p) if activation == "silu" else p


def reference(u: Tensor, kernel: Tensor, D: Tensor | None, activation: str | None, gate: Tensor | None) -> Tensor:
    """See `fft_conv`. Work O(B L D K)."""
    acc = torch.promote_types(u.dtype, torch.float32)
    wide, kernel = u.to(acc), kernel[:, : u.shape[1]].to(acc)
    taps = kernel.shape[1]
    p = F.conv1d(F.pad(wide.mT, (taps - 1, 0)), kernel.flip(-1).unsqueeze(1), groups=u.shape[2]).mT if taps else wide
    if D is not None:
        p = p + D.to(acc) * wide
    y = activate(p, activation)
    return (y if gate is None else y * gate.to(acc)).to(u.dtype)

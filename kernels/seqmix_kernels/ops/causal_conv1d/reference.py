"""The causal depthwise convolution in plain torch: the sum of W shifted copies, each times its tap.

    y_t = act(bias + Σ_w weight_w · x_{t-W+1+w})        w = 0 .. W-1; the last tap multiplies the current step

Steps before the sequence come from the state. Steps of other documents (see seq_idx) count as zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(x, weight, bias=None, activation=None, initial_state=None, seq_idx=None) -> tuple[Tensor, Tensor]:
    """See `causal_conv1d`. Depth W, work O(B L D W)."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    back = taps - 1
    past = x.new_zeros(batch, back, width) if initial_state is None else initial_state.to(x.dtype)
    window = torch.cat([past, x], 1) if back else x  # (B, W-1+L, D)
    final = window[:, length:] if back else x[:, :0]
    if seq_idx is not None:
        # documents are numbered in order; the initial state belongs to the document of position 0
        document = F.pad((seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1), (taps if length else back, 0))
        final = final.masked_fill((document[:, length:] != document[:, -1:]).unsqueeze(2), 0)
    acc = torch.promote_types(x.dtype, torch.float32)
    y = None
    for w in range(taps):
        shifted = window[:, w : w + length].to(acc)
        if seq_idx is not None and w < back:
            other = document[:, w : w + length] != document[:, back:]
            shifted = shifted.masked_fill(other.unsqueeze(2), 0)
        term = shifted * weight[:, w].to(acc)
        y = term if y is None else y + term
    if bias is not None:
        y = y + bias.to(acc)
    if activation == "silu":
        y = F.silu(y)
    return y.to(x.dtype), final.clone()

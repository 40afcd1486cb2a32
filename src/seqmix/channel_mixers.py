"""Mixers across channels, (..., D) to (..., D), each position by itself: the second, optional part of a block.

Each is made with `d_model=`, and its last product is `out_proj`, an nn.Linear whose initial weight the backbone scales.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from seqmix_kernels.ops.swiglu import swiglu


class SwiGLU(nn.Module):
    """y = W_out (silu(W_gate x) ∘ W_in x) (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6).

    d_hidden is `expand · d_model`, rounded up to a multiple of 8; 8/3 gives as many parameters as an MLP of width 4 d_model.
    """

    def __init__(self, d_model: int, expand: float = 8 / 3):
        super().__init__()
        d_hidden = _hidden(d_model, expand)
        self.in_proj = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.out_proj = nn.Linear(d_hidden, d_model, bias=False)
        nn.init.normal_(self.in_proj.weight, std=d_model**-0.5)
        nn.init.normal_(self.out_proj.weight, std=d_hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(swiglu(self.in_proj(x)))  # of (..., 2 d_hidden)


class GELUMLP(nn.Module):
    """y = W_out gelu(W_in x + b) + b' (Vaswani et al. 2017, §3.3; GELU: Hendrycks & Gimpel 2016).

    d_hidden is `expand · d_model`, rounded up to a multiple of 8.
    """

    def __init__(self, d_model: int, expand: float = 4.0):
        super().__init__()
        d_hidden = _hidden(d_model, expand)
        self.in_proj = nn.Linear(d_model, d_hidden)
        self.out_proj = nn.Linear(d_hidden, d_model)
        for layer in (self.in_proj, self.out_proj):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.gelu(self.in_proj(x)))


def _hidden(d_model: int, expand: float) -> int:
    if not expand > 0:
        raise ValueError(f"expand must be positive, got {expand!r}")
    return -(-int(expand * d_model) // 8) * 8

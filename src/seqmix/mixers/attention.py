"""Causal softmax attention with rotary positions.

    y_t = W_o concat_h Σ_{s<=t} softmax_s(q_t·k_s / √P) v_s     Vaswani et al. 2017, "Attention Is All You Need", §3.2
    q_t = R(t) W_q x_t,  k_s = R(s) W_k x_s                     R turns pairs, so q_t·k_s sees t - s alone: Su et al.
                                                                2021, "RoFormer", §3.2
With fewer key heads than query heads, n_heads / n_kv_heads neighbouring query heads read one key head (Ainslie et al.
2023, "GQA"). The state is the cache of rotated keys and of values: it grows with the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmix.mixers.base import Mixer


class AttentionState(NamedTuple):
    k: Tensor  # (B, L, H_kv, P), rotated
    v: Tensor  # (B, L, H_kv, P)


class Attention(Mixer):
    """Multi-head causal attention.

    n_heads divides d_model, n_kv_heads (null: n_heads) divides n_heads. rotary_fraction: the part of each head that
    rotates; 0 leaves attention without positions. qk_norm: RMS norm of q and k over a head (Henry et al. 2020).
    attn_dropout: of attention weights, in training only.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        rotary_fraction: float = 1.0,
        qk_norm: bool = False,
        attn_dropout: float = 0.0,
        *,
        bias: bool = False,
        rope_base: float = 10_000.0,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model, got n_heads={n_heads} and d_model={d_model}")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads, got n_kv_heads={n_kv_heads} and n_heads={n_heads}")
        if not 0.0 <= rotary_fraction <= 1.0:
            raise ValueError(f"rotary_fraction must lie in [0, 1], got {rotary_fraction!r}")
        if not 0.0 <= attn_dropout < 1.0:
            raise ValueError(f"attn_dropout must lie in [0, 1), got {attn_dropout!r}")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.head_dim = d_model // n_heads
        self.rotary_dim = round(rotary_fraction * self.head_dim)
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs, so their width must be even: d_model={d_model}, n_heads={n_heads} and "
                f"rotary_fraction={rotary_fraction} give {self.rotary_dim} of a head of {self.head_dim}; "
                f"rotary_fraction={(self.rotary_dim - 1) / self.head_dim:.3g} would do"
            )
        self.rope_base, self.attn_dropout = rope_base, attn_dropout
        self.q_proj = nn.Linear(d_model, n_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(n_heads * self.head_dim, d_model, bias=bias)
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
            if bias:
                nn.init.zeros_(layer.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if qk_norm else nn.Identity()

    def init_state(self, batch: int) -> AttentionState:
        empty = self.k_proj.weight.new_zeros(batch, 0, self.n_kv_heads, self.head_dim)
        return AttentionState(empty, empty.clone())

    def prefill(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        B, L, _ = x.shape
        past = state.k.shape[1]
        q = self.q_proj(x).view(B, L, self.n_heads, self.head_dim)
        k = self.k_proj(x).view(B, L, self.n_kv_heads, self.head_dim)
        v = self.v_proj(x).view(B, L, self.n_kv_heads, self.head_dim)
        cos, sin = rotary_phases(past, L, self.rotary_dim, self.rope_base, x)  # (L, 1, R/2) each
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        if past:
            k = torch.cat((state.k.to(k.dtype), k), dim=1)  # (B, past + L, H_kv, P)
            v = torch.cat((state.v.to(v.dtype), v), dim=1)
        y = causal_attention(q, k, v, self.attn_dropout if self.training else 0.0)  # (B, L, H, P)
        return self.out_proj(y.reshape(B, L, self.n_heads * self.head_dim)), AttentionState(k, v)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """q (B, L, H, P), k and v (B, S, H_kv, P) with S >= L -> (B, L, H, P); the last query sees all S keys.

    Query i sees keys 0..S-L+i. `is_causal` anchors the mask at the top left corner, which is right for S = L alone;
    against a cache the mask is made here, anchored at the bottom right.
    """
    L, S = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, P), (B, H_kv, S, P)
    mask = None
    if 1 < L < S:
        mask = torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=L == S, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def rotary_phases(start: int, length: int, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (length, 1, width/2) of t · base^(-2i/width), for t from `start`, on the device of `like`.

    In float32 or wider whatever the dtype of `like`: 16-bit numbers cannot tell position 256 from 257.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    t = torch.arange(start, start + length, device=like.device, dtype=dtype)
    frequency = base ** (torch.arange(0, width, 2, device=like.device, dtype=dtype) / -max(width, 1))
    phase = (t[:, None] * frequency)[:, None]  # (L, 1, R/2)
    return phase.cos(), phase.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (i, i + R/2) of the first R numbers of x (B, L, H, P) by phase i; result in the dtype of the phases."""
    half = cos.shape[-1]
    if half == 0:
        return x
    a, b, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)

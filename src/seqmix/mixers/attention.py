"""Causal softmax attention, with several position encodings.

    y_t = W_o concat_h Σ_{s<=t} softmax_s(q_t·k_s / √P + b_h(t - s)) v_s     Vaswani et al. 2017, §3.2
    q_t = R(t) W_q x_t,  k_s = R(s) W_k x_s,  v_s = W_v x_s

    rope         R rotates pairs of q and k, so that q_t·k_s depends on t - s only    Su et al. 2021, "RoFormer", §3.2
    none         positions differ by causality only                                  Kazemnejad et al. 2023, "NoPE"
    alibi        b_h = -m_h (t - s)                                                  Press et al. 2022, §3
    hard_alibi   head h < m sees the last h + 1 tokens, the other heads see all       Jelassi et al. 2024, §3.1

With fewer key heads than query heads, n_heads / n_kv_heads neighbouring query heads share one key head (Ainslie et al.
2023, "GQA"). The state is a cache of rotated keys and of values, which grows with the sequence, one page at a time.
"""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmix.mixers.base import Mixer
from seqmix_kernels.frame import named
from seqmix_kernels.ops.attention import (
    IMPLS,
    alibi_slopes,
    attention,
    attention_step,
    case_of,
    rotate_queries_and_keys,
    which_impl,
    why_not,
)

POSITIONS = ("rope", "none", "alibi", "hard_alibi")
SCALINGS = ("linear", "ntk")


class AttentionState(NamedTuple):
    """The tokens of a row are in slots 0..length-1; the slots after them are spare and may hold any finite numbers.

    Rows may have different lengths. Right-padded prompts are prefilled with their padding, which is then cut off by
    `state._replace(length=...)`: it becomes spare slots. Index each tensor to reorder, drop or repeat rows.

    A step writes into the spare slots of its input's buffers if no other state has used them since. So an old state stays
    valid, and the buffers are only copied when a second step continues from the same state. Under torch.compile, and while
    a CUDA graph is captured, this cannot be checked: there the step overwrites its input, whose capacity must suffice.
    """

    k: Tensor  # (B, H_kv, C, P), rotated; the capacity C is a whole number of pages
    v: Tensor  # (B, H_kv, C, P)
    length: Tensor  # (B,) int32

    def reserve(self, tokens: int) -> AttentionState:
        """The same state with room for `tokens` more in every row. A CUDA graph needs it, because its buffers cannot grow."""
        extra = _span(self.length)[1] + tokens - self.k.shape[2]
        if extra <= 0:
            return self
        k, v = (F.pad(t, (0, 0, 0, extra)) for t in (self.k, self.v))
        return _marked(k, v, self.length.clone(), _span(self.length))

    def rows(self, index: Tensor) -> AttentionState:
        """The rows `index` (B',), in buffers of their own, so that a step can write there without a copy."""
        k, v, length = (t[index] for t in self)
        return _marked(k, v, length, _span(length))


class Attention(Mixer):
    """Multi-head causal attention.

    n_heads divides d_model, n_kv_heads (null: n_heads) divides n_heads.
    positions: rope, none, alibi, hard_alibi, as above; the last two leave rope_* unused.
    rotary_fraction: the part of each head that is rotated. rope_base: pair i rotates by base^(-2i/R) per position, in float32.
    rope_scaling, rope_factor: for sequences rope_factor times as long as in training: linear divides positions by it (Chen
    et al. 2023); ntk raises the base so that the slowest pair rotates that much slower, and the fastest as before.
    hard_alibi_heads: m; null takes half of the heads.
    window: number of tokens that a head sees, up to and including the current one; null for all.
    qk_norm: RMS norm of q and k over each head (Henry et al. 2020).
    attn_dropout: on attention weights, in training only.
    attn_impl: implementation for whole sequences (seqmix_kernels/ops/attention); all compute the same function. With a cache
    "math" is used if it was chosen, else what "auto" chooses.
    cache_page: number of tokens by which the cache grows.
    """

    kernel_arguments = ("attn_impl",)

    def __init__(
        self,
        d_model: int,
        n_heads: int = 4,
        n_kv_heads: int | None = None,
        positions: str = "rope",
        rotary_fraction: float = 1.0,
        rope_base: float = 10_000.0,
        rope_scaling: str = "linear",
        rope_factor: float = 1.0,
        hard_alibi_heads: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        attn_dropout: float = 0.0,
        attn_impl: str = "auto",
        cache_page: int = 256,
        *,
        bias: bool = False,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model, got n_heads={n_heads} and d_model={d_model}")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads, got n_kv_heads={n_kv_heads} and n_heads={n_heads}")
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
        if not 0.0 <= rotary_fraction <= 1.0:
            raise ValueError(f"rotary_fraction must lie in [0, 1], got {rotary_fraction!r}")
        if not rope_base > 1.0:
            raise ValueError(f"rope_base must be above 1, got {rope_base!r}")
        if rope_scaling not in SCALINGS:
            raise ValueError(f"rope_scaling must be one of {', '.join(SCALINGS)}, got {rope_scaling!r}")
        if not rope_factor >= 1.0:
            raise ValueError(f"rope_factor must be at least 1, got {rope_factor!r}")
        if hard_alibi_heads is not None and not 0 <= hard_alibi_heads <= n_heads:
            raise ValueError(f"hard_alibi_heads must lie in 0..n_heads = {n_heads}, got {hard_alibi_heads}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if not 0.0 <= attn_dropout < 1.0:
            raise ValueError(f"attn_dropout must lie in [0, 1), got {attn_dropout!r}")
        if attn_impl not in IMPLS:
            raise ValueError(f"attn_impl must be one of {', '.join(IMPLS)}, got {attn_impl!r}")
        if cache_page < 1:
            raise ValueError(f"cache_page must be at least 1, got {cache_page}")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.head_dim = d_model // n_heads
        self.rotary_dim = round(rotary_fraction * self.head_dim) if positions == "rope" else 0
        if self.rotary_dim % 2:
            raise ValueError(
                f"rotary positions rotate pairs, so their width must be even: d_model={d_model}, n_heads={n_heads} and "
                f"rotary_fraction={rotary_fraction} give {self.rotary_dim} of a head of {self.head_dim}; "
                f"rotary_fraction={(self.rotary_dim - 1) / self.head_dim:.3g} would work"
            )
        self.rope_base, self.rope_shrink = rope_base, rope_factor
        if rope_scaling == "ntk":
            self.rope_base = rope_base * rope_factor ** (self.rotary_dim / max(self.rotary_dim - 2, 1))
            self.rope_shrink = 1.0
        self.slopes = alibi_slopes(n_heads) if positions == "alibi" else None
        self.windows = None if window is None else (window,) * n_heads
        if positions == "hard_alibi":
            m = n_heads // 2 if hard_alibi_heads is None else hard_alibi_heads
            self.windows = (*range(1, m + 1), *(window,) * (n_heads - m))
        self.attn_dropout, self.attn_impl, self.cache_page = attn_dropout, attn_impl, cache_page
        self.qkv_proj = nn.Linear(d_model, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=bias)  # W_q, W_k, W_v
        self.out_proj = nn.Linear(n_heads * self.head_dim, d_model, bias=bias)
        for layer in (self.qkv_proj, self.out_proj):
            nn.init.normal_(layer.weight, std=d_model**-0.5)
            if bias:
                nn.init.zeros_(layer.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-5) if qk_norm else None

    def forward(self, x: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """x (B, L, D) -> y (B, L, D). seq_idx (B, L) integers: number of the document of each token, if a row packs several
        documents, which do not see each other."""
        q, k, v = self._project(x, torch.arange(x.shape[1], device=x.device))
        return self._out(self._attend(q, k, v, seq_idx=seq_idx))

    def init_state(self, batch: int) -> AttentionState:
        empty = self.qkv_proj.weight.new_zeros(batch, self.n_kv_heads, 0, self.head_dim)
        length = torch.zeros(batch, dtype=torch.int32, device=empty.device)
        return _marked(empty, empty.clone(), length, (0, 0))

    def prefill(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        L = x.shape[1]
        if L == 0:
            return self.forward(x), state
        steps = torch.arange(L, device=x.device)
        if _blind(x):
            q, k, v = self._project(x, state.length[:, None] + steps)
            after = _write(state, k, v, None)
            y = self._attend(q, after.k.transpose(1, 2), after.v.transpose(1, 2), lengths=after.length)
            return self._out(y), after

        first, last = _span(state.length)
        q, k, v = self._project(x, steps + first if first == last else state.length[:, None] + steps)
        state = _with_room(state, L, v.dtype, self.cache_page, torch.is_grad_enabled() and q.requires_grad)
        after = _write(state, k, v, (first, last))
        if last == 0:
            return self._out(self._attend(q, k, v)), after
        one_corner = first == last and L > 1
        seen = last + L if one_corner else _rounded_up(last + L, 64, after.k.shape[2])
        k, v = (t[:, :, :seen].transpose(1, 2).to(q.dtype) for t in (after.k, after.v))  # (B, S, H_kv, P)
        return self._out(self._attend(q, k, v, lengths=None if one_corner else after.length)), after

    def step(self, x_t: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """One token, by the decoding operator, which computes the same function and has no gradient."""
        if torch.is_grad_enabled() or (self.training and self.attn_dropout) or self.attn_impl == "math":
            return super().step(x_t, state)
        qk, v = self._product(x_t)
        q, k = self._normed(qk)  # (B, H, P), (B, H_kv, P)
        keys, values, span = state.k, state.v, None
        if not _blind(x_t):
            span = _span(state.length)
            state = _with_room(state, 1, v.dtype, self.cache_page, keep_graph=False)
            seen = _rounded_up(span[1] + 1, 64, state.k.shape[2])
            keys, values = state.k[:, :, :seen], state.v[:, :, :seen]
        y, length = attention_step(
            q.to(v.dtype), k.to(v.dtype), v, keys, values, state.length, self.rotary_dim, self.rope_base, self.rope_shrink,
            self.windows, self.slopes,
        )  # fmt: skip
        return self.out_proj(y.flatten(1)), _advanced(state, length, 1, span)

    def kernels_used(self, x: Tensor) -> dict[str, str]:
        q = x.unflatten(-1, (self.n_heads, self.head_dim))
        k = q[:, :, : self.n_kv_heads]
        case = case_of(q, k, k, self.windows, self.slopes, dropout=self.attn_dropout if self.training else 0.0)
        return {"attention": named(self.attn_impl, which_impl, why_not, case)}

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, D) at positions (L,) or (B, L) -> q (B, L, H, P), k and v (B, L, H_kv, P)."""
        qk, v = self._product(x)
        if self.q_norm is not None:
            qk = torch.cat(self._normed(qk), dim=-2)
        if self.rotary_dim:
            q, k = rotate_queries_and_keys(qk, self.n_heads, positions, self.rotary_dim, self.rope_base, self.rope_shrink)
        else:
            q, k = qk.split((self.n_heads, self.n_kv_heads), dim=-2)
        return q.to(v.dtype), k.to(v.dtype), v

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (..., D) -> q and k (..., H + H_kv, P), not yet normed or rotated, and v (..., H_kv, P): views of one product."""
        heads = self.n_heads + self.n_kv_heads, self.n_kv_heads
        return self.qkv_proj(x).unflatten(-1, (sum(heads), self.head_dim)).split(heads, dim=-2)

    def _normed(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """qk (..., H + H_kv, P) -> q and k, normed if qk_norm. They are cast to the dtype of the norm's weight first, since
        under autocast they have 16 bits, and torch's fused norm does not take two dtypes."""
        q, k = qk.split((self.n_heads, self.n_kv_heads), dim=-2)
        if self.q_norm is None:
            return q, k
        return tuple(norm(t.to(norm.weight.dtype)) for norm, t in ((self.q_norm, q), (self.k_norm, k)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seq_idx: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        dropout = self.attn_dropout if self.training else 0.0
        # attn_impl is for whole sequences, because few implementations can read a cache
        whole = lengths is None and q.shape[1] == k.shape[1]
        impl = self.attn_impl if whole or self.attn_impl == "math" else "auto"
        return attention(q, k, v, self.windows, self.slopes, seq_idx, lengths, dropout, impl)

    def _out(self, y: Tensor) -> Tensor:
        return self.out_proj(y.flatten(2))


# ---- the cache ------------------------------------------------------------------------------------------------------
# Two attributes on the tensors save each step a wait for the device. `length.span` holds the minimum and maximum of `length`
# and the version of the tensor that they belong to. `length` and the buffer `k` each have a ticket: if both are equal, no other
# state has written to the buffers since. A tensor made elsewhere (a row of a batch, a copy, a cut length) has neither, and one
# that was changed in place has another version: then `length` is read from the device, or the buffers are copied.

_tickets = itertools.count(time.time_ns())  # a state is saved with its ticket, so a later process must not reuse the number


def _marked(k: Tensor, v: Tensor, length: Tensor, span: tuple[int, int]) -> AttentionState:
    length.span, length.ticket = (_version(length), *span), next(_tickets)
    k.ticket = length.ticket
    return AttentionState(k, v, length)


def _span(length: Tensor) -> tuple[int, int]:
    version, *span = getattr(length, "span", (None,))
    if version is None or version != _version(length):
        span = torch.stack(length.aminmax()).tolist() if len(length) else (0, 0)
        length.span = _version(length), *span
    return tuple(span)


def _version(length: Tensor) -> int | None:
    """Increases with every in-place change; None in inference mode, where torch does not count them."""
    return None if length.is_inference() else length._version


def _blind(x: Tensor) -> bool:
    """Whether this call is traced or captured, so that its Python code does not run again. The lengths are then unknown to the
    host, which must not wait for the device, and the buffers must not grow or be copied."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _with_room(state: AttentionState, L: int, dtype: torch.dtype, page: int, keep_graph: bool) -> AttentionState:
    """The state with room for L more tokens, in buffers that no other state uses and that autograd has not saved."""
    last, room = _span(state.length)[1], state.k.shape[2]
    mine = getattr(state.k, "ticket", -1) == getattr(state.length, "ticket", -2)
    mine = mine and (torch.is_inference_mode_enabled() or not state.k.is_inference())  # else torch forbids writes to them
    dtype = dtype if last == 0 else state.k.dtype  # the first tokens decide
    if mine and last + L <= room and state.k.dtype == dtype and not keep_graph and not state.k.requires_grad:
        return state
    extra = max(0, -(-(last + L) // page) * page - room) if last + L > room else 0
    k, v = (F.pad(t.to(dtype), (0, 0, 0, extra)) if extra else t.to(dtype, copy=True) for t in (state.k, state.v))
    return AttentionState(k, v, state.length)


def _write(state: AttentionState, k: Tensor, v: Tensor, span: tuple[int, int] | None) -> AttentionState:
    """The state after k and v (B, L, H_kv, P), for which it must have room. span: minimum and maximum of its lengths, or None.

    Written in place; differentiable if k and v are, since the buffers were then made for this call. Writing past the capacity
    is an error, and on a GPU a device-side assertion.
    """
    L = k.shape[1]
    for buffer, new in ((state.k, k), (state.v, v)):
        if span is not None and span[0] == span[1]:
            buffer[:, :, span[1] : span[1] + L] = new.transpose(1, 2)
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            slots = state.length[:, None] + torch.arange(L, device=new.device, dtype=torch.int32)
            buffer.transpose(1, 2).index_put_((rows, slots), new.to(buffer.dtype))
    return _advanced(state, state.length + L, L, span)


def _advanced(state: AttentionState, length: Tensor, L: int, span: tuple[int, int] | None) -> AttentionState:
    if span is not None:
        return _marked(state.k, state.v, length, (span[0] + L, span[1] + L))
    if not torch.compiler.is_compiling() and hasattr(state.length, "span"):
        del state.length.span  # replays of the graph change `length` without Python
    return AttentionState(state.k, state.v, length)


def _rounded_up(n: int, multiple: int, most: int) -> int:
    return min(-(-n // multiple) * multiple, most)

"""The equation of README.md in plain torch: it stores every score, so memory grows with L · S."""

import functools

import torch
from torch import Tensor

Windows = tuple[int | None, ...]  # one per head


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: Windows | None = None,
    slopes: tuple[float, ...] | None = None,
    seq_idx: Tensor | None = None,
    lengths: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """q (B, L, H, P), k and v (B, S, H_kv, P) -> (B, L, H, P) in q's dtype; float32 inside, or float64."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    shared = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2).to(wide) for t in (q, k, v))  # (B, H, L, P), (B, H_kv, S, P)
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))  # (B, H, S, P)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, L, S)
    t, s = positions(q.shape[2], k.shape[2], lengths, q.device)
    if slopes is not None:
        scores = scores - constant(slopes, wide, q.device)[:, None, None] * (t - s)
    seen = visible(t, s, windows, seq_idx)
    # the floor is finite, and the weights of a row that sees nothing are set to 0: no NaN in it or its gradients
    weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(-1).masked_fill(~seen, 0.0)
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
    return (weights @ v).transpose(1, 2).to(dtype)


def positions(L: int, S: int, lengths: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """t of each query, (L, 1) or (B, 1, L, 1), and s of each key, (S,): the last query is at the position of the last key."""
    last = S if lengths is None else lengths[:, None, None, None]
    t = last - L + torch.arange(L, device=device)[:, None]
    return t, torch.arange(S, device=device)


def visible(t: Tensor, s: Tensor, windows: Windows | None = None, seq_idx: Tensor | None = None) -> Tensor:
    """Whether the query at t sees the key at s: bool (..., L, S), broadcastable to (B, H, L, S)."""
    seen = s <= t
    if windows is not None:
        w = windows[0]
        if len(set(windows)) > 1:
            far = torch.iinfo(torch.int32).max
            w = constant(tuple(far if w is None else w for w in windows), torch.int32, s.device)[:, None, None]  # (H, 1, 1)
        seen = seen & (t - s < w)
    if seq_idx is not None:
        run = documents(seq_idx)  # (B, L)
        seen = seen & (run[:, None, :, None] == run[:, None, None, :])
    return seen


def documents(seq_idx: Tensor) -> Tensor:
    """(B, L) numbers that increase by one where seq_idx changes: an index that occurs again later is another document."""
    new = torch.zeros_like(seq_idx)
    new[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return new.cumsum(1)


def constant(values: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is created once and cached: a copy from the host cannot be captured in a CUDA graph."""
    return torch.tensor(values, dtype=dtype, device=device) if passing() else _kept(values, dtype, device)


@functools.cache
def _kept(values, dtype, device):
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def passing() -> bool:
    """Whether a tensor created now must not be cached: one of torch.compile, or of a mode that replaces it (FakeTensorMode)."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def known(condition) -> bool:
    """The condition as a bool: under torch.compile with dynamic shapes it is symbolic, and the branch adds a guard."""
    return True if condition else False

"""The kernels that ship with torch: FlashAttention-2, cuDNN's and the memory-efficient one on a GPU, a tiled one on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .reference import Windows, known, positions, visible

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LOW = (torch.bfloat16, torch.float16)


def why_not(impl: str, case) -> str | None:
    if case.device.type == "cpu":
        if impl != "flash":
            return "it needs an NVIDIA GPU, q is on the CPU"
        return "on a CPU it has no dropout" if case.dropout else None
    if case.device.type != "cuda":
        return f"it needs an NVIDIA GPU or a CPU, q is on {case.device.type}"
    if case.dtype == torch.float64 or (impl != "efficient" and case.dtype not in LOW):
        able = "float32, bfloat16 and float16" if impl == "efficient" else "bfloat16 and float16"
        return f"it computes in {able}, q is {str(case.dtype)[6:]}"
    if impl == "efficient":
        return None
    if impl == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "it is not deterministic"
    major, minor = torch.cuda.get_device_capability(case.device)
    if major < 8:
        return f"it needs compute capability 8.0, this GPU has {major}.{minor}"
    most = 128 if impl == "cudnn" else 256
    if case.head_dim > most:
        return f"heads are at most {most} wide, these are {case.head_dim} with padding and positions"
    if case.cached:
        return "it takes no lengths"
    if impl == "cudnn":
        for has, what in ((case.windowed, "window"), (case.packed, "seq_idx"), (not case.square, "keys before the queries")):
            if has:
                return f"it takes no {what}"
    return None


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    offsets: Tensor | None,
    lengths: None,
    dropout: float,
    longest: int | None = None,
) -> Tensor:
    """torch's FlashAttention-2, on (B, L, H, P) without a transpose; with offsets on (B L, H, P).

    scaled_dot_product_attention is not used, because it supports neither a window nor documents nor a causal mask aligned to
    the last key.
    """
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    L, S = (q.shape[1], k.shape[1]) if offsets is None else (longest, longest)
    op = torch.ops.aten._flash_attention_forward
    return op(q, k, v, offsets, offsets, L, S, dropout, True, False, scale=scale, **sides)[0]


def masked(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    windows: Windows | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    dropout: float,
) -> Tensor:
    """scaled_dot_product_attention with one backend; what `is_causal` cannot express becomes a mask (.., L, S)."""
    L, S, H, H_kv = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, P), (B, H_kv, S, P)
    plain = windows is None and seq_idx is None and lengths is None
    mask = None
    if not plain or 1 < L < S:
        t, s = positions(L, S, lengths, q.device)
        mask = visible(t, s, windows, seq_idx)
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)  # 1 or B, 1 or H, L, S
        if lengths is not None:
            mask = mask | (t < 0) & (s == 0)  # a row that sees nothing is given one key, and set to 0 below
    folded = L == 1 < H // H_kv and (mask is None or mask.shape[1] == 1)
    if folded:  # the query heads of one key head become its queries
        q = q.reshape(q.shape[0], H_kv, H // H_kv, q.shape[-1])
    elif H > H_kv and impl != "cudnn":
        k, v = k.repeat_interleave(H // H_kv, dim=1), v.repeat_interleave(H // H_kv, dim=1)
    with sdpa_kernel(BACKENDS[impl]):
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=known(plain and L == S > 1), scale=scale,
            enable_gqa=impl == "cudnn" and H > H_kv,
        )  # fmt: skip
    if folded:
        y = y.reshape(y.shape[0], H, 1, y.shape[-1])
    if lengths is not None:
        y = y.masked_fill(t < 0, 0.0)
    return y.transpose(1, 2)

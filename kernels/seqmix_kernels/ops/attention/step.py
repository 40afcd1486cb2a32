"""One token against a cache: rotate, write, attend. This is the operator for decoding; it updates the cache in place."""

import torch
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from .op import attention
from .reference import Windows, constant
from .rotary import rotary_frequencies, rotary_phases, rotate


def _limit(q: Tensor, k_cache: Tensor, needs_grad: bool) -> str | None:
    if needs_grad:
        return "it has no gradient"
    if q.shape[-1] > 256:
        return f"heads are at most 256 wide, these are {q.shape[-1]}"
    shared = q.shape[1] // k_cache.shape[1]
    return f"at most 64 query heads share a key head, these are {shared}" if shared > 64 else None


OPERATOR = Operator(
    __package__,
    Impl("fused", "cuda", "fused GPU kernels", limit=_limit, module="fused_step"),
    Impl("torch"),
    name="attention_step",
    fallback="torch",
)
STEP_IMPLS = OPERATOR.names


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    length: Tensor,
    rotary_dim: int = 0,
    rope_base: float = 10_000.0,
    rope_shrink: float = 1.0,
    windows: Windows | None = None,
    slopes: tuple[float, ...] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of the token at position `length` of every row: `attention` with lengths + 1, in one or two launches.

        k_cache[:, :, length] = R(length) k        v_cache[:, :, length] = v
        y = softmax over s <= length of (R(length) q · k_cache_s / √P - slope (length - s)), times v_cache

    Args:
        q: (B, H, P); k, v: (B, H_kv, P), not yet rotated, in float32, bfloat16, float16 (float64 with "torch").
        k_cache, v_cache: (B, H_kv, C, P), written at slot `length`; P contiguous. Keys and values are stored in their dtype.
        length: (B,) int32, on the device, each below C. The host does not read it, so a CUDA graph can capture this call.
            Past C nothing is written and "fused" gives NaN; "torch" raises an error, on a GPU a device assert.
        rotary_dim, rope_base, rope_shrink: R rotates the first rotary_dim numbers of a head by `rotary_phases`.
        windows, slopes: one per head, as in `attention`.
        impl: "fused" is one Triton kernel that splits a row's keys among programs, and one that combines their results; it
            reads only the slots that are filled. "torch" computes the same in plain torch, on any device.

    Returns:
        y (B, H, P) in q's dtype, and length + 1. "fused" has no gradient; "auto" selects "torch" where one is needed.

    Raises:
        ValueError: an implementation that cannot run here.
    """
    given = (q, k, v, k_cache, v_cache)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if OPERATOR.choose(impl, q, k_cache, needs_grad) == "torch":
        return _plain(q, k, v, k_cache, v_cache, length, rotary_dim, rope_base, rope_shrink, windows, slopes)
    frequency = rotary_frequencies(rotary_dim, rope_base, q.device, q.dtype) if rotary_dim else None
    far = torch.iinfo(torch.int32).max
    wide = None if windows is None else constant(tuple(far if w is None else w for w in windows), torch.int32, q.device)
    steep = None if slopes is None else constant(slopes, torch.float32, q.device)
    return torch.ops.seqmix.attention_step(q, k, v, k_cache, v_cache, length, frequency, wide, steep, rope_shrink)


def _plain(q, k, v, k_cache, v_cache, length, rotary_dim, rope_base, rope_shrink, windows, slopes):
    if rotary_dim:
        phases = rotary_phases(length, rotary_dim, rope_base, rope_shrink, q.dtype)  # (B, 1, R/2)
        q, k = rotate(q, *phases).to(v.dtype), rotate(k, *phases)
    rows = torch.arange(len(length), device=length.device)
    k_cache.transpose(1, 2).index_put_((rows, length), k.to(k_cache.dtype))  # past C this raises an error, also on the device
    v_cache.transpose(1, 2).index_put_((rows, length), v.to(v_cache.dtype))
    keys, values = (t.transpose(1, 2).to(q.dtype) for t in (k_cache, v_cache))  # (B, C, H_kv, P)
    return attention(q[:, None], keys, values, windows, slopes, lengths=length + 1)[:, 0], length + 1


def _fake(q, k, v, k_cache, v_cache, length, frequency, windows, slopes, shrink):
    return q.new_empty(q.shape), torch.empty_like(length)


frame.register(
    "attention_step",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor length, Tensor? frequency, "
    "Tensor? windows, Tensor? slopes, float shrink) -> (Tensor y, Tensor after)",
    OPERATOR.run("step", "fused"),
    _fake,
)

"""Rotary positions (Su et al. 2021, "RoFormer", §3.4.2), in the half-split layout: pair i is the numbers i and i + R/2 of a
head."""

import functools

import torch
from torch import Tensor

from ... import frame
from .reference import passing


def rotary_frequencies(width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """base^(-2i/width), (width/2,), in float32 or wider whatever `dtype`."""
    dtype = torch.promote_types(dtype, torch.float32)
    return (_compute if passing() else _kept)(width, base, device, dtype)


def _compute(width, base, device, dtype):
    return base ** (torch.arange(0, width, 2, device=device, dtype=dtype) / -max(width, 1))


@functools.cache
def _kept(width, base, device, dtype):
    with torch.inference_mode(False), torch.no_grad():
        return _compute(width, base, device, dtype)


def rotary_phases(positions: Tensor, width: int, base: float, shrink: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (..., 1, width/2) of t/shrink · base^(-2i/width) for positions t (...), integers.

    In float32 or wider whatever `dtype`: 16-bit numbers cannot distinguish position 256 from 257.
    """
    frequency = rotary_frequencies(width, base, positions.device, dtype)
    phase = (positions.to(frequency.dtype) / shrink)[..., None, None] * frequency  # (..., 1, R/2)
    return phase.cos(), phase.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pair (i, i + R/2) of the first R numbers of x (..., H, P) by phase i; the result has the dtype of the phases."""
    half = cos.shape[-1]
    a, b, rest = x.to(cos.dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), dim=-1)


def rotate_queries_and_keys(
    qk: Tensor, n_heads: int, positions: Tensor, width: int, base: float, shrink: float
) -> tuple[Tensor, Tensor]:
    """qk (B, L, H + H_kv, P), H = n_heads, at positions (L,) or (B, L) -> q (B, L, H, P), k (B, L, H_kv, P), in qk's dtype.

    The first `width` numbers of every head are rotated, in float32 or wider. On a GPU this is one kernel forward and one
    backward; under torch.compile and elsewhere it is plain torch.
    """
    fused = qk.is_cuda and qk.dtype != torch.float64 and not torch.compiler.is_compiling()
    if fused and frame.not_ready("cuda", f"{__package__}.fused_rotary") is None:
        frequency = rotary_frequencies(width, base, qk.device, qk.dtype)
        return torch.ops.seqmix.rotate(qk, positions, frequency, shrink, n_heads)
    cos, sin = rotary_phases(positions, width, base, shrink, qk.dtype)
    return rotate(qk, cos, sin).to(qk.dtype).split((n_heads, qk.shape[2] - n_heads), dim=2)


def _forward(*args):
    from . import fused_rotary

    return fused_rotary.forward(*args)


def _backward(*args):
    from . import fused_rotary

    return fused_rotary.backward(*args)


def _fake_forward(qk, positions, frequency, shrink, n_heads):
    B, L, heads, P = qk.shape
    return qk.new_empty(B, L, n_heads, P), qk.new_empty(B, L, heads - n_heads, P)


def _fake_backward(dq, dk, positions, frequency, shrink):
    B, L, H, P = dq.shape
    return dq.new_empty(B, L, H + dk.shape[2], P)


frame.register(
    "rotate",
    "(Tensor qk, Tensor positions, Tensor frequency, float shrink, int n_heads) -> (Tensor q, Tensor k)",
    _forward,
    _fake_forward,
)
frame.register(
    "rotate_back",
    "(Tensor dq, Tensor dk, Tensor positions, Tensor frequency, float shrink) -> Tensor",
    _backward,
    _fake_backward,
)


def _keep(ctx, inputs, output):
    *_, positions, frequency, ctx.shrink, ctx.n_heads = inputs
    ctx.save_for_backward(positions, frequency)


def _keep_back(ctx, inputs, output):
    dq, _, positions, frequency, ctx.shrink = inputs
    ctx.n_heads = dq.shape[2]
    ctx.save_for_backward(positions, frequency)


def _derivative(ctx, dq, dk):
    return torch.ops.seqmix.rotate_back(dq, dk, *ctx.saved_tensors, ctx.shrink), None, None, None, None


def _derivative_back(ctx, dqk):  # the gradient of a rotation is the inverse rotation, whose gradient is the rotation
    return *torch.ops.seqmix.rotate(dqk, *ctx.saved_tensors, ctx.shrink, ctx.n_heads), None, None, None


torch.library.register_autograd("seqmix::rotate", _derivative, setup_context=_keep)
torch.library.register_autograd("seqmix::rotate_back", _derivative_back, setup_context=_keep_back)

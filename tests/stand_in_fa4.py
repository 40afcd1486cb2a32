"""flash-attn-4's two functions, as its interface.py names their arguments, in plain float64 torch: what the wrapper around
them does (layouts, windows, documents, autograd, fake kernels) is the same without a GPU."""

import torch

from seqmix_kernels.ops.attention.reference import positions, visible


def _weights(q, k, scale, left, offsets, used):
    """Weights (B, H, L, S) and k with as many heads as q; of rows laid end to end B is 1."""
    shared = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(shared, dim=2)
    index = None
    if offsets is not None:
        index = torch.bucketize(torch.arange(q.shape[1]), offsets[1:], right=True)[None]
    t, s = positions(q.shape[1], k.shape[1], used, q.device)
    seen = visible(t, s, None if left is None else (left + 1,) * q.shape[2], index)
    scores = torch.einsum("blhp,bshp->bhls", q.double(), k.double()) * scale
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()


def _batched(offsets, *tensors):
    return tensors if offsets is None else tuple(t[None] for t in tensors)


def _flash_attn_fwd(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale,
    causal, window_size_left=None, return_lse=False,
):  # fmt: skip
    assert causal and return_lse and (cu_seqlens_q is None or cu_seqlens_q.dtype == torch.int32)
    assert all(t.stride(-1) == 1 for t in (q, k, v)) and q.shape[-1] % 8 == 0
    rows = (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    q, k, v = _batched(cu_seqlens_q, q, k, v)
    weights = _weights(q, k, softmax_scale, window_size_left, cu_seqlens_q, seqused_k)
    y = torch.einsum("bhls,bshp->blhp", weights, v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).double())
    y = y.to(q.dtype).contiguous()
    return y if cu_seqlens_q is None else y[0].clone(), torch.zeros(rows), None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None, window_size_left=None, deterministic=False,
):  # fmt: skip
    assert causal and dout.is_contiguous()
    flat = cu_seqlens_q is not None
    q, k, v, out, dout = _batched(cu_seqlens_q, q, k, v, out, dout)
    shared = q.shape[2] // k.shape[2]
    weights = _weights(q, k, softmax_scale, window_size_left, cu_seqlens_q, None)
    wide_k, wide_v = (t.repeat_interleave(shared, dim=2).double() for t in (k, v))
    dweights = torch.einsum("blhp,bshp->bhls", dout.double(), wide_v)
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)[..., None]  # (B, H, L, 1)
    dscores = weights * (dweights - delta) * softmax_scale
    dq = torch.einsum("bhls,bshp->blhp", dscores, wide_k)
    dk = torch.einsum("bhls,blhp->bshp", dscores, q.double()).unflatten(2, (-1, shared)).sum(3)
    dv = torch.einsum("bhls,blhp->bshp", weights, dout.double()).unflatten(2, (-1, shared)).sum(3)
    grads = (g.to(q.dtype).contiguous() for g in (dq, dk, dv))
    return tuple(g[0].clone() for g in grads) if flat else tuple(grads)

"""The benchmarks of attention over whole sequences and of one token against a cache: see ../../benchmark.py. P: a head's width.

sdpa_flash, sdpa_cudnn, flash_attn_4: the backends called directly, as their documentation says, where "auto" is measured too.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...benchmark import PIECE, Op, Peer, Work
from .op import IMPLS, alibi_slopes, attention
from .step import STEP_IMPLS, attention_step


def inputs(normal, dtype, B, L, H, P, K=None):
    """K: heads of keys and values, where they are fewer than H."""
    return tuple(normal(B, L, heads, P).to(dtype) for heads in (H, K or H, K or H))


def work(size, B, L, H, P, K=None):
    queries, keys = (B * L * heads * P * size for heads in (H, K or H))
    scores = B * H * L**2 / 2  # the causal half
    flops = 4 * scores * P
    return Work(2 * queries + 2 * keys, flops, scores), Work(6 * queries + 6 * keys, 3.5 * flops, 2 * scores)


def whole(options, shapes):
    """options: (B, L, H, device) -> further arguments of attention."""

    def run(impl, q, k, v):
        return attention(q, k, v, **options(*q.shape[:3], q.device), impl=impl)

    def check(tensors, y):
        return y[:1, : 2 * PIECE], run("math", *(t[:1, : 2 * PIECE].double() for t in tensors))

    peers = {"sdpa_flash": sdpa("FLASH_ATTENTION"), "sdpa_cudnn": sdpa("CUDNN_ATTENTION"), "flash_attn_4": Peer(flash_attn_4)}
    return Op(IMPLS, inputs, run, check, work, shapes, peers if shapes else {})


def sdpa(backend):
    def run(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            given, shared = (t.transpose(1, 2) for t in (q, k, v)), q.shape[2] != k.shape[2]
            return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=shared).transpose(1, 2)

    return Peer(run)


def flash_attn_4(q, k, v):
    from flash_attn.cute import flash_attn_func

    return flash_attn_func(q, k, v, causal=True)[0]


@functools.cache  # so that the tensor is made outside the measured time
def documents(B, L, H, device):
    return {"seq_idx": (torch.arange(L, device=device) // 512).repeat(B, 1)}


def hard_alibi(B, L, H, device):
    return {"window": (*range(1, H // 2 + 1), *(None,) * (H - H // 2))}


def step_inputs(normal, dtype, B, L, H, P, K=None):
    """The token after L cached ones, in caches with room for 256 more."""
    q, k, v = (normal(B, heads, P).to(dtype) for heads in (H, K or H, K or H))
    caches = (normal(B, K or H, L + 256, P).to(dtype) for _ in "kv")
    return q, k, v, *caches, torch.full((B,), L, dtype=torch.int32, device=q.device)


def step(impl, q, k, v, k_cache, v_cache, length):
    return attention_step(q, k, v, k_cache, v_cache, length, q.shape[-1], impl=impl)[0]


def step_check(tensors, y):
    *numbers, length = (t[:1] for t in tensors)
    return y[:1], step("torch", *(t.double() for t in numbers), length)


def step_work(size, B, L, H, P, K=None):
    scores = B * H * (L + 1)
    return Work((2 * B * (K or H) * (L + 1) + 2 * B * H) * P * size, 4 * scores * P, scores), None


SHAPES = {"cuda": ("B8 L2048 H24 P64 bfloat16",), "cpu": ("B2 L512 H4 P32 float32",)}
STEPS = {"cuda": ("B1 L2048 H12 P64 bfloat16", "B64 L2048 H12 P64 bfloat16"), "cpu": ("B8 L128 H4 P32 float32",)}
OPS = {
    "attention": whole(lambda B, L, H, device: {}, SHAPES),
    "attention_window": whole(lambda B, L, H, device: {"window": 512}, {}),
    "attention_documents": whole(documents, {}),
    "attention_alibi": whole(lambda B, L, H, device: {"slopes": alibi_slopes(H)}, {}),
    "attention_hard_alibi": whole(hard_alibi, {}),
    "attention_step": Op(STEP_IMPLS, step_inputs, step, step_check, step_work, STEPS),
}

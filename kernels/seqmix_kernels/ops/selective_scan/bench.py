"""The benchmark of the selective scan: see ../../benchmark.py."""

import torch
import torch.nn.functional as F

from ...benchmark import PIECE, Op, Peer, Work
from .op import IMPLS, selective_scan


def inputs(normal, dtype, B, L, D, N):
    A = -torch.arange(1.0, N + 1, device=normal(1).device).repeat(D, 1)
    x, dt, z = (normal(B, L, D).to(dtype) for _ in range(3))
    return x, dt, A, normal(B, L, 1, N).to(dtype), normal(B, L, 1, N).to(dtype), normal(D), z, normal(D) - 4


def check(tensors, y, rule="euler"):
    x, dt, A, B, C, D, z, bias = (t.double() for t in tensors)
    x, dt, z = (t[:1, :PIECE, :PIECE] for t in (x, dt, z))
    piece = x, dt, A[:PIECE], B[:1, :PIECE], C[:1, :PIECE], D[:PIECE], z, bias[:PIECE]
    return y[:1, :PIECE, :PIECE], selective_scan(*piece, discretization=rule, impl="sequential")[0]


def work(size, B, L, D, N):
    wide, narrow, exponentials = B * L * D * size, B * L * N * size, B * L * D * N
    return Work(4 * wide + 2 * narrow, 0, exponentials), Work(11 * wide + 6 * narrow, 0, 2 * exponentials)


def naive(x, dt, A, B, C):
    """The exponential inside the loop over steps."""
    h, ys = A.new_zeros(len(x), *A.shape), []
    for x_t, dt_t, B_t, C_t in zip(x.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True):
        h = torch.exp(dt_t.unsqueeze(2) * A) * h + (dt_t * x_t).unsqueeze(2) * B_t.unsqueeze(1)
        ys.append((h @ C_t.unsqueeze(2)).squeeze(2))
    return torch.stack(ys, 1)


def naive_precomputed(x, dt, A, B, C):
    """Decays and inputs of all steps first, then the loop, then all outputs."""
    decay, b = torch.exp(dt.unsqueeze(3) * A), (dt * x).unsqueeze(3) * B.unsqueeze(2)  # (B, L, D, N)
    h, states = A.new_zeros(len(x), *A.shape), []
    for decay_t, b_t in zip(decay.unbind(1), b.unbind(1), strict=True):
        h = decay_t * h + b_t
        states.append(h)
    return (torch.stack(states, 1) @ C.unsqueeze(3)).squeeze(3)


def loop(scan):
    def run(x, dt, A, B, C, D, z, bias):
        y = scan(x, F.softplus(dt + bias), A, B[:, :, 0], C[:, :, 0].to(A.dtype))
        return ((y + D * x) * F.silu(z)).to(x.dtype)

    return Peer(run)


def arrange(x, dt, A, B, C, D, z, bias):
    x, dt, z = (t.transpose(1, 2).contiguous() for t in (x, dt, z))  # (B, D, L)
    B, C = (t.permute(0, 2, 3, 1).contiguous() for t in (B, C))  # (B, G, N, L)
    return x, dt, A, B, C, D, z, bias


def mamba_ssm(*tensors):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(*tensors, delta_softplus=True).transpose(1, 2)


PEERS = {
    "mamba_ssm": Peer(mamba_ssm, arrange, "mamba_ssm"),
    "naive": loop(naive),
    "naive_precomputed": loop(naive_precomputed),
}
SHAPES = {
    "cuda": ("B8 L2048 D3072 N16 bfloat16", "B1 L65536 D1536 N16 bfloat16"),
    "cpu": ("B2 L512 D128 N16 float32",),
}
OPS = {
    "selective_scan": Op(IMPLS, inputs, lambda impl, *t: selective_scan(*t, impl=impl)[0], check, work, SHAPES, PEERS),
    "selective_scan_zoh": Op(
        IMPLS,
        inputs,
        lambda impl, *t: selective_scan(*t, discretization="zoh", impl=impl)[0],
        lambda tensors, y: check(tensors, y, "zoh"),
        work,
    ),
}

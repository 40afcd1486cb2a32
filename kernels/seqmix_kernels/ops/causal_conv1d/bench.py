"""The benchmark of the convolution with SiLU: see ../../benchmark.py."""

import torch.nn.functional as F

from ...benchmark import PIECE, Op, Peer, Work
from .op import IMPLS, causal_conv1d


def inputs(normal, dtype, B, L, D, W):
    return normal(B, L, D).to(dtype), normal(D, W), normal(D)


def run(impl, x, weight, bias):
    return causal_conv1d(x, weight, bias, "silu", impl=impl)[0]


def check(tensors, y):
    x, weight, bias = (t.double() for t in tensors)
    return y[:1, :PIECE], run("reference", x[:1, :PIECE], weight, bias)


def work(size, B, L, D, W):
    return Work(2 * B * L * D * size), Work(5 * B * L * D * size)


def channels_first(x, weight, bias):
    return x.transpose(1, 2).contiguous(), weight, bias


def torchs(x, weight, bias):
    """torch's own convolution of x (B, D, L); the parameters are cast as under autocast."""
    weight, bias = weight.to(x.dtype).unsqueeze(1), bias.to(x.dtype)
    y = F.conv1d(x, weight, bias, padding=weight.shape[2] - 1, groups=len(weight))
    return F.silu(y[..., : x.shape[2]]).transpose(1, 2)


def theirs(x, weight, bias):
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(x, weight, bias, activation="silu").transpose(1, 2)


PEERS = {
    "causal_conv1d": Peer(theirs, channels_first, "causal_conv1d"),
    "torch": Peer(lambda x, weight, bias: torchs(x.transpose(1, 2), weight, bias)),
    "torch_channels_first": Peer(torchs, channels_first),
}
SHAPES = {"cuda": ("B8 L2048 D3072 W4 bfloat16",), "cpu": ("B2 L512 D128 W4 float32",)}
OPS = {"causal_conv1d": Op(IMPLS, inputs, run, check, work, SHAPES, PEERS)}

"""The benchmarks of the convolution kernels of S4D and S4 (DPLR): see ../../benchmark.py. M: pairs of modes.

*_layer_kernel: from the parameters of a layer, as a model has them.
"""

import torch

from ...benchmark import Op, Work
from .op import IMPLS, dplr_kernel, dplr_layer_kernel, s4d_kernel, s4d_layer_kernel


def discretised(normal, dtype, D, M):
    dt = torch.exp(normal(D, 1).sigmoid() * 4.6 - 6.9)  # log-uniform-like in [0.001, 0.1]
    A = torch.stack((-0.5 * torch.ones(M), torch.pi * torch.arange(M)), -1).to(dt.device)  # S4D-Lin
    return dt, (dt[..., None] * A).double(), normal(D, M, 2).to(dtype)


def s4d_inputs(normal, dtype, L, D, M):
    _, a, c = discretised(normal, dtype, D, M)
    return a, c, L


def dplr_inputs(normal, dtype, L, D, M):
    dt, a, c = discretised(normal, dtype, D, M)
    P = (normal(D, M, 2) * 0.5 * dt[..., None].sqrt()).double()
    return a, P, (dt[..., None] * torch.ones_like(a)).double(), c, L


def layer(normal, dtype, D, M):
    imag = torch.pi * torch.arange(M, device=normal(1).device).repeat(D, 1).to(dtype)
    return normal(D).sigmoid() * 4.6 - 6.9, torch.full_like(imag, -0.69), imag, normal(D, M, 2).to(dtype) * 0.5**0.5


def s4d_layer(normal, dtype, L, D, M):
    return *layer(normal, dtype, D, M), L


def dplr_layer(normal, dtype, L, D, M):
    *shared, C = layer(normal, dtype, D, M)
    P, B = normal(D, M, 2) * M**0.5 / 2, normal(D, M, 2) * M**0.5
    return *shared, P.to(dtype), B.to(dtype), C, L


def work(size, L, D, M):
    return Work(4 * D * L + 24 * D * M, 4 * D * M * L), Work(8 * D * L + 48 * D * M, 12 * D * M * L)


def of(kernel, inputs, shapes):
    def check(given, K):
        *tensors, L = given
        return K[:8], kernel(*(t[:8].double() for t in tensors), L, impl="reference")

    return Op(IMPLS, inputs, lambda impl, *given: kernel(*given, impl=impl), check, work, shapes)


SHAPES = {"cuda": ("L2048 D768 M32 float32",), "cpu": ("L512 D128 M32 float32",)}
OPS = {
    "s4d_kernel": of(s4d_kernel, s4d_inputs, SHAPES),
    "dplr_kernel": of(dplr_kernel, dplr_inputs, SHAPES),
    "s4d_layer_kernel": of(s4d_layer_kernel, s4d_layer, {}),
    "dplr_layer_kernel": of(dplr_layer_kernel, dplr_layer, {}),
}

"""The long convolution on the GPU: Triton around cuFFT. Its circular convolutions are right-angled (README.md).

With weights e^(iπt/2n), what wraps around at n is multiplied by i: for real inputs and taps it is the imaginary part,
and the real part is the causal convolution. So the transforms are complex and of length n >= L, whereas zero padding needs
real ones of 2L. Work and memory are the same, but half of the input is not zeros, a spectrum has n numbers instead of n/2 + 1,
and torch makes no copy before a complex-to-real transform.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...launch import launch
from . import triton_kernels as tk
from .torch_forms import fft_length

WORKSPACE = 1 << 28  # most bytes of one complex buffer, unless a single channel of the batch needs more
BT, BD = 32, 64  # steps and channels per tile
WARPS = 4
BLOCK = 1024  # complex numbers per program of the products


def _parts(batch: int, width: int, n: int):
    """Slices of channels whose buffers fit into the workspace."""
    step = max(1, min(width, WORKSPACE // (batch * n * 8)))
    step = step // BD * BD or step
    return [slice(d, min(width, d + step)) for d in range(0, width, step)]


def _grid(batch: int, steps: int, width: int):
    return batch * triton.cdiv(steps, BT), triton.cdiv(width, BD)


def _pack(x: Tensor, n: int, p=None, gate=None, dgate=None, activation="none") -> Tensor:
    """x (B, L, D) -> the spectrum (B, D, n) complex64 of its weighted rows."""
    batch, length, width = x.shape
    z = torch.empty(batch, width, n, 2, dtype=torch.float32, device=x.device)
    like = x if p is None else p
    args = (
        x, like, x if gate is None else gate, z, x if dgate is None else dgate, length, n, width, triton.cdiv(n, BT),
        *x.stride(), *like.stride(),
    )  # fmt: skip
    form = {"BT": BT, "BD": BD, "ACT": activation, "GATED": gate is not None}
    launch(tk.pack_kernel, _grid(batch, n, width), args, form, {"num_warps": WARPS})
    return torch.fft.fft(torch.view_as_complex(z))


def _inverse(z: Tensor) -> Tensor:
    return torch.fft.ifft(z, norm="forward")  # unscaled: 1/n is in the product of the spectra


def forward(u, kernel, D, gate, activation: str | None) -> tuple[Tensor, Tensor]:
    """y (B, L, D), and p before the activation in u's dtype; (0,) where the backward needs none."""
    batch, length, width = u.shape
    n = fft_length(length)
    gate = None if gate is None else gate.contiguous()
    y = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    keep = activation is not None or gate is not None
    p = torch.empty(u.shape if keep else 0, dtype=u.dtype, device=u.device)
    for part in _parts(batch, width, n):
        x, out = u[..., part], y[..., part]
        kf, z = _pack(kernel[None, part].mT, n), _pack(x, n)
        size = z[0].numel()
        args = torch.view_as_real(z), torch.view_as_real(kf), batch, size, 1 / n
        launch(tk.multiply_kernel, (triton.cdiv(size, BLOCK),), args, {"BLOCK": BLOCK}, {"num_warps": 4})
        z = _inverse(z)
        g, kept = (out if gate is None else gate[..., part]), (p[..., part] if keep else out)
        args = (
            torch.view_as_real(z), x, x if D is None else D[part], g, out, kept, length, n, x.shape[2],
            triton.cdiv(length, BT), *x.stride(), *g.stride(), *out.stride(), *kept.stride(),
        )  # fmt: skip
        form = {"SKIP": D is not None, "GATED": gate is not None, "ACT": activation or "none", "KEEP": keep}
        launch(tk.unpack_kernel, _grid(batch, length, x.shape[2]), args, {"BT": BT, "BD": BD} | form, {"num_warps": WARPS})
    return y, p


def backward(dy, u, kernel, D, gate, p, activation: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du, dkernel, dD, dgate; (0,) for what was not given. All spectra are recomputed."""
    batch, length, width = u.shape
    n, act = fft_length(length), activation or "none"
    none = torch.empty(0, dtype=torch.float32, device=u.device)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    dkernel = torch.empty_like(kernel, memory_format=torch.contiguous_format)
    gate = None if gate is None else gate.contiguous()
    dgate = none if gate is None else torch.empty_like(gate)
    dD = none if D is None else torch.empty_like(D)
    for part in _parts(batch, width, n):
        x, g = u[..., part], dy[..., part]
        # p, gate and dgate are all contiguous, so they share one stride
        own = None if p.numel() == 0 else p[..., part]
        gates = (None, None) if gate is None else (gate[..., part], dgate[..., part])
        kf, uf, gf = _pack(kernel[None, part].mT, n), _pack(x, n), _pack(g, n, own, *gates, act)
        sums, size = torch.empty_like(kf), kf.numel()
        args = *(torch.view_as_real(t) for t in (gf, uf, kf, sums)), batch, size, 1 / n
        launch(tk.correlate_kernel, (triton.cdiv(size, BLOCK),), args, {"BLOCK": BLOCK}, {"num_warps": 4})
        del uf, kf
        gf = _inverse(gf)
        grid = _grid(batch, length, x.shape[2])
        like = g if own is None else own
        partial = torch.empty(grid[0], x.shape[2], dtype=torch.float32, device=u.device)
        args = (
            torch.view_as_real(gf), g, x, like, x if D is None else D[part], like if gate is None else gates[0], du[..., part],
            partial, length, n, x.shape[2], triton.cdiv(length, BT), *g.stride(), *x.stride(), *du[..., part].stride(),
            *like.stride(),
        )  # fmt: skip
        form = {"BT": BT, "BD": BD, "SKIP": D is not None, "GATED": gate is not None, "ACT": act}
        launch(tk.unpack_bwd_kernel, grid, args, form, {"num_warps": WARPS})
        del gf
        if D is not None:
            dD[part] = partial.sum(0)
        taps = kernel.shape[1]
        out = dkernel[None, part].mT  # (1, K, D)
        args = (
            torch.view_as_real(_inverse(sums)), out, out, out, out, out, taps, n, x.shape[2], triton.cdiv(taps, BT),
            *out.stride(), *out.stride(), *out.stride(), *out.stride(),
        )  # fmt: skip
        form = {"BT": BT, "BD": BD, "SKIP": False, "GATED": False, "ACT": "none", "KEEP": False}
        launch(tk.unpack_kernel, _grid(1, taps, x.shape[2]), args, form, {"num_warps": WARPS})
    return du, dkernel, dD, dgate

"""Launches the Triton kernels of S4D and S4: what goes in, how it is cut, and what is left to torch."""

from __future__ import annotations

import math
import os

import torch
import triton
from torch import Tensor

from . import torch_forms
from . import triton_kernels as tk

PRECISION = "tf32x3"  # of the products of matrices: three on the tensor cores for one in float32
SMS = 132  # programs are cut smaller until there are twice as many as this
PACE = 2  # tests may set a lower number


def why_not(c: Tensor) -> str | None:
    """Why coefficients like these cannot go through the kernels; None if they can."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        if c.device.type != "cpu":
            return "Triton's interpreter is on and the coefficients are not on the CPU"
    elif c.device.type != "cuda":
        return f"it needs a CUDA device, the coefficients are on {c.device.type}"
    elif torch.version.cuda and torch.cuda.get_device_capability(c.device) < (8, 0):
        return "it needs compute capability 8.0 or newer"
    if c.dtype != torch.float32:
        return f"it computes in float32, the coefficients are {c.dtype}"
    return None


def _spans(programs: int, tiles: int) -> int:
    """Into how many spans of tiles a sum is cut, so that all multiprocessors have work."""
    return max(1, min(tiles, PACE * SMS // programs))


# ---- S4D ------------------------------------------------------------------------------------------------------------


def _tables(log_a: Tensor) -> tuple[Tensor, Tensor]:
    """log2 |ā| in float32 and the angle as int64, 2^64 a turn."""
    log_a = log_a.double()
    turns = log_a[..., 1] / (2 * math.pi)
    turns = ((turns - turns.round()) * 2.0**62).long() << 2
    return (log_a[..., 0] / math.log(2)).float(), turns


def _tile(length: int, Q: int) -> tuple[int, int]:
    """Q and R, the sides of a tile of taps: near a square, at most Q and 64."""
    Q = min(Q, max(16, triton.next_power_of_2(math.isqrt(length - 1) + 1)))
    return Q, min(64, max(16, triton.next_power_of_2(triton.cdiv(length, Q))))


def s4d_forward(log_a: Tensor, c: Tensor, length: int) -> Tensor:
    width, modes = log_a.shape[:2]
    c = c.contiguous()
    K = c.new_empty(*c.shape[:-2], length)
    if K.numel():
        (Q, R), BM = _tile(length, 128), 32 if modes > 16 else 16
        tk.s4d_fwd_kernel[(c.numel() // (2 * modes), triton.cdiv(length, Q * R))](
            *_tables(log_a), c, K, width, modes, length, Q=Q, R=R, BM=BM, PRECISION=PRECISION, num_warps=8 if Q * R == 8192 else 4
        )
    return K


def s4d_backward(dK: Tensor, log_a: Tensor, c: Tensor, length: int) -> tuple[Tensor, Tensor]:
    width, modes = log_a.shape[:2]
    dK, rows = dK.contiguous(), c.numel() // (2 * modes)
    if not dK.numel():
        return torch.zeros_like(log_a), torch.zeros_like(c)
    (Q, R), BM = _tile(length, 64), 16  # what fits into registers
    spans = _spans(rows, triton.cdiv(length, Q * R))
    out = c.new_empty(spans, rows, 4, modes)
    tk.s4d_bwd_kernel[(rows, spans, triton.cdiv(modes, BM))](
        dK, *_tables(log_a), out, width, modes, length, spans, Q=Q, R=R, BM=BM, PRECISION=PRECISION, num_warps=4
    )
    Sr, Si, Tr, Ti = out.sum(0).view(*c.shape[:-2], 4, modes).unbind(-2)
    cr, ci = c.unbind(-1)
    dlog = torch.stack((cr * Tr - ci * Ti, -cr * Ti - ci * Tr), -1)
    return dlog.sum_to_size(log_a.shape).to(log_a.dtype), torch.stack((Sr, -Si), -1)


# ---- DPLR -----------------------------------------------------------------------------------------------------------

FREQUENCIES = 256  # of a program of the sums, 2 a thread
BWD_FREQUENCIES = 64


def _inputs(lam: Tensor, w: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and poles with the parts beyond float32 of what is subtracted."""
    tangent, cosine, sine, _ = torch_forms.nodes(length, lam.device)
    node = torch.stack((tangent.float(), (tangent - tangent.float()).float(), cosine.float(), sine.float()))
    re, im = lam.double().unbind(-1)
    return node, torch.stack((re.float(), im.float(), (im - im.float()).float()), 1), w.contiguous()


def _sums(inputs: tuple[Tensor, ...], quotients: bool) -> Tensor:
    node, lam, w = inputs
    (width, modes), F = w.shape[:2], node.shape[1]
    out = w.new_empty(width, F, 4 if quotients else 2)
    if out.numel():
        tk.dplr_sums_kernel[(triton.cdiv(F, FREQUENCIES), width)](
            node, lam, w, out, modes, F, BF=FREQUENCIES, QUOTIENTS=quotients, num_warps=4
        )
    return out


def dplr_forward(lam: Tensor, w: Tensor, length: int) -> Tensor:
    spectrum = _sums(_inputs(lam, w, length), quotients=False)
    return torch.fft.irfft(torch.view_as_complex(spectrum), length)


def dplr_backward(dK: Tensor, lam: Tensor, w: Tensor, length: int) -> tuple[Tensor, Tensor]:
    inputs = node, poles, w = _inputs(lam, w, length)
    (width, modes), F = w.shape[:2], node.shape[1]
    if not width:
        return torch.zeros_like(lam), torch.zeros_like(w)
    g = torch.view_as_real(torch.fft.rfft(dK))
    spans = _spans(width, triton.cdiv(F, BWD_FREQUENCIES))
    dw, dlam = w.new_empty(spans, width, modes, 8), w.new_empty(spans, width, 2, modes)
    BM = 32 if modes > 16 else 16
    tk.dplr_bwd_kernel[(width, spans, triton.cdiv(modes, BM))](
        node, poles, w, g, _sums(inputs, quotients=True), dw, dlam, modes, F, length, spans,
        BF=BWD_FREQUENCIES, BM=BM, PRECISION=PRECISION, num_warps=4,
    )  # fmt: skip
    return dlam.sum(0).transpose(-1, -2).to(lam.dtype).contiguous(), dw.sum(0)

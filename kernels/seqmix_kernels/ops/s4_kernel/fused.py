"""Launches the Triton kernels of S4D and S4: prepares their inputs, splits the work, and does the rest in torch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ...launch import launch
from . import triton_kernels as tk

PRECISION = "tf32x3"  # of matrix products: three tensor-core products for one in float32
SMS = 132  # multiprocessors to keep busy


def _spans(programs: int, tiles: int, a_multiprocessor: int) -> int:
    """Number of spans of tiles into which a sum is split, so that each multiprocessor gets twice `a_multiprocessor`
    programs."""
    return max(1, min(tiles, 2 * SMS * a_multiprocessor // programs))


# ---- S4D ------------------------------------------------------------------------------------------------------------


def _tables(log_a: Tensor) -> tuple[Tensor, Tensor]:
    """log2 |ā| in float32 and the angle as int64, 2^64 per turn."""
    log_a = log_a.double()
    turns = log_a[..., 1] / (2 * math.pi)
    turns = ((turns - turns.round()) * 2.0**62).long() << 2
    return (log_a[..., 0] / math.log(2)).float(), turns


def _tile(length: int, Q: int) -> tuple[int, int]:
    """Q and R, the sides of a tile of taps: near a square, at most Q and 64."""
    Q = min(Q, max(16, triton.next_power_of_2(math.isqrt(length - 1) + 1)))
    return Q, min(64, max(16, triton.next_power_of_2(triton.cdiv(length, Q))))


def s4d_forward(log_a: Tensor, c: Tensor, length: int) -> Tensor:
    K = c.new_empty(*c.shape[:-2], length)
    if K.numel():
        _s4d_forward(*_tables(log_a), c.contiguous(), K)
    return K


def s4d_backward(dK: Tensor, log_a: Tensor, c: Tensor, length: int) -> tuple[Tensor, Tensor]:
    if not dK.numel():
        return torch.zeros_like(log_a), torch.zeros_like(c)
    sums = _s4d_sums(dK.contiguous(), *_tables(log_a))
    Sr, Si, Tr, Ti = sums.sum(0).view(*c.shape[:-2], 4, -1).unbind(-2)
    cr, ci = c.unbind(-1)
    dlog = torch.stack((cr * Tr - ci * Ti, -cr * Ti - ci * Tr), -1)
    return dlog.sum_to_size(log_a.shape).to(log_a.dtype), torch.stack((Sr, -Si), -1)


def _s4d_forward(size: Tensor, turns: Tensor, c: Tensor, K: Tensor) -> None:
    (width, modes), length = size.shape, K.shape[-1]
    (Q, R), BM = _tile(length, 128), 32 if modes > 16 else 16
    tile = {"Q": Q, "R": R, "BM": BM, "PRECISION": PRECISION}
    grid = K.numel() // length, triton.cdiv(length, Q * R)
    launch(
        tk.s4d_fwd_kernel, grid, (size, turns, c, K, width, modes, length), tile, {"num_warps": 8 if Q * R == 8192 else 4}
    )


def _s4d_sums(dK: Tensor, size: Tensor, turns: Tensor) -> Tensor:
    """S and T, real and imaginary parts: (spans, rows of dK, 4, M)."""
    (width, modes), length = size.shape, dK.shape[-1]
    rows = dK.numel() // length
    (Q, R), BM = _tile(length, 64), 16  # as much as fits into registers
    spans = _spans(rows, triton.cdiv(length, Q * R), 1)
    out = dK.new_empty(spans, rows, 4, modes)
    tile = {"Q": Q, "R": R, "BM": BM, "PRECISION": PRECISION}
    grid = rows, spans, triton.cdiv(modes, BM)
    launch(tk.s4d_bwd_kernel, grid, (dK, size, turns, out, width, modes, length, spans), tile, {"num_warps": 4})
    return out


def s4d_layer_forward(log_dt: Tensor, log_decay: Tensor, imag: Tensor, C: Tensor, length: int) -> Tensor:
    size, turns, c = _prepare(log_dt, log_decay, imag, C)
    K = C.new_empty(len(C), length)
    _s4d_forward(size, turns, c, K)
    return K


def s4d_layer_backward(dK, log_dt, log_decay, imag, C, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (width, modes, _), sets = C.shape, len(imag)
    size, turns, _ = _prepare(log_dt, log_decay, imag, C)
    sums = _s4d_sums(dK.contiguous(), size, turns)
    dlog_dt, ddecay, dimag, dC = (C.new_empty(s) for s in ((width,), (width, modes), (width, modes), (width, modes, 2)))
    args = sums, log_dt, log_decay, imag, C, dlog_dt, ddecay, dimag, dC, modes, sets, len(sums)
    launch(tk.s4d_finish_kernel, (width,), args, {"BM": triton.next_power_of_2(modes)}, {"num_warps": 1})
    if sets < width:
        ddecay, dimag = (t.view(-1, sets, modes).sum(0) for t in (ddecay, dimag))
    return dlog_dt, ddecay, dimag, dC


def _prepare(log_dt: Tensor, log_decay: Tensor, imag: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width, modes, _ = C.shape
    size, turns, c = C.new_empty(width, modes), C.new_empty(width, modes, dtype=torch.int64), torch.empty_like(C)
    BM = min(32, triton.next_power_of_2(modes))
    args = log_dt, log_decay, imag, C, size, turns, c, modes, len(imag)
    launch(tk.s4d_prepare_kernel, (width, triton.cdiv(modes, BM)), args, {"BM": BM}, {"num_warps": 1})
    return size, turns, c


# ---- DPLR -----------------------------------------------------------------------------------------------------------

FREQUENCIES = 512  # per program of the sums, 4 per thread
BWD_TILE = 32, 8  # modes and frequencies per warp of the backward at a time


def _nodes(length: int, device: torch.device) -> Tensor:
    node = torch.empty(4, length // 2 + 1, dtype=torch.float32, device=device)
    grid = (triton.cdiv(node.shape[1], 128),)
    launch(tk.nodes_kernel, grid, (node, node.shape[1], length), {"BF": 128}, {"num_warps": 4})
    return node


def _poles(lam: Tensor) -> Tensor:
    """The real part, and the imaginary part as a float32 and its remainder: (D, 3, M)."""
    re, im = lam.double().unbind(-1)
    return torch.stack((re.float(), im.float(), (im - im.float()).float()), 1)


def _sums(node: Tensor, poles: Tensor, w: Tensor, quotients: bool) -> Tensor:
    (width, modes, _), F = w.shape, node.shape[1]
    out = w.new_empty(width, F, 4 if quotients else 2)
    if out.numel():
        grid, form = (triton.cdiv(F, FREQUENCIES), width), {"BF": FREQUENCIES, "QUOTIENTS": quotients}
        launch(tk.dplr_sums_kernel, grid, (node, poles, w, out, modes, F), form, {"num_warps": 4})
    return out


def _sums_backward(dK: Tensor, node: Tensor, poles: Tensor, w: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Partial sums of the gradients of poles and weights: (spans, D, 2, M), (spans, D, M, 8)."""
    (width, modes, _), F = w.shape, node.shape[1]
    g = torch.view_as_real(torch.fft.rfft(dK))
    BM, BK = min(BWD_TILE[0], max(8, triton.next_power_of_2(modes))), BWD_TILE[1]
    blocks = triton.cdiv(modes, BM)
    spans = _spans(width * blocks, triton.cdiv(F, BK), 16)
    dw, dlam = w.new_empty(spans, width, modes, 8), w.new_empty(spans, width, 2, modes)
    args = node, poles, w, g, _sums(node, poles, w, quotients=True), dw, dlam, modes, F, length, spans
    launch(tk.dplr_bwd_kernel, (width, spans, blocks), args, {"BK": BK, "BM": BM}, {"num_warps": 1})
    return dlam, dw


def _kernel(node: Tensor, poles: Tensor, w: Tensor, length: int) -> Tensor:
    return torch.fft.irfft(torch.view_as_complex(_sums(node, poles, w, quotients=False)), length)


def dplr_forward(lam: Tensor, w: Tensor, length: int) -> Tensor:
    return _kernel(_nodes(length, w.device), _poles(lam), w.contiguous(), length)


def dplr_backward(dK: Tensor, lam: Tensor, w: Tensor, length: int) -> tuple[Tensor, Tensor]:
    if not w.numel():
        return torch.zeros_like(lam), torch.zeros_like(w)
    dlam, dw = _sums_backward(dK, _nodes(length, w.device), _poles(lam), w.contiguous(), length)
    return dlam.sum(0).transpose(-1, -2).to(lam.dtype).contiguous(), dw.sum(0)


def dplr_layer_forward(log_dt, log_decay, imag, P, B, C, length: int) -> Tensor:
    X, _, _, row = _system(log_dt, log_decay, imag, P, C)
    applied, _ = _row_powers(row, X, length)
    poles, w = _weights((log_dt, log_decay, imag, P, B, C), applied[-1])
    return _kernel(_nodes(length, C.device), poles, w, length)


def dplr_layer_backward(dK, log_dt, log_decay, imag, P, B, C, length: int) -> tuple[Tensor, ...]:
    (width, modes, _), sets = C.shape, len(imag)
    given = log_dt, log_decay, imag, P, B, C
    X, left, right, row = _system(log_dt, log_decay, imag, P, C)
    applied, powers = _row_powers(row, X, length)
    poles, w = _weights(given, applied[-1])
    dlam, dw = _sums_backward(dK, _nodes(length, C.device), poles, w, length)
    part, dpower = X.new_empty(width, 8, modes), torch.empty_like(row)
    block, warps = {"BM": triton.next_power_of_2(modes)}, {"num_warps": 1 if modes <= 64 else 4}
    args = *given, applied[-1], dw, dlam, part, dpower, modes, sets, len(dw)
    launch(tk.dplr_weights_bwd_kernel, (width,), args, block, warps)
    drow, dX = _row_powers_backward(dpower, applied, powers)
    dlog_dt, out, dC = C.new_empty(width), C.new_empty(width, 6, modes), torch.empty_like(C)
    args = *given[:5], dX, dX @ right.mT, dX.mT @ left.mT, drow, part, dlog_dt, out, dC, modes, sets
    launch(tk.dplr_finish_kernel, (width,), args, block, warps)
    if sets < width:
        out = out.view(-1, sets, 6, modes).sum(0)
    dP, dB = out[:, 2:4].transpose(1, 2).contiguous(), out[:, 4:].transpose(1, 2).contiguous()
    return dlog_dt, out[:, 0].clone(), out[:, 1].clone(), dP, dB, dC


def _system(log_dt, log_decay, imag, P, C) -> tuple[Tensor, ...]:
    """Ā (D, N, N) in real coordinates, the two factors of its rank-one part and C as a row, (D, 1, N) each. float64."""
    width, modes, _ = C.shape
    N = 2 * modes
    X = C.new_empty(width, N, N, dtype=torch.float64)
    left, right, row = (C.new_empty(width, 1, N, dtype=torch.float64) for _ in range(3))
    BN = max(16, triton.next_power_of_2(N))
    args = log_dt, log_decay, imag, P, C, X, left, right, row, modes, len(imag)
    tile = {"BR": 16, "BN": BN, "BM": max(16, BN // 2)}
    launch(tk.dplr_prepare_kernel, (width, triton.cdiv(N, 16)), args, tile, {"num_warps": 4})
    return X, left, right, row


def _weights(given: tuple[Tensor, ...], power: Tensor) -> tuple[Tensor, Tensor]:
    C, imag = given[-1], given[2]
    width, modes, _ = C.shape
    poles, w = C.new_empty(width, 3, modes), C.new_empty(width, modes, 8)
    args = *given, power, poles, w, modes, len(imag)
    block, warps = {"BM": triton.next_power_of_2(modes)}, {"num_warps": 1 if modes <= 64 else 4}
    launch(tk.dplr_weights_kernel, (width,), args, block, warps)
    return poles, w


def _row_powers(row: Tensor, X: Tensor, n: int) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """Computes row X^n by squaring. Returns the intermediate rows, and the powers with how often each was applied."""
    rows, powers = [row], []
    while n:
        times = n if n < 4 else n % 2
        for _ in range(times):
            rows.append(rows[-1] @ X)
        powers.append((times, X))
        n = 0 if n < 4 else n // 2
        if n:
            X = X @ X
    return rows, powers


def _row_powers_backward(g: Tensor, rows: list[Tensor], powers: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Gradients of row and X. The highest power is applied at least once, so its gradient exists from the start."""
    at, dX = len(rows) - 1, None
    for i in range(len(powers) - 1, -1, -1):
        times, X = powers[i]
        if dX is not None:  # of X²
            dX = torch.baddbmm(dX @ X.mT, X.mT, dX)
        for _ in range(times):
            at -= 1
            dX = rows[at].mT @ g if dX is None else torch.baddbmm(dX, rows[at].mT, g)
            g = g @ X.mT
    return g, dX

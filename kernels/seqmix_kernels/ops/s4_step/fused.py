"""One decoding step on the GPU, in plain Triton: `step_kernel` from the parameters of a layer and its state to y and the new
state, in one launch; `gated_kernel` computes the projections after it.

Parameters are discretised in float64, in registers, by each program for its channels: an error of 1e-7 in the step size becomes
one of 1e-4 in the phase after a thousand steps. Operations on the state are in float32. README.md has the formulas.

PDL: from compute capability 9.0 a kernel starts while the previous one finishes (programmatic dependent launch). Before
gdc_wait it reads only weights; every other load, and every store, comes after.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...launch import launch, programmatic
from ...product import linear
from ...triton_math import sigmoid

TILE, WARPS = 128, 2  # modes per program; more than its threads, so that no state is read again after it was written
FEW, SOME = 4, 64  # most rows whose projections a program sums by itself; on tensor cores. With more: cuBLAS
OUTPUTS, COLUMNS = 4, 1024  # per program with the projections: rows of the weights, and columns loaded at once
BLOCK = 1024  # numbers per program of gate_kernel

SQRT_HALF = tl.constexpr(0.7071067811865476)
PI = tl.constexpr(3.141592653589793)
HALF_TURNS = tl.constexpr(0.15915494309189535)  # 1 / 2π


@triton.jit
def both(at):
    """Where the two parts of pairs are: [..., 2]."""
    return tl.expand_dims(at, -1) * 2 + tl.arange(0, 2)


@triton.jit
def pairs(ptr, at, mask, REAL: tl.constexpr):
    """Real and imaginary parts of what lies in pairs, or alone (REAL)."""
    if REAL:
        re = tl.load(ptr + at, mask=mask, other=0.0)
        return re, tl.zeros_like(re)
    else:
        return tl.split(tl.load(ptr + both(at), mask=tl.expand_dims(mask, -1), other=0.0))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0, float64: the series where the difference would cancel."""
    series = 1.0 + x * (1.0 / 5) * (1.0 + x * (1.0 / 6))
    series = x * (1.0 + x * 0.5 * (1.0 + x * (1.0 / 3) * (1.0 + x * 0.25 * series)))
    return tl.where(x > -0.01, series, tl.exp(x) - 1.0)


@triton.jit
def sine_cosine(turns):
    """Of π r for r = turns less the nearest integer, float64; Taylor's, below 1e-13 up to a quarter turn."""
    z = PI * (turns - tl.floor(turns + 0.5))
    w = -z * z
    s = 1.0 + w * (1.0 / 156) * (1.0 + w * (1.0 / 210) * (1.0 + w * (1.0 / 272)))
    s = 1.0 + w * (1.0 / 42) * (1.0 + w * (1.0 / 72) * (1.0 + w * (1.0 / 110) * s))
    s = z * (1.0 + w * (1.0 / 6) * (1.0 + w * (1.0 / 20) * s))
    c = 1.0 + w * (1.0 / 182) * (1.0 + w * (1.0 / 240) * (1.0 + w * (1.0 / 306)))
    c = 1.0 + w * (1.0 / 56) * (1.0 + w * (1.0 / 90) * (1.0 + w * (1.0 / 132) * c))
    c = 1.0 + w * 0.5 * (1.0 + w * (1.0 / 12) * (1.0 + w * (1.0 / 30) * c))
    return s, c


@triton.jit(do_not_specialize=["batch"])
def step_kernel(
    u_ptr, x_ptr, log_dt_ptr, decay_ptr, imag_ptr, P_ptr, B_ptr, C_ptr, skip_ptr, y_ptr, new_ptr, batch, E, sub,
    M: tl.constexpr, SETS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr,
    LOW_RANK: tl.constexpr, ZOH: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BD channels of ROWS rows. x and new (batch, E, M, 2), or (batch, E, M) where REAL. SETS: rows of decay, imag, P, B."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    m = tl.arange(0, BM)
    dm = d < E
    mask = dm[:, None] & (m < M)[None, :]
    at = (d % SETS)[:, None] * M + m[None, :]
    own = d[:, None] * M + m[None, :]
    log_dt = tl.load(log_dt_ptr + d, mask=dm, other=0.0).to(tl.float64)
    dt = tl.exp(log_dt)[:, None]
    re = -tl.exp(tl.load(decay_ptr + at, mask=mask, other=0.0).to(tl.float64))
    if REAL:
        im = tl.zeros_like(re)
    else:
        im = tl.load(imag_ptr + at, mask=mask, other=0.0).to(tl.float64)
    Cr, Ci = pairs(C_ptr, own, mask, REAL)
    skip = tl.load(skip_ptr + d, mask=dm, other=0.0)
    # a = the discrete A - 1, b = the discrete B: the change is (a x + b u), minus v (q x) if there is a P
    lr, li = dt * re, dt * im
    if ZOH:
        s, c = sine_cosine(li * HALF_TURNS)  # of half the phase; the common sign drops out
        grown, turned = expm1(lr), 2.0 * s * s
        ar, ai = grown * (1.0 - turned) - turned, (1.0 + grown) * (2.0 * s * c)
        scale = 1.0 / (re * re + im * im)
        br, bi = (ar * re + ai * im) * scale, (ai * re - ar * im) * scale
    else:
        x1 = 1.0 - 0.5 * lr
        scale = 1.0 / (x1 * x1 + 0.25 * li * li)
        Er, Ei = x1 * scale, 0.5 * li * scale  # 1 / (1 - lambda / 2)
        ar, ai = lr * Er - li * Ei, lr * Ei + li * Er
        br, bi = dt * Er, dt * Ei
        if LOW_RANK:
            root = tl.exp(0.5 * log_dt)[:, None]
            pr, pi = pairs(P_ptr, at, mask, False)
            gr, gi = pairs(B_ptr, at, mask, False)
            pr, pi = root * pr.to(tl.float64), root * pi.to(tl.float64)
            gr, gi = dt * gr.to(tl.float64), dt * gi.to(tl.float64)
            q0r, q0i = pr * Er + pi * Ei, pr * Ei - pi * Er  # conj(P) E
            v0r, v0i = pr * Er - pi * Ei, pr * Ei + pi * Er  # E P
            gain = 2.0 / (1.0 + tl.sum((pr * pr + pi * pi) * Er, axis=1))
            by_u = 0.5 * gain * tl.sum(q0r * gr - q0i * gi, axis=1)
            gain, by_u = gain[:, None], by_u[:, None]
            br, bi = Er * gr - Ei * gi - by_u * v0r, Er * gi + Ei * gr - by_u * v0i
            qr, qi = q0r.to(tl.float32), q0i.to(tl.float32)
            vr, vi = (gain * v0r).to(tl.float32), (gain * v0i).to(tl.float32)
    ar, ai, br, bi = ar.to(tl.float32), ai.to(tl.float32), br.to(tl.float32), bi.to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    us, rs, js = (), (), ()
    for i in tl.static_range(ROWS):  # all loads come before any store: the compiler may not reorder them itself
        b = tl.program_id(1).to(tl.int64) * ROWS + i
        us = us + (tl.load(u_ptr + b * sub + d, mask=dm & (b < batch), other=0.0).to(tl.float32),)  # noqa: RUF005
        xr, xi = pairs(x_ptr, b * (E * M) + own, mask & (b < batch), REAL)
        rs, js = rs + (xr,), js + (xi,)  # noqa: RUF005
    for i in tl.static_range(ROWS):  # as an axis of the tile the rows took nearly twice as long: H200.md
        b = tl.program_id(1).to(tl.int64) * ROWS + i
        u, xr, xi = us[i], rs[i], js[i]
        there = mask & (b < batch)
        if REAL:
            xr += ar * xr + br * u[:, None]
            y = tl.sum(Cr * xr, axis=1)
            tl.store(new_ptr + b * (E * M) + own, xr, mask=there)
        else:
            dr = ar * xr - ai * xi + br * u[:, None]
            di = ar * xi + ai * xr + bi * u[:, None]
            if LOW_RANK:
                w = tl.sum(qr * xr - qi * xi, axis=1)[:, None]
                dr -= vr * w
                di -= vi * w
            xr += dr
            xi += di
            y = 2.0 * tl.sum(Cr * xr - Ci * xi, axis=1)
            tl.store(new_ptr + both(b * (E * M) + own), tl.join(xr, xi), mask=tl.expand_dims(there, -1))
        y += skip * u
        if GELU:
            y = 0.5 * y * (1.0 + tl.erf(y * SQRT_HALF))
        tl.store(y_ptr + b * E + d, y.to(y_ptr.dtype.element_ty), mask=dm & (b < batch))


@triton.jit
def gated_kernel(
    y_ptr, gate_ptr, gb_ptr, w_ptr, wb_ptr, out_ptr, O, E: tl.constexpr, ROWS: tl.constexpr, BO: tl.constexpr,
    BE: tl.constexpr, HAS_GB: tl.constexpr, HAS_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BO outputs of all ROWS rows: weights are read once, in their own dtype, and rounded to that of the step."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    om = o < O
    low = out_ptr.dtype.element_ty
    rows = o.to(tl.int64)[:, None] * E
    c = tl.arange(0, BE)
    wm = om[:, None] & (c < E)[None, :]
    g = tl.load(gate_ptr + rows + c[None, :], mask=wm, other=0.0)
    w = tl.load(w_ptr + rows + c[None, :], mask=wm, other=0.0)
    gate, out = tl.zeros([BO], tl.float32), tl.zeros([BO], tl.float32)
    if HAS_GB:
        gate = tl.load(gb_ptr + o, mask=om, other=0.0).to(low).to(tl.float32)
    if HAS_B:
        out = tl.load(wb_ptr + o, mask=om, other=0.0).to(low).to(tl.float32)
    gates, outs = (), ()
    for _ in tl.static_range(ROWS):
        gates, outs = gates + (gate,), outs + (out,)  # noqa: RUF005
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for c0 in tl.static_range(0, E, BE):
        c = c0 + tl.arange(0, BE)
        if c0 > 0:
            wm = om[:, None] & (c < E)[None, :]
            g = tl.load(gate_ptr + rows + c[None, :], mask=wm, other=0.0)
            w = tl.load(w_ptr + rows + c[None, :], mask=wm, other=0.0)
        more_gates, more_outs = (), ()
        for i in tl.static_range(ROWS):
            y = tl.load(y_ptr + i * E + c, mask=c < E, other=0.0).to(tl.float32)[None, :]
            more_gates = more_gates + (gates[i] + tl.sum(g.to(low).to(tl.float32) * y, axis=1),)  # noqa: RUF005
            more_outs = more_outs + (outs[i] + tl.sum(w.to(low).to(tl.float32) * y, axis=1),)  # noqa: RUF005
        gates, outs = more_gates, more_outs
    for i in tl.static_range(ROWS):
        tl.store(out_ptr + i * O + o, (outs[i] * sigmoid(gates[i])).to(low), mask=om)


@triton.jit(do_not_specialize=["batch"])
def gated_rows_kernel(
    y_ptr, gate_ptr, gb_ptr, w_ptr, wb_ptr, out_ptr, batch, O, E: tl.constexpr, ROWS: tl.constexpr, BO: tl.constexpr,
    BE: tl.constexpr, HAS_GB: tl.constexpr, HAS_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BO outputs of ROWS rows, by tensor cores."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    b = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    om, bm = o < O, b < batch
    low = out_ptr.dtype.element_ty
    rows = o.to(tl.int64)[None, :] * E
    gate, out = tl.zeros([ROWS, BO], tl.float32), tl.zeros([ROWS, BO], tl.float32)
    if HAS_GB:
        gate += tl.load(gb_ptr + o, mask=om, other=0.0).to(low).to(tl.float32)[None, :]
    if HAS_B:
        out += tl.load(wb_ptr + o, mask=om, other=0.0).to(low).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for c0 in tl.range(0, E, BE):
        c = c0 + tl.arange(0, BE)
        wm = (c < E)[:, None] & om[None, :]
        y = tl.load(y_ptr + b[:, None] * E + c[None, :], mask=bm[:, None] & (c < E)[None, :], other=0.0)
        g = tl.load(gate_ptr + rows + c[:, None], mask=wm, other=0.0)
        w = tl.load(w_ptr + rows + c[:, None], mask=wm, other=0.0)
        gate = tl.dot(y, g.to(low), gate)
        out = tl.dot(y, w.to(low), out)
    tl.store(out_ptr + b[:, None] * O + o[None, :], (out * sigmoid(gate)).to(low), mask=bm[:, None] & om[None, :])


@triton.jit(do_not_specialize=["n"])
def gate_kernel(value_ptr, gate_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, (value * sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=i < n)


def step(
    u, x, log_dt, log_decay, imag, P, B, C, D, method: str, activation: str | None, dtype: torch.dtype, in_place: bool = False,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y (B, E) in dtype and the new state; see `s4_step`. in_place: the new state overwrites the old one, if that is
    contiguous. rows: number of rows per program, a power of two."""
    (batch, width), (_, modes, parts) = u.shape, C.shape
    new = x if in_place and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
    y = u.new_empty(batch, width, dtype=dtype)
    if not y.numel():
        return y, new
    u, log_dt, log_decay, C, D = u if u.stride(-1) == 1 else u.contiguous(), *map(_whole, (log_dt, log_decay, C, D))
    if rows is None:
        rows = 1 if batch < 4 else 4 if batch < 128 else 8
    padded = triton.next_power_of_2(modes)
    channels = max(1, TILE // padded)
    early = programmatic(u.device)
    launch(
        step_kernel, (triton.cdiv(width, channels), triton.cdiv(batch, rows)),
        (
            u, x.contiguous(), log_dt, log_decay, _or(imag, u), _or(P, u), _or(B, u), C, D, y, new, batch, width,
            u.stride(0),
        ),
        dict(M=modes, SETS=len(log_decay), BM=padded, BD=channels, ROWS=rows, REAL=parts == 1, LOW_RANK=P is not None,
             ZOH=P is None and method == "zoh", GELU=activation == "gelu", PDL=early),
        {"num_warps": WARPS} | ({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return y, new


def gated(y, gate_proj, gate_bias, out_proj, out_bias) -> Tensor:
    """See `gated_projection`."""
    batch, width = y.shape
    outputs = len(out_proj)
    out = y.new_empty(batch, outputs)
    if not out.numel():
        return out
    some = FEW < batch <= SOME and y.dtype != torch.float32  # float32 products do not run on tensor cores here
    if batch > FEW and not some:
        value, gate = linear(y, out_proj, out_bias), linear(y, gate_proj, gate_bias)
        n = out.numel()
        launch(gate_kernel, (triton.cdiv(n, BLOCK),), (value, gate, out, n), {"BLOCK": BLOCK}, {"num_warps": 4})
        return out
    given = y.contiguous(), gate_proj.contiguous(), _or(gate_bias, y), out_proj.contiguous(), _or(out_bias, y), out
    early = programmatic(y.device)
    constants = {"HAS_GB": gate_bias is not None, "HAS_B": out_bias is not None, "PDL": early}
    options = {"num_warps": 4} | ({"launch_pdl": True} if early else {})
    if some:
        rows = 16 if batch <= 16 else 32
        tile = dict(E=width, ROWS=rows, BO=16, BE=128)
        grid = triton.cdiv(outputs, 16), triton.cdiv(batch, rows)
        launch(gated_rows_kernel, grid, (*given, batch, outputs), tile | constants, options | {"num_stages": 4})
    else:
        tile = dict(E=width, ROWS=batch, BO=OUTPUTS, BE=min(COLUMNS, triton.next_power_of_2(width)))
        launch(gated_kernel, (triton.cdiv(outputs, OUTPUTS),), (*given, outputs), tile | constants, options)
    return out


def _whole(t: Tensor) -> Tensor:
    return t.contiguous()


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """t made contiguous, or a placeholder pointer that the kernel does not read."""
    return other if t is None else t.contiguous()

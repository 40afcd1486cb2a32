"""The Triton kernels around the FFTs of the long convolution, between (B, L, D) and the FFTs' rows of complex numbers.

`pack` transposes and weights the input, `unpack` takes the real part, transposes back and applies skip, activation and gate;
`multiply` and `correlate` are the products of spectra. Each accesses every number once; README.md has the mathematics.
L, n and D are specialised (one kernel for multiples of 16, another for other numbers), so that accesses can be of 16 bytes.
"""

import triton
import triton.language as tl

HALF_PI = tl.constexpr(1.5707963267948966)
SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def weight(t, n):
    """e^(i pi t / 2n) for 0 <= t < n: about its middle, where two short series do."""
    x = (t.to(tl.float32) / n - 0.5) * HALF_PI  # in [-pi/4, pi/4)
    r = x * x
    s = x * (1.0 + r * (-1.6666667e-1 + r * (8.3333333e-3 + r * (-1.9841270e-4 + r * 2.7557319e-6))))
    c = 1.0 + r * (-0.5 + r * (4.1666667e-2 + r * (-1.3888889e-3 + r * (2.4801587e-5 - r * 2.7557319e-7))))
    return (c - s) * SQRT_HALF, (c + s) * SQRT_HALF


@triton.jit
def activated(p, ACT: tl.constexpr):
    if ACT == "gelu":
        return 0.5 * p * (1.0 + tl.erf(p * SQRT_HALF))
    elif ACT == "silu":
        return p / (1.0 + tl.exp(-p))
    else:
        return p


@triton.jit
def slope(p, ACT: tl.constexpr):
    if ACT == "gelu":
        return 0.5 * (1.0 + tl.erf(p * SQRT_HALF)) + p * tl.exp(-0.5 * p * p) * 0.3989422804014327
    else:
        e = 1.0 / (1.0 + tl.exp(-p))
        return e * (1.0 + p * (1.0 - e))


@triton.jit
def place(L, D, tiles, BT: tl.constexpr, BD: tl.constexpr):
    """A program's batch row and first step and channel, 64 bits each; steps and channels from there, and which exist."""
    t0 = (tl.program_id(0) % tiles).to(tl.int64) * BT
    d0 = tl.program_id(1).to(tl.int64) * BD
    t, d = tl.arange(0, BT), tl.arange(0, BD)
    return (tl.program_id(0) // tiles).to(tl.int64), t0, d0, t, d, (t < L - t0)[:, None] & (d < D - d0)[None, :]


@triton.jit
def incoming(x, p_ptr, gate_ptr, at, mask, ACT: tl.constexpr, GATED: tl.constexpr):
    """The gradient before activation and gate, from that after them."""
    if GATED:
        x *= tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ACT != "none":
        x *= slope(tl.load(p_ptr + at, mask=mask, other=0.0).to(tl.float32), ACT)
    return x


@triton.jit(do_not_specialize=["tiles"])
def pack_kernel(
    x_ptr, p_ptr, gate_ptr, z_ptr, dgate_ptr, L, n, D, tiles, sxb, sxl, sxd, spb, spl, spd, BT: tl.constexpr,
    BD: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """z (B, D, n, 2) = x (B, L, D) weighted, zeros beyond L. In the backward x is dy: p, gate and dgate as strided as p."""
    b, t0, d0, t, d, mask = place(L, D, tiles, BT, BD)
    x_ptr += b * sxb + t0 * sxl + d0 * sxd
    x = tl.load(x_ptr + t[:, None] * sxl + d[None, :] * sxd, mask=mask, other=0.0).to(tl.float32)
    base = b * spb + t0 * spl + d0 * spd
    at = t[:, None] * spl + d[None, :] * spd
    if GATED:
        y = activated(tl.load(p_ptr + base + at, mask=mask, other=0.0).to(tl.float32), ACT)
        tl.store(dgate_ptr + base + at, (x * y).to(dgate_ptr.dtype.element_ty), mask=mask)
    x = incoming(x, p_ptr + base, gate_ptr + base, at, mask, ACT, GATED)
    re, im = weight(t0 + t, n)
    z = tl.join(x * re[:, None], x * im[:, None])  # [BT, BD, 2]
    z = tl.reshape(tl.permute(z, (1, 0, 2)), (BD, 2 * BT))
    i = tl.arange(0, 2 * BT)
    z_ptr += ((b * D + d0) * n + t0) * 2
    tl.store(z_ptr + d[:, None] * (2 * n) + i[None, :], z, mask=(d < D - d0)[:, None] & (i < 2 * (n - t0))[None, :])


@triton.jit
def taken(z_ptr, b, t0, d0, t, d, L, n, D, BT: tl.constexpr, BD: tl.constexpr):
    """The real part of the weighted result, [BT, BD]."""
    i = tl.arange(0, 2 * BT)
    z_ptr += ((b * D + d0) * n + t0) * 2
    mask = (d < D - d0)[:, None] & (i < 2 * (L - t0))[None, :]
    re, im = tl.split(tl.reshape(tl.load(z_ptr + d[:, None] * (2 * n) + i[None, :], mask=mask, other=0.0), (BD, BT, 2)))
    wr, wi = weight(t0 + t, n)
    return tl.trans(re * wr[None, :] + im * wi[None, :])


@triton.jit(do_not_specialize=["tiles"])
def unpack_kernel(
    z_ptr, u_ptr, skip_ptr, gate_ptr, y_ptr, p_ptr, L, n, D, tiles, sub, sul, sud, sgb, sgl, sgd, syb, syl, syd, spb, spl,
    spd, BT: tl.constexpr, BD: tl.constexpr, SKIP: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """y (B, L, D) from z (B, D, n, 2): with the skip's u, activation and gate; p, before those, where it is kept."""
    b, t0, d0, t, d, mask = place(L, D, tiles, BT, BD)
    p = taken(z_ptr, b, t0, d0, t, d, L, n, D, BT, BD)
    if SKIP:
        u_ptr += b * sub + t0 * sul + d0 * sud
        u = tl.load(u_ptr + t[:, None] * sul + d[None, :] * sud, mask=mask, other=0.0).to(tl.float32)
        p += tl.load(skip_ptr + d0 + d, mask=d < D - d0, other=0.0)[None, :] * u
    if KEEP:
        p_ptr += b * spb + t0 * spl + d0 * spd
        tl.store(p_ptr + t[:, None] * spl + d[None, :] * spd, p.to(p_ptr.dtype.element_ty), mask=mask)
    y = activated(p, ACT)
    if GATED:
        gate_ptr += b * sgb + t0 * sgl + d0 * sgd
        y *= tl.load(gate_ptr + t[:, None] * sgl + d[None, :] * sgd, mask=mask, other=0.0).to(tl.float32)
    y_ptr += b * syb + t0 * syl + d0 * syd
    tl.store(y_ptr + t[:, None] * syl + d[None, :] * syd, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def unpack_bwd_kernel(
    z_ptr, dy_ptr, u_ptr, p_ptr, skip_ptr, gate_ptr, du_ptr, dskip_ptr, L, n, D, tiles, sgb, sgl, sgd, sub, sul, sud, sdb,
    sdl, sdd, spb, spl, spd, BT: tl.constexpr, BD: tl.constexpr, SKIP: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """du (B, L, D) from z and the skip; dskip (B · tiles, D): sums over a tile. gate is as strided as p."""
    b, t0, d0, t, d, mask = place(L, D, tiles, BT, BD)
    du = taken(z_ptr, b, t0, d0, t, d, L, n, D, BT, BD)
    if SKIP:
        dy_ptr += b * sgb + t0 * sgl + d0 * sgd
        g = tl.load(dy_ptr + t[:, None] * sgl + d[None, :] * sgd, mask=mask, other=0.0).to(tl.float32)
        base = b * spb + t0 * spl + d0 * spd
        g = incoming(g, p_ptr + base, gate_ptr + base, t[:, None] * spl + d[None, :] * spd, mask, ACT, GATED)
        du += tl.load(skip_ptr + d0 + d, mask=d < D - d0, other=0.0)[None, :] * g
        u_ptr += b * sub + t0 * sul + d0 * sud
        u = tl.load(u_ptr + t[:, None] * sul + d[None, :] * sud, mask=mask, other=0.0).to(tl.float32)
        tl.store(dskip_ptr + tl.program_id(0).to(tl.int64) * D + d0 + d, tl.sum(g * u, 0), mask=d < D - d0)
    du_ptr += b * sdb + t0 * sdl + d0 * sdd
    tl.store(du_ptr + t[:, None] * sdl + d[None, :] * sdd, du.to(du_ptr.dtype.element_ty), mask=mask)


@triton.jit
def complex_load(ptr, i, mask, BLOCK: tl.constexpr):
    return tl.split(tl.reshape(tl.load(ptr + i, mask=mask, other=0.0), (BLOCK, 2)))


@triton.jit
def complex_store(ptr, i, mask, re, im, BLOCK: tl.constexpr):
    tl.store(ptr + i, tl.reshape(tl.join(re, im), (2 * BLOCK,)), mask=mask)


@triton.jit(do_not_specialize=["B", "scale"])
def multiply_kernel(z_ptr, k_ptr, B, size, scale, BLOCK: tl.constexpr):
    """z (B, size, 2) times scale k (size, 2), in place."""
    i = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    mask = i < 2 * size
    kr, ki = complex_load(k_ptr, i, mask, BLOCK)
    kr, ki = kr * scale, ki * scale
    for _ in range(0, B):
        zr, zi = complex_load(z_ptr, i, mask, BLOCK)
        complex_store(z_ptr, i, mask, zr * kr - zi * ki, zr * ki + zi * kr, BLOCK)
        z_ptr += 2 * size


@triton.jit(do_not_specialize=["B", "scale"])
def correlate_kernel(g_ptr, u_ptr, k_ptr, s_ptr, B, size, scale, BLOCK: tl.constexpr):
    """s = scale sum_b conj(u) g, and g times scale conj(k), in place. g, u (B, size, 2), k, s (size, 2)."""
    i = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    mask = i < 2 * size
    kr, ki = complex_load(k_ptr, i, mask, BLOCK)
    kr, ki = kr * scale, ki * scale
    sr = tl.zeros([BLOCK], tl.float32)
    si = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, B):
        gr, gi = complex_load(g_ptr, i, mask, BLOCK)
        ur, ui = complex_load(u_ptr, i, mask, BLOCK)
        sr += ur * gr + ui * gi
        si += ur * gi - ui * gr
        complex_store(g_ptr, i, mask, gr * kr + gi * ki, gi * kr - gr * ki, BLOCK)
        g_ptr += 2 * size
        u_ptr += 2 * size
    complex_store(s_ptr, i, mask, sr * scale, si * scale, BLOCK)

# ruff: noqa: RUF005 (the compiler's front end knows tuple concatenation, not unpacking)
"""The convolution kernels of S4D and S4 in Triton, forward and backward; the mathematics is in README.md.

S4D: the two tables of powers are made in registers and multiplied on the tensor cores, three tf32 products for one of
float32. An angle is a 64-bit integer, 2^64 a turn: l times it wraps around by itself, so phases are as good at step 10^6
as at step 1.
S4: a thread owns frequencies and walks the modes, so the sums need no reduction; the backward's sums over frequencies
are products of matrices.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TURN32 = tl.constexpr(1.4629180792671596e-9)  # 2 pi / 2^32


@triton.jit
def cis(turns):
    """Cosine and sine of an angle given as int64, 2^64 a turn."""
    t = (turns >> 32).to(tl.int32)
    quadrant = (t + (1 << 29)) >> 30
    x = (t - (quadrant << 30)).to(tl.float32) * TURN32  # in [-pi/4, pi/4]
    r = x * x
    s = x * (1.0 + r * (-1.6666667e-1 + r * (8.3333333e-3 + r * (-1.9841270e-4 + r * 2.7557319e-6))))
    c = 1.0 + r * (-0.5 + r * (4.1666667e-2 + r * (-1.3888889e-3 + r * (2.4801587e-5 - r * 2.7557319e-7))))
    odd = (quadrant & 1) != 0
    re, im = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where(((quadrant + 1) & 2) != 0, -re, re), tl.where((quadrant & 2) != 0, -im, im)


@triton.jit
def power(log_size, turns, k):
    """exp2(k log_size) e^(i k angle); k int64."""
    re, im = cis(k * turns)
    size = tl.exp2(k.to(tl.float32) * log_size)
    return size * re, size * im


@triton.jit(do_not_specialize=["D", "M", "L"])
def s4d_fwd_kernel(
    size_ptr, turn_ptr, c_ptr, K_ptr, D, M, L, Q: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """size, turn (D, M): log2 |a| and its angle. c (rows, M, 2), K (rows, L); row r has channel r mod D."""
    row = tl.program_id(0).to(tl.int64)
    d = row % D
    i = (tl.program_id(1) * R + tl.arange(0, R)).to(tl.int64)
    j = tl.arange(0, Q).to(tl.int64)
    acc = tl.zeros([R, Q], tl.float32)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        mm = m < M
        size = tl.load(size_ptr + d * M + m, mask=mm, other=0.0)
        turn = tl.load(turn_ptr + d * M + m, mask=mm, other=0)
        cr = tl.load(c_ptr + (row * M + m) * 2, mask=mm, other=0.0)
        ci = tl.load(c_ptr + (row * M + m) * 2 + 1, mask=mm, other=0.0)
        re, im = power(size[None, :], turn[None, :], (i * Q)[:, None])  # [R, BM]
        left_re, left_im = cr[None, :] * re - ci[None, :] * im, cr[None, :] * im + ci[None, :] * re
        re, im = power(size[:, None], turn[:, None], j[None, :])  # [BM, Q]
        acc = tl.dot(left_re, re, acc, input_precision=PRECISION)
        acc = tl.dot(-left_im, im, acc, input_precision=PRECISION)
    l = i[:, None] * Q + j[None, :]
    tl.store(K_ptr + row * L + l, acc, mask=l < L)


@triton.jit(do_not_specialize=["D", "M", "L", "SPANS"])
def s4d_bwd_kernel(
    dK_ptr, size_ptr, turn_ptr, out_ptr, D, M, L, SPANS, Q: tl.constexpr, R: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S = sum_l dK_l a^l and T = sum_l l dK_l a^l over a span of tiles. out (spans, rows, 4, M): Re S, Im S, Re T, Im T."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    d = row % D
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    mm = m < M
    size = tl.load(size_ptr + d * M + m, mask=mm, other=0.0)
    turn = tl.load(turn_ptr + d * M + m, mask=mm, other=0)
    j = tl.arange(0, Q).to(tl.int64)
    in_re, in_im = power(size[None, :], turn[None, :], j[:, None])  # [Q, BM]
    Sr = tl.zeros([R, BM], tl.float32)
    Si, Tr, Ti = Sr, Sr, Sr
    tiles = tl.cdiv(L, Q * R)
    for tile in range(span * tiles // SPANS, (span + 1) * tiles // SPANS):
        i = (tile * R + tl.arange(0, R)).to(tl.int64)
        l = i[:, None] * Q + j[None, :]
        g = tl.load(dK_ptr + row * L + l, mask=l < L, other=0.0)
        gj = g * j[None, :].to(tl.float32)
        first = (i * Q).to(tl.float32)[:, None]
        gr = tl.dot(g, in_re, input_precision=PRECISION)  # [R, BM]
        gi = tl.dot(g, in_im, input_precision=PRECISION)
        hr = tl.dot(gj, in_re, input_precision=PRECISION) + first * gr
        hi = tl.dot(gj, in_im, input_precision=PRECISION) + first * gi
        re, im = power(size[None, :], turn[None, :], (i * Q)[:, None])
        Sr += re * gr - im * gi
        Si += re * gi + im * gr
        Tr += re * hr - im * hi
        Ti += re * hi + im * hr
    out = out_ptr + (span * tl.num_programs(0) + row) * 4 * M + m
    tl.store(out, tl.sum(Sr, 0), mask=mm)
    tl.store(out + M, tl.sum(Si, 0), mask=mm)
    tl.store(out + 2 * M, tl.sum(Tr, 0), mask=mm)
    tl.store(out + 3 * M, tl.sum(Ti, 0), mask=mm)


@triton.jit
def fraction(y0, y1, c, s, lr, li0, li1):
    """kappa = 1/((2is - lambda c)(2is - conj(lambda) c)); the parts beyond float32 of 2 tan and Im lambda meet first."""
    near = c * ((y0 - li0) + (y1 - li1))
    far = c * (y0 + li0)
    sigma = c * lr
    Dr = sigma * sigma - near * far
    Di = -4.0 * s * sigma
    scale = 1.0 / (Dr * Dr + Di * Di)
    return Dr * scale, -Di * scale


@triton.jit(do_not_specialize=["M", "F"])
def dplr_sums_kernel(node_ptr, lam_ptr, w_ptr, out_ptr, M, F, BF: tl.constexpr, QUOTIENTS: tl.constexpr):
    """node (4, F): 2 tan (high, low), cos, sin. lam (D, 3, M): re, im (high, low). w (D, M, 8).

    out (D, F, 2), the spectrum; or (D, F, 4), the two quotients of Woodbury's formula, for the backward.
    """
    d = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BF + tl.arange(0, BF)
    mk = k < F
    y0 = tl.load(node_ptr + k, mask=mk, other=0.0)
    y1 = tl.load(node_ptr + F + k, mask=mk, other=0.0)
    c = tl.load(node_ptr + 2 * F + k, mask=mk, other=1.0)
    s = tl.load(node_ptr + 3 * F + k, mask=mk, other=0.0)
    lam_ptr += d * 3 * M
    w_ptr += d * M * 8
    sums = ()
    for _ in tl.static_range(16):
        sums = sums + (tl.zeros([BF], tl.float32),)
    for n in range(0, M):
        lr = tl.load(lam_ptr + n)
        li0 = tl.load(lam_ptr + M + n)
        li1 = tl.load(lam_ptr + 2 * M + n)
        kr, ki = fraction(y0, y1, c, s, lr, li0, li1)
        new = ()
        for q in tl.static_range(8):
            w = tl.load(w_ptr + n * 8 + q)
            new = new + (sums[2 * q] + kr * w, sums[2 * q + 1] + ki * w)
        sums = new
    # q = i s U + c W for C B, C P, P* B, P* P
    q0r, q0i = c * sums[8] - s * sums[1], c * sums[9] + s * sums[0]
    q1r, q1i = c * sums[10] - s * sums[3], c * sums[11] + s * sums[2]
    q2r, q2i = c * sums[12] - s * sums[5], c * sums[13] + s * sums[4]
    q3r, q3i = c * sums[14] - s * sums[7], c * sums[15] + s * sums[6]
    er, ei = 1.0 + c * q3r, c * q3i
    scale = 1.0 / (er * er + ei * ei)
    er, ei = er * scale, -ei * scale
    lr_, li_ = q1r * er - q1i * ei, q1r * ei + q1i * er  # q01 / (1 + c q11)
    if QUOTIENTS:
        rr, ri = q2r * er - q2i * ei, q2r * ei + q2i * er  # q10 / (1 + c q11)
        out = out_ptr + (d * F + k) * 4
        tl.store(out, lr_, mask=mk)
        tl.store(out + 1, li_, mask=mk)
        tl.store(out + 2, rr, mask=mk)
        tl.store(out + 3, ri, mask=mk)
    else:
        zr, zi = q0r - c * (lr_ * q2r - li_ * q2i), q0i - c * (lr_ * q2i + li_ * q2r)
        out = out_ptr + (d * F + k) * 2
        tl.store(out, c * zr - s * zi, mask=mk)
        tl.store(out + 1, c * zi + s * zr, mask=mk)


@triton.jit
def choose(j, a, b, c, d):
    """Column j of a matrix made of four vectors, each repeated: a, b, c or d by j in 0..3."""
    return tl.where(j == 0, a[:, None], tl.where(j == 1, b[:, None], tl.where(j == 2, c[:, None], d[:, None])))


@triton.jit(do_not_specialize=["M", "F", "L", "SPANS"])
def dplr_bwd_kernel(
    node_ptr, lam_ptr, w_ptr, g_ptr, quotient_ptr, dw_ptr, dlam_ptr, M, F, L, SPANS, BF: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """g (D, F, 2): transform of dK. dw (spans, D, M, 8), dlam (spans, D, 2, M): sums over a span of frequencies."""
    d = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    mm = m < M
    lam_ptr += d * 3 * M
    lr = tl.load(lam_ptr + m, mask=mm, other=-1.0)[None, :]
    li0 = tl.load(lam_ptr + M + m, mask=mm, other=0.0)[None, :]
    li1 = tl.load(lam_ptr + 2 * M + m, mask=mm, other=0.0)[None, :]
    col = tl.arange(0, 16)
    wt = tl.load(w_ptr + (d * M + m[None, :]) * 8 + col[:, None], mask=mm[None, :] & (col < 8)[:, None], other=0.0)  # [16, BM]
    dw = tl.zeros([BM, 16], tl.float32)
    dr_acc = tl.zeros([BF, BM], tl.float32)
    di_acc = tl.zeros([BF, BM], tl.float32)
    tiles = tl.cdiv(F, BF)
    j = (col & 3)[None, :]
    for tile in range(span * tiles // SPANS, (span + 1) * tiles // SPANS):
        k = tile * BF + tl.arange(0, BF)
        mk = k < F
        y0 = tl.load(node_ptr + k, mask=mk, other=0.0)
        y1 = tl.load(node_ptr + F + k, mask=mk, other=0.0)
        c = tl.load(node_ptr + 2 * F + k, mask=mk, other=1.0)
        s = tl.load(node_ptr + 3 * F + k, mask=mk, other=0.0)
        at = d * F + k
        gr, gi = tl.load(g_ptr + at * 2, mask=mk, other=0.0), tl.load(g_ptr + at * 2 + 1, mask=mk, other=0.0)
        Lr, Li = tl.load(quotient_ptr + at * 4, mask=mk, other=0.0), tl.load(quotient_ptr + at * 4 + 1, mask=mk, other=0.0)
        Rr, Ri = tl.load(quotient_ptr + at * 4 + 2, mask=mk, other=0.0), tl.load(quotient_ptr + at * 4 + 3, mask=mk, other=0.0)
        # how often the frequency stands in the full spectrum, over L; and back through 1/sqrt(omega)
        scale = tl.where((k == 0) | (2 * k == L), 1.0, 2.0) / L
        gr, gi = (gr * c + gi * s) * scale, (gi * c - gr * s) * scale
        # the four derivatives by q00, q01, q10, q11: conj(f) g with f = 1, -c right, -c left, c^2 left right
        f3r, f3i = c * c * (Lr * Rr - Li * Ri), c * c * (Lr * Ri + Li * Rr)
        one = tl.full([BF], 1.0, tl.float32)
        fr = choose(j, one, -c * Rr, -c * Lr, f3r)
        fi = choose(j, 0.0 * one, -c * Ri, -c * Li, f3i)  # [BF, 16]
        qr = fr * gr[:, None] + fi * gi[:, None]
        qi = fr * gi[:, None] - fi * gr[:, None]
        first = (col < 4)[None, :]  # by U = sum kappa a: -i s dq; by W = sum kappa b: c dq
        dr = tl.where(first, s[:, None] * qi, c[:, None] * qr)
        di = tl.where(first, -s[:, None] * qr, c[:, None] * qi)  # [BF, 16]
        s, c = s[:, None], c[:, None]
        kr, ki = fraction(y0[:, None], y1[:, None], c, s, lr, li0, li1)  # [BF, BM]
        dw = tl.dot(tl.trans(kr), dr, dw, input_precision=PRECISION)
        dw = tl.dot(tl.trans(ki), di, dw, input_precision=PRECISION)
        hr = tl.dot(dr, wt, input_precision=PRECISION)
        hi = tl.dot(di, wt, input_precision=PRECISION)
        # kappa = 1/D: dD = -conj(kappa^2) dkappa
        sr, si = kr * kr - ki * ki, 2.0 * kr * ki
        Dr, Di = -(sr * hr + si * hi), -(sr * hi - si * hr)
        dr_acc += c * (2.0 * c * lr * Dr - 4.0 * s * Di)
        di_acc += c * c * Dr
    at = (span * tl.num_programs(0) + d) * M
    tl.store(dw_ptr + (at + m[:, None]) * 8 + col[None, :], dw, mask=mm[:, None] & (col < 8)[None, :])
    tl.store(dlam_ptr + at * 2 + m, tl.sum(dr_acc, 0), mask=mm)
    tl.store(dlam_ptr + at * 2 + M + m, tl.sum(di_acc * 2.0 * li0, 0), mask=mm)

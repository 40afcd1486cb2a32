# ruff: noqa: RUF005 (the compiler's front end supports tuple concatenation, not unpacking)
"""The convolution kernels of S4D and S4 in Triton, forward and backward; the mathematics is in README.md.

S4D: the two tables of powers are computed in registers and multiplied on the tensor cores, with three tf32 products for
one of float32. An angle is a 64-bit integer, 2^64 per turn: l times it wraps around by itself, so phases are as accurate at
step 10^6 as at step 1.
S4: in the forward a thread owns frequencies and loops over the modes, in the backward it owns modes and loops over the
frequencies, so that threads exchange sums only at the end.
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


@triton.jit
def zero_order_hold(log_dt_ptr, log_decay_ptr, imag_ptr, d, m, mm, M, SETS):
    """In float64: dt, A, w = dt A, exp(w) - 1 and the input's factor b = (exp(w) - 1)/A, of modes m of channel d."""
    dt = tl.exp(tl.load(log_dt_ptr + d).to(tl.float64))
    at = (d % SETS) * M + m
    Ar = -tl.exp(tl.load(log_decay_ptr + at, mask=mm, other=0.0).to(tl.float64))
    Ai = tl.load(imag_ptr + at, mask=mm, other=0.0).to(tl.float64)
    wr, wi = dt * Ar, dt * Ai
    grown, half = tl.exp(wr) - 1.0, tl.sin(wi * 0.5)
    er, ei = grown * tl.cos(wi) - 2.0 * half * half, (1.0 + grown) * tl.sin(wi)
    scale = 1.0 / (Ar * Ar + Ai * Ai)
    return dt, Ar, Ai, wr, wi, er, ei, (er * Ar + ei * Ai) * scale, (ei * Ar - er * Ai) * scale


@triton.jit(do_not_specialize=["M", "SETS"])
def s4d_prepare_kernel(log_dt_ptr, log_decay_ptr, imag_ptr, C_ptr, size_ptr, turn_ptr, c_ptr, M, SETS, BM: tl.constexpr):
    """From the parameters of a layer: log2 |a|, its angle in 64 bits, and c = 2 C b."""
    d = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    mm = m < M
    _, _, _, wr, wi, _, _, br, bi = zero_order_hold(log_dt_ptr, log_decay_ptr, imag_ptr, d, m, mm, M, SETS)
    at = d * M + m
    turns = wi * 0.15915494309189535
    turns -= tl.floor(turns + 0.5)
    Cr = 2.0 * tl.load(C_ptr + at * 2, mask=mm, other=0.0).to(tl.float64)
    Ci = 2.0 * tl.load(C_ptr + at * 2 + 1, mask=mm, other=0.0).to(tl.float64)
    tl.store(size_ptr + at, (wr * LOG2E).to(tl.float32), mask=mm)
    tl.store(turn_ptr + at, (turns * 4611686018427387904.0).to(tl.int64) << 2, mask=mm)
    tl.store(c_ptr + at * 2, (Cr * br - Ci * bi).to(tl.float32), mask=mm)
    tl.store(c_ptr + at * 2 + 1, (Cr * bi + Ci * br).to(tl.float32), mask=mm)


@triton.jit(do_not_specialize=["M", "SETS", "SPANS"])
def s4d_finish_kernel(
    sums_ptr, log_dt_ptr, log_decay_ptr, imag_ptr, C_ptr, dlog_dt_ptr, ddecay_ptr, dimag_ptr, dC_ptr, M, SETS, SPANS,
    BM: tl.constexpr,
):  # fmt: skip
    """From S and T (spans, D, 4, M) to the gradients of the parameters; those of A for each channel. All M in one block."""
    d = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    mm = m < M
    Sr = tl.zeros([BM], tl.float64)
    Si, Tr, Ti = Sr, Sr, Sr
    for span in range(0, SPANS):
        at = sums_ptr + (span * tl.num_programs(0) + d) * 4 * M + m
        Sr += tl.load(at, mask=mm, other=0.0).to(tl.float64)
        Si += tl.load(at + M, mask=mm, other=0.0).to(tl.float64)
        Tr += tl.load(at + 2 * M, mask=mm, other=0.0).to(tl.float64)
        Ti += tl.load(at + 3 * M, mask=mm, other=0.0).to(tl.float64)
    dt, Ar, Ai, wr, wi, er, ei, br, bi = zero_order_hold(log_dt_ptr, log_decay_ptr, imag_ptr, d, m, mm, M, SETS)
    at = d * M + m
    Cr = 2.0 * tl.load(C_ptr + at * 2, mask=mm, other=0.0).to(tl.float64)
    Ci = 2.0 * tl.load(C_ptr + at * 2 + 1, mask=mm, other=0.0).to(tl.float64)
    # gradients: conj(S) of c, hence 2 conj(b S) of C and conj(2 C S) of b; conj(c T) of w, through the powers
    cr, ci = Cr * br - Ci * bi, Cr * bi + Ci * br
    tl.store(dC_ptr + at * 2, (2.0 * (br * Sr - bi * Si)).to(tl.float32), mask=mm)
    tl.store(dC_ptr + at * 2 + 1, (-2.0 * (br * Si + bi * Sr)).to(tl.float32), mask=mm)
    gr, gi = Cr * Sr - Ci * Si, -(Cr * Si + Ci * Sr)
    # the derivative of b = (exp(w) - 1)/A is exp(w)/A with respect to w, and -b/A to A alone; g/conj(A) occurs in both
    scale = 1.0 / (Ar * Ar + Ai * Ai)
    qr, qi = (gr * Ar - gi * Ai) * scale, (gr * Ai + gi * Ar) * scale
    vr = cr * Tr - ci * Ti + (1.0 + er) * qr + ei * qi
    vi = -(cr * Ti + ci * Tr) + (1.0 + er) * qi - ei * qr
    dAr, dAi = dt * vr - (br * qr + bi * qi), dt * vi - (br * qi - bi * qr)
    tl.store(ddecay_ptr + at, (dAr * Ar).to(tl.float32), mask=mm)
    tl.store(dimag_ptr + at, dAi.to(tl.float32), mask=mm)
    tl.store(dlog_dt_ptr + d, (tl.sum(tl.where(mm, wr * vr + wi * vi, 0.0), 0)).to(tl.float32))


@triton.jit(do_not_specialize=["D", "M"])
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


@triton.jit(do_not_specialize=["D", "M", "SPANS"])
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
def fraction(y0, y1, cc, sc, lr, li0, li1):
    """kappa = 1/((2is - lambda c)(2is - conj(lambda) c)) from y = 2s/c, c^2 and s c, as torch_forms.fractions says."""
    near = (y0 - li0) + (y1 - li1)
    re = cc * (lr * lr - near * (y0 + li0))
    im = 4.0 * sc * lr  # minus the imaginary part
    scale = 1.0 / (re * re + im * im)
    return re * scale, im * scale


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
    cc, sc = c * c, s * c
    sums = ()
    for _ in tl.static_range(16):
        sums = sums + (tl.zeros([BF], tl.float32),)
    for n in range(0, M):
        lr = tl.load(lam_ptr + n)
        li0 = tl.load(lam_ptr + M + n)
        li1 = tl.load(lam_ptr + 2 * M + n)
        kr, ki = fraction(y0, y1, cc, sc, lr, li0, li1)
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
def conj_times(ar, ai, br, bi):
    return ar * br + ai * bi, ar * bi - ai * br


@triton.jit(do_not_specialize=["M", "F", "L", "SPANS"])
def dplr_bwd_kernel(
    node_ptr, lam_ptr, w_ptr, g_ptr, quotient_ptr, dw_ptr, dlam_ptr, M, F, L, SPANS, BK: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """g (D, F, 2): transform of dK. dw (spans, D, M, 8), dlam (spans, D, 2, M): sums over a span of frequencies.

    A thread has one of BK frequencies and several modes: what belongs to the frequency is loaded and made once for them
    all, and sums over frequencies stay in the thread until the end.
    """
    d = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    mm = m < M
    lam_ptr += d * 3 * M
    lr = tl.load(lam_ptr + m, mask=mm, other=-1.0)[:, None]
    li0 = tl.load(lam_ptr + M + m, mask=mm, other=0.0)[:, None]
    li1 = tl.load(lam_ptr + 2 * M + m, mask=mm, other=0.0)[:, None]
    w, sums = (), ()
    for j in tl.static_range(8):
        w = w + (tl.load(w_ptr + (d * M + m) * 8 + j, mask=mm, other=0.0)[:, None],)
        sums = sums + (tl.zeros([BM, BK], tl.float32),)
    near = tl.zeros([BM, BK], tl.float32)  # c^2 Re dD, s c Im dD
    damp = tl.zeros([BM, BK], tl.float32)
    tiles = tl.cdiv(F, BK)
    for tile in range(span * tiles // SPANS, (span + 1) * tiles // SPANS):
        k = tile * BK + tl.arange(0, BK)
        mk = k < F
        y0 = tl.load(node_ptr + k, mask=mk, other=0.0)
        y1 = tl.load(node_ptr + F + k, mask=mk, other=0.0)
        c = tl.load(node_ptr + 2 * F + k, mask=mk, other=1.0)
        s = tl.load(node_ptr + 3 * F + k, mask=mk, other=0.0)
        at = d * F + k
        gr, gi = tl.load(g_ptr + at * 2, mask=mk, other=0.0), tl.load(g_ptr + at * 2 + 1, mask=mk, other=0.0)
        Lr, Li = tl.load(quotient_ptr + at * 4, mask=mk, other=0.0), tl.load(quotient_ptr + at * 4 + 1, mask=mk, other=0.0)
        Rr, Ri = tl.load(quotient_ptr + at * 4 + 2, mask=mk, other=0.0), tl.load(quotient_ptr + at * 4 + 3, mask=mk, other=0.0)
        # the number of times that the frequency occurs in the full spectrum, over L; then the gradient of 1/sqrt(omega)
        scale = tl.where((k == 0) | (2 * k == L), 1.0, 2.0) / L
        gr, gi = (gr * c + gi * s) * scale, (gi * c - gr * s) * scale
        # gradients: g of q00, -conj(c right) g of q01, -conj(c left) g of q10, conj(c^2 left right) g of q11
        q1r, q1i = conj_times(-c * Rr, -c * Ri, gr, gi)
        q2r, q2i = conj_times(-c * Lr, -c * Li, gr, gi)
        q3r, q3i = conj_times(-c * Lr, -c * Li, q1r, q1i)
        dq = (gr[None, :], gi[None, :], q1r[None, :], q1i[None, :], q2r[None, :], q2i[None, :], q3r[None, :], q3i[None, :])
        c, s = c[None, :], s[None, :]
        cc, sc = c * c, s * c
        kr, ki = fraction(y0[None, :], y1[None, :], cc, sc, lr, li0, li1)  # [BM, BK]
        # dkappa = -i s sum a dq + c sum b dq
        xr = w[0] * dq[0] + w[1] * dq[2] + w[2] * dq[4] + w[3] * dq[6]
        xi = w[0] * dq[1] + w[1] * dq[3] + w[2] * dq[5] + w[3] * dq[7]
        yr = w[4] * dq[0] + w[5] * dq[2] + w[6] * dq[4] + w[7] * dq[6]
        yi = w[4] * dq[1] + w[5] * dq[3] + w[6] * dq[5] + w[7] * dq[7]
        hr, hi = s * xi + c * yr, c * yi - s * xr
        # kappa = 1/D: dD = -conj(kappa^2) dkappa
        sr, si = kr * kr - ki * ki, 2.0 * kr * ki
        near -= cc * (sr * hr + si * hi)
        damp -= sc * (sr * hi - si * hr)
        ar, ai, br, bi = -s * ki, s * kr, c * kr, c * ki
        new = ()
        for j in tl.static_range(4):
            new = new + (sums[j] + ar * dq[2 * j] + ai * dq[2 * j + 1],)
        for j in tl.static_range(4):
            new = new + (sums[4 + j] + br * dq[2 * j] + bi * dq[2 * j + 1],)
        sums = new
    at = (span * tl.num_programs(0) + d) * M
    for j in tl.static_range(8):
        tl.store(dw_ptr + (at + m) * 8 + j, tl.sum(sums[j], 1), mask=mm)
    tl.store(dlam_ptr + at * 2 + m, tl.sum(2.0 * lr * near - 4.0 * damp, 1), mask=mm)
    tl.store(dlam_ptr + at * 2 + M + m, tl.sum(2.0 * li0 * near, 1), mask=mm)


# From the parameters of an S4 layer to the inputs of the sums, and back, in float64; README.md has the formulas


@triton.jit(do_not_specialize=["F", "L"])
def nodes_kernel(node_ptr, F, L, BF: tl.constexpr):
    """As torch_forms.nodes: 2 tan(theta/2) (high, low), cos(theta/2), sin(theta/2). node (4, F) float32."""
    k = tl.program_id(0) * BF + tl.arange(0, BF)
    mk = k < F
    half = k.to(tl.float64) / L * 3.141592653589793
    c, s = tl.cos(half), tl.sin(half)
    last = 2 * k == L
    c, s = tl.where(last, 1.734723475976807e-18, c), tl.where(last, 1.0, s)  # 2^-59
    y = 2.0 * s / c
    high = y.to(tl.float32)
    tl.store(node_ptr + k, high, mask=mk)
    tl.store(node_ptr + F + k, (y - high.to(tl.float64)).to(tl.float32), mask=mk)
    tl.store(node_ptr + 2 * F + k, c.to(tl.float32), mask=mk)
    tl.store(node_ptr + 3 * F + k, s.to(tl.float32), mask=mk)


@triton.jit
def pair(ptr, at, mask):
    re, im = tl.load(ptr + at * 2, mask=mask, other=0.0), tl.load(ptr + at * 2 + 1, mask=mask, other=0.0)
    return re.to(tl.float64), im.to(tl.float64)


@triton.jit
def dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, m, mm, M, SETS):
    """Of modes m of channel d: dt, its root, lambda = dt A, sqrt(dt) P, and E = 1/(1 - lambda/2)."""
    log_dt = tl.load(log_dt_ptr + d).to(tl.float64)
    dt, root = tl.exp(log_dt), tl.exp(0.5 * log_dt)
    at = (d % SETS) * M + m
    lr = -dt * tl.exp(tl.load(decay_ptr + at, mask=mm, other=0.0).to(tl.float64))
    li = dt * tl.load(imag_ptr + at, mask=mm, other=0.0).to(tl.float64)
    pr, pi = pair(P_ptr, at, mm)
    x = 1.0 - 0.5 * lr
    scale = 1.0 / (x * x + 0.25 * li * li)
    return dt, root, lr, li, root * pr, root * pi, x * scale, 0.5 * li * scale


@triton.jit
def rank_one_gain(pr, pi, Er):
    return 1.0 / (1.0 + tl.sum((pr * pr + pi * pi) * Er, 0))


@triton.jit(do_not_specialize=["M", "SETS"])
def dplr_prepare_kernel(
    log_dt_ptr, decay_ptr, imag_ptr, P_ptr, C_ptr, X_ptr, left_ptr, right_ptr, row_ptr, M, SETS, BR: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """X (D, N, N) = the discrete state matrix in real coordinates; left = E p, right = E^T p and the row of C (D, N)."""
    d = tl.program_id(0).to(tl.int64)
    N = 2 * M
    m = tl.arange(0, BM)
    _, _, _, _, pr, pi, Er, _ = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, m, m < M, M, SETS)
    gain = rank_one_gain(pr, pi, Er)
    i = tl.program_id(1) * BR + tl.arange(0, BR)
    mi = i % M
    _, _, _, _, pr, pi, Er, Ei = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, mi, i < N, M, SETS)
    left = tl.where(i < M, Er * pr - Ei * pi, Er * pi + Ei * pr)
    j = tl.arange(0, BN)
    mj = j % M
    _, _, _, _, pr, pi, Fr, Fi = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, mj, j < N, M, SETS)
    right = tl.where(j < M, Fr * pr + Fi * pi, Fr * pi - Fi * pr)
    side = tl.where((i < M)[:, None], -Ei[:, None], Ei[:, None])
    block = tl.where((i < M)[:, None] == (j < M)[None, :], Er[:, None], side)
    X = tl.where(mi[:, None] == mj[None, :], block, 0.0) - gain * left[:, None] * right[None, :]
    X = 2.0 * X - tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    mask = (i < N)[:, None] & (j < N)[None, :]
    tl.store(X_ptr + d * N * N + i[:, None] * N + j[None, :], X, mask=mask)
    tl.store(left_ptr + d * N + i, left, mask=i < N)
    if tl.program_id(1) == 0:
        Cr, Ci = pair(C_ptr, d * M + mj, j < N)
        tl.store(right_ptr + d * N + j, right, mask=j < N)
        tl.store(row_ptr + d * N + j, tl.where(j < M, 2.0 * Cr, -2.0 * Ci), mask=j < N)


@triton.jit
def dplr_residues(dt, lr, li, pr, pi, B_ptr, C_ptr, power_ptr, d, m, mm, M, SETS):
    """dt B, C~ = C (I - A^n) and the four residues C~ B, C~ P, P* B, P* P (the last is real)."""
    br, bi = pair(B_ptr, (d % SETS) * M + m, mm)
    br, bi = dt * br, dt * bi
    Cr, Ci = pair(C_ptr, d * M + m, mm)
    cr = Cr - 0.5 * tl.load(power_ptr + d * 2 * M + m, mask=mm, other=0.0)
    ci = Ci + 0.5 * tl.load(power_ptr + d * 2 * M + M + m, mask=mm, other=0.0)
    return (
        br, bi, cr, ci, cr * br - ci * bi, cr * bi + ci * br, cr * pr - ci * pi, cr * pi + ci * pr, pr * br + pi * bi,
        pr * bi - pi * br, pr * pr + pi * pi,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "SETS"])
def dplr_weights_kernel(
    log_dt_ptr, decay_ptr, imag_ptr, P_ptr, B_ptr, C_ptr, power_ptr, lam_ptr, w_ptr, M, SETS, BM: tl.constexpr
):  # fmt: skip
    """power (D, N): the row of C times A^n. lam (D, 3, M) and w (D, M, 8) as the sums take them."""
    d = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    mm = m < M
    dt, _, lr, li, pr, pi, _, _ = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, m, mm, M, SETS)
    _, _, _, _, v0r, v0i, v1r, v1i, v2r, v2i, v3r = dplr_residues(
        dt, lr, li, pr, pi, B_ptr, C_ptr, power_ptr, d, m, mm, M, SETS
    )
    high = li.to(tl.float32)
    lam_ptr += d * 3 * M + m
    tl.store(lam_ptr, lr.to(tl.float32), mask=mm)
    tl.store(lam_ptr + M, high, mask=mm)
    tl.store(lam_ptr + 2 * M, (li - high.to(tl.float64)).to(tl.float32), mask=mm)
    w_ptr += (d * M + m) * 8
    tl.store(w_ptr, (4.0 * v0r).to(tl.float32), mask=mm)
    tl.store(w_ptr + 1, (4.0 * v1r).to(tl.float32), mask=mm)
    tl.store(w_ptr + 2, (4.0 * v2r).to(tl.float32), mask=mm)
    tl.store(w_ptr + 3, (4.0 * v3r).to(tl.float32), mask=mm)
    tl.store(w_ptr + 4, (-2.0 * (v0r * lr + v0i * li)).to(tl.float32), mask=mm)
    tl.store(w_ptr + 5, (-2.0 * (v1r * lr + v1i * li)).to(tl.float32), mask=mm)
    tl.store(w_ptr + 6, (-2.0 * (v2r * lr + v2i * li)).to(tl.float32), mask=mm)
    tl.store(w_ptr + 7, (-2.0 * v3r * lr).to(tl.float32), mask=mm)


@triton.jit(do_not_specialize=["M", "SETS", "SPANS"])
def dplr_weights_bwd_kernel(
    log_dt_ptr, decay_ptr, imag_ptr, P_ptr, B_ptr, C_ptr, power_ptr, dw_ptr, dlam_ptr, part_ptr, dpower_ptr, M, SETS, SPANS,
    BM: tl.constexpr,
):  # fmt: skip
    """part (D, 8, M): gradients of lambda, sqrt(dt) P, dt B and C~, real and imaginary; dpower (D, N)."""
    d = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BM)
    mm = m < M
    dt, _, lr, li, pr, pi, _, _ = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, m, mm, M, SETS)
    br, bi, cr, ci, v0r, v0i, v1r, v1i, v2r, v2i, v3r = dplr_residues(
        dt, lr, li, pr, pi, B_ptr, C_ptr, power_ptr, d, m, mm, M, SETS
    )
    dlr, dli = tl.zeros([BM], tl.float64), tl.zeros([BM], tl.float64)
    dw = ()
    for _ in tl.static_range(8):
        dw = dw + (tl.zeros([BM], tl.float64),)
    for span in range(0, SPANS):
        at = span * tl.num_programs(0) + d
        dlr += tl.load(dlam_ptr + at * 2 * M + m, mask=mm, other=0.0).to(tl.float64)
        dli += tl.load(dlam_ptr + at * 2 * M + M + m, mask=mm, other=0.0).to(tl.float64)
        new = ()
        for j in tl.static_range(8):
            new = new + (dw[j] + tl.load(dw_ptr + (at * M + m) * 8 + j, mask=mm, other=0.0).to(tl.float64),)
        dw = new
    # a = 4 Re v, b = -2 Re(v conj(lambda))
    dlr -= 2.0 * (dw[4] * v0r + dw[5] * v1r + dw[6] * v2r + dw[7] * v3r)
    dli -= 2.0 * (dw[4] * v0i + dw[5] * v1i + dw[6] * v2i)
    g0r, g0i = 4.0 * dw[0] - 2.0 * dw[4] * lr, -2.0 * dw[4] * li
    g1r, g1i = 4.0 * dw[1] - 2.0 * dw[5] * lr, -2.0 * dw[5] * li
    g2r, g2i = 4.0 * dw[2] - 2.0 * dw[6] * lr, -2.0 * dw[6] * li
    g3r = 4.0 * dw[3] - 2.0 * dw[7] * lr
    dcr = br * g0r + bi * g0i + pr * g1r + pi * g1i
    dci = br * g0i - bi * g0r + pr * g1i - pi * g1r
    part_ptr += d * 8 * M + m
    tl.store(part_ptr, dlr, mask=mm)
    tl.store(part_ptr + M, dli, mask=mm)
    tl.store(part_ptr + 2 * M, cr * g1r + ci * g1i + g2r * br + g2i * bi + 2.0 * pr * g3r, mask=mm)
    tl.store(part_ptr + 3 * M, cr * g1i - ci * g1r + g2r * bi - g2i * br + 2.0 * pi * g3r, mask=mm)
    tl.store(part_ptr + 4 * M, cr * g0r + ci * g0i + pr * g2r - pi * g2i, mask=mm)
    tl.store(part_ptr + 5 * M, cr * g0i - ci * g0r + pr * g2i + pi * g2r, mask=mm)
    tl.store(part_ptr + 6 * M, dcr, mask=mm)
    tl.store(part_ptr + 7 * M, dci, mask=mm)
    tl.store(dpower_ptr + d * 2 * M + m, -0.5 * dcr, mask=mm)
    tl.store(dpower_ptr + d * 2 * M + M + m, 0.5 * dci, mask=mm)


@triton.jit(do_not_specialize=["M", "SETS"])
def dplr_finish_kernel(
    log_dt_ptr, decay_ptr, imag_ptr, P_ptr, B_ptr, dX_ptr, Xr_ptr, Xl_ptr, drow_ptr, part_ptr, dlog_dt_ptr, out_ptr, dC_ptr,
    M, SETS, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of the parameters. Xr = dX right and Xl = dX^T left (D, N). out (D, 6, M): log_decay, imag, P, B."""
    d = tl.program_id(0).to(tl.int64)
    N = 2 * M
    m = tl.arange(0, BM)
    mm = m < M
    dt, root, lr, li, pr, pi, Er, Ei = dplr_modes(log_dt_ptr, decay_ptr, imag_ptr, P_ptr, d, m, mm, M, SETS)
    gain = rank_one_gain(pr, pi, Er)
    xr, xi = tl.load(Xr_ptr + d * N + m, mask=mm, other=0.0), tl.load(Xr_ptr + d * N + M + m, mask=mm, other=0.0)
    yr, yi = tl.load(Xl_ptr + d * N + m, mask=mm, other=0.0), tl.load(Xl_ptr + d * N + M + m, mask=mm, other=0.0)
    # X = 2 (E - gain left right^T) - I, left = E P and right = conj(E) P as pairs, gain = 1/(1 + sum |P|^2 Re E)
    ur, ui, vr, vi = -2.0 * gain * xr, -2.0 * gain * xi, -2.0 * gain * yr, -2.0 * gain * yi
    dsum = 2.0 * gain * gain * tl.sum((Er * pr - Ei * pi) * xr + (Er * pi + Ei * pr) * xi, 0)
    dX = dX_ptr + d * N * N + m * (N + 1)
    dEr = 2.0 * (tl.load(dX, mask=mm, other=0.0) + tl.load(dX + M * (N + 1), mask=mm, other=0.0))
    dEi = 2.0 * (tl.load(dX + M * N, mask=mm, other=0.0) - tl.load(dX + M, mask=mm, other=0.0))
    dEr += dsum * (pr * pr + pi * pi) + pr * ur + pi * ui + vr * pr + vi * pi
    dEi += pr * ui - pi * ur + vr * pi - vi * pr
    part_ptr += d * 8 * M + m
    dpr = tl.load(part_ptr + 2 * M, mask=mm, other=0.0) + Er * ur + Ei * ui + Er * vr - Ei * vi + 2.0 * dsum * Er * pr
    dpi = tl.load(part_ptr + 3 * M, mask=mm, other=0.0) + Er * ui - Ei * ur + Er * vi + Ei * vr + 2.0 * dsum * Er * pi
    # the derivative of E = 1/(1 - lambda/2) with respect to lambda is E^2/2
    sr, si = 0.5 * (Er * Er - Ei * Ei), Er * Ei
    dlr = tl.load(part_ptr, mask=mm, other=0.0) + sr * dEr + si * dEi
    dli = tl.load(part_ptr + M, mask=mm, other=0.0) + sr * dEi - si * dEr
    dbr, dbi = tl.load(part_ptr + 4 * M, mask=mm, other=0.0), tl.load(part_ptr + 5 * M, mask=mm, other=0.0)
    br, bi = pair(B_ptr, (d % SETS) * M + m, mm)
    # lambda = dt A, p = sqrt(dt) P, b = dt B
    by_dt = lr * dlr + li * dli + 0.5 * (pr * dpr + pi * dpi) + dt * (br * dbr + bi * dbi)
    tl.store(dlog_dt_ptr + d, tl.sum(tl.where(mm, by_dt, 0.0), 0).to(tl.float32))
    out_ptr += d * 6 * M + m
    tl.store(out_ptr, (dlr * lr).to(tl.float32), mask=mm)
    tl.store(out_ptr + M, (dt * dli).to(tl.float32), mask=mm)
    tl.store(out_ptr + 2 * M, (root * dpr).to(tl.float32), mask=mm)
    tl.store(out_ptr + 3 * M, (root * dpi).to(tl.float32), mask=mm)
    tl.store(out_ptr + 4 * M, (dt * dbr).to(tl.float32), mask=mm)
    tl.store(out_ptr + 5 * M, (dt * dbi).to(tl.float32), mask=mm)
    dC = dC_ptr + (d * M + m) * 2
    dcr = tl.load(part_ptr + 6 * M, mask=mm, other=0.0) + 2.0 * tl.load(drow_ptr + d * N + m, mask=mm, other=0.0)
    dci = tl.load(part_ptr + 7 * M, mask=mm, other=0.0) - 2.0 * tl.load(drow_ptr + d * N + M + m, mask=mm, other=0.0)
    tl.store(dC, dcr.to(tl.float32), mask=mm)
    tl.store(dC + 1, dci.to(tl.float32), mask=mm)

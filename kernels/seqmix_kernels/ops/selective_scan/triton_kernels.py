# ruff: noqa: RUF005 (the compiler's front end supports tuple concatenation, not unpacking)
"""The selective scan in plain Triton: any N up to 256, any length, strides, options. Triton's interpreter can run it.

    delta_t = softplus(dt_t + dt_bias)                      (or dt_t + dt_bias)
    h_t = a_t h_{t-1} + w_t x_t,  a_t = exp(delta_t A)      w_t = delta_t B_t (euler) or expm1(delta_t A) / A B_t (zoh)
    y_t = (C_t . h_t + D x_t) silu(z_t)                     Gu and Dao 2023, section 3

A program owns BD channels of one group of one batch row and walks L serially; the states are a [NP, BD] tile. Triton
does not know that any offset into such a tile is contiguous (every stride is unspecialised), so it uses one or a few lanes
per channel and keeps the states in registers: the sum over states then needs few shuffles.
The kernel writes only the state before every K-th step. The backward processes the chunks last to first: it runs a chunk
forward, storing the state before every S-th step in scratch, and then each group of S steps forward and backward in
registers.

Saved states (rows, chunks, ...): float32 [D, N], or for 16-bit inputs block floating point, int16: [D, N] with 15 bits
and a sign relative to the largest state of the channel, then the D biased exponents.
"""

import triton
import triton.language as tl

from ...triton_math import LOG2E, sigmoid, softplus, zoh

SHRINK, GROW = tl.constexpr(0.999938964), tl.constexpr(1.00006104)  # 1 - 2^-14 and its inverse
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits

_ints = ["one", "L", "T0", "T1", "PL", "D", "DG", "NB", "sxb", "sxl", "sxd", "stb", "stl", "std", "szb", "szl", "szd",
         "sgb", "sgl", "sgd", "sBb", "sBl", "sBg", "sCb", "sCl", "sCg", "sAd", "sAn", "sqb", "sql"]  # fmt: skip


@triton.jit
def save_state(ptr, h, n, d, N: tl.constexpr, D, one, mask, dm, BFP: tl.constexpr):
    """One saved state: [D, N] at ptr, then with BFP the D exponents."""
    p = ptr + d[None, :].to(tl.int64) * N + n[:, None] * one
    if BFP:
        m = tl.max(h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) >> 23  # exponent of the largest; 255: not finite
        e = tl.maximum(m, 14)
        # slightly less than 2^(141 - e), so that |h| scale < 32767
        scale = ((268 - tl.minimum(e, 254)) << 23).to(tl.float32, bitcast=True) * SHRINK
        q = (h * scale[None, :] + MAGIC).to(tl.int32, bitcast=True).to(tl.int16)
        tl.store(p, q, mask=mask)
        tl.store(ptr + N * D.to(tl.int64) + d, e.to(tl.int16), mask=dm)
    else:
        tl.store(p, h, mask=mask)


@triton.jit
def load_state(ptr, n, d, N: tl.constexpr, D, one, mask, dm, BFP: tl.constexpr):
    h = tl.load(ptr + d[None, :].to(tl.int64) * N + n[:, None] * one, mask=mask, other=0).to(tl.float32)
    if BFP:
        e = tl.load(ptr + N * D.to(tl.int64) + d, mask=dm, other=14).to(tl.int32)
        f = ((e - 14) << 23).to(tl.float32, bitcast=True) * GROW
        h = h * tl.where(e == 255, float("nan"), f)[None, :]
    return h


@triton.jit(do_not_specialize=_ints)
def fwd_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, h0_ptr, seq_ptr, y_ptr, hT_ptr, hs_ptr,
    one, L, D, DG, NB, sxb, sxl, sxd, stb, stl, std, szb, szl, szd, sBb, sBl, sBg, sCb, sCl, sCg, sAd, sAn, sqb, sql,
    N: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_H0: tl.constexpr, HAS_SEQ: tl.constexpr,
    SOFTPLUS: tl.constexpr, ZOH: tl.constexpr, SAVE: tl.constexpr, BFP: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    blk = pid % NB
    g = (pid // NB) % G
    b = (pid // NB // G).to(tl.int64)
    i = blk * BD + tl.arange(0, BD)
    d = g * DG + i
    n = tl.arange(0, NP)
    dm = i < DG
    nm = n < N
    m2 = nm[:, None] & dm[None, :]
    A = tl.load(A_ptr + d[None, :] * sAd.to(tl.int64) + n[:, None] * sAn, mask=m2, other=0.0)
    xp = x_ptr + b * sxb + d * sxd.to(tl.int64)
    tp = dt_ptr + b * stb + d * std.to(tl.int64)
    zp = z_ptr + b * szb + d * szd.to(tl.int64)
    yp = y_ptr + b * L * D + d
    Bp = B_ptr + b * sBb + g * sBg.to(tl.int64) + n
    Cp = C_ptr + b * sCb + g * sCg.to(tl.int64) + n
    qp = seq_ptr + b * sqb
    R: tl.constexpr = N + 1 if BFP else N
    hp = hs_ptr + b * ((L + K - 1) // K) * R * D
    sp = (b * D + d[None, :]) * N + n[:, None]
    if HAS_H0:
        h = tl.load(h0_ptr + sp, mask=m2, other=0.0)
    else:
        h = tl.zeros([NP, BD], tl.float32)
    if HAS_D:
        Dv = tl.load(D_ptr + d, mask=dm, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=dm, other=0.0)
    for t0 in range(0, L, S):
        xs = ()
        ds = ()
        zs = ()
        Bs = ()
        Cs = ()
        rs = ()
        for k in tl.static_range(S):  # all loads of a group first, so that no step waits for memory
            t = b * 0 + t0 + k
            tm = t < L
            xs = xs + (tl.load(xp + t * sxl, mask=dm & tm, other=0.0).to(tl.float32),)
            ds = ds + (tl.load(tp + t * stl, mask=dm & tm, other=0.0).to(tl.float32),)
            Bs = Bs + (tl.load(Bp + t * sBl, mask=nm & tm, other=0.0).to(tl.float32),)
            Cs = Cs + (tl.load(Cp + t * sCl, mask=nm & tm, other=0.0).to(tl.float32),)
            if HAS_Z:
                zs = zs + (tl.load(zp + t * szl, mask=dm & tm, other=0.0).to(tl.float32),)
            if HAS_SEQ:
                rs = rs + (tl.load(qp + t * sql, mask=tm & (t > 0), other=0)
                           != tl.load(qp + (t - 1) * sql, mask=tm & (t > 0), other=0),)  # fmt: skip
        if SAVE:
            if t0 % K == 0:
                save_state(hp + (b * 0 + t0 // K) * R * D, h, n, d, N, D, one, m2, dm, BFP)
        for k in tl.static_range(S):
            t = b * 0 + t0 + k
            x = xs[k]
            delta = ds[k]
            if HAS_BIAS:
                delta += bias
            if SOFTPLUS:
                delta = softplus(delta)
            delta = tl.where(t < L, delta, 0.0)  # past the end: decay 1, input 0 (masked after softplus)
            q = delta[None, :] * A
            a = tl.exp2(q * LOG2E)
            if HAS_SEQ:
                a = tl.where(rs[k], 0.0, a)
            if ZOH:
                gq, _ = zoh(q)
                h = a * h + Bs[k][:, None] * gq * (delta * x)[None, :]
            else:
                h = a * h + Bs[k][:, None] * (delta * x)[None, :]
            y = tl.sum(Cs[k][:, None] * h, axis=0)
            if HAS_D:
                y += Dv * x
            if HAS_Z:
                y *= zs[k] * sigmoid(zs[k])
            tl.store(yp + t * D, y.to(y_ptr.dtype.element_ty), mask=dm & (t < L))
    tl.store(hT_ptr + sp, h, mask=m2)


@triton.jit(do_not_specialize=_ints)
def bwd_kernel(
    dy_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, seq_ptr, hs_ptr, adj_ptr, scratch_ptr,
    dx_ptr, ddt_ptr, dz_ptr, pbc_ptr, pA_ptr,
    one, L, T0, T1, PL, D, DG, NB, sxb, sxl, sxd, stb, stl, std, szb, szl, szd, sgb, sgl, sgd,
    sBb, sBl, sBg, sCb, sCl, sCg, sAd, sAn, sqb, sql,
    N: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    SOFTPLUS: tl.constexpr, ZOH: tl.constexpr, BFP: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Steps T0 (a multiple of K) to T1, last to first. one: 1, but the compiler must not know (see above).
    adj (rows, N, D): what later steps hand to the state after T1 - 1; replaced by the same for T0.
    pA (rows, N + 2, D): dA, dD, ddt_bias are added to it. pbc (rows, PL, G, NB, 2 N): this program's share of dB, dC."""
    pid = tl.program_id(0)
    blk = pid % NB
    g = (pid // NB) % G
    b = (pid // NB // G).to(tl.int64)
    i = blk * BD + tl.arange(0, BD)
    d = g * DG + i
    n = tl.arange(0, NP)
    dm = i < DG
    nm = n < N
    m2 = nm[:, None] & dm[None, :]
    A = tl.load(A_ptr + d[None, :] * sAd.to(tl.int64) + n[:, None] * sAn, mask=m2, other=0.0)
    xp = x_ptr + b * sxb + d * sxd.to(tl.int64)
    tp = dt_ptr + b * stb + d * std.to(tl.int64)
    zp = z_ptr + b * szb + d * szd.to(tl.int64)
    gp = dy_ptr + b * sgb + d * sgd.to(tl.int64)
    op = b * L * D + d
    Bp = B_ptr + b * sBb + g * sBg.to(tl.int64) + n
    Cp = C_ptr + b * sCb + g * sCg.to(tl.int64) + n
    qp = seq_ptr + b * sqb
    pp = pbc_ptr + ((b * PL * G + g) * NB + blk) * (2 * N) + n
    R: tl.constexpr = N + 1 if BFP else N
    hp = hs_ptr + b * ((L + K - 1) // K) * R * D
    kp = scratch_ptr + (pid.to(tl.int64) * (K // S)) * (NP * BD) + n[:, None] * BD + tl.arange(0, BD)[None, :] * one
    ap = adj_ptr + (b * N + n[:, None]) * D + d[None, :]
    carry = tl.load(ap, mask=m2, other=0.0)
    pap = pA_ptr + (b * (N + 2) + n[:, None]) * D + d[None, :]
    pdp = pA_ptr + (b * (N + 2) + N) * D + d
    dA = tl.load(pap, mask=m2, other=0.0)
    dD = tl.load(pdp, mask=dm, other=0.0)
    db = tl.load(pdp + D, mask=dm, other=0.0)
    if HAS_D:
        Dv = tl.load(D_ptr + d, mask=dm, other=0.0)
    else:
        Dv = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=dm, other=0.0)
    else:
        bias = tl.zeros([BD], tl.float32)
    c1 = (T1 + K - 1) // K
    for cc in range(0, c1 - T0 // K):
        c = c1 - 1 - cc
        h = load_state(hp + (b * 0 + c) * R * D, n, d, N, D, one, m2, dm, BFP)
        for j in range(0, K // S):
            tl.store(kp + j * (NP * BD), h)
            for k in tl.static_range(S):
                t = b * 0 + c * K + j * S + k
                tm = t < T1
                x = tl.load(xp + t * sxl, mask=dm & tm, other=0.0).to(tl.float32)
                delta = tl.load(tp + t * stl, mask=dm & tm, other=0.0).to(tl.float32) + bias
                if SOFTPLUS:
                    delta = softplus(delta)
                delta = tl.where(tm, delta, 0.0)
                Bt = tl.load(Bp + t * sBl, mask=nm & tm, other=0.0).to(tl.float32)
                q = delta[None, :] * A
                a = tl.exp2(q * LOG2E)
                if HAS_SEQ:
                    ok = tm & (t > 0)
                    r = tl.load(qp + t * sql, mask=ok, other=0) != tl.load(qp + (t - 1) * sql, mask=ok, other=0)
                    a = tl.where(r, 0.0, a)
                if ZOH:
                    gq, _ = zoh(q)
                    h = a * h + Bt[:, None] * gq * (delta * x)[None, :]
                else:
                    h = a * h + Bt[:, None] * (delta * x)[None, :]
        tl.debug_barrier()  # other threads may read the scratch below
        for jj in range(0, K // S):
            j = K // S - 1 - jj
            h = tl.load(kp + j * (NP * BD))
            hl = (h,)
            al = ()
            xl = ()
            rl = ()
            dl = ()
            Bl = ()
            for k in tl.static_range(S):
                t = b * 0 + c * K + j * S + k
                tm = t < T1
                x = tl.load(xp + t * sxl, mask=dm & tm, other=0.0).to(tl.float32)
                raw = tl.load(tp + t * stl, mask=dm & tm, other=0.0).to(tl.float32) + bias
                delta = raw
                if SOFTPLUS:
                    delta = softplus(raw)
                delta = tl.where(tm, delta, 0.0)
                Bt = tl.load(Bp + t * sBl, mask=nm & tm, other=0.0).to(tl.float32)
                q = delta[None, :] * A
                a = tl.exp2(q * LOG2E)
                if HAS_SEQ:
                    ok = tm & (t > 0)
                    r = tl.load(qp + t * sql, mask=ok, other=0) != tl.load(qp + (t - 1) * sql, mask=ok, other=0)
                    a = tl.where(r, 0.0, a)
                if ZOH:
                    gq, _ = zoh(q)
                    h = a * h + Bt[:, None] * gq * (delta * x)[None, :]
                else:
                    h = a * h + Bt[:, None] * (delta * x)[None, :]
                hl = hl + (h,)
                al = al + (a,)
                xl = xl + (x,)
                rl = rl + (raw,)
                dl = dl + (delta,)
                Bl = Bl + (Bt,)
            for kk in tl.static_range(S):
                t = b * 0 + c * K + j * S + S - 1 - kk
                tm = t < T1
                x = xl[S - 1 - kk]
                delta = dl[S - 1 - kk]
                Ct = tl.load(Cp + t * sCl, mask=nm & tm, other=0.0).to(tl.float32)
                gy = tl.load(gp + t * sgl, mask=dm & tm, other=0.0).to(tl.float32)
                if HAS_Z:
                    z = tl.load(zp + t * szl, mask=dm & tm, other=0.0).to(tl.float32)
                    sg = sigmoid(z)
                    y = tl.sum(Ct[:, None] * hl[S - kk], axis=0) + Dv * x
                    dz = gy * y * sg * (1.0 + z * (1.0 - sg))
                    tl.store(dz_ptr + op + t * D, dz.to(dz_ptr.dtype.element_ty), mask=dm & tm)
                    gy *= z * sg
                gh = carry + Ct[:, None] * gy[None, :]
                carry = al[S - 1 - kk] * gh
                w = carry * hl[S - 1 - kk]
                dA += w * delta[None, :]
                dd = tl.sum(w * A, axis=0)
                if ZOH:
                    q = delta[None, :] * A
                    gq, dq = zoh(q)
                    gx = gh * Bl[S - 1 - kk][:, None] * x[None, :]
                    dA += gx * (delta * delta)[None, :] * dq
                    dd += tl.sum(gx * tl.exp2(q * LOG2E), axis=0)
                    dx = tl.sum(gh * Bl[S - 1 - kk][:, None] * gq, axis=0) * delta
                    dB = tl.sum(gh * gq * (delta * x)[None, :], axis=1)
                else:
                    s = tl.sum(gh * Bl[S - 1 - kk][:, None], axis=0)
                    dd += s * x
                    dx = s * delta
                    dB = tl.sum(gh * (delta * x)[None, :], axis=1)
                dC = tl.sum(hl[S - kk] * gy[None, :], axis=1)
                tl.store(pp + (t - T0) * G * NB * (2 * N), dB, mask=nm & tm)
                tl.store(pp + (t - T0) * G * NB * (2 * N) + N, dC, mask=nm & tm)
                dD += gy * x
                dx += Dv * gy
                if SOFTPLUS:
                    dd *= sigmoid(rl[S - 1 - kk])
                dd = tl.where(tm, dd, 0.0)
                db += dd
                tl.store(dx_ptr + op + t * D, dx.to(dx_ptr.dtype.element_ty), mask=dm & tm)
                tl.store(ddt_ptr + op + t * D, dd.to(ddt_ptr.dtype.element_ty), mask=dm & tm)
        tl.debug_barrier()
    tl.store(ap, carry, mask=m2)
    tl.store(pap, dA, mask=m2)
    tl.store(pdp, dD, mask=dm)
    tl.store(pdp + D, db, mask=dm)


@triton.jit(do_not_specialize=["R0", "PL", "NB", "P0", "LS", "SEG", "L", "spb", "sps", "sk", "sn"])
def reduce_bc_kernel(
    pB_ptr, pC_ptr, dB_ptr, dC_ptr, R0, PL, NB, P0, LS, SEG, L, spb, sps, sk, sn,
    C: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, KB: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """dB, dC (rows, L, C, N, the last but one stride sn) at steps P0 to P0 + PL of each of the SEG segments of LS steps,
    from partials (rows, SEG, PL, C, NB, N) with strides spb, sps for the first two and sk for the last but one, always in
    the same order. R0: how many (row, segment, step, C) there are."""
    r = tl.program_id(0) * R + tl.arange(0, R)  # 32 bits, because it is divided below
    c = tl.arange(0, NP)
    k = tl.arange(0, KB)
    row = r // (PL * C)
    i = r - row * (PL * C)
    b = row // SEG
    seg = row - b * SEG
    t = seg * LS + P0 + i // C
    m = ((r < R0) & (t < L) & (P0 + i // C < LS))[:, None] & (c < N)[None, :]
    p = (b.to(tl.int64) * spb + seg.to(tl.int64) * sps)[:, None, None] + (i.to(tl.int64) * NB * sk)[:, None, None]
    p += k[None, :, None] * sk + c[None, None, :]
    dB = tl.zeros([R, NP], tl.float32)
    dC = tl.zeros([R, NP], tl.float32)
    for k0 in range(0, NB, U * KB):
        Bs = ()
        Cs = ()
        for u in tl.static_range(U):  # loads first
            j = k0 + u * KB
            ok = m[:, None, :] & (k + j < NB)[None, :, None]
            Bs = Bs + (tl.load(pB_ptr + p + j * sk, mask=ok, other=0.0),)
            Cs = Cs + (tl.load(pC_ptr + p + j * sk, mask=ok, other=0.0),)
        for u in tl.static_range(U):
            dB += tl.sum(Bs[u], axis=1)
            dC += tl.sum(Cs[u], axis=1)
    o = ((b.to(tl.int64) * L + t) * C + i % C)[:, None] * sn + c[None, :]
    tl.store(dB_ptr + o, dB.to(dB_ptr.dtype.element_ty), mask=m)
    tl.store(dC_ptr + o, dC.to(dC_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["SEG", "D"])
def combine_kernel(
    end_ptr, sum_ptr, A_ptr, alive_ptr, ini_ptr, SEG, D,
    N: tl.constexpr, BD: tl.constexpr, REV: tl.constexpr, HAS_INI: tl.constexpr, HAS_SEQ: tl.constexpr,
):  # fmt: skip
    """The state that comes into each segment, from the segments before it (REV: the adjoint, from those after it).
    alive (rows, SEG): 0 where a document begins in the segment, which lets nothing through, else 1.
    ini (rows, SEG, N, D): with HAS_INI its first (REV: last) segment holds what comes in from outside."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    m = d < D
    A = tl.load(A_ptr + d * N + n, mask=m, other=0.0) * LOG2E
    h = tl.zeros([BD], tl.float32)
    if HAS_INI:
        s0 = SEG - 1 if REV else 0
        h = tl.load(ini_ptr + ((b * SEG + s0) * N + n) * D + d, mask=m, other=0.0)
    for i0 in range(0, SEG, 8):
        ends = ()
        sums = ()
        for k in tl.static_range(8):  # loads first, so that no segment waits for memory
            s = b * SEG + (SEG - 1 - i0 - k if REV else i0 + k)
            ok = i0 + k < SEG
            a = tl.load(sum_ptr + s * D + d, mask=m & ok, other=0.0)
            if HAS_SEQ:
                a = tl.where(tl.load(alive_ptr + s, mask=ok, other=1.0) > 0.0, a, float("inf"))
            sums = sums + (a,)
            ends = ends + (tl.load(end_ptr + (s * N + n) * D + d, mask=m & ok, other=0.0),)
        for k in tl.static_range(8):
            s = b * SEG + (SEG - 1 - i0 - k if REV else i0 + k)
            tl.store(ini_ptr + (s * N + n) * D + d, h, mask=m & (i0 + k < SEG))
            a = tl.exp2(A * sums[k])
            if HAS_SEQ:
                a = tl.where(sums[k] == float("inf"), 0.0, a)
            h = a * h + ends[k]


@triton.jit(do_not_specialize=["ROWS", "D"])
def finish_kernel(p_ptr, dA_ptr, dD_ptr, db_ptr, ROWS, D, N: tl.constexpr, BD: tl.constexpr, RB: tl.constexpr):
    """dA (D, N), dD (D,), ddt_bias (D,) from the rows of p (rows, N + 2, D), always in the same order."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    n = tl.program_id(1)
    r = tl.arange(0, RB)
    m = d < D
    acc = tl.zeros([BD], tl.float32)
    p = p_ptr + (r.to(tl.int64)[:, None] * (N + 2) + n) * D + d[None, :]
    for r0 in range(0, ROWS, RB):
        acc += tl.sum(tl.load(p, mask=m[None, :] & (r + r0 < ROWS)[:, None], other=0.0), axis=0)
        p += (d[None, :] * 0 + RB).to(tl.int64) * (N + 2) * D
    if n < N:
        tl.store(dA_ptr + d * N + n, acc, mask=m)
    elif n == N:
        tl.store(dD_ptr + d, acc, mask=m)
    else:
        tl.store(db_ptr + d, acc, mask=m)

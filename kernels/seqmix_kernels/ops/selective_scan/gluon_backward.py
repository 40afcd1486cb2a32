# ruff: noqa: RUF005 (the compiler's front end supports tuple concatenation, not unpacking)
"""The backward kernel of the scan in Gluon. gluon_helpers.py describes the design."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_helpers import (
    LN2,
    LOG2E,
    NP,
    TB,
    S,
    channel,
    delta_of,
    enters,
    ex2,
    held_slope,
    load_state,
    pair_load,
    pair_registers,
    pair_shared,
    pair_tile,
    part_n,
    prefetch,
    quad_sum,
    rcp,
    row_shared,
    row_tile,
    softplus_slope,
    stack2,
    stack4,
    stack4p,
    state_shared,
    store_keep,
    unpack,
    view,
    words,
)


@gluon.jit
def steps(
    h, A, rA, dS, BS, KS, g, HAS_SEQ: gl.constexpr, ZOH: gl.constexpr, FINE: gl.constexpr, ld: gl.constexpr, ln: gl.constexpr
):
    """The state after the S steps of group g."""
    for s in gl.static_range(S):
        du, uu = pair_load(dS.index(g * S + s), pair_registers(h.shape[1], 2), ld)
        Bu = BS.index(g * S + s).load(ln)
        e = ex2(du[None, :] * A)
        a = e
        if HAS_SEQ:
            a = a * KS.index(g * S + s).load(ln)[:, None]
        h = a * h + enters(e, A, rA, du, uu, Bu, ZOH, FINE)
    return h


@gluon.jit
def again(x, PRE: gl.constexpr):
    """x, but the compiler must not know where registers are short: it would compute every tile's addresses before the
    loop, spill them and fetch them back from L2 (8 % of the time)."""
    if PRE:
        return x
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_rows(p, stride, rows, cols, L, D, EVEN: gl.constexpr):
    """[rows, cols] of a matrix at p, zeros past row L and column D."""
    p += rows[:, None].to(gl.int64) * stride + cols[None, :]
    if EVEN:
        return gl.load(p)
    else:
        return gl.load(p, mask=(rows < L)[:, None] & (cols < D)[None, :], other=0.0)


@gluon.jit
def store_rows(p, stride, rows, cols, v, L, D, EVEN: gl.constexpr):
    p += rows[:, None].to(gl.int64) * stride + cols[None, :]
    if EVEN:
        gl.store(p, v.to(p.dtype.element_ty))
    else:
        gl.store(p, v.to(p.dtype.element_ty), mask=(rows < L)[:, None] & (cols < D)[None, :])


@gluon.jit
def load_all(
    xp, tp, gp, zp, yp, Bp, Cp, tw, cw, tb, nb, t0, L, D, N: gl.constexpr, W: gl.constexpr, sxl, stl, sgl, szl, sBl, sCl,
    HAS_Z: gl.constexpr, DZ: gl.constexpr, EVEN: gl.constexpr, EVEN_B: gl.constexpr, PRE: gl.constexpr,
):  # fmt: skip
    """A tile of the backward as it lies in memory: x, dt, dy, z, y (words), B, C."""
    r = again(tw, PRE) + t0
    xr = load_rows(xp, sxl // W, r, cw, L, D // W, EVEN)
    dr = load_rows(tp, stl // W, r, cw, L, D // W, EVEN)
    gr = load_rows(gp, sgl // W, r, cw, L, D // W, EVEN)
    zr = xr
    yr = xr
    if HAS_Z:
        zr = load_rows(zp, szl // W, r, cw, L, D // W, EVEN)
    if DZ % 2 == 1:
        yr = load_rows(yp, D // W, r, cw, L, D // W, EVEN)
    r = again(tb, PRE) + t0
    nb = again(nb, PRE)
    Br = load_rows(Bp, sBl, r, nb, L, N, EVEN_B)
    Cr = load_rows(Cp, sCl, r, nb, L, N, EVEN_B)
    return xr, dr, gr, zr, yr, Br, Cr


@gluon.jit
def store_y(q, hl, CS, g, ln: gl.constexpr):
    """C . h of the S steps of group g, into rows of q."""
    y0 = part_n(CS.index(g * S).load(ln)[:, None] * hl[1])
    y1 = part_n(CS.index(g * S + 1).load(ln)[:, None] * hl[2])
    y2 = part_n(CS.index(g * S + 2).load(ln)[:, None] * hl[3])
    y3 = part_n(CS.index(g * S + 3).load(ln)[:, None] * hl[4])
    q.slice(2 * S, S).store(stack2(quad_sum(y0, y1), quad_sum(y2, y3)))


@gluon.jit(do_not_specialize=["ADJ", "MORE"])
def bwd_kernel(
    dy_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, keep_ptr, hs_ptr, y_ptr, gate_ptr, accx_ptr, acct_ptr,
    adj_ptr, dx_ptr, ddt_ptr, dz_ptr, pB_ptr, pC_ptr, sum_ptr,
    L, P0, PL, D, DG, ND, LS, SEG, ADJ, MORE, spb, sps, sgb, sgl, sxb, sxl, stb, stl, szb, szl, sBb, sBl, sBg, sCb, sCl, sCg,
    N: gl.constexpr, NT: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SEQ: gl.constexpr, SOFTPLUS: gl.constexpr, BFP: gl.constexpr, DZ: gl.constexpr, ACC: gl.constexpr,
    EVEN_L: gl.constexpr, EVEN_D: gl.constexpr, ZOH: gl.constexpr, PRE: gl.constexpr, BD: gl.constexpr, MD: gl.constexpr,
):  # fmt: skip
    """Steps P0 to P0 + PL (multiples of K = NT T) of each segment, last to first.
    adj (rows, N, D): what later steps hand to the state at the end of the range (ADJ = 0: nothing, not read); replaced by
    the same for its beginning. sum (rows, N + 2, D): dA, dD, ddt_bias, added to what is there if MORE.
    pB, pC (rows, PL, ND, N), strides spb a batch row and sps a segment: this CTA's share of dB and dC.
    DZ: how dz is had. 0: not at all. 1: from y, y / silu(z) being what was gated; where gate marks a tile, as 2.
    2: from C . h once more (float16, whose small outputs have too few digits, and float32). 3: gate is y before the gate.
    ACC: accx, acct (rows, L, D), shares of other states, are added to dx and ddt.
    PRE = 0: 168 registers, three CTAs an SM, the next chunk prefetched into L2, the next tile loaded into registers only
    after the steps. PRE = 1: 255 registers, two CTAs an SM, the next tile loaded before the steps; the faster one where
    there are at most two CTAs for each SM (of 64 channels, or four of 32).
    MD: the channels of a CTA of the forward, and so of a mark in gate; ND: the CTAs of D here."""
    NW: gl.constexpr = BD // 16
    T: gl.constexpr = TB
    f32: gl.constexpr = gl.float32
    FINE: gl.constexpr = x_ptr.dtype.element_ty == gl.float32
    EVEN: gl.constexpr = EVEN_L and EVEN_D
    EVEN_B: gl.constexpr = EVEN_L and N == NP
    K: gl.constexpr = NT * T
    G: gl.constexpr = T // S
    P: gl.constexpr = BD // 2
    lay: gl.constexpr = gl.BlockedLayout([4, 2], [4, 8], [1, NW], [0, 1])
    ld: gl.constexpr = gl.SliceLayout(0, lay)
    ln: gl.constexpr = gl.SliceLayout(1, lay)
    lt: gl.constexpr = gl.BlockedLayout([1, BD // 8], [4, 8], [NW, 1], [1, 0])
    l2: gl.constexpr = gl.BlockedLayout([1, 2, BD // 8], [1, 4, 8], [NW, 1, 1], [2, 1, 0])
    ly: gl.constexpr = gl.BlockedLayout([1, 1, BD // 8], [1, 4, 8], [NW, 1, 1], [2, 1, 0])
    ltd: gl.constexpr = gl.SliceLayout(0, lt)
    lp: gl.constexpr = pair_registers(BD, 2)
    DT: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = 4 // (DT.primitive_bitwidth // 8)  # values per word
    lw: gl.constexpr = gl.BlockedLayout([1, BD // 8 // W], [4, 8], [NW, 1], [1, 0])
    lb: gl.constexpr = gl.BlockedLayout([1, 8 // NW], [16 // NW, 2 * NW], [NW, 1], [1, 0])
    lr: gl.constexpr = gl.BlockedLayout([1, 1, 2], [4 // NW, NW, 8], [NW, 1, 1], [2, 1, 0])
    lj: gl.constexpr = gl.BlockedLayout([1, BD // 8, 2], [4, 8, 1], [NW, 1, 1], [2, 1, 0])
    lq: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    s3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sp: gl.constexpr = pair_tile(BD, T)
    sw: gl.constexpr = row_tile(BD, T)
    sy: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    st: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [2, 1, 0])
    pid_d = gl.program_id(0)
    b = gl.program_id(1).to(gl.int64)
    seg = gl.program_id(2)
    row = b * SEG + seg
    d = pid_d * BD + gl.arange(0, BD, layout=ld)
    n = gl.arange(0, NP, layout=ln)
    m2 = (n < N)[:, None] & (d < D)[None, :]
    A = gl.load(A_ptr + d[None, :] * N + n[:, None], mask=m2, other=0.0) * LOG2E
    rA = A
    if ZOH:
        rA = rcp(A)  # not read where A is 0
    dv = pid_d * BD + gl.arange(0, BD, layout=gl.SliceLayout(0, lt))
    tv = gl.arange(0, T, layout=gl.SliceLayout(1, lt))
    tw = gl.arange(0, T, layout=gl.SliceLayout(1, lw))
    cw = pid_d * (BD // W) + gl.arange(0, BD // W, layout=gl.SliceLayout(0, lw))
    Dv = gl.zeros([BD], f32, layout=ltd)
    bv = Dv
    if HAS_D:
        Dv = gl.load(D_ptr + dv, mask=dv < D, other=0.0)
    if HAS_BIAS:
        bv = gl.load(bias_ptr + dv, mask=dv < D, other=0.0)
    # without PRE much stays in shared memory: registers would spill to L2, because no L1 is left
    DS = gl.allocate_shared_memory(f32, [BD], s1)
    bS = gl.allocate_shared_memory(f32, [BD], s1)
    if not PRE:
        DS.store(Dv)
        bS.store(bv)
    tb = gl.arange(0, T, layout=gl.SliceLayout(1, lb))
    nb = gl.arange(0, NP, layout=gl.SliceLayout(0, lb))
    g0 = (pid_d * BD) // DG
    gp = words(dy_ptr) + b * (sgb // W)
    xp = words(x_ptr) + b * (sxb // W)
    tp = words(dt_ptr) + b * (stb // W)
    zp = words(z_ptr) + b * (szb // W)
    Bp = B_ptr + b * sBb + g0 * sBg
    Cp = C_ptr + b * sCb + g0 * sCg
    ob = b * L * D
    rs = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(1, lr)))
    rn = gl.arange(0, NP, layout=gl.SliceLayout(0, gl.SliceLayout(1, lr)))
    ps = b * spb + (b * 0 + seg) * sps + pid_d * N
    pp = gl.where(rs % 2 == 0, pB_ptr + ps, pC_ptr + ps)[:, None] + ((rs // 2) * ND * N)[:, None] + rn[None, :]
    yp = words(y_ptr) + b * (L * D // W)
    kp = keep_ptr + b * L
    nm = ND
    cm = pid_d
    if MD > BD:
        nm = (ND + 1) // 2
        cm = pid_d // 2
    if MD < BD:
        nm = (D + MD - 1) // MD
        cm = pid_d * 2
    mp = gate_ptr + b * ((L + T - 1) // T) * nm + cm
    dS = gl.allocate_shared_memory(f32, [T, BD, 2], pair_shared(BD))  # delta, delta x
    gS = gl.allocate_shared_memory(f32, [T, BD], row_shared(BD))  # dy silu(z)
    BS = gl.allocate_shared_memory(f32, [T, NP], s1)
    CS = gl.allocate_shared_memory(f32, [T, NP], s1)
    KS = BS
    if HAS_SEQ:
        KS = gl.allocate_shared_memory(f32, [T, NP], s1)
    # delta of a chunk's first tile, from the sweep; with documents three CTAs per SM leave no room for it
    REUSE: gl.constexpr = NT == 2 and not HAS_SEQ
    if REUSE:
        tS = gl.allocate_shared_memory(f32, [T, BD], sw)
    # the state before each group; after the group: rows 0-7 hold the sums over n of g B and of a g h_{t-1} A (ZOH: g r B
    # and that plus g B x exp(u)), one pair per step, rows 8-11 hold C . h if it is needed
    hS = gl.allocate_shared_memory(f32, [NT * G, NP, BD], state_shared(BD))
    rS = view(hS, [NT * G, NP, BD], sy)
    p0 = gl.allocate_shared_memory(f32, [4, P, NP], s3)  # partial dB, dC of two steps
    p1 = gl.allocate_shared_memory(f32, [4, P, NP], s3)
    dA = gl.zeros([NP, BD], f32, layout=lay)
    dD = gl.zeros([T, BD], f32, layout=lt)
    db = gl.zeros([T, BD], f32, layout=lt)
    if not PRE:
        aS = gl.allocate_shared_memory(f32, [T, BD], sw)
        eS = gl.allocate_shared_memory(f32, [T, BD], sw)
        aS.store(dD)
        eS.store(db)
    R: gl.constexpr = N + 1 if BFP else N
    hp = hs_ptr + b * ((L + K - 1) // K) * R * D
    ap = adj_ptr + (row * N + n[:, None]) * D + d[None, :]
    gc = gl.load(ap, mask=m2 & (ADJ != 0), other=0.0)
    first = seg * LS + P0
    tiles = (gl.maximum(gl.minimum(gl.minimum(first + PL, seg * LS + LS), L) - first, 0) + K - 1) // K * NT
    h = gl.zeros([NP, BD], f32, layout=lay)
    if PRE:
        t0 = first + gl.maximum(tiles - NT, 0) * T
        if EVEN_L:  # unmasked, so the address must be valid even if the range is empty
            t0 = gl.minimum(t0, L - T)
        xr, dr, gr, zr, yr, Br, Cr = load_all(xp, tp, gp, zp, yp, Bp, Cp, tw, cw, tb,
            nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)
    for kk in range(0, tiles):
        k = tiles - 1 - kk
        t0 = first + k * T
        top = k % NT == NT - 1
        mark = 0
        if DZ == 1:
            mark = gl.load(mp + (b * 0 + t0 // T) * nm).to(gl.int32)
            if MD < BD:
                mark |= gl.load(mp + (b * 0 + t0 // T) * nm + 1, mask=cm + 1 < nm, other=0).to(gl.int32)
        if top:  # a new chunk: its saved state, and a sweep over all its tiles but this one
            h = load_state(hp + (b * 0 + t0 // K) * R * D, n, d, N, D, BFP, EVEN_D)
            if NT == 2:
                t1 = t0 - T
                if not PRE:
                    r1 = again(tw, PRE) + t1
                    xr = load_rows(xp, sxl // W, r1, cw, L, D // W, EVEN)
                    dr = load_rows(tp, stl // W, r1, cw, L, D // W, EVEN)
                    Br = load_rows(Bp, sBl, again(tb, PRE) + t1, nb, L, N, EVEN_B)
                delta = delta_of(dr, bv, bS, tv, t1, L, DT, lt, HAS_BIAS, SOFTPLUS, EVEN_L, FINE, PRE)
                if REUSE:
                    tS.store(delta)
                view(dS, [T, BD, 2], sp).store(
                    gl.join(delta, unpack(xr, DT, lt) if ZOH else delta * unpack(xr, DT, lt))
                )
                view(BS, [T, NP], s2).store(Br.to(f32))
                if HAS_SEQ:
                    store_keep(KS, kp, tb, t1, L, s2, lb)
                if PRE:
                    xr, dr, gr, zr, yr, Br, Cr = load_all(xp, tp, gp, zp, yp, Bp, Cp, tw, cw,
                        tb, nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)
                for g in range(0, G):
                    hS.index(g).store(h)
                    h = steps(h, A, rA, dS, BS, KS, g, HAS_SEQ, ZOH, FINE, ld, ln)
        if not PRE:
            xr, dr, gr, zr, yr, Br, Cr = load_all(xp, tp, gp, zp, yp, Bp, Cp, tw, cw,
                tb, nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)
            if k % NT == 0 and k > 0:  # prefetch the next chunk into L2: one warp each for x, dt, dy and z
                i = gl.arange(0, 4 * 32, layout=lq)
                w = i // 32
                c = (t0 - K).to(gl.int64) + i % K
                q = gl.where(w < 2, gl.where(w == 0, xp, tp), gl.where(w == 2, gp, zp))
                c = c * gl.where(w < 2, gl.where(w == 0, sxl, stl), gl.where(w == 2, sgl, szl)) + pid_d * BD
                prefetch(q + c // W)
        if k % NT == 0 and k > 0:  # also prefetch its saved state and y
            i = gl.arange(0, 4 * 32, layout=lq)
            w = i // 32
            i = i % 32
            c = gl.where(i < NP, pid_d * BD * N + i * BD, N * D * (R - N) + pid_d * BD)
            q = words(hp + (b * 0 + t0 // K - 1) * R * D)
            c = c // (2 if BFP else 1) + i.to(gl.int64) * 0
            if DZ % 2 == 1 and not PRE:
                q = gl.where(w < 2, q, yp)
                c = gl.where(w < 2, c, (((t0 - K).to(gl.int64) + i % K) * D + pid_d * BD) // W)
            prefetch(q + c)
        xc = xr
        xv = unpack(xr, DT, lt)
        gy = unpack(gr, DT, lt)
        if HAS_Z:
            zf = unpack(zr, DT, lt)
            sg = rcp(1.0 + ex2(zf * -LOG2E))
            sl = zf * sg
            if DZ % 2 == 1:
                dz = gy * unpack(yr, DT, lt)
                if DZ == 1:  # silu'(z) / silu(z)
                    dz *= rcp(zf) + (1.0 - sg)
                else:
                    dz *= sg + sl * (1.0 - sg)
                if PRE:  # load here: just before the steps this would also wait for the next tile's loads
                    if mark == 0:
                        store_rows(dz_ptr + ob, D, again(tv, PRE) + t0, dv, dz, L, D, EVEN)
                else:
                    store_rows(dz_ptr + ob, D, again(tv, PRE) + t0, dv, dz, L, D, EVEN)
            gy = gy * sl
        if REUSE:
            if top:
                delta = delta_of(dr, bv, bS, tv, t0, L, DT, lt, HAS_BIAS, SOFTPLUS, EVEN_L, FINE, PRE)
            else:
                delta = tS.load(lt)
        else:
            delta = delta_of(dr, bv, bS, tv, t0, L, DT, lt, HAS_BIAS, SOFTPLUS, EVEN_L, FINE, PRE)
        view(dS, [T, BD, 2], sp).store(gl.join(delta, xv if ZOH else delta * xv))
        view(gS, [T, BD], sw).store(gy)
        if PRE:
            dD += gy * xv
        else:
            aS.store(aS.load(lt) + gy * xv)
        view(BS, [T, NP], s2).store(Br.to(f32))
        view(CS, [T, NP], s2).store(Cr.to(f32))
        if HAS_SEQ:
            store_keep(KS, kp, tb, t0, L, s2, lb)
        base = (k % NT) * G
        if top:
            for g in range(0, G - 1):
                hS.index(base + g).store(h)
                h = steps(h, A, rA, dS, BS, KS, g, HAS_SEQ, ZOH, FINE, ld, ln)
            hS.index(base + G - 1).store(h)
        if PRE:  # inputs of the next stage: the tile before this one, or the first tile of the previous chunk
            tn = gl.maximum(gl.where(k % NT > 0, t0 - T, t0 - K), first)
            xr, dr, gr, zr, yr, Br, Cr = load_all(xp, tp, gp, zp, yp, Bp, Cp, tw, cw,
                tb, nb, tn, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)
        for gg in range(0, G):
            g = G - 1 - gg
            h = hS.index(base + g).load(lay)
            al = ()
            hl = (h,)
            dl = ()
            ul = ()
            for s in gl.static_range(S):
                u = g * S + s
                du, uu = pair_load(dS.index(u), lp, ld)
                Bu = BS.index(u).load(ln)
                e = ex2(du[None, :] * A)
                a = e
                if HAS_SEQ:
                    a = a * KS.index(u).load(ln)[:, None]
                h = a * h + enters(e, A, rA, du, uu, Bu, ZOH, FINE)
                al = al + (e if ZOH else a,)  # a document border does not change the exponential in r
                hl = hl + (h,)
                dl = dl + (du,)
                ul = ul + (uu,)
            q = rS.index(base + g)
            if DZ == 2:
                store_y(q, hl, CS, g, ln)
            elif DZ == 1:
                if mark != 0:
                    store_y(q, hl, CS, g, ln)
            rl = ()
            pl = ()
            for r in gl.static_range(S):
                u = g * S + S - 1 - r
                gu = gS.index(u).load(ld)
                Bu = BS.index(u).load(ln)
                Cu = CS.index(u).load(ln)
                gh = gc + Cu[:, None] * gu[None, :]
                gc = al[S - 1 - r] * gh
                if ZOH and HAS_SEQ:
                    gc = gc * KS.index(u).load(ln)[:, None]
                w = gc * hl[S - 1 - r]
                dA += w * dl[S - 1 - r][None, :]
                if ZOH:
                    e = al[S - 1 - r]
                    du = dl[S - 1 - r]
                    rr, slope = held_slope(du[None, :] * A, e, du, rA, FINE)
                    p = gh * Bu[:, None] * (ul[S - 1 - r] * LOG2E)[None, :]
                    dA += p * slope
                    gh = gh * rr
                    rl = (quad_sum(part_n(gh * Bu[:, None]), part_n(w * A + p * e)),) + rl
                else:
                    rl = (quad_sum(part_n(gh * Bu[:, None]), part_n(w * A)),) + rl
                vB = gl.sum(gl.reshape(gh * ul[S - 1 - r][None, :], [NP, P, 2]), axis=2)
                vC = gl.sum(gl.reshape(hl[S - r] * gu[None, :], [NP, P, 2]), axis=2)
                pl = (vB, vC) + pl
                if r == 1:
                    p1.store(stack4p(pl))
                    pl = ()
                if r == 3:
                    p0.store(stack4p(pl))
            q.slice(0, 2 * S).store(stack4(rl))
            tp1 = t0 - first + g * S
            v1 = gl.sum(p1.load(lr), axis=1)
            v0 = gl.sum(p0.load(lr), axis=1)
            if EVEN_B:
                gl.store(pp + (b * 0 + tp1 + 2) * ND * N, v1)
                gl.store(pp + (b * 0 + tp1) * ND * N, v0)
            else:  # not past the range, where an output may be stored
                pm = (rn < N)[None, :] & (t0 + g * S + rs // 2 < L)[:, None]
                pn = (rn < N)[None, :] & (t0 + g * S + 2 + rs // 2 < L)[:, None]
                gl.store(pp + (b * 0 + tp1 + 2) * ND * N, v1, mask=pn)
                gl.store(pp + (b * 0 + tp1) * ND * N, v0, mask=pm)
        rT = view(rS, [NT, G, NP, BD], st).index(k % NT)
        q = rT.slice(0, 2 * S, dim=1).load(l2)
        du, dd = gl.split(gl.permute(gl.reshape(q, [T, 2, BD]), [0, 2, 1]))
        du = gl.convert_layout(du, lt, assert_trivial=True)
        dd = gl.convert_layout(dd, lt, assert_trivial=True) * LN2
        delta, _ = gl.split(view(dS, [T, BD, 2], sp).load(lj))
        delta = gl.convert_layout(delta, lt, assert_trivial=True)
        gy = view(gS, [T, BD], sw).load(lt)
        xv = unpack(xc, DT, lt)
        dx = du if ZOH else du * delta
        if HAS_D:
            dx += channel(Dv, DS, PRE)[None, :] * gy
        ddt = dd if ZOH else dd + du * xv
        if SOFTPLUS:
            ddt = ddt * softplus_slope(delta, FINE)
        if not EVEN_L:
            ddt = gl.where((tv + t0 < L)[:, None], ddt, 0.0)
        if PRE:
            db += ddt
        else:
            eS.store(eS.load(lt) + ddt)
        rv = again(tv, PRE) + t0
        if ACC:
            dx += load_rows(accx_ptr + ob, D, rv, dv, L, D, EVEN)
            ddt += load_rows(acct_ptr + ob, D, rv, dv, L, D, EVEN)
        store_rows(dx_ptr + ob, D, rv, dv, dx, L, D, EVEN)
        store_rows(ddt_ptr + ob, D, rv, dv, ddt, L, D, EVEN)
        if DZ == 2:
            mark = 1
        if DZ == 1 or DZ == 2:
            if mark != 0:
                y = gl.reshape(rT.slice(2 * S, S, dim=1).load(ly), [T, BD])
                y = gl.convert_layout(y, lt, assert_trivial=True)
                if HAS_D:
                    y += channel(Dv, DS, PRE)[None, :] * xv
                r = again(tw, PRE) + t0
                zf = unpack(load_rows(zp, szl // W, r, cw, L, D // W, EVEN), DT, lt)
                sg = rcp(1.0 + ex2(zf * -LOG2E))
                y *= sg + zf * sg * (1.0 - sg)
                y *= unpack(load_rows(gp, sgl // W, r, cw, L, D // W, EVEN), DT, lt)
                store_rows(dz_ptr + ob, D, rv, dv, y, L, D, EVEN)
    if not PRE:
        dD = aS.load(lt)
        db = eS.load(lt)
    gl.store(ap, gc, mask=m2)
    pa = sum_ptr + (row * (N + 2) + n[:, None]) * D + d[None, :]
    gl.store(pa, gl.load(pa, mask=m2 & (MORE != 0), other=0.0) + dA, mask=m2)
    pd = sum_ptr + (row * (N + 2) + N) * D + dv
    old = (dv < D) & (MORE != 0)
    gl.store(pd, gl.load(pd, mask=old, other=0.0) + gl.sum(dD, axis=0), mask=dv < D)
    gl.store(pd + D, gl.load(pd + D, mask=old, other=0.0) + gl.sum(db, axis=0), mask=dv < D)

# ruff: noqa: RUF005 (the compiler's front end supports tuple concatenation, not unpacking)
"""The forward kernels of the scan in Gluon: a segment with its outputs, and the state that it passes on (`carry_kernel`, which
also runs in reverse, for the adjoint). gluon_helpers.py describes the design."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_helpers import (
    LOG2E,
    NP,
    SMALL_Z,
    TB,
    TF,
    enters,
    ex2,
    load_tile,
    pair_load,
    pair_registers,
    pair_shared,
    pair_tile,
    rcp,
    save_state,
    softplus,
    stack32,
    store_keep,
    store_tile,
    unpack,
    view,
    words,
)


@gluon.jit
def fwd_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, keep_ptr, ini_ptr, acc_ptr, y_ptr, gate_ptr, hT_ptr, hs_ptr,
    L, D, DG, LS, SEG, sxb, sxl, stb, stl, szb, szl, sBb, sBl, sBg, sCb, sCl, sCg,
    N: gl.constexpr, K: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_INI: gl.constexpr, HAS_SEQ: gl.constexpr, SOFTPLUS: gl.constexpr, SAVE: gl.constexpr,
    BFP: gl.constexpr, OUT: gl.constexpr, ACC: gl.constexpr, GATE: gl.constexpr, EVEN_L: gl.constexpr, EVEN_D: gl.constexpr,
    ZOH: gl.constexpr, BD: gl.constexpr,
):  # fmt: skip
    """Segment of LS steps. ini (rows, SEG, N, D): the state that comes in; hT (rows, D, N): the last one.
    keep (rows, L): 0 where a document begins, else 1. OUT = 0: no y, only states. ACC: acc (rows, L, D), y of the states
    before these, is added. GATE = 1: gate (rows, ceil(L / 16), CTAs of D) says where y is no help with the gradient of z;
    GATE = 2: gate (rows, L, D) is y before the gate."""
    NW: gl.constexpr = BD // 16
    T: gl.constexpr = TF
    FINE: gl.constexpr = x_ptr.dtype.element_ty == gl.float32
    EVEN: gl.constexpr = EVEN_L and EVEN_D
    EVEN_B: gl.constexpr = EVEN_L and N == NP
    lay: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [1, NW], [1, 0])
    ld: gl.constexpr = gl.SliceLayout(0, lay)
    ln: gl.constexpr = gl.SliceLayout(1, lay)
    lt: gl.constexpr = gl.BlockedLayout([1, BD // 8], [4, 8], [NW, 1], [1, 0])
    lp: gl.constexpr = pair_registers(BD, 1)
    DT: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = 4 // (DT.primitive_bitwidth // 8)  # values per word
    lw: gl.constexpr = gl.BlockedLayout([1, BD // 8 // W], [4, 8], [NW, 1], [1, 0])
    lb: gl.constexpr = gl.BlockedLayout([1, 8 // NW], [16 // NW, 2 * NW], [NW, 1], [1, 0])
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pid_d = gl.program_id(0)
    b = gl.program_id(1).to(gl.int64)
    seg = gl.program_id(2)
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
    bias = gl.zeros([BD], gl.float32, layout=gl.SliceLayout(0, lt))
    Dv = bias
    if HAS_D:
        Dv = gl.load(D_ptr + dv, mask=dv < D, other=0.0)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + dv, mask=dv < D, other=0.0)
    offx = tw[:, None] * (sxl // W) + cw[None, :]
    offt = tw[:, None] * (stl // W) + cw[None, :]
    offz = tw[:, None] * (szl // W) + cw[None, :]
    offy = tv[:, None] * D + dv[None, :]
    tb = gl.arange(0, T, layout=gl.SliceLayout(1, lb))
    nb = gl.arange(0, NP, layout=gl.SliceLayout(0, lb))
    offB = tb[:, None] * sBl + nb[None, :]
    offC = tb[:, None] * sCl + nb[None, :]
    g = (pid_d * BD) // DG
    xp = words(x_ptr) + b * (sxb // W)
    tp = words(dt_ptr) + b * (stb // W)
    zp = words(z_ptr) + b * (szb // W)
    yp = y_ptr + b * L * D
    Bp = B_ptr + b * sBb + g * sBg
    Cp = C_ptr + b * sCb + g * sCg
    kp = keep_ptr + b * L
    mt: gl.constexpr = T // TB
    mp = gate_ptr + b * ((L + TB - 1) // TB) * gl.num_programs(0) + pid_d
    dS = gl.allocate_shared_memory(gl.float32, [T, BD, 2], pair_shared(BD))  # delta, delta x
    BS = gl.allocate_shared_memory(gl.float32, [T, NP], s1)
    CS = BS
    if OUT:
        CS = gl.allocate_shared_memory(gl.float32, [T, NP], s1)
        yS = gl.allocate_shared_memory(gl.float32, [T, BD], s1)
    KS = BS
    if HAS_SEQ:
        KS = gl.allocate_shared_memory(gl.float32, [T, NP], s1)
    h = gl.zeros([NP, BD], gl.float32, layout=lay)
    if HAS_INI:
        h = gl.load(ini_ptr + ((b * SEG + seg) * N + n[:, None]) * D + d[None, :], mask=m2, other=0.0)
    R: gl.constexpr = N + 1 if BFP else N
    hp = hs_ptr + b * ((L + K - 1) // K) * R * D
    lo = seg * LS
    hi = gl.minimum(lo + LS, L)
    t = lo.to(gl.int64)
    xr = load_tile(xp + t * (sxl // W), offx, tw, cw, lo, L, D // W, EVEN)
    dr = load_tile(tp + t * (stl // W), offt, tw, cw, lo, L, D // W, EVEN)
    zr = xr
    if HAS_Z:
        zr = load_tile(zp + t * (szl // W), offz, tw, cw, lo, L, D // W, EVEN)
    Br = load_tile(Bp + t * sBl, offB, tb, nb, lo, L, N, EVEN_B)
    Cr = Br
    if OUT:
        Cr = load_tile(Cp + t * sCl, offC, tb, nb, lo, L, N, EVEN_B)
    for t0 in range(lo, hi, T):
        if GATE == 1:  # barriers separate this from the marks at the end of the tile
            im = gl.arange(0, mt, layout=gl.SliceLayout(1, lt)) + t0 // TB
            gl.store(mp + im * gl.num_programs(0), (im * 0).to(gl.int8), mask=im * TB < L)
        xv = unpack(xr, DT, lt)
        delta = unpack(dr, DT, lt) + bias[None, :]
        if SOFTPLUS:
            delta = softplus(delta, FINE)
        if not EVEN_L:  # past the end: decay 1, input 0 (masked after softplus)
            delta = gl.where((tv + t0 < L)[:, None], delta, 0.0)
        zc = zr
        xc = xr
        view(dS, [T, BD, 2], pair_tile(BD, T)).store(gl.join(delta, xv if ZOH else delta * xv))
        view(BS, [T, NP], s2).store(Br.to(gl.float32))
        if OUT:
            view(CS, [T, NP], s2).store(Cr.to(gl.float32))
        if HAS_SEQ:
            store_keep(KS, kp, tb, t0, L, s2, lb)
        tn = gl.where(t0 + T < hi, t0 + T, t0)  # the next tile is prefetched
        t = tn.to(gl.int64)
        xr = load_tile(xp + t * (sxl // W), offx, tw, cw, tn, L, D // W, EVEN)
        dr = load_tile(tp + t * (stl // W), offt, tw, cw, tn, L, D // W, EVEN)
        zr = xr
        if HAS_Z:
            zr = load_tile(zp + t * (szl // W), offz, tw, cw, tn, L, D // W, EVEN)
        Br = load_tile(Bp + t * sBl, offB, tb, nb, tn, L, N, EVEN_B)
        if OUT:
            Cr = load_tile(Cp + t * sCl, offC, tb, nb, tn, L, N, EVEN_B)
        ys = ()
        for u in gl.static_range(T):
            if SAVE and u % K == 0:
                if EVEN_L or u == 0:
                    save_state(hp + (b * 0 + (t0 + u) // K) * R * D, h, d, N, D, BFP, EVEN_D)
                elif t0 + u < L:
                    save_state(hp + (b * 0 + (t0 + u) // K) * R * D, h, d, N, D, BFP, EVEN_D)
            du, uu = pair_load(dS.index(u), lp, ld)
            Bu = BS.index(u).load(ln)
            e = ex2(du[None, :] * A)
            a = e
            if HAS_SEQ:
                a = a * KS.index(u).load(ln)[:, None]
            h = a * h + enters(e, A, rA, du, uu, Bu, ZOH, FINE)
            if OUT:
                Cu = CS.index(u).load(ln)
                ys = ys + (gl.sum(Cu[:, None] * h, axis=0),)
        if OUT:
            view(yS, [T, BD], s2).store(stack32(ys))
            y = view(yS, [T, BD], s2).load(lt)
            if ACC:
                y = y + load_tile(acc_ptr + b * L * D + (b * 0 + t0) * D, offy, tv, dv, t0, L, D, EVEN)
            if HAS_D:
                y = y + Dv[None, :] * unpack(xc, DT, lt)
            if GATE == 2:
                store_tile(gate_ptr + b * L * D + (b * 0 + t0) * D, offy, y, tv, dv, t0, L, D, EVEN)
            if HAS_Z:
                zf = unpack(zc, DT, lt)
                y = y * zf * rcp(1.0 + ex2(zf * -LOG2E))
                if GATE == 1:
                    za = gl.abs(zf)
                    if not EVEN:
                        za = gl.where((tv + t0 < L)[:, None] & (dv < D)[None, :], za, 1.0)
                    low = gl.min(gl.reshape(za, [T, 8, BD // 8]), axis=2)
                    ll: gl.constexpr = low.type.layout
                    im = (gl.arange(0, T, layout=gl.SliceLayout(1, ll)) + t0) // TB
                    im = im[:, None] + gl.zeros([1, 8], gl.int32, layout=ll)
                    gl.store(mp + im * gl.num_programs(0), (im * 0 + 1).to(gl.int8), mask=low < SMALL_Z)
            store_tile(yp + (b * 0 + t0) * D, offy, y, tv, dv, t0, L, D, EVEN)
    if hi == L:
        gl.store(hT_ptr + (b * D + d[None, :]) * N + n[:, None], h, mask=m2)


@gluon.jit
def carry_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, z_ptr, bias_ptr, keep_ptr, end_ptr, sum_ptr,
    L, D, DG, LS, SEG, sxb, sxl, stb, stl, szb, szl, sBb, sBl, sBg,
    N: gl.constexpr, REV: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_SEQ: gl.constexpr,
    SOFTPLUS: gl.constexpr, EVEN_L: gl.constexpr, EVEN_D: gl.constexpr, ZOH: gl.constexpr, BD: gl.constexpr,
):  # fmt: skip
    """State at the end of each segment, started from zero, and the segment's sum of delta. REV: the adjoint's carry,
    walked backwards (x is then dy, B is C; ZOH changes nothing). One more pass over the exponentials: for when there are too
    few CTAs."""
    NW: gl.constexpr = BD // 16
    T: gl.constexpr = TF
    FINE: gl.constexpr = x_ptr.dtype.element_ty == gl.float32
    EVEN: gl.constexpr = EVEN_L and EVEN_D
    EVEN_B: gl.constexpr = EVEN_L and N == NP
    lay: gl.constexpr = gl.BlockedLayout([4, 2], [4, 8], [1, NW], [0, 1])
    ld: gl.constexpr = gl.SliceLayout(0, lay)
    ln: gl.constexpr = gl.SliceLayout(1, lay)
    lt: gl.constexpr = gl.BlockedLayout([1, BD // 8], [4, 8], [NW, 1], [1, 0])
    lp: gl.constexpr = pair_registers(BD, 2)
    DT: gl.constexpr = x_ptr.dtype.element_ty
    W: gl.constexpr = 4 // (DT.primitive_bitwidth // 8)  # values per word
    lw: gl.constexpr = gl.BlockedLayout([1, BD // 8 // W], [4, 8], [NW, 1], [1, 0])
    lb: gl.constexpr = gl.BlockedLayout([1, 8 // NW], [16 // NW, 2 * NW], [NW, 1], [1, 0])
    s1: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s2: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pid_d = gl.program_id(0)
    b = gl.program_id(1).to(gl.int64)
    seg = gl.program_id(2)
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
    bias = gl.zeros([BD], gl.float32, layout=gl.SliceLayout(0, lt))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + dv, mask=dv < D, other=0.0)
    offx = tw[:, None] * (sxl // W) + cw[None, :]
    offt = tw[:, None] * (stl // W) + cw[None, :]
    offz = tw[:, None] * (szl // W) + cw[None, :]
    tb = gl.arange(0, T, layout=gl.SliceLayout(1, lb))
    nb = gl.arange(0, NP, layout=gl.SliceLayout(0, lb))
    offB = tb[:, None] * sBl + nb[None, :]
    xp = words(x_ptr) + b * (sxb // W)
    tp = words(dt_ptr) + b * (stb // W)
    zp = words(z_ptr) + b * (szb // W)
    Bp = B_ptr + b * sBb + (pid_d * BD) // DG * sBg
    kp = keep_ptr + b * L
    dS = gl.allocate_shared_memory(gl.float32, [T, BD, 2], pair_shared(BD))
    BS = gl.allocate_shared_memory(gl.float32, [T, NP], s1)
    KS = BS
    if HAS_SEQ:
        KS = gl.allocate_shared_memory(gl.float32, [T, NP], s1)
    h = gl.zeros([NP, BD], gl.float32, layout=lay)
    sd = gl.zeros([BD], gl.float32, layout=ld)
    lo = seg * LS
    tiles = (gl.maximum(gl.minimum(LS, L - lo), 0) + T - 1) // T
    if REV:  # nothing uses the carry out of the last segment
        tiles = gl.where(seg == 0, 0, tiles)
    else:
        tiles = gl.where(seg == SEG - 1, 0, tiles)
    t0 = lo
    if REV:
        t0 = lo + gl.maximum(tiles - 1, 0) * T
    t = t0.to(gl.int64)
    xr = load_tile(xp + t * (sxl // W), offx, tw, cw, t0, L, D // W, EVEN)
    dr = load_tile(tp + t * (stl // W), offt, tw, cw, t0, L, D // W, EVEN)
    Br = load_tile(Bp + t * sBl, offB, tb, nb, t0, L, N, EVEN_B)
    zr = xr
    if REV and HAS_Z:
        zr = load_tile(zp + t * (szl // W), offz, tw, cw, t0, L, D // W, EVEN)
    for i in range(0, tiles):
        uv = unpack(xr, DT, lt)
        delta = unpack(dr, DT, lt) + bias[None, :]
        if SOFTPLUS:
            delta = softplus(delta, FINE)
        if not EVEN_L:
            delta = gl.where((tv + t0 < L)[:, None], delta, 0.0)
        if REV:
            if HAS_Z:
                zf = unpack(zr, DT, lt)
                uv = uv * zf * rcp(1.0 + ex2(zf * -LOG2E))
        elif not ZOH:
            uv = delta * uv
        view(dS, [T, BD, 2], pair_tile(BD, T)).store(gl.join(delta, uv))
        view(BS, [T, NP], s2).store(Br.to(gl.float32))
        if HAS_SEQ:
            store_keep(KS, kp, tb, t0, L, s2, lb)
        if REV:
            t0 = gl.maximum(t0 - T, lo)
        else:
            t0 = gl.where(i + 1 < tiles, t0 + T, t0)
        t = t0.to(gl.int64)  # the next tile is prefetched
        xr = load_tile(xp + t * (sxl // W), offx, tw, cw, t0, L, D // W, EVEN)
        dr = load_tile(tp + t * (stl // W), offt, tw, cw, t0, L, D // W, EVEN)
        Br = load_tile(Bp + t * sBl, offB, tb, nb, t0, L, N, EVEN_B)
        if REV and HAS_Z:
            zr = load_tile(zp + t * (szl // W), offz, tw, cw, t0, L, D // W, EVEN)
        for r in gl.static_range(T):
            du, uu = pair_load(dS.index(T - 1 - r if REV else r), lp, ld)
            Bu = BS.index(T - 1 - r if REV else r).load(ln)
            sd += du
            e = ex2(du[None, :] * A)
            a = e
            if HAS_SEQ:
                a = a * KS.index(T - 1 - r if REV else r).load(ln)[:, None]
            if REV:
                h = a * (h + Bu[:, None] * uu[None, :])
            else:
                h = a * h + enters(e, A, rA, du, uu, Bu, ZOH, FINE)
    row = b * SEG + seg
    gl.store(end_ptr + (row * N + n[:, None]) * D + d[None, :], h, mask=m2)
    gl.store(sum_ptr + row * D + d, sd, mask=d < D)

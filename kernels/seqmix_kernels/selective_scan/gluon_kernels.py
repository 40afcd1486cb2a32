# ruff: noqa: RUF005 (the compiler's front end supports tuple concatenation, not unpacking)
"""The selective scan for Hopper in Gluon: the design of triton_kernels.py with every layout chosen by hand.
A call processes 16 states; more take several calls, whose y, dx and ddt accumulate in float32 (ACC). ZOH: zero-order hold,
where delta B becomes r B with r = (exp(delta A) - 1) / A per state, recomputed wherever it is used.

It has the same contract and saved states as the plain Triton kernels, so forward and backward of the two can be mixed.

A CTA owns BD channels of one segment of one batch row, 64 or 32 (16 for each warp), and walks it in tiles of T steps,
serially: 32 forward, 16 backward. The states stay in registers. There are three kinds of layout:
  lay   [NP, BD], the recurrence. Forward: 8 states x 1 channel per thread, two lanes per channel: y takes one shuffle.
        Backward: 4 states x 2 channels, lane bits 0-1 over states and 2-4 over channels: half as many partial sums of
        dB and dC. Its slices read rows of shared memory: B, C as 128-bit broadcasts, (delta, delta x) as pairs.
  lt    [T, BD], elementwise work and global memory: eight lanes per step, BD / 8 neighbouring channels each (128 or 64
        bits). With 8 channels per lane in narrow CTAs, two steps would conflict in the same banks of shared memory.
  shared memory between the two: the functions below choose bit patterns without bank conflicts on either side.
Stages of a tile: (1) in lt: softplus, delta x, the gate -> fp32 shared memory; (2) in lay: the steps; (3) in lt: the rest,
store.

The backward processes a chunk of NT = 1 or 2 tiles from its saved state, last tile first. One forward sweep over the chunk
stores the state before every group of S = 4 steps in shared memory; then each group, last to first, is run forward
again with all decays and states in registers, then backward: 1.9 exponentials per state, none in the reverse direction.
Sums over states end in `quad_sum`: four values over four lanes with three shuffles. dB, dC: summed over a thread's two
channels, partials to shared memory, summed over the CTA, written (rows, steps, blocks, 2 N), added by reduce_bc_kernel.

Gluon adds a barrier after every store to a shared buffer that is accessed again, even in another row, so values of several
steps are stacked in registers (join, permute, reshape cost nothing) and stored once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from Triton 3.9 on
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
MAGIC = gl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits
SHRINK, GROW = gl.constexpr(0.999938964), gl.constexpr(1.00006104)  # 1 - 2^-14 and its inverse
NP = gl.constexpr(16)  # states, padded
TF = gl.constexpr(32)  # steps per tile, forward
TB = gl.constexpr(16)  # steps per tile, backward
S = gl.constexpr(4)  # steps whose states and decays the backward holds in registers
NEAR_FINE, NEAR = gl.constexpr(0.75), gl.constexpr(0.375)  # |delta A log2(e)| below which zero-order hold uses a series
SMALL_Z = gl.constexpr(2.0**-24)  # for smaller |z| (above all 0) the value before the gate cannot be recovered from the output


# ---- layouts for CTAs of BD channels: built here, because a layout argument would become a string at each launch ---------
# Layouts of shared memory are lists of bases: bit i of the offset -> coordinates (xor of bases).


@gluon.constexpr_function
def powers(n):
    return [1 << i for i in range(n.bit_length() - 1)]


@gluon.constexpr_function
def pair_registers(BD, CHANNELS):
    """[BD, 2], (delta, delta x): 1 channel per thread, the same in lanes that differ in bit 4, or 2 channels and bits 0-1."""
    channels = [[v, 0] for v in powers(BD)]
    if CHANNELS == 1:
        return gl.DistributedLinearLayout([[0, 1]], channels[:4] + [[0, 0]], channels[4:], [], [BD, 2])
    return gl.DistributedLinearLayout([[0, 1], [1, 0]], [[0, 0], [0, 0]] + channels[1:4], channels[4:], [], [BD, 2])


@gluon.constexpr_function
def pair_channels(BD):
    """Channel bits of pairs: 16-byte chunks xored by higher bits, so that writers of BD / 8 channels hit all banks."""
    return [v ^ (v >> 3 if v >= 16 else 0) for v in powers(BD)]


@gluon.constexpr_function
def pair_shared(BD):
    return gl.SharedLinearLayout([[0, 1]] + [[v, 0] for v in pair_channels(BD)])


@gluon.constexpr_function
def pair_tile(BD, T):
    """T rows of `pair_shared`."""
    return gl.SharedLinearLayout([[0, 0, 1]] + [[0, v, 0] for v in pair_channels(BD)] + [[v, 0, 0] for v in powers(T)])


@gluon.constexpr_function
def state_shared(BD):
    """[NP, BD]: a thread's own slots for its states, neighbouring threads 16 bytes apart."""
    d = [[0, v] for v in powers(BD)]
    return gl.SharedLinearLayout([[v, 0] for v in powers(16)] + d[1:4] + d[:1] + d[4:])


@gluon.constexpr_function
def row_channels(BD):
    return [v ^ (4 if v == 32 else 0) for v in powers(BD)]


@gluon.constexpr_function
def row_shared(BD):
    return gl.SharedLinearLayout([[v] for v in row_channels(BD)])


@gluon.constexpr_function
def row_tile(BD, T):
    """T rows of `row_shared`."""
    return gl.SharedLinearLayout([[0, v] for v in row_channels(BD)] + [[v, 0] for v in powers(T)])


@gluon.constexpr_function
def save_registers(BD):
    """[NP, BD], 8 states of a channel per thread: the forward's layout of h with the states first."""
    d = [[0, v] for v in powers(BD)]
    return gl.DistributedLinearLayout([[1, 0], [2, 0], [4, 0]], d[:4] + [[8, 0]], d[4:], [], [16, BD])


@gluon.jit
def view(smem, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if RENAMED:
        return smem.reinterpret(gl.float32, shape, layout)
    else:
        return smem._reinterpret(gl.float32, shape, layout)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rcp(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def shfl1(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def shfl2(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def prefetch(p):
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def softplus(x, FINE: gl.constexpr):
    """max(x, 0) + log1p(u), u = exp(-|x|); log1p(u) = 2 atanh(v / 2), v = 2u / (2 + u), the quotient by v a polynomial
    in v^2 fitted on [0, 4/9]: within 3e-7 of itself at every x, FINE: 1e-8."""
    u = ex2(gl.abs(x) * -LOG2E)
    v = u * rcp(1.0 + 0.5 * u)
    r = v * v
    if FINE:
        p = 1.0 + r * (0.0833328949 + r * (0.0125077668 + r * (0.00218448585 + r * 0.000550286275)))
    else:
        p = 1.0 + r * (0.0833449725 + r * (0.0123718936 + r * 0.0026736292))
    return gl.maximum(x, 0.0) + v * p  # maximum drops a NaN, v keeps it


@gluon.jit
def softplus_slope(delta, FINE: gl.constexpr):
    """sigmoid(x) = 1 - exp(-delta) where delta = softplus(x). FINE: without the cancellation at small delta."""
    f = 1.0 - ex2(delta * -LOG2E)
    if FINE:
        f = gl.where(delta < 0.125, delta * (1.0 - delta * (0.5 - delta * (0.16666667 - delta * (0.041666667
            - delta * 0.0083333333)))), f)  # fmt: skip
    return f


@gluon.jit
def series(v, FINE: gl.constexpr):
    """(phi(u) - 1) / v, phi(u) = expm1(u) / u, u = v ln 2, fitted for |v| < 3/4, phi within 3e-8
    and phi' 2e-7; without FINE for |v| < 3/8, 2e-7 and 4e-6."""
    if FINE:
        return 0.346573621 + v * (0.0800755098 + v * (0.0138755469 + v * (0.00192355842 + v * (0.000224043877
            + v * 2.21839164e-05))))  # fmt: skip
    else:
        return 0.346572399 + v * (0.0800752267 + v * (0.0139135923 + v * 0.00192867417))


@gluon.jit
def held(v, e, du, rA, FINE: gl.constexpr):
    """r = (exp(delta A) - 1) / A = delta phi(u), from v = delta A log2(e), e = 2^v and rA = 1 / (A log2(e)). The quotient
    cancels near 0, the series does not."""
    near = du[None, :] + v * (du[None, :] * series(v, FINE))
    return gl.where(gl.abs(v) < (NEAR_FINE if FINE else NEAR), near, (e * LOG2E - LOG2E) * rA)


@gluon.jit
def held_slope(v, e, du, rA, FINE: gl.constexpr):
    """r as `held` makes it, and ln 2 of its slope: delta^2 phi'(u), phi'(u) = phi - (phi - 1) / u = (exp(u) - phi) / u."""
    s = du[None, :] * series(v, FINE)
    near = gl.abs(v) < (NEAR_FINE if FINE else NEAR)
    r = gl.where(near, du[None, :] + v * s, (e * LOG2E - LOG2E) * rA)
    return r, gl.where(near, du[None, :] * (r * LN2 - s), (du[None, :] * e - r) * rA)


@gluon.jit
def enters(e, A, rA, du, uu, Bu, ZOH: gl.constexpr, FINE: gl.constexpr):
    """What a step adds to the state. uu: delta x, or with ZOH x."""
    if ZOH:
        return Bu[:, None] * uu[None, :] * held(du[None, :] * A, e, du, rA, FINE)
    else:
        return Bu[:, None] * uu[None, :]


@gluon.jit
def part_n(v):
    """[16, BD] -> [4, BD]: sum over the 4 states that a thread holds; axis 0 is lane bits 0-1."""
    return gl.sum(gl.reshape(v, [4, 4, v.shape[1]]), axis=1)


@gluon.jit
def quad_sum(a, b):
    """Two [4, BD] tensors of per-lane parts -> [2, BD], row 0 = sum of a, row 1 = sum of b, over the four lanes.
    A butterfly that halves what a lane holds at each step: 4 values (2 channels of a, 2 of b) with 3 shuffles."""
    BD: gl.constexpr = a.shape[1]
    a0, a1 = gl.split(gl.reshape(a, [4, BD // 2, 2]))
    b0, b1 = gl.split(gl.reshape(b, [4, BD // 2, 2]))
    j = gl.arange(0, 4, layout=gl.SliceLayout(1, a0.type.layout))[:, None]
    c1 = (j & 1) == 1
    c2 = (j & 2) == 2
    u = gl.where(c1, a1, a0) + shfl1(gl.where(c1, a0, a1))
    v = gl.where(c1, b1, b0) + shfl1(gl.where(c1, b0, b1))
    r = gl.where(c2, v, u) + shfl2(gl.where(c2, u, v))
    return gl.reshape(gl.permute(gl.reshape(r, [2, 2, BD // 2]), [0, 2, 1]), [2, BD])


@gluon.jit
def stack2(a, b):
    """2 tensors [P, Q] -> [2 P, Q], registers only."""
    P: gl.constexpr = a.shape[0]
    Q: gl.constexpr = a.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), [2, 0, 1]), [2 * P, Q])


@gluon.jit
def stack4(xs):
    """4 tensors [P, Q] -> [4 P, Q], registers only: one shared-memory store (one barrier) instead of four."""
    r = gl.join(gl.join(xs[0], xs[2]), gl.join(xs[1], xs[3]))
    P: gl.constexpr = xs[0].shape[0]
    Q: gl.constexpr = xs[0].shape[1]
    return gl.reshape(gl.permute(gl.reshape(r, [P, Q, 4]), [2, 0, 1]), [4 * P, Q])


@gluon.jit
def stack4p(xs):
    """4 tensors [N, P] -> [4, P, N]"""
    r = gl.join(gl.join(xs[0], xs[2]), gl.join(xs[1], xs[3]))
    return gl.permute(gl.reshape(r, [xs[0].shape[0], xs[0].shape[1], 4]), [2, 1, 0])


@gluon.jit
def stack32(xs):
    """32 tensors [BD] -> [32, BD], registers only."""
    y16 = ()
    for i in gl.static_range(16):
        y16 = y16 + (gl.join(xs[i], xs[i + 16]),)
    y8 = ()
    for i in gl.static_range(8):
        y8 = y8 + (gl.join(y16[i], y16[i + 8]),)
    y4 = ()
    for i in gl.static_range(4):
        y4 = y4 + (gl.join(y8[i], y8[i + 4]),)
    r = gl.join(gl.join(y4[0], y4[2]), gl.join(y4[1], y4[3]))
    return gl.permute(gl.reshape(r, [xs[0].shape[0], 32]), [1, 0])


@gluon.jit
def pair_load(smem, lp: gl.constexpr, ld: gl.constexpr):
    """delta and delta x of a step: one 64-bit read a channel (128-bit for a thread with two)."""
    a, b = gl.split(smem.load(lp))
    return gl.convert_layout(a, ld, assert_trivial=True), gl.convert_layout(b, ld, assert_trivial=True)


@gluon.jit
def load_tile(p, offs, tv, cv, t0, L, D, EVEN: gl.constexpr):
    """A tile at p + offs, zeros past step L and column D (for B and C the columns are states)."""
    if EVEN:
        return gl.load(p + offs)
    else:
        return gl.load(p + offs, mask=(tv + t0 < L)[:, None] & (cv < D)[None, :], other=0.0)


@gluon.jit
def words(p):
    """The pointer as one to 32-bit words: two 16-bit values each. Packed, what is fetched ahead takes half the registers."""
    if p.dtype.element_ty == gl.float32:
        return p
    else:
        return p.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def unpack(v, DT: gl.constexpr, lt: gl.constexpr):
    """[T, BD] float32 in lt from a tile of words."""
    if DT == gl.float32:
        return v
    else:
        if DT == gl.bfloat16:
            a = (v << 16).to(gl.float32, bitcast=True)
            b = (v & -65536).to(gl.float32, bitcast=True)
        else:
            a = v.to(gl.int16).to(DT, bitcast=True).to(gl.float32)
            b = (v >> 16).to(gl.int16).to(DT, bitcast=True).to(gl.float32)
        w = gl.reshape(gl.join(a, b), [v.shape[0], 2 * v.shape[1]])
        return gl.convert_layout(w, lt, assert_trivial=True)


@gluon.jit
def channel(v, smem, PRE: gl.constexpr):
    """A value a channel that is kept in registers with PRE, in shared memory without."""
    if PRE:
        return v
    else:
        return smem.load(v.type.layout)


@gluon.jit
def delta_of(
    dr, bv, bS, tv, t0, L, DT: gl.constexpr, lt: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
    EVEN_L: gl.constexpr, FINE: gl.constexpr, PRE: gl.constexpr,
):  # fmt: skip
    """delta of a tile of the backward."""
    delta = unpack(dr, DT, lt)
    if HAS_BIAS:
        delta += channel(bv, bS, PRE)[None, :]
    if SOFTPLUS:
        delta = softplus(delta, FINE)
    if not EVEN_L:
        delta = gl.where((tv + t0 < L)[:, None], delta, 0.0)
    return delta


@gluon.jit
def store_tile(p, offs, v, tv, cv, t0, L, D, EVEN: gl.constexpr):
    if EVEN:
        gl.store(p + offs, v.to(p.dtype.element_ty))
    else:
        gl.store(p + offs, v.to(p.dtype.element_ty), mask=(tv + t0 < L)[:, None] & (cv < D)[None, :])


@gluon.jit
def store_keep(KS, kp, tb, t0, L, s2: gl.constexpr, lb: gl.constexpr):
    """keep of a tile's steps into shared memory, once for every state: read there like B."""
    T: gl.constexpr = KS.shape[0]
    k = gl.load(kp + t0 + tb, mask=tb + t0 < L, other=1.0)
    view(KS, [T, NP], s2).store(k[:, None] + gl.zeros([T, NP], gl.float32, layout=lb))


@gluon.jit
def save_state(ptr, h, d, N: gl.constexpr, D, BFP: gl.constexpr, EVEN_D: gl.constexpr):
    """One saved state of the forward: [D, N] at ptr, then with BFP the D exponents. The layout of h, but with the states
    first, which is what lets a thread write its 8 states at once."""
    BD: gl.constexpr = h.shape[1]
    ls: gl.constexpr = save_registers(BD)
    ds = gl.program_id(0) * BD + gl.arange(0, BD, layout=gl.SliceLayout(0, ls))
    ns = gl.arange(0, NP, layout=gl.SliceLayout(1, ls))
    p = ptr + ds[None, :] * N + ns[:, None]
    if BFP:
        m = gl.max(h.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) >> 23  # exponent of the largest; 255: not finite
        e = gl.maximum(m, 14)
        # slightly less than 2^(141 - e), so that |h| scale < 32767
        scale = ((268 - gl.minimum(e, 254)) << 23).to(gl.float32, bitcast=True) * SHRINK
        v = (h * scale[None, :] + MAGIC).to(gl.int32, bitcast=True).to(gl.int16)
        if EVEN_D:
            gl.store(ptr + N * D + d, e.to(gl.int16))
        else:
            gl.store(ptr + N * D + d, e.to(gl.int16), mask=d < D)
    else:
        v = h
    v = gl.convert_layout(v, ls, assert_trivial=True)
    if N == NP and EVEN_D:
        gl.store(p, v)
    else:
        gl.store(p, v, mask=(ns < N)[:, None] & (ds < D)[None, :])


@gluon.jit
def load_state(ptr, n, d, N: gl.constexpr, D, BFP: gl.constexpr, EVEN_D: gl.constexpr):
    dm = d < D
    if N == NP and EVEN_D:
        h = gl.load(ptr + d[None, :] * N + n[:, None]).to(gl.float32)
    else:
        h = gl.load(ptr + d[None, :] * N + n[:, None], mask=(n < N)[:, None] & dm[None, :], other=0).to(gl.float32)
    if BFP:
        e = gl.load(ptr + N * D + d, mask=dm, other=14).to(gl.int32)
        f = ((e - 14) << 23).to(gl.float32, bitcast=True) * GROW
        h = h * gl.where(e == 255, float("nan"), f)[None, :]
    return h


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
            nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)  # fmt: skip
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
                        tb, nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)  # fmt: skip
                for g in range(0, G):
                    hS.index(g).store(h)
                    h = steps(h, A, rA, dS, BS, KS, g, HAS_SEQ, ZOH, FINE, ld, ln)
        if not PRE:
            xr, dr, gr, zr, yr, Br, Cr = load_all(xp, tp, gp, zp, yp, Bp, Cp, tw, cw,
                tb, nb, t0, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)  # fmt: skip
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
                tb, nb, tn, L, D, N, W, sxl, stl, sgl, szl, sBl, sCl, HAS_Z, DZ, EVEN, EVEN_B, PRE)  # fmt: skip
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

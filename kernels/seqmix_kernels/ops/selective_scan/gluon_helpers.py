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

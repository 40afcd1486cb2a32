/* The selective scan on a CPU, forward and backward. README.md has the equations; cpu.py builds and calls this file.

Channels are innermost in memory, so a vector holds VW channels and nothing is shuffled. A task is one batch row and a
block of channels of one group; it processes time in tiles. Within a tile each vector of channels processes its states
KN at a time, whose h and A stay in registers over the tile's steps:

    forward    h = exp(ΔA) h + B̄ x,  y += C h
    backward   per chunk, last to first: first forward from the chunk's saved state, keeping ā and h of the chunk in L1,
               then in reverse with the adjoint g:  g += C dy;  dC += dy h;  dB += g Δx;  ...;  g *= ā

No (B, L, D, N) array exists. dB and dC are summed over channels within the task and then over tasks in a fixed order,
which depends only on the shape: the result is bitwise the same for any number of threads. */
#include "../../vector.h"

#define KN 4     /* states handled together */
#define TILE 32  /* steps per forward tile */

/* One call. Strides are in elements. A, D, bias, h0, dfinal and all results are contiguous; absent ones are null. */
struct args {
    int64_t batch, length, width, groups, n, chunk, softplus, zoh, threads, block; /* block: vectors of a task */
    const float *x, *dt, *z, *dy, *B, *C, *A, *D, *bias, *h0, *dfinal;
    const int64_t *seq;                                       /* (B, L) contiguous */
    int64_t sx[3], sdt[3], sz[3], sdy[3];                     /* batch, time, channel */
    int64_t sB[4], sC[4];                                     /* batch, time, group, state */
    float *y, *final, *bound;                                 /* (B,L,D) (B,D,N) (B,ceil(L/chunk),N,D) or null */
    float *dx, *ddt, *dz, *dB, *dC, *dA, *dD, *dbias, *dh0;   /* as their inputs; dB, dC (B,L,G,N) */
    float *pB, *pC, *pA, *pD, *pbias; /* partial sums: (B,G,blocks,L,N) twice, (B,D,N), (B,D) twice */
};

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

/* 2^x for x <= 0, the case of every stable state's decay: it takes fewer operations, and most of the time is spent here.
Below -126 it stays 1e-38. Vectors that can look up 32 values use 2^x = 2^k 2^f with k in steps of 1/32, |f| <= 1/64,
and a cubic for f (1e-10, because a slow decay repeats its error a thousand times). The bits of k + magic count those steps;
shifted to the exponent's place they are added to a table entry from which its own low bits were subtracted before. */
#if defined(__AVX512F__)
struct powers { vf low, high; };
INLINE struct powers powers(void) {
    static const int32_t bits[32] = {
        0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
        0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
        0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
        0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3,
    };
    struct powers p;
    memcpy(&p, bits, sizeof p);
    return p;
}
INLINE vf decay2v(vf x, struct powers p) {
    x = (vf)_mm512_max_ps((__m512)splat(-126.0f), (__m512)x); /* the second operand where one is NaN */
    vf t = x + 393216.0f, f = x - (t - 393216.0f);            /* 1.5 2^18: 5 bits are left for a fraction */
    vi step = (vi)_mm512_permutex2var_ps((__m512)p.low, (__m512i)t, (__m512)p.high) + ((vi)t << 18);
    return (vf)step * (1.0f + f * (0.6931471806f + f * (0.24022846f + f * 0.055503614f)));
}
#else
struct powers { int none; };
INLINE struct powers powers(void) { return (struct powers){0}; }
INLINE vf decay2v(vf x, struct powers p) {
    (void)p;
    return exp2v(x);
}
#endif

/* The sums over the lanes of KN vectors, each in a fixed order. */
INLINE void totals(const vf *v, float *to) {
#if defined(__AVX512F__)
    __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    __m512 all = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd); /* a, b, c, d four times */
    __m256 half = _mm512_castps512_ps256(all) + _mm512_castps512_ps256(_mm512_shuffle_f32x4(all, all, 0x4e));
    _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
    for (int j = 0; j < KN; j++) {
        float a[VW];
        memcpy(a, v + j, sizeof a);
        for (int w = VW / 2; w; w /= 2)
            for (int i = 0; i < w; i++) a[i] += a[i + w];
        to[j] = a[0];
    }
#endif
}

/* ---- tasks and their memory -------------------------------------------------------------------------------------- */

struct task { /* a batch row, a group, a block of its channels: nv vectors, the last of `last` lanes */
    int64_t b, g, index, first, nv, np; /* np: N rounded up to KN */
    int last;
};

static int64_t vectors(const struct args *a) { return (a->width / a->groups + VW - 1) / VW; }
static int64_t blocks(const struct args *a) { return (vectors(a) + a->block - 1) / a->block; }

static struct task find(const struct args *a, int64_t i) {
    int64_t nb = blocks(a), per = a->width / a->groups, index = i % nb, from = index * a->block * VW;
    struct task k = {.b = i / nb / a->groups, .g = i / nb % a->groups, .index = index, .np = (a->n + KN - 1) / KN * KN};
    k.nv = min64(a->block, vectors(a) - index * a->block);
    k.first = k.g * per + from;
    k.last = (int)(min64(per - from, k.nv * VW) - (k.nv - 1) * VW);
    return k;
}
static int lanes(const struct task *k, int64_t v) { return v + 1 < k->nv ? VW : k->last; }

/* Scratch of one thread; every array is a whole number of vectors. */
struct scratch {
    float *B, *C;                                 /* [T][np] */
    vf *A, *A2, *invA, *h, *g, *dA;               /* [nv][np]: A, A log2 e, 1/A or 0, states, adjoint, ∂A */
    vf *delta, *x, *dx, *y, *dy, *dd, *ds, *gate; /* [nv][T]: Δ, x, Δx, y, ∂y before the gate, sums over states, ∂z/y */
    vf *keep, *ratio;                             /* [T + 1][2][KN]: ā_t and h_{t-1} of KN states; [T][KN]: B̄/B */
    vf *acc;                                      /* [T][2][KN]: ∂B and ∂C of KN states, lanes not yet summed */
    vf *dD, *dbias;                               /* [nv] */
    unsigned char *fresh;                         /* [T]: a document starts here */
    struct stream { const char *at; int64_t step, across; } soon[8]; /* what each pass over a tile fetches */
};

/* The processor's own prefetch works poorly on rows of a few cache lines far apart, so each pass over the tile's steps also
touches one array's rows, of the next tile (inputs) or of this one (results). Strides in elements. */
static void fetch(struct scratch *s, int pass, const float *p, int64_t time, int64_t channel) {
    s->soon[pass] = (struct stream){(const char *)(p ? p : s->B), p ? 4 * time : 0, p ? 4 * VW * channel : 0};
}

/* Places the arrays in `memory`, or only counts; returns the bytes that they take. */
static int64_t lay_out(struct scratch *s, void *memory, const struct args *a, int64_t steps) {
    int64_t nv = a->block, np = (a->n + KN - 1) / KN * KN, per = nv * np, row = nv * steps, own = steps * KN;
    int64_t bc = (steps * np + VW - 1) / VW, flags = (steps + 4 * VW - 1) / (4 * VW), used = 0;
#define TAKE(field, count) s->field = memory ? (void *)((vf *)memory + used) : 0, used += (count)
    TAKE(B, bc), TAKE(C, bc), TAKE(A, per), TAKE(A2, per), TAKE(invA, per), TAKE(h, per), TAKE(g, per), TAKE(dA, per);
    TAKE(delta, row), TAKE(x, row), TAKE(dx, row), TAKE(y, row), TAKE(dy, row), TAKE(dd, row), TAKE(ds, row);
    TAKE(gate, row), TAKE(ratio, own), TAKE(keep, 2 * (own + KN)), TAKE(acc, 2 * own), TAKE(dD, nv), TAKE(dbias, nv);
    TAKE(fresh, flags);
#undef TAKE
    return used * (int64_t)sizeof(vf);
}

/* A row of B or C of the tile, padded to np states: padded states have B = C = 0, and with A = 0 they stay 0. */
static void load_states(float *to, const float *from, const int64_t *s, const struct args *a, const struct task *k,
                        int64_t t0, int64_t steps) {
    for (int64_t t = 0; t < steps; t++) {
        const float *row = from + k->b * s[0] + (t0 + t) * s[1] + k->g * s[2];
        for (int64_t n = 0; n < a->n; n++) to[t * k->np + n] = row[n * s[3]];
        for (int64_t n = a->n; n < k->np; n++) to[t * k->np + n] = 0.0f;
    }
}

/* Returns whether an A is positive. */
static int load_A(struct scratch *s, const struct args *a, const struct task *k) {
    int grows = 0;
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < k->np; n++) {
            vf A = splat(0.0f);
            if (n < a->n) A = load(a->A + (k->first + v * VW) * a->n + n, a->n, lanes(k, v));
            for (int i = 0; i < VW; i++) grows |= A[i] > 0.0f;
            s->A[v * k->np + n] = A;
            s->A2[v * k->np + n] = A * LOG2E;
            /* (exp(ΔA) - 1)/A equals Δ in float32 long before A is this small; 0 marks this case */
            s->invA[v * k->np + n] = pick((A > 1e-20f) | (A < -1e-20f), 1.0f / A, splat(0.0f));
        }
    return grows;
}

static void load_state(vf *to, const float *from, const struct args *a, const struct task *k) { /* from (B,D,N) */
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < k->np; n++)
            to[v * k->np + n] = from && n < a->n
                ? load(from + (k->b * a->width + k->first + v * VW) * a->n + n, a->n, lanes(k, v)) : splat(0.0f);
}

static void store_state(float *to, const vf *from, const struct args *a, const struct task *k, int64_t row) {
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < a->n; n++) {
            float lane[VW];
            memcpy(lane, from + v * k->np + n, sizeof lane);
            for (int i = 0; i < lanes(k, v); i++) to[(row * a->width + k->first + v * VW + i) * a->n + n] = lane[i];
        }
}

/* The case for which the inner loops are written. ΔA > 0 requires an A > 0, or a Δ < 0, which softplus never gives. */
enum kind { EULER, EULER_GROWING, ZOH };

/* Δ, x, Δx of the tile, and D x. Sets whether a document starts in the tile. */
static enum kind load_tile(struct scratch *s, const struct args *a, const struct task *k, int64_t t0, int64_t steps,
                           int grows, int *any) {
    *any = 0;
    vi negative = {0};
    for (int64_t t = 0; t < steps; t++) {
        const int64_t at = k->b * a->length + t0 + t;
        s->fresh[t] = a->seq && t0 + t > 0 && a->seq[at] != a->seq[at - 1];
        *any |= s->fresh[t];
    }
    load_states(s->B, a->B, a->sB, a, k, t0, steps);
    load_states(s->C, a->C, a->sC, a, k, t0, steps);
    for (int64_t v = 0; v < k->nv; v++) {
        int w = lanes(k, v);
        int64_t c = k->first + v * VW;
        const float *x = a->x + k->b * a->sx[0] + c * a->sx[2], *dt = a->dt + k->b * a->sdt[0] + c * a->sdt[2];
        vf bias = load_or(a->bias, c, 0.0f, w), D = load_or(a->D, c, 0.0f, w);
        for (int64_t t = 0; t < steps; t++) {
            int64_t i = v * steps + t;
            s->x[i] = load(x + (t0 + t) * a->sx[1], a->sx[2], w);
            vf raw = load(dt + (t0 + t) * a->sdt[1], a->sdt[2], w) + bias;
            s->delta[i] = a->softplus ? softplus(raw) : raw;
            negative |= s->delta[i] < 0.0f;
            s->dx[i] = s->delta[i] * s->x[i];
            s->y[i] = D * s->x[i];
        }
    }
    for (int i = 0; i < VW; i++) grows |= negative[i];
    return a->zoh ? ZOH : grows ? EULER_GROWING : EULER;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* ā and B̄/B of one state. The input is (B̄/B) B x; for Euler B̄/B is Δ, so that Δx serves all states. */
#define DISCRETISE(decay, ratio, delta, A2, invA)                                     \
    if (kind == ZOH) {                                                                \
        vf em1 = exp2m1v(delta * A2);                                                 \
        decay = 1.0f + em1;                                                           \
        ratio = pick(invA == 0.0f, delta, em1 * invA);                                \
    } else decay = kind == EULER ? decay2v(delta * A2, table) : exp2v(delta * A2)

INLINE void scan_tile(struct scratch *s, const struct task *k, int64_t steps, const enum kind kind, const int any) {
    struct powers table = powers();
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < k->np; n += KN) {
            const vf *delta = s->delta + v * steps, *x = s->x + v * steps, *dx = s->dx + v * steps;
            const float *B = s->B + n, *C = s->C + n;
            vf *y = s->y + v * steps;
            vf h[KN], A2[KN], invA[KN];
            for (int j = 0; j < KN; j++) h[j] = s->h[v * k->np + n + j], A2[j] = s->A2[v * k->np + n + j];
            if (kind == ZOH) for (int j = 0; j < KN; j++) invA[j] = s->invA[v * k->np + n + j];
            struct stream soon = s->soon[n / KN % 4];
            soon.at += v * soon.across;
            for (int64_t t = 0; t < steps; t++, B += k->np, C += k->np, soon.at += soon.step) {
                __builtin_prefetch(soon.at);
                vf sum = y[t], in = dx[t], d = delta[t];
                for (int j = 0; j < KN; j++) {
                    vf decay, ratio;
                    DISCRETISE(decay, ratio, d, A2[j], invA[j]);
                    if (kind == ZOH) in = ratio * x[t];
                    if (any && s->fresh[t]) h[j] = in * B[j];
                    else h[j] = decay * h[j] + in * B[j];
                    sum += h[j] * C[j];
                }
                y[t] = sum;
            }
            for (int j = 0; j < KN; j++) s->h[v * k->np + n + j] = h[j];
        }
}

static void forward_task(const void *args, void *memory, int64_t i) {
    const struct args *a = args;
    struct scratch scratch, *s = &scratch;
    struct task k = find(a, i);
    lay_out(s, memory, a, TILE);
    int64_t chunks = (a->length + a->chunk - 1) / a->chunk;
    int any, grows = load_A(s, a, &k);
    load_state(s->h, a->h0, a, &k);
    for (int64_t t0 = 0, steps; t0 < a->length; t0 += steps) {
        int64_t next = (t0 / a->chunk + 1) * a->chunk;
        steps = min64(TILE, min64(next, a->length) - t0);
        if (a->bound && t0 % a->chunk == 0)
            for (int64_t v = 0; v < k.nv; v++)
                for (int64_t n = 0; n < a->n; n++)
                    store(a->bound + ((k.b * chunks + t0 / a->chunk) * a->n + n) * a->width + k.first + v * VW,
                          s->h[v * k.np + n], lanes(&k, v));
        enum kind kind = load_tile(s, a, &k, t0, steps, grows, &any);
        int64_t to = t0 + steps;
        fetch(s, 0, a->x + k.b * a->sx[0] + to * a->sx[1] + k.first * a->sx[2], a->sx[1], a->sx[2]);
        fetch(s, 1, a->dt + k.b * a->sdt[0] + to * a->sdt[1] + k.first * a->sdt[2], a->sdt[1], a->sdt[2]);
        fetch(s, 2, a->y + (k.b * a->length + t0) * a->width + k.first, a->width, 1);
        fetch(s, 3, a->z ? a->z + k.b * a->sz[0] + t0 * a->sz[1] + k.first * a->sz[2] : 0, a->sz[1], a->sz[2]);
        /* the usual case has its own code, without a branch in the loop */
        if (kind == EULER && !any) scan_tile(s, &k, steps, EULER, 0);
        else if (kind == EULER) scan_tile(s, &k, steps, EULER, any);
        else if (kind == ZOH) scan_tile(s, &k, steps, ZOH, any);
        else scan_tile(s, &k, steps, EULER_GROWING, any);
        for (int64_t v = 0; v < k.nv; v++)
            for (int64_t t = 0; t < steps; t++) {
                int64_t c = k.first + v * VW;
                vf y = s->y[v * steps + t];
                if (a->z) {
                    vf z = load(a->z + k.b * a->sz[0] + (t0 + t) * a->sz[1] + c * a->sz[2], a->sz[2], lanes(&k, v));
                    y *= z * sigmoid(z);
                }
                store(a->y + (k.b * a->length + t0 + t) * a->width + c, y, lanes(&k, v));
            }
    }
    store_state(a->final, s->h, a, &k, k.b);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* ∂(B̄/B)/∂A = Δ² φ'(u), u = ΔA, φ'(u) = (exp(u) - φ(u))/u: as it stands, and as a series where that cancels. */
INLINE vf slope(vf u, vf delta, vf grow, vf ratio, vf invA) {
    vf near = 1.0f / 840 + u * (1.0f / 5760 + u * (1.0f / 45360));
    near = 0.5f + u * (1.0f / 3 + u * (1.0f / 8 + u * (1.0f / 30 + u * (1.0f / 144 + u * near))));
    return pick((u < 0.5f) & (u > -0.5f), delta * delta * near, (delta * grow - ratio) * invA);
}

/* One vector, KN states, one chunk: recompute forward, then reverse. Letters as in README.md: g is ∂loss/∂h. */
INLINE void reverse_chunk(struct scratch *s, const struct task *k, int64_t v, int64_t n, int64_t steps,
                          const enum kind kind, const int any, const int gated) {
    const vf *delta = s->delta + v * steps, *x = s->x + v * steps, *dx = s->dx + v * steps, *dy = s->dy + v * steps;
    vf *y = s->y + v * steps, *ds = s->ds + v * steps, *dd = s->dd + v * steps;
    vf *keep = s->keep, *ratios = s->ratio, *acc = s->acc;
    struct powers table = powers();
    vf h[KN], A[KN], A2[KN], invA[KN];
    for (int j = 0; j < KN; j++) keep[KN + j] = h[j] = s->h[v * k->np + n + j], A2[j] = s->A2[v * k->np + n + j];
    if (kind == ZOH) for (int j = 0; j < KN; j++) invA[j] = s->invA[v * k->np + n + j];
    const float *B = s->B + n, *C = s->C + n;
    struct stream soon = s->soon[n / KN % 4];
    soon.at += v * soon.across;
    for (int64_t t = 0; t < steps; t++, B += k->np, C += k->np, soon.at += soon.step) {
        __builtin_prefetch(soon.at);
        vf in = dx[t], d = delta[t], sum = gated ? y[t] : in;
        for (int j = 0; j < KN; j++) {
            vf decay, ratio;
            DISCRETISE(decay, ratio, d, A2[j], invA[j]);
            if (kind == ZOH) ratios[t * KN + j] = ratio, in = ratio * x[t];
            if (any && s->fresh[t]) decay = splat(0.0f), h[j] = in * B[j];
            else h[j] = decay * h[j] + in * B[j];
            keep[2 * t * KN + j] = decay;
            keep[(2 * t + 3) * KN + j] = h[j];
            if (gated) sum += h[j] * C[j];
        }
        if (gated) y[t] = sum;
    }
    vf g[KN], dA[KN];
    for (int j = 0; j < KN; j++) {
        g[j] = s->g[v * k->np + n + j], A[j] = s->A[v * k->np + n + j], dA[j] = s->dA[v * k->np + n + j];
    }
    soon = s->soon[4 + n / KN % 4];
    soon.at += v * soon.across;
    for (int64_t t = steps - 1; t >= 0; t--, soon.at += soon.step) {
        __builtin_prefetch(soon.at);
        B -= k->np, C -= k->np;
        vf dyt = dy[t], in = dx[t], d = delta[t], sum = ds[t], sumd = dd[t];
        for (int j = 0; j < KN; j++) {
            g[j] += dyt * C[j];
            acc[(2 * t + 1) * KN + j] += dyt * h[j];
            h[j] = keep[(2 * t + 1) * KN + j];
            vf back = keep[2 * t * KN + j] * g[j], w = back * h[j]; /* ∂h_{t-1}, and ∂(ΔA) through the decay */
            if (any && s->fresh[t]) back = w = splat(0.0f);
            if (kind == ZOH) {
                vf ratio = ratios[t * KN + j], u = d * A[j], grow = 1.0f + A[j] * ratio; /* exp(u), also at a border */
                vf p = g[j] * B[j] * x[t];                                           /* ∂(B̄/B) */
                in = ratio * x[t];
                sum += g[j] * B[j] * ratio;
                sumd += w * A[j] + p * grow;
                dA[j] += w * d + p * slope(u, d, grow, ratio, invA[j]);
            } else {
                sum += g[j] * B[j];
                sumd += w * A[j];
                dA[j] += w * d;
            }
            acc[2 * t * KN + j] += g[j] * in;
            g[j] = back;
        }
        ds[t] = sum, dd[t] = sumd;
    }
    for (int j = 0; j < KN; j++) s->g[v * k->np + n + j] = g[j], s->dA[v * k->np + n + j] = dA[j];
}

/* ∂y before the gate, and the factor that turns y into ∂z; sums start at 0. */
static void load_gradients(struct scratch *s, const struct args *a, const struct task *k, int64_t t0, int64_t steps) {
    for (int64_t v = 0; v < k->nv; v++) {
        int w = lanes(k, v);
        int64_t c = k->first + v * VW;
        for (int64_t t = 0; t < steps; t++) {
            int64_t i = v * steps + t;
            vf dy = load(a->dy + k->b * a->sdy[0] + (t0 + t) * a->sdy[1] + c * a->sdy[2], a->sdy[2], w);
            if (a->z) {
                vf z = load(a->z + k->b * a->sz[0] + (t0 + t) * a->sz[1] + c * a->sz[2], a->sz[2], w), r = sigmoid(z);
                s->gate[i] = dy * r * (1.0f + z * (1.0f - r));
                dy *= z * r;
            }
            s->dy[i] = dy;
            s->dd[i] = s->ds[i] = splat(0.0f);
            s->dD[v] += dy * s->x[i];
        }
    }
}

static void store_gradients(struct scratch *s, const struct args *a, const struct task *k, int64_t t0, int64_t steps) {
    for (int64_t v = 0; v < k->nv; v++) {
        int w = lanes(k, v);
        int64_t c = k->first + v * VW, at = (k->b * a->length + t0) * a->width + c;
        vf D = load_or(a->D, c, 0.0f, w);
        for (int64_t t = 0; t < steps; t++, at += a->width) {
            int64_t i = v * steps + t;
            vf dx = s->ds[i], dd = s->dd[i];
            if (!a->zoh) dd += s->x[i] * dx, dx *= s->delta[i];
            if (a->softplus) dd *= -exp2m1v(s->delta[i] * -LOG2E); /* sigmoid of the softplus's input */
            store(a->dx + at, dx + D * s->dy[i], w);
            store(a->ddt + at, dd, w);
            if (a->z) store(a->dz + at, s->gate[i] * s->y[i], w);
            s->dbias[v] += dd;
        }
    }
}

static void backward_task(const void *args, void *memory, int64_t i) {
    const struct args *a = args;
    struct scratch scratch, *s = &scratch;
    struct task k = find(a, i);
    lay_out(s, memory, a, a->chunk);
    int64_t chunks = (a->length + a->chunk - 1) / a->chunk;
    int64_t part = ((k.b * a->groups + k.g) * blocks(a) + k.index) * a->length;
    int any, grows = load_A(s, a, &k);
    load_state(s->g, a->dfinal, a, &k);
    memset(s->dA, 0, sizeof(vf) * k.nv * k.np);
    memset(s->dD, 0, sizeof(vf) * k.nv);
    memset(s->dbias, 0, sizeof(vf) * k.nv);
    for (int64_t c = chunks - 1; c >= 0; c--) {
        int64_t t0 = c * a->chunk, steps = min64(a->chunk, a->length - t0);
        for (int64_t v = 0; v < k.nv; v++)
            for (int64_t n = 0; n < k.np; n++)
                s->h[v * k.np + n] = n < a->n
                    ? load(a->bound + ((k.b * chunks + c) * a->n + n) * a->width + k.first + v * VW, 1, lanes(&k, v))
                    : splat(0.0f);
        enum kind kind = load_tile(s, a, &k, t0, steps, grows, &any);
        load_gradients(s, a, &k, t0, steps);
        int64_t to = t0 - a->chunk, here = (k.b * a->length + t0) * a->width + k.first;
        fetch(s, 0, a->x + k.b * a->sx[0] + to * a->sx[1] + k.first * a->sx[2], a->sx[1], a->sx[2]);
        fetch(s, 1, a->dt + k.b * a->sdt[0] + to * a->sdt[1] + k.first * a->sdt[2], a->sdt[1], a->sdt[2]);
        fetch(s, 2, a->dy + k.b * a->sdy[0] + to * a->sdy[1] + k.first * a->sdy[2], a->sdy[1], a->sdy[2]);
        fetch(s, 3, a->z ? a->z + k.b * a->sz[0] + to * a->sz[1] + k.first * a->sz[2] : 0, a->sz[1], a->sz[2]);
        fetch(s, 4, a->bound + (k.b * chunks + c - 1) * a->n * a->width + k.first, a->width, 1);
        fetch(s, 5, a->dx + here, a->width, 1);
        fetch(s, 6, a->ddt + here, a->width, 1);
        fetch(s, 7, a->z ? a->dz + here : 0, a->width, 1);
        for (int64_t n = 0; n < k.np; n += KN) {
            memset(s->acc, 0, sizeof(vf) * steps * 2 * KN);
            for (int64_t v = 0; v < k.nv; v++) {
                if (kind == EULER && !any && a->z) reverse_chunk(s, &k, v, n, steps, EULER, 0, 1);
                else if (kind == EULER && !any) reverse_chunk(s, &k, v, n, steps, EULER, 0, 0);
                else if (kind == EULER) reverse_chunk(s, &k, v, n, steps, EULER, any, a->z != 0);
                else if (kind == ZOH) reverse_chunk(s, &k, v, n, steps, ZOH, any, a->z != 0);
                else reverse_chunk(s, &k, v, n, steps, EULER_GROWING, any, a->z != 0);
            }
            for (int64_t t = 0; t < steps; t++) {
                float sB[KN], sC[KN];
                totals(s->acc + 2 * t * KN, sB);
                totals(s->acc + (2 * t + 1) * KN, sC);
                for (int64_t j = 0; j < min64(KN, a->n - n); j++) {
                    a->pB[(part + t0 + t) * a->n + n + j] = sB[j];
                    a->pC[(part + t0 + t) * a->n + n + j] = sC[j];
                }
            }
        }
        store_gradients(s, a, &k, t0, steps);
    }
    store_state(a->pA, s->dA, a, &k, k.b);
    if (a->dh0) store_state(a->dh0, s->g, a, &k, k.b);
    for (int64_t v = 0; v < k.nv; v++) {
        store(a->pD + k.b * a->width + k.first + v * VW, s->dD[v], lanes(&k, v));
        store(a->pbias + k.b * a->width + k.first + v * VW, s->dbias[v], lanes(&k, v));
    }
}

/* Partial sums over the blocks of a group, in order. One task: one batch row and group. */
static void sum_task(const void *args, void *memory, int64_t i) {
    (void)memory;
    const struct args *a = args;
    int64_t b = i / a->groups, g = i % a->groups, nb = blocks(a);
    for (int64_t t = 0; t < a->length; t++) {
        float *dB = a->dB + ((b * a->length + t) * a->groups + g) * a->n, *dC = a->dC + (dB - a->dB);
        for (int64_t n = 0; n < a->n; n++) {
            float sumB = 0.0f, sumC = 0.0f;
            for (int64_t q = 0; q < nb; q++) {
                int64_t at = ((i * nb + q) * a->length + t) * a->n + n;
                sumB += a->pB[at], sumC += a->pC[at];
            }
            dB[n] = sumB, dC[n] = sumC;
        }
    }
}

/* ---- entry points: 0, or 1 if out of memory --------------------------------------------------------------------- */

int64_t seqmix_lanes(void) { return VW; }

int64_t seqmix_scan_forward(const struct args *a) {
    struct scratch s;
    int64_t tasks = a->batch * a->groups * blocks(a), bytes = lay_out(&s, 0, a, TILE);
    return run((struct job){.args = a, .task = forward_task, .tasks = tasks, .threads = a->threads, .bytes = bytes});
}

int64_t seqmix_scan_backward(const struct args *a) {
    struct scratch s;
    int64_t rows = a->batch * a->groups, tasks = rows * blocks(a), bytes = lay_out(&s, 0, a, a->chunk);
    struct job job = {.args = a, .task = backward_task, .tasks = tasks, .threads = a->threads, .bytes = bytes};
    if (run(job)) return 1;
    int64_t threads = tasks * a->length * a->n > 1 << 20 ? a->threads : 1; /* less work is done before a thread wakes */
    run((struct job){.args = a, .task = sum_task, .tasks = rows, .threads = threads});
    sum_rows(a->dA, a->pA, a->batch, a->width * a->n);
    sum_rows(a->dD, a->pD, a->batch, a->width);
    sum_rows(a->dbias, a->pbias, a->batch, a->width);
    return 0;
}

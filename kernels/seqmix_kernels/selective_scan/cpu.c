/* The selective scan on a CPU, forward and backward. README.md has the equations; cpu.py builds and calls this file.

Channels lie innermost in memory, so a vector holds VW channels and nothing is shuffled. A task is one batch row and a
block of channels of one group; it walks time in tiles. Within a tile each vector of channels goes through its states
KN at a time, whose h and A stay in registers over the tile's steps:

    forward    h = exp(ΔA) h + B̄ x,  y += C h
    backward   per chunk, last to first: once forward from the chunk's saved state, keeping ā and h of the chunk in L1,
               then in reverse with the adjoint g:  g += C dy;  dC += dy h;  dB += g Δx;  ...;  g *= ā

No (B, L, D, N) array exists. dB and dC are summed over channels within the task and then over tasks in a fixed order,
which depends on the shape alone: the result is the same bits for any number of threads. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#include <pthread.h>
#endif
#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX__)
#define VW 8
#else
#define VW 4
#endif
#define KN 4     /* states handled together */
#define TILE 32  /* steps of a forward tile */

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef float vfu __attribute__((vector_size(4 * VW), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

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

INLINE vf splat(float s) { return s - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* x rounded to an integer, and p 2^k for an integer k; NaN goes through both. */
#if defined(__AVX512F__)
INLINE vf nearest(vf x) { return (vf)_mm512_roundscale_ps((__m512)x, 8); }
INLINE vf scale(vf p, vf k) { return (vf)_mm512_scalef_ps((__m512)p, (__m512)k); }
INLINE vf limit(vf x) { return x; }
#else
INLINE vf nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; } /* 1.5 2^23: no bits are left for a fraction */
INLINE vf scale(vf p, vf k) { return p * (vf)((__builtin_convertvector(k, vi) + 127) << 23); }
INLINE vf limit(vf x) { /* to [-127, 128], where scale gives 0 and infinity */
    x = pick(x < -127.0f, splat(-127.0f), x);
    return pick(x > 128.0f, splat(128.0f), x);
}
#endif

/* 2^x: 2^k 2^f, f in [-1/2, 1/2], 2^f = 1 + f q(f) with q minimax of degree 4 (9e-8 relative); 2^0 is exactly 1. */
INLINE vf exp2v(vf x) {
    x = limit(x);
    vf k = nearest(x), f = x - k;
    vf q = 0.2402224243f + f * (0.0555073359f + f * (0.00967151299f + f * 0.00132647273f));
    return scale(1.0f + f * (0.6931470037f + f * q), k);
}

/* 2^x - 1, to full relative precision near 0, where k is 0; q of degree 5 (1e-8 relative). */
INLINE vf exp2m1v(vf x) {
    x = limit(x);
    vf k = nearest(x), f = x - k;
    vf q = 0.2402264923f + f * (0.0555035733f + f * (0.00961823761f + f * (0.00133907353f + f * 0.00015403512f)));
    vf g = f * (0.6931471825f + f * q), s = scale(splat(1.0f), k);
    return s * g + (s - 1.0f);
}

#define LOG2E 1.4426950409f

INLINE vf sigmoid(vf v) { return 1.0f / (1.0f + exp2v(v * -LOG2E)); }

/* max(v, 0) + log(1 + exp(-|v|)): nothing overflows. log(1 + w) = 2 atanh(w / (2 + w)), w in [0, 1]. */
INLINE vf softplus(vf v) {
    vf w = exp2v(pick(v > 0.0f, -v, v) * LOG2E), s = w / (2.0f + w), t = s * s;
    vf r = 0.3333320916f + t * (0.2001076937f + t * (0.1400081366f + t * 0.1400641948f));
    return pick(v < 0.0f, splat(0.0f), v) + 2.0f * (s + s * t * r);
}

INLINE float total(const vf v) { /* a fixed tree */
    float a[VW];
    memcpy(a, &v, sizeof a);
    for (int w = VW / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

INLINE vf load(const float *p, int64_t stride, int lanes) {
    if (lanes == VW && stride == 1) return *(const vfu *)p;
    float a[VW] = {0};
    for (int i = 0; i < lanes; i++) a[i] = p[i * stride];
    vf v;
    memcpy(&v, a, sizeof v);
    return v;
}

INLINE void store(float *p, vf v, int lanes) {
    if (lanes == VW) *(vfu *)p = v;
    else memcpy(p, &v, sizeof(float) * lanes);
}

INLINE vf load_or(const float *p, int64_t offset, float absent, int lanes) {
    return p ? load(p + offset, 1, lanes) : splat(absent);
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

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
    void *base;
    float *B, *C;                                 /* [T][np] */
    vf *A, *A2, *invA, *h, *g, *dA;               /* [nv][np]: A, A log2 e, 1/A or 0, states, adjoint, ∂A */
    vf *delta, *x, *dx, *y, *dy, *dd, *ds, *gate; /* [nv][T]: Δ, x, Δx, y, ∂y before the gate, sums over states, ∂z/y */
    vf *ka, *kh, *kp;                             /* [T][KN]: ā, h and B̄/B of one vector's KN states */
    vf *sB, *sC;                                  /* [T][KN]: ∂B, ∂C of KN states, lanes not yet summed */
    vf *dD, *dbias;                               /* [nv] */
    unsigned char *fresh;                         /* [T]: a document starts here */
};

static int reserve(struct scratch *s, const struct args *a, int64_t steps) {
    int64_t nv = a->block, np = (a->n + KN - 1) / KN * KN, per = nv * np, row = nv * steps, own = steps * KN;
    int64_t bc = (steps * np + VW - 1) / VW, flags = (steps + 4 * VW - 1) / (4 * VW);
    size_t bytes = sizeof(vf) * (2 * bc + 6 * per + 8 * row + 5 * own + 2 * nv + flags);
    vf *p = s->base = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) return 0;
#define TAKE(field, count) s->field = (void *)p, p += (count)
    TAKE(B, bc), TAKE(C, bc), TAKE(A, per), TAKE(A2, per), TAKE(invA, per), TAKE(h, per), TAKE(g, per), TAKE(dA, per);
    TAKE(delta, row), TAKE(x, row), TAKE(dx, row), TAKE(y, row), TAKE(dy, row), TAKE(dd, row), TAKE(ds, row);
    TAKE(gate, row), TAKE(ka, own), TAKE(kh, own), TAKE(kp, own), TAKE(sB, own), TAKE(sC, own), TAKE(dD, nv);
    TAKE(dbias, nv), TAKE(fresh, flags);
#undef TAKE
    return 1;
}

/* A row of B or C of the tile, widened to np states: absent states have B = C = 0, and with A = 0 they stay 0. */
static void load_states(float *to, const float *from, const int64_t *s, const struct args *a, const struct task *k,
                        int64_t t0, int64_t steps) {
    for (int64_t t = 0; t < steps; t++)
        for (int64_t n = 0; n < k->np; n++)
            to[t * k->np + n] = n < a->n ? from[k->b * s[0] + (t0 + t) * s[1] + k->g * s[2] + n * s[3]] : 0.0f;
}

static void load_A(struct scratch *s, const struct args *a, const struct task *k) {
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < k->np; n++) {
            vf A = splat(0.0f);
            if (n < a->n) A = load(a->A + (k->first + v * VW) * a->n + n, a->n, lanes(k, v));
            s->A[v * k->np + n] = A;
            s->A2[v * k->np + n] = A * LOG2E;
            /* (exp(ΔA) - 1)/A is Δ to float32 long before A gets this small; 0 marks it */
            s->invA[v * k->np + n] = pick((A > 1e-20f) | (A < -1e-20f), 1.0f / A, splat(0.0f));
        }
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

/* Δ, x, Δx of the tile, and what else has the shape (L, D). Returns whether a document starts in the tile. */
static int load_tile(struct scratch *s, const struct args *a, const struct task *k, int64_t t0, int64_t steps) {
    int any = 0;
    for (int64_t t = 0; t < steps; t++) {
        const int64_t at = k->b * a->length + t0 + t;
        s->fresh[t] = a->seq && t0 + t > 0 && a->seq[at] != a->seq[at - 1];
        any |= s->fresh[t];
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
            s->dx[i] = s->delta[i] * s->x[i];
            s->y[i] = D * s->x[i];
        }
    }
    return any;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* ā and B̄/B of one state; the input is (B̄/B) x for zoh and Δx for euler, which multiplies B in both. */
#define DISCRETISE(decay, ratio, delta, A, A2, invA)                                  \
    if (zoh) {                                                                        \
        vf em1 = exp2m1v(delta * A2);                                                 \
        decay = 1.0f + em1;                                                           \
        ratio = pick(invA == 0.0f, delta, em1 * invA);                              \
    } else decay = exp2v(delta * A2)

INLINE void scan_tile(struct scratch *s, const struct task *k, int64_t steps, const int zoh, const int any) {
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t n = 0; n < k->np; n += KN) {
            const vf *delta = s->delta + v * steps, *x = s->x + v * steps, *dx = s->dx + v * steps;
            const float *B = s->B + n, *C = s->C + n;
            vf *y = s->y + v * steps;
            vf h[KN], A2[KN], invA[KN];
            for (int j = 0; j < KN; j++) h[j] = s->h[v * k->np + n + j], A2[j] = s->A2[v * k->np + n + j];
            if (zoh) for (int j = 0; j < KN; j++) invA[j] = s->invA[v * k->np + n + j];
            for (int64_t t = 0; t < steps; t++, B += k->np, C += k->np) {
                vf sum = y[t], in = dx[t], d = delta[t];
                for (int j = 0; j < KN; j++) {
                    vf decay, ratio;
                    DISCRETISE(decay, ratio, d, A, A2[j], invA[j]);
                    if (zoh) in = ratio * x[t];
                    if (any && s->fresh[t]) h[j] = in * B[j];
                    else h[j] = decay * h[j] + in * B[j];
                    sum += h[j] * C[j];
                }
                y[t] = sum;
            }
            for (int j = 0; j < KN; j++) s->h[v * k->np + n + j] = h[j];
        }
}

static void forward_task(const struct args *a, struct scratch *s, int64_t i) {
    struct task k = find(a, i);
    int64_t chunks = (a->length + a->chunk - 1) / a->chunk;
    load_A(s, a, &k);
    load_state(s->h, a->h0, a, &k);
    for (int64_t t0 = 0, steps; t0 < a->length; t0 += steps) {
        int64_t next = (t0 / a->chunk + 1) * a->chunk;
        steps = min64(TILE, min64(next, a->length) - t0);
        if (a->bound && t0 % a->chunk == 0)
            for (int64_t v = 0; v < k.nv; v++)
                for (int64_t n = 0; n < a->n; n++)
                    store(a->bound + ((k.b * chunks + t0 / a->chunk) * a->n + n) * a->width + k.first + v * VW,
                          s->h[v * k.np + n], lanes(&k, v));
        int any = load_tile(s, a, &k, t0, steps);
        if (a->zoh) any ? scan_tile(s, &k, steps, 1, 1) : scan_tile(s, &k, steps, 1, 0);
        else any ? scan_tile(s, &k, steps, 0, 1) : scan_tile(s, &k, steps, 0, 0);
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

/* One vector, KN states, one chunk: forward again, then reverse. Letters as in README.md: g is ∂loss/∂h. */
INLINE void reverse_chunk(struct scratch *s, const struct task *k, int64_t v, int64_t n, int64_t steps, const int zoh,
                          const int any, const int gated) {
    const vf *delta = s->delta + v * steps, *x = s->x + v * steps, *dx = s->dx + v * steps, *dy = s->dy + v * steps;
    vf *y = s->y + v * steps, *ds = s->ds + v * steps, *dd = s->dd + v * steps;
    vf *ka = s->ka, *kh = s->kh, *kp = s->kp, *sB = s->sB, *sC = s->sC;
    vf h[KN], A[KN], A2[KN], invA[KN], h0[KN];
    for (int j = 0; j < KN; j++) h0[j] = h[j] = s->h[v * k->np + n + j], A2[j] = s->A2[v * k->np + n + j];
    if (zoh) for (int j = 0; j < KN; j++) invA[j] = s->invA[v * k->np + n + j];
    const float *B = s->B + n, *C = s->C + n;
    for (int64_t t = 0; t < steps; t++, B += k->np, C += k->np) {
        vf in = dx[t], d = delta[t], sum = gated ? y[t] : in;
        for (int j = 0; j < KN; j++) {
            vf decay, ratio;
            DISCRETISE(decay, ratio, d, A, A2[j], invA[j]);
            if (zoh) kp[t * KN + j] = ratio, in = ratio * x[t];
            if (any && s->fresh[t]) decay = splat(0.0f), h[j] = in * B[j];
            else h[j] = decay * h[j] + in * B[j];
            ka[t * KN + j] = decay;
            kh[t * KN + j] = h[j];
            if (gated) sum += h[j] * C[j];
        }
        if (gated) y[t] = sum;
    }
    vf g[KN], dA[KN];
    for (int j = 0; j < KN; j++) {
        g[j] = s->g[v * k->np + n + j], A[j] = s->A[v * k->np + n + j], dA[j] = s->dA[v * k->np + n + j];
    }
    for (int64_t t = steps - 1; t >= 0; t--) {
        B -= k->np, C -= k->np;
        vf dyt = dy[t], in = dx[t], d = delta[t], sum = ds[t], sumd = dd[t];
        for (int j = 0; j < KN; j++) {
            g[j] += dyt * C[j];
            sC[t * KN + j] += dyt * h[j];
            h[j] = t ? kh[(t - 1) * KN + j] : h0[j];
            vf back = ka[t * KN + j] * g[j], w = back * h[j]; /* ∂h_{t-1}, and ∂(ΔA) through the decay */
            if (any && s->fresh[t]) back = w = splat(0.0f);
            if (zoh) {
                vf ratio = kp[t * KN + j], u = d * A[j], grow = 1.0f + A[j] * ratio; /* exp(u), also at a border */
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
            sB[t * KN + j] += g[j] * in;
            g[j] = back;
        }
        ds[t] = sum, dd[t] = sumd;
    }
    for (int j = 0; j < KN; j++) s->g[v * k->np + n + j] = g[j], s->dA[v * k->np + n + j] = dA[j];
}

/* ∂y before the gate, and the factor that makes ∂z of y; sums start at 0. */
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
            if (a->softplus) dd *= -exp2m1v(s->delta[i] * -LOG2E); /* sigmoid of what went into the softplus */
            store(a->dx + at, dx + D * s->dy[i], w);
            store(a->ddt + at, dd, w);
            if (a->z) store(a->dz + at, s->gate[i] * s->y[i], w);
            s->dbias[v] += dd;
        }
    }
}

static void backward_task(const struct args *a, struct scratch *s, int64_t i) {
    struct task k = find(a, i);
    int64_t chunks = (a->length + a->chunk - 1) / a->chunk;
    int64_t part = ((k.b * a->groups + k.g) * blocks(a) + k.index) * a->length;
    load_A(s, a, &k);
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
        int any = load_tile(s, a, &k, t0, steps);
        load_gradients(s, a, &k, t0, steps);
        for (int64_t n = 0; n < k.np; n += KN) {
            memset(s->sB, 0, sizeof(vf) * steps * KN);
            memset(s->sC, 0, sizeof(vf) * steps * KN);
            for (int64_t v = 0; v < k.nv; v++) {
                if (a->zoh) reverse_chunk(s, &k, v, n, steps, 1, any, a->z != 0);
                else if (any) reverse_chunk(s, &k, v, n, steps, 0, 1, a->z != 0);
                else if (a->z) reverse_chunk(s, &k, v, n, steps, 0, 0, 1);
                else reverse_chunk(s, &k, v, n, steps, 0, 0, 0);
            }
            for (int64_t t = 0; t < steps; t++)
                for (int64_t j = 0; j < KN && n + j < a->n; j++) {
                    a->pB[(part + t0 + t) * a->n + n + j] = total(s->sB[t * KN + j]);
                    a->pC[(part + t0 + t) * a->n + n + j] = total(s->sC[t * KN + j]);
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
static void sum_task(const struct args *a, struct scratch *s, int64_t i) {
    (void)s;
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

/* The same over batch rows, for the gradients of parameters of `count` elements. */
static void sum_rows(float *to, const float *from, int64_t rows, int64_t count) {
    if (!to) return;
    memset(to, 0, sizeof(float) * count);
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = 0; i < count; i++) to[i] += from[b * count + i];
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

struct job {
    const struct args *a;
    void (*task)(const struct args *, struct scratch *, int64_t);
    int64_t tasks, next, steps; /* steps: of the scratch, 0 for none */
    int failed;
};

static void *work(void *p) { /* tasks are handed out as threads come free: which thread has one changes no result */
    struct job *job = p;
    struct scratch s = {0};
#if defined(__SSE__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* denormals are zero: a forgotten state must not cost a hundred cycles a step */
#endif
    if (job->steps && !reserve(&s, job->a, job->steps)) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    else
        for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->tasks;)
            job->task(job->a, &s, i);
    free(s.base);
#if defined(__SSE__)
    _mm_setcsr(mode);
#endif
    return 0;
}

static int run(struct job job) {
    int64_t threads = min64(job.a->threads, job.tasks);
    if (threads < 2) {
        work(&job);
        return job.failed;
    }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    work(&job);
#else
    pthread_t *pool = malloc(sizeof *pool * threads);
    int64_t started = 0;
    while (pool && started < threads - 1 && !pthread_create(pool + started, 0, work, &job)) started++;
    work(&job);
    while (started) pthread_join(pool[--started], 0);
    free(pool);
#endif
    return job.failed;
}

/* ---- entry points: 0, or 1 where there was no memory ------------------------------------------------------------- */

int64_t seqmix_lanes(void) { return VW; }

int64_t seqmix_scan_forward(const struct args *a) {
    return run((struct job){.a = a, .task = forward_task, .tasks = a->batch * a->groups * blocks(a), .steps = TILE});
}

int64_t seqmix_scan_backward(const struct args *a) {
    int64_t rows = a->batch * a->groups;
    if (run((struct job){.a = a, .task = backward_task, .tasks = rows * blocks(a), .steps = a->chunk})) return 1;
    run((struct job){.a = a, .task = sum_task, .tasks = rows});
    sum_rows(a->dA, a->pA, a->batch, a->width * a->n);
    sum_rows(a->dD, a->pD, a->batch, a->width);
    sum_rows(a->dbias, a->pbias, a->batch, a->width);
    return 0;
}

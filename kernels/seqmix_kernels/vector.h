/* Vectors of channels for the CPU kernels: arithmetic, loads and stores with any stride, and a pool of threads.

A vector is VW floats, as wide as the target's registers; GCC's and Clang's vector types provide the plain arithmetic. */
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

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef float vfu __attribute__((vector_size(4 * VW), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

INLINE vf splat(float s) { return s - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

/* x rounded to an integer, and p 2^k for an integer k; both propagate NaN. */
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

/* 2^x = 2^k 2^f, f in [-1/2, 1/2], 2^f = 1 + f q(f) with q minimax of degree 5 (2e-9 relative); 2^0 is exactly 1. */
INLINE vf exp2v(vf x) {
    x = limit(x);
    vf k = nearest(x), f = x - k;
    vf q = 0.2402264774f + f * (0.0555033237f + f * (0.00961843692f + f * (0.00133988739f + f * 0.00015353362f)));
    return scale(1.0f + f * (0.6931471825f + f * q), k);
}

/* 2^x - 1, to full relative precision near 0, where k is 0; q of degree 5 (1e-8 relative). */
INLINE vf exp2m1v(vf x) {
    x = limit(x);
    vf k = nearest(x), f = x - k;
    vf q = 0.2402264923f + f * (0.0555035733f + f * (0.00961823761f + f * (0.00133907353f + f * 0.00015403512f)));
    vf g = f * (0.6931471825f + f * q), s = scale(splat(1.0f), k);
    return pick(x > 64.0f, scale(1.0f + g, k), s * g + (s - 1.0f)); /* avoids infinity times a g of 0 */
}

#define LOG2E 1.4426950409f

INLINE vf sigmoid(vf v) { return 1.0f / (1.0f + exp2v(v * -LOG2E)); }

/* max(v, 0) + log(1 + exp(-|v|)): nothing overflows. log(1 + w) = 2 atanh(w / (2 + w)), w in [0, 1]. */
INLINE vf softplus(vf v) {
    vf w = exp2v(pick(v > 0.0f, -v, v) * LOG2E), s = w / (2.0f + w), t = s * s;
    vf r = 0.3333320916f + t * (0.2001076937f + t * (0.1400081366f + t * 0.1400641948f));
    return pick(v < 0.0f, splat(0.0f), v) + 2.0f * (s + s * t * r);
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

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Partial sums of `rows` rows of `count`, added in order. */
static inline void sum_rows(float *to, const float *from, int64_t rows, int64_t count) {
    if (!to) return;
    memset(to, 0, sizeof(float) * count);
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = 0; i < count; i++) to[i] += from[b * count + i];
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

/* `tasks` calls of task(args, memory, i), where each thread has its own `bytes` of memory, aligned to a vector. */
struct job {
    const void *args;
    void (*task)(const void *, void *, int64_t);
    int64_t tasks, threads, bytes, next;
    int failed;
};

static void *work(void *p) { /* free threads take the next task; which thread runs it does not change the result */
    struct job *job = p;
    void *memory = job->bytes ? aligned_alloc(64, (job->bytes + 63) / 64 * 64) : 0;
#if defined(__SSE__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* denormals are zero: a decayed state must not cost a hundred cycles per step */
#endif
    if (job->bytes && !memory) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    else
        for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->tasks;)
            job->task(job->args, memory, i);
    free(memory);
#if defined(__SSE__)
    _mm_setcsr(mode);
#endif
    return 0;
}

/* Returns 0, or 1 if a thread ran out of memory. */
static inline int run(struct job job) {
    int64_t threads = min64(job.threads, job.tasks);
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

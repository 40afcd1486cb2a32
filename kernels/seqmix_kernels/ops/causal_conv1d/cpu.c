/* The short causal convolution on a CPU, forward and backward; cpu.py builds and calls this file.

A task is one batch row and a block of channels, and passes over time once. The last W inputs of each channel are its window:

    forward    y = act(bias + Σ_w weight_w window_w)
    backward   recomputes p, the sum before act; then ∂p = ∂y act'(p), ∂weight_w += ∂p window_w, and each input
               in the window gathers weight_w ∂p until it leaves, when its gradient is complete

A step that begins a document sees no earlier step: `reach` counts how far back a window may be read. */
#include "../../vector.h"

#define MAX_TAPS 4

/* One call. Strides are in elements. bias, state, dfinal and all results are contiguous; absent ones are null. */
struct args {
    int64_t batch, length, width, taps, silu, threads, block; /* block: vectors of a task */
    const float *x, *dy, *weight, *bias, *state, *dfinal;     /* weight (D,W); state, dfinal (B,W-1,D) */
    const int64_t *seq;                                       /* (B,L) contiguous */
    int64_t sx[3], sdy[3], sw[2];                             /* batch, time, channel; channel, tap */
    float *y, *final;                                         /* (B,L,D) (B,W-1,D) */
    float *dx, *dw, *dbias, *dstate;                          /* (B,L,D) (W,D) (D) (B,W-1,D) */
    float *pw, *pbias;                                        /* partial sums: (B,W,D) (B,D) */
};

struct task { int64_t b, first, nv; int last; };

static int64_t blocks(const struct args *a) { return ((a->width + VW - 1) / VW + a->block - 1) / a->block; }

static struct task find(const struct args *a, int64_t i) {
    int64_t first = i % blocks(a) * a->block * VW, nv = min64(a->block, (a->width - first + VW - 1) / VW);
    return (struct task){i / blocks(a), first, nv, (int)(min64(a->width - first, nv * VW) - (nv - 1) * VW)};
}
static int lanes(const struct task *k, int64_t v) { return v + 1 < k->nv ? VW : k->last; }

struct channel { vf weight[MAX_TAPS], bias, window[MAX_TAPS], dwindow[MAX_TAPS], dweight[MAX_TAPS], dbias; };

/* window[1 ..] hold the steps before the first, as if the window had just advanced */
static void start(struct channel *c, const struct args *a, const struct task *k) {
    memset(c, 0, sizeof *c * k->nv);
    for (int64_t v = 0; v < k->nv; v++)
        for (int64_t w = 0; w < a->taps; w++) {
            int64_t at = k->first + v * VW, past = (k->b * (a->taps - 1) + w - 1) * a->width + at;
            c[v].weight[w] = load(a->weight + at * a->sw[0] + w * a->sw[1], a->sw[0], lanes(k, v));
            c[v].bias = load_or(a->bias, at, 0.0f, lanes(k, v));
            if (w) c[v].window[w] = load_or(a->state, past, 0.0f, lanes(k, v));
        }
}

static int opens(const struct args *a, const struct task *k, int64_t t) {
    return a->seq && t && a->seq[k->b * a->length + t] != a->seq[k->b * a->length + t - 1];
}

/* Advances the window by one step, which enters last. */
INLINE void move(struct channel *c, const int taps, int fresh, vf x) {
    for (int w = 0; w + 1 < taps; w++) c->window[w] = fresh ? splat(0.0f) : c->window[w + 1];
    c->window[taps - 1] = x;
}

INLINE vf filter(const struct channel *c, const int taps) {
    vf p = c->bias;
    for (int w = 0; w < taps; w++) p += c->weight[w] * c->window[w];
    return p;
}

INLINE void forward_steps(struct channel *c, const struct args *a, const struct task *k, const int taps) {
    for (int64_t t = 0; t < a->length; t++) {
        int fresh = opens(a, k, t);
        const float *x = a->x + k->b * a->sx[0] + t * a->sx[1] + k->first * a->sx[2];
        float *y = a->y + (k->b * a->length + t) * a->width + k->first;
        for (int64_t v = 0; v < k->nv; v++) {
            move(c + v, taps, fresh, load(x + v * VW * a->sx[2], a->sx[2], lanes(k, v)));
            vf p = filter(c + v, taps);
            store(y + v * VW, a->silu ? p * sigmoid(p) : p, lanes(k, v));
        }
    }
}

static void forward_task(const void *args, void *memory, int64_t i) {
    const struct args *a = args;
    struct task k = find(a, i);
    struct channel *c = memory;
    start(c, a, &k);
    if (a->taps == 4) forward_steps(c, a, &k, 4);
    else if (a->taps == 3) forward_steps(c, a, &k, 3);
    else if (a->taps == 2) forward_steps(c, a, &k, 2);
    else forward_steps(c, a, &k, 1);
    for (int64_t v = 0; v < k.nv; v++)
        for (int64_t w = 1; w < a->taps; w++)
            store(a->final + (k.b * (a->taps - 1) + w - 1) * a->width + k.first + v * VW, c[v].window[w], lanes(&k, v));
}

/* The gradient of the input of step t is complete; before the first step it belongs to the state. */
INLINE void leave(const struct args *a, const struct task *k, int64_t t, int64_t v, vf d) {
    int64_t at = k->first + v * VW, back = a->taps - 1;
    if (t >= 0) store(a->dx + (k->b * a->length + t) * a->width + at, d, lanes(k, v));
    else if (a->dstate) store(a->dstate + (k->b * back + back + t) * a->width + at, d, lanes(k, v));
}

INLINE void backward_steps(struct channel *c, const struct args *a, const struct task *k, const int taps) {
    int reach = taps - 1;
    for (int64_t t = 0; t < a->length; t++) {
        int fresh = opens(a, k, t);
        reach = fresh ? 0 : reach + 1 < taps ? reach + 1 : taps - 1;
        const float *x = a->x + k->b * a->sx[0] + t * a->sx[1] + k->first * a->sx[2];
        const float *dy = a->dy + k->b * a->sdy[0] + t * a->sdy[1] + k->first * a->sdy[2];
        for (int64_t v = 0; v < k->nv; v++) {
            struct channel *q = c + v;
            move(q, taps, fresh, load(x + v * VW * a->sx[2], a->sx[2], lanes(k, v)));
            for (int w = 0; w + 1 < taps; w++) q->dwindow[w] = q->dwindow[w + 1];
            q->dwindow[taps - 1] = splat(0.0f);
            vf dp = load(dy + v * VW * a->sdy[2], a->sdy[2], lanes(k, v));
            if (a->silu) {
                vf p = filter(q, taps), r = sigmoid(p);
                dp *= r * (1.0f + p * (1.0f - r));
            }
            q->dbias += dp;
            for (int w = 0; w < taps; w++) {
                q->dweight[w] += dp * q->window[w];
                if (w >= taps - 1 - reach) q->dwindow[w] += dp * q->weight[w];
            }
            leave(a, k, t - (taps - 1), v, q->dwindow[0]);
        }
    }
    for (int64_t v = 0; v < k->nv; v++)
        for (int w = 1; w < taps; w++) {
            vf d = c[v].dwindow[w];
            if (a->dfinal && w >= taps - 1 - reach)
                d += load(a->dfinal + (k->b * (taps - 1) + w - 1) * a->width + k->first + v * VW, 1, lanes(k, v));
            leave(a, k, a->length - taps + w, v, d);
        }
}

static void backward_task(const void *args, void *memory, int64_t i) {
    const struct args *a = args;
    struct task k = find(a, i);
    struct channel *c = memory;
    start(c, a, &k);
    if (a->taps == 4) backward_steps(c, a, &k, 4);
    else if (a->taps == 3) backward_steps(c, a, &k, 3);
    else if (a->taps == 2) backward_steps(c, a, &k, 2);
    else backward_steps(c, a, &k, 1);
    for (int64_t v = 0; v < k.nv; v++) {
        int64_t at = k.first + v * VW;
        for (int64_t w = 0; w < a->taps; w++)
            store(a->pw + (k.b * a->taps + w) * a->width + at, c[v].dweight[w], lanes(&k, v));
        store(a->pbias + k.b * a->width + at, c[v].dbias, lanes(&k, v));
    }
}

/* ---- entry points: 0, or 1 if out of memory --------------------------------------------------------------------- */

int64_t seqmix_lanes(void) { return VW; }

static int all(const struct args *a, void (*task)(const void *, void *, int64_t)) {
    return run((struct job){.args = a, .task = task, .tasks = a->batch * blocks(a), .threads = a->threads,
                            .bytes = a->block * (int64_t)sizeof(struct channel)});
}

int64_t seqmix_conv_forward(const struct args *a) { return all(a, forward_task); }

int64_t seqmix_conv_backward(const struct args *a) {
    if (all(a, backward_task)) return 1;
    sum_rows(a->dw, a->pw, a->batch, a->taps * a->width);
    sum_rows(a->dbias, a->pbias, a->batch, a->width);
    return 0;
}

"""The operators of seqmix_kernels as the benchmark needs them: the shapes that are measured, their inputs, a call of each, what
its output is compared with, and the work that has to be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Case(NamedTuple):
    """op and impl by name; length, batch; width and inner: D and N of a scan, D and W of a convolution, heads and their
    width of attention, D and modes of an S4 kernel, V and the model's width M of a loss or an embedding."""

    op: str
    impl: str
    length: int
    batch: int
    width: int
    inner: int
    dtype: str


class Work(NamedTuple):
    """What has to be moved, multiplied (two FLOPs a multiply-add), exponentiated."""

    bytes: float
    flops: float = 0.0
    specials: float = 0.0


class Op(NamedTuple):
    """inputs: (case, random) -> tensors; run: (case, tensors) -> output; check: (tensors, output) -> (got, want) on a piece;
    work: (case, bytes an element) -> of the forward, of forward and backward (None: there is no backward)."""

    impls: tuple[str, ...]
    inputs: Callable
    run: Callable
    check: Callable
    work: Callable
    letters: str  # of the shape, as the op's README writes it: B, L and what width and inner are


SHAPES = {  # length, batch, width, inner, dtype
    "cuda": {
        "selective_scan": ((2048, 8, 3072, 16, "bfloat16"), (65536, 1, 1536, 16, "bfloat16")),
        "causal_conv1d": ((2048, 8, 3072, 4, "bfloat16"),),
        "mamba_step": ((1, 1, 1536, 16, "bfloat16"), (1, 64, 1536, 16, "bfloat16")),
        "attention": ((2048, 8, 24, 64, "bfloat16"),),
        "add_rms_norm": ((2048, 8, 768, 0, "bfloat16"),),
        "swiglu": ((2048, 8, 2048, 0, "bfloat16"),),
        "fft_conv": ((2048, 8, 768, 0, "bfloat16"),),
        "s4d_kernel": ((2048, 1, 768, 32, "float32"),),
        "dplr_kernel": ((2048, 1, 768, 32, "float32"),),
        "s4_step": ((1, 1, 768, 32, "bfloat16"), (1, 64, 768, 32, "bfloat16")),
        "s4d_step": ((1, 1, 768, 32, "bfloat16"), (1, 64, 768, 32, "bfloat16")),
        "cross_entropy": ((16384, 1, 50277, 0, "bfloat16"),),
        "linear_cross_entropy": ((16384, 1, 50277, 768, "bfloat16"),),
        "embedding": ((2048, 8, 50277, 768, "float32"), (4096, 64, 16, 64, "float32")),
    },
    "cpu": {
        "selective_scan": ((512, 2, 128, 16, "float32"),),
        "causal_conv1d": ((512, 2, 128, 4, "float32"),),
        "mamba_step": ((1, 8, 128, 16, "float32"),),
        "attention": ((512, 2, 4, 32, "float32"),),
        "add_rms_norm": ((512, 2, 128, 0, "float32"),),
        "swiglu": ((512, 2, 344, 0, "float32"),),
        "fft_conv": ((512, 2, 128, 0, "float32"),),
        "s4d_kernel": ((512, 1, 128, 32, "float32"),),
        "dplr_kernel": ((512, 1, 128, 32, "float32"),),
        "s4_step": ((1, 8, 128, 32, "float32"),),
        "s4d_step": ((1, 8, 128, 32, "float32"),),
        "cross_entropy": ((512, 1, 1000, 0, "float32"),),
        "linear_cross_entropy": ((512, 1, 1000, 128, "float32"),),
        "embedding": ((512, 2, 1000, 128, "float32"),),
    },
}
PEERS = {"selective_scan": "mamba_ssm", "causal_conv1d": "causal_conv1d"}  # by op: module of another's kernel


def shape_of(case: Case) -> str:
    values = {"B": case.batch, "L": case.length, "D": case.width, "H": case.width, "E": case.width, "V": case.width}
    values |= {"N": case.inner, "W": case.inner, "P": case.inner, "M": case.inner}
    letters = OPS[case.op].letters
    return " ".join(f"{letter}{values[letter]}" for letter in letters) + f" {case.dtype}"


def peer(op: str) -> tuple[Callable, Callable]:
    """Another's kernel: what lays our tensors out as it wants them, once and outside the time, as a model built on it would;
    and the call, as its documentation has it, with its output as a view of our shape."""
    if op == "selective_scan":
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        def turn(x, dt, A, B, C, D, z, bias):
            x, dt, z = (t.transpose(1, 2).contiguous() for t in (x, dt, z))  # (B, D, L)
            B, C = (t.permute(0, 2, 3, 1).contiguous() for t in (B, C))  # (B, G, N, L)
            return x, dt, A, B, C, D, z, bias

        def scan(x, dt, A, B, C, D, z, bias):
            return selective_scan_fn(x, dt, A, B, C, D, z, bias, delta_softplus=True).transpose(1, 2)

        return turn, scan
    from causal_conv1d import causal_conv1d_fn

    def convolve(x, weight, bias):
        return causal_conv1d_fn(x, weight, bias, activation="silu").transpose(1, 2)

    return lambda x, weight, bias: (x.transpose(1, 2).contiguous(), weight, bias), convolve


# A piece of the output is compared: by causality the first steps depend on nothing later, and a channel, a head or a row on no
# other.
PIECE = 64


def _scan() -> Op:
    from seqmix_kernels.selective_scan import IMPLS, reference, selective_scan

    def inputs(case, normal, dtype):
        wide, narrow = (case.batch, case.length, case.width), (case.batch, case.length, 1, case.inner)
        A = -torch.arange(1.0, case.inner + 1, device=normal(1).device).repeat(case.width, 1)
        x, dt, z, B, C = (normal(*shape).to(dtype) for shape in (wide, wide, wide, narrow, narrow))
        return x, dt, A, B, C, normal(case.width), z, normal(case.width) - 4

    def check(tensors, y):
        x, dt, A, B, C, D, z, bias = (t.double() for t in _cut(tensors))
        want, _ = reference.sequential(x, dt, A, B, C, D, z, bias, True, "euler", None, None)
        return y[:1, :PIECE, :PIECE], want

    def _cut(tensors):
        x, dt, A, B, C, D, z, bias = tensors
        n = PIECE
        return x[:1, :n, :n], dt[:1, :n, :n], A[:n], B[:1, :n], C[:1, :n], D[:n], z[:1, :n, :n], bias[:n]

    def work(case, size):
        wide, narrow = (case.batch * case.length * n * size for n in (case.width, case.inner))
        exps = case.batch * case.length * case.width * case.inner
        return Work(4 * wide + 2 * narrow, 0, exps), Work(11 * wide + 6 * narrow, 0, 2 * exps)

    return Op(IMPLS[1:], inputs, lambda case, t: selective_scan(*t, impl=case.impl)[0], check, work, "BLDN")


def _conv() -> Op:
    from seqmix_kernels.causal_conv1d import IMPLS, causal_conv1d, reference

    def inputs(case, normal, dtype):
        return normal(case.batch, case.length, case.width).to(dtype), normal(case.width, case.inner), normal(case.width)

    def check(tensors, y):
        x, weight, bias = (t.double() for t in tensors)
        want, _ = _call(reference, "reference")(x[:1, :PIECE], weight, bias, "silu", None, None)
        return y[:1, :PIECE], want

    def work(case, size):
        wide = case.batch * case.length * case.width * size
        return Work(2 * wide), Work(5 * wide)

    return Op(IMPLS[1:], inputs, lambda case, t: causal_conv1d(*t, "silu", impl=case.impl)[0], check, work, "BLDW")


def _step() -> Op:
    from seqmix_kernels.mamba_step import IMPLS, mamba_step

    names = ("u", "in_proj", "conv", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj", "conv_state", "ssm_state")

    def inputs(case, normal, dtype):
        E, N, B = case.width, case.inner, case.batch
        M, R = E // 2, E // 32

        def weight(rows, columns):
            return (normal(rows, columns) * columns**-0.5).to(dtype)

        A_log = torch.arange(1.0, N + 1, device=normal(1).device).log().repeat(E, 1)
        products = weight(2 * E, M), normal(E, 4), weight(R + 2 * N, E), weight(E, R)
        states = normal(B, 3, E).to(dtype), normal(B, E, N)
        return normal(B, M).to(dtype), *products, normal(E) - 4, A_log, normal(E), weight(M, E), *states

    def run(impl, tensors):
        return mamba_step(**dict(zip(names, tensors, strict=True)), impl=impl)[0]

    def check(tensors, y):
        return y, run("reference", [t.double() for t in tensors])

    def work(case, size):
        E, N, B = case.width, case.inner, case.batch
        M, R = E // 2, E // 32
        weights = E * (2 * M + R + 2 * N + R + M)
        states = B * E * (2 * N * 4 + 2 * 3 * size)
        return Work(weights * size + E * (N + 6) * 4 + states + 2 * B * M * size, 2 * B * weights, B * E * N), None

    return Op(IMPLS[1:], inputs, lambda case, t: run(case.impl, t), check, work, "BEN")


def _attention() -> Op:
    from seqmix_kernels.attention import IMPLS, attention

    def inputs(case, normal, dtype):
        return tuple(normal(case.batch, case.length, case.width, case.inner).to(dtype) for _ in range(3))

    def check(tensors, y):
        want = attention(*(t[:1, : 2 * PIECE].double() for t in tensors), impl="math")
        return y[:1, : 2 * PIECE], want

    def work(case, size):
        wide = case.batch * case.length * case.width * case.inner * size
        scores = case.batch * case.width * case.length**2 / 2  # the causal half
        flops = 4 * scores * case.inner
        return Work(4 * wide, flops, scores), Work(12 * wide, 3.5 * flops, 2 * scores)

    return Op(IMPLS[1:], inputs, lambda case, t: attention(*t, impl=case.impl), check, work, "BLHP")


def _add_rms_norm() -> Op:
    from seqmix_kernels.add_rms_norm import IMPLS, add_rms_norm

    def inputs(case, normal, dtype):
        wide = (case.batch, case.length, case.width)
        return normal(*wide), normal(*wide).to(dtype), normal(case.width).to(dtype)

    def check(tensors, n):
        x, y, weight = (t.double() for t in tensors)
        return n[:1, :PIECE], add_rms_norm(x[:1, :PIECE], y[:1, :PIECE], weight, impl="reference")[1]

    def work(case, size):
        once = case.batch * case.length * case.width * (8 + 2 * size)  # x, s, y, n
        return Work(once), Work(2 * once)  # backward: s and the gradients of x, y, n

    return Op(IMPLS[1:], inputs, lambda case, t: add_rms_norm(*t, impl=case.impl)[1], check, work, "BLD")


def _swiglu() -> Op:
    from seqmix_kernels.swiglu import IMPLS, swiglu

    def inputs(case, normal, dtype):
        return (normal(case.batch, case.length, 2 * case.width).to(dtype),)

    def check(tensors, a):
        return a[:1, :PIECE], swiglu(tensors[0][:1, :PIECE].double(), impl="reference")

    def work(case, size):
        numbers = case.batch * case.length * case.width
        return Work(3 * numbers * size, 0, numbers), Work(8 * numbers * size, 0, 2 * numbers)

    return Op(IMPLS[1:], inputs, lambda case, t: swiglu(*t, impl=case.impl), check, work, "BLH")


def _fft_conv() -> Op:
    from seqmix_kernels.fft_conv import IMPLS, fft_conv

    def inputs(case, normal, dtype):
        kernel = normal(case.width, case.length) * 0.9 ** torch.arange(case.length, device=normal(1).device).clamp(max=500)
        return normal(case.batch, case.length, case.width).to(dtype), kernel, normal(case.width)

    def check(tensors, y):
        u, kernel, D = (t.double() for t in tensors)
        want = fft_conv(u[:1, :PIECE, :PIECE], kernel[:PIECE, :PIECE], D[:PIECE], impl="reference")
        return y[:1, :PIECE, :PIECE], want

    def work(case, size):
        wide, taps = case.batch * case.length * case.width * size, 4 * case.length * case.width
        return Work(2 * wide + taps), Work(5 * wide + 3 * taps)

    return Op(IMPLS[1:], inputs, lambda case, t: fft_conv(*t, impl=case.impl), check, work, "BLD")


def _s4_kernel(name: str) -> Op:
    from seqmix_kernels import s4_kernel

    def decay(case, normal):
        D, M = case.width, case.inner
        dt = torch.exp(normal(D, 1).sigmoid() * 4.6 - 6.9)  # log-uniform-like in [0.001, 0.1]
        A = torch.stack((-0.5 * torch.ones(M), torch.pi * torch.arange(M)), -1).to(dt.device)  # S4D-Lin
        return dt[..., None] * A, dt  # (D, M, 2)

    def inputs(case, normal, dtype):
        a, dt = decay(case, normal)
        a, c = a.to(torch.float64), normal(case.width, case.inner, 2).to(dtype)
        if name == "s4d_kernel":
            return a, c
        P = (normal(case.width, case.inner, 2) * 0.5 * dt[..., None].sqrt()).double()
        return a, P, (dt[..., None] * torch.ones_like(a)).double(), c

    def run(case, tensors):
        return getattr(s4_kernel, name)(*tensors, case.length, impl=case.impl)

    def check(tensors, K):
        want = getattr(s4_kernel, name)(*(t[:8].double() for t in tensors), K.shape[-1], impl="reference")
        return K[:8], want

    def work(case, size):
        D, M, L = case.width, case.inner, case.length
        return Work(4 * D * L + 24 * D * M, 4 * D * M * L), Work(8 * D * L + 48 * D * M, 12 * D * M * L)

    return Op(s4_kernel.IMPLS[1:], inputs, run, check, work, "LDM")


def _s4_step(low_rank: bool) -> Op:
    from seqmix_kernels.s4_step import IMPLS, s4_step

    def inputs(case, normal, dtype):
        E, M, n = case.width, case.inner, 1 if low_rank else case.width  # sets of modes, as the mixers have them
        imag = torch.pi * torch.arange(M, device=normal(1).device).repeat(n, 1).float()
        own = normal(E).sigmoid() * 4.6 - 6.9, torch.full_like(imag, -0.69), imag, normal(E, M, 2), normal(E)
        pairs = (normal(n, M, 2), normal(n, M, 2)) if low_rank else ()
        return normal(case.batch, E).to(dtype), normal(case.batch, E, M, 2), *own, *pairs

    def check(tensors, y):
        return y, s4_step(*(t.double() for t in tensors), impl="reference")[0]

    def work(case, size):
        E, M, B, n = case.width, case.inner, case.batch, 1 if low_rank else case.width
        parameters = 4 * (2 * E + 2 * E * M + n * M * (6 if low_rank else 2))
        return Work(parameters + B * E * (2 * 2 * M * 4 + 2 * size), B * E * M * (36 if low_rank else 20)), None

    return Op(IMPLS[1:], inputs, lambda case, t: s4_step(*t, impl=case.impl)[0], check, work, "BEM")


def _cross_entropy() -> Op:
    from seqmix_kernels.cross_entropy import IMPLS, cross_entropy

    def inputs(case, normal, dtype):
        logits = normal(case.length, case.width).to(dtype)
        return logits, torch.arange(case.length, device=logits.device) % case.width

    def check(tensors, losses):
        logits, targets = (t[:PIECE] for t in tensors)
        return losses[:PIECE], cross_entropy(logits.double(), targets, impl="reference")

    def work(case, size):
        numbers = case.length * case.width
        return Work(numbers * size, 0, numbers), Work(3 * numbers * size, 0, 2 * numbers)

    return Op(IMPLS[1:], inputs, lambda case, t: cross_entropy(*t, impl=case.impl), check, work, "LV")


def _linear_cross_entropy() -> Op:
    from seqmix_kernels.cross_entropy import IMPLS, linear_cross_entropy

    def inputs(case, normal, dtype):
        x, weight = (normal(rows, case.inner).to(dtype) for rows in (case.length, case.width))
        return x, weight * case.inner**-0.5, torch.arange(case.length, device=x.device) % case.width

    def check(tensors, losses):
        x, weight, targets = tensors
        want, _ = linear_cross_entropy(x[:PIECE].double(), weight.double(), targets[:PIECE], impl="reference")
        return losses[:PIECE], want

    def work(case, size):
        given, logits = (case.length + case.width) * case.inner * size, case.length * case.width
        flops = 2 * logits * case.inner
        # three products, not four: keeping the logits for the backward takes less time than computing them again
        return Work(given, flops, logits), Work(3 * given, 3 * flops, 2 * logits)

    return Op(IMPLS[1:], inputs, lambda case, t: linear_cross_entropy(*t, impl=case.impl)[0], check, work, "LVM")


def _embedding() -> Op:
    from seqmix_kernels.embedding import IMPLS, embedding

    def inputs(case, normal, dtype):
        tokens = (1e6 * normal(case.batch, case.length)).long() % case.width
        return tokens, normal(case.width, case.inner).to(dtype)

    def check(tensors, y):
        tokens, weight = tensors
        return y[:1, :PIECE], embedding(tokens[:1, :PIECE], weight.double(), impl="reference")

    def work(case, size):
        T, V, M = case.batch * case.length, case.width, case.inner
        once = 8 * T + (T + min(T, V)) * M * size  # each row that can occur is read
        return Work(once), Work(once + (T + V) * M * size)

    return Op(IMPLS[1:], inputs, lambda case, t: embedding(*t, impl=case.impl), check, work, "BLVM")


def _call(module: object, name: str) -> Callable:
    """A function, or that of the same name in the module that was imported in its place."""
    return module if callable(module) else getattr(module, name)


OPS: dict[str, Op] = {
    "selective_scan": _scan(),
    "causal_conv1d": _conv(),
    "mamba_step": _step(),
    "attention": _attention(),
    "add_rms_norm": _add_rms_norm(),
    "swiglu": _swiglu(),
    "fft_conv": _fft_conv(),
    "s4d_kernel": _s4_kernel("s4d_kernel"),
    "dplr_kernel": _s4_kernel("dplr_kernel"),
    "s4_step": _s4_step(low_rank=True),
    "s4d_step": _s4_step(low_rank=False),
    "cross_entropy": _cross_entropy(),
    "linear_cross_entropy": _linear_cross_entropy(),
    "embedding": _embedding(),
}

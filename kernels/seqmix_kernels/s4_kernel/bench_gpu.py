# ruff: noqa: B023, F821 (a closure is called within its iteration)
"""Checks S4's and S4D's kernels on this GPU, then times them and a whole layer.

    python -m seqmix_kernels.s4_kernel.bench_gpu [check] [kernels] [layer] [parts] [tune]

check     relative errors against plain torch in float64 on this device: kernels and convolution, outputs and gradients
kernels   D 1024, N 64, L 16384: from parameters to K and back; also the plain torch form that stores (D, N/2, L)
layer     B 8, D 1024, L 2048 and 16384, bf16 autocast: kernel, convolution, skip, GELU, gated linear unit; also the same
          in plain torch
parts     the time of each part of a layer; tune: other tiles

Times are medians of triton.testing.do_bench, and of replays of a CUDA graph, which exclude the host's work; memory is the
peak above what was allocated before the call.
"""

import math
import sys

import torch
import torch.nn.functional as F
import triton
from triton.testing import do_bench

from ..fft_conv import fft_conv, fft_length
from ..fft_conv import fused as conv_fused
from ..fft_conv import torch_forms as conv_torch
from ..graph_timing import graph_milliseconds
from . import fused, op


def legs(width, modes, device="cuda"):
    """Parameters as a layer initialises them: Δ log-uniform, a spectrum of growing frequencies, P and B of its size."""
    r = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=r, device=device)

    log_dt = torch.empty(width, device=device).uniform_(math.log(1e-3), math.log(1e-1), generator=r)
    imag = math.pi * torch.arange(modes, device=device, dtype=torch.float32).repeat(width, 1)
    P, B = normal(width, modes, 2) * modes**0.5 / 2, normal(width, modes, 2) * modes**0.5
    parameters = log_dt, torch.full_like(imag, math.log(0.5)), imag, P, B, normal(width, modes, 2) * 0.5**0.5
    return [p.requires_grad_() for p in parameters]


def s4d(parameters, length, impl):
    """K from the parameters of S4D, zero-order hold."""
    return op.s4d_layer_kernel(*parameters[:3], parameters[5], length, "zoh", impl)


def s4d_plain(parameters, length):
    """The same as in published code: complex64, every power in memory."""
    log_dt, log_decay, imag, _, _, C = parameters
    A = torch.complex(-log_decay.exp(), imag)
    dtA = A * log_dt.exp()[:, None]
    c = torch.view_as_complex(C) * (torch.exp(dtA) - 1) / A
    K = dtA[..., None] * torch.arange(length, device=A.device)
    return 2 * torch.einsum("dm,dml->dl", c, torch.exp(K)).real


def dplr(parameters, length, impl):
    """K from the parameters of S4, bilinear. "reference": the paper's four Cauchy sums, every fraction in memory."""
    return op.dplr_layer_kernel(*parameters, length, impl)


CASES = {"s4d": (s4d, s4d_plain), "dplr": (dplr, lambda p, length: dplr(p, length, "reference"))}


def used_by(name, parameters):
    return parameters if name == "dplr" else [*parameters[:3], parameters[5]]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN: unwritten elements show
    r = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=r, device="cuda")

    for width, modes, length in ((64, 32, 16384), (48, 32, 2048), (5, 3, 7), (3, 40, 1000), (2, 128, 4097), (1, 1, 1)):
        parameters = [p.detach() for p in legs(width, modes)]
        for name, (make, _) in CASES.items():
            g, out = normal(width, length), []
            for impl, cast in (("fused", None), ("fused", None), ("torch", torch.float64), ("torch", None)):
                leaves = [p.clone().to(cast or p.dtype).requires_grad_() for p in parameters]
                K = make(leaves, length, impl)
                out.append([K.detach(), *torch.autograd.grad(K, used_by(name, leaves), g.to(K.dtype))])
            same = all(torch.equal(a, b) for a, b in zip(out[0], out[1], strict=True))
            ours = " ".join(f"{relative(a, b):.1e}" for a, b in zip(out[0], out[2], strict=True))
            plain = " ".join(f"{relative(a, b):.1e}" for a, b in zip(out[3], out[2], strict=True))
            print(f"{name} D{width} M{modes} L{length}: {ours}; torch {plain}{'' if same else ' TWO RUNS DIFFER'}", flush=True)
    for batch, length, width, taps, dtype in (
        (2, 1000, 40, 1000, torch.float32), (3, 2048, 64, 2048, torch.bfloat16), (1, 16384, 33, 16384, torch.float32),
        (2, 65536, 8, 65536, torch.float32), (2, 1021, 70, 100, torch.float16), (1, 1, 3, 1, torch.float32),
    ):  # fmt: skip
        for activation, gated in ((None, False), ("gelu", False), ("silu", True)):
            u, dy, gate = (normal(batch, width, length).mT.to(dtype) for _ in range(3))
            kernel = normal(width, taps) * torch.exp(-5 / taps * torch.arange(taps, device="cuda")) / taps**0.5
            given, out = (u, kernel, normal(width), gate if gated else None), []
            for module, cast in ((conv_fused, None), (conv_fused, None), (conv_torch, None), (conv_torch, torch.float64)):
                ts = [t if t is None or cast is None else t.to(cast) for t in given]
                y, p = module.forward(*ts, activation)
                out.append([y, *module.backward(dy.to(y.dtype), *ts, p, activation)])
            same = all(torch.equal(a, b) for a, b in zip(out[0], out[1], strict=True))
            ours, plain = (" ".join(f"{relative(a, b):.1e}" for a, b in zip(o, out[3], strict=True)) for o in (out[0], out[2]))
            print(f"conv B{batch} L{length} D{width} K{taps} {str(dtype)[6:]} {activation} gate {gated}: {ours}; torch {plain}"
                  f"{'' if same else ' TWO RUNS DIFFER'}", flush=True)  # fmt: skip
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False


def measure(f, rep=150, graph=True):
    """Median ms of a call launched by the host; median ms in a CUDA graph; peak MiB of a call."""
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = f()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del kept
    ms = do_bench(f, warmup=25, rep=rep, return_mode="median")
    torch.cuda.empty_cache()
    return ms, graph_milliseconds(f, 10, 3) if graph else math.nan, peak


def line(name, f, rep=150, graph=True):
    try:
        ms, replayed, peak = measure(f, rep, graph)
        print(f"{name:60s} {ms:9.3f} ms, {replayed:9.3f} ms in a graph, {peak:8.0f} MiB", flush=True)
    except Exception as error:  # the other rows still count
        print(f"{name:60s} {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.empty_cache()


def kernels(width=1024, modes=32, length=16384):
    parameters = legs(width, modes)
    g = torch.randn(width, length, device="cuda")
    for name, (make, plain) in CASES.items():
        used = used_by(name, parameters)
        forms = {impl: lambda impl=impl: make(parameters, length, impl) for impl in ("fused", "torch")}
        forms["plain (D, N/2, L)"] = lambda: plain(parameters, length)
        for form, f in forms.items():
            line(f"{name} {form} forward", lambda: f().detach())
            line(f"{name} {form} forward + backward", lambda: torch.autograd.grad(f(), used, g))


def plain_layer(x, K, D, weights, biases):
    """The part of a layer after its kernel, written without this package's ops."""
    n = 2 * x.shape[1]
    u = x.float().mT
    y = torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(K, n), n)[..., : x.shape[1]] + D[:, None] * u
    return gated(F.gelu(y).mT, weights, biases)


def gated(y, weights, biases):
    return F.linear(y, weights[0], biases[0]) * torch.sigmoid(F.linear(y, weights[1], biases[1]))


def layer(batch=8, width=1024, modes=32, lengths=(2048, 16384)):
    parameters = legs(width, modes)
    D = torch.randn(width, device="cuda", requires_grad=True)
    shapes = (width, width), (width,)
    weights, biases = ([torch.randn(s, device="cuda").mul_(0.03).requires_grad_() for _ in "ab"] for s in shapes)
    for length in lengths:
        x = torch.randn(batch, length, width, device="cuda", requires_grad=True)
        dy = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
        for name, (make, plain) in CASES.items():
            used = [*used_by(name, parameters), D, *weights, *biases, x]

            def ours():
                with torch.autocast("cuda", torch.bfloat16):
                    return gated(fft_conv(x, make(parameters, length, "auto"), D, "gelu"), weights, biases)

            def theirs():
                with torch.autocast("cuda", torch.bfloat16):
                    return plain_layer(x, plain(parameters, length), D, weights, biases)

            for title, f in (("ours", ours), ("plain torch", theirs)):
                line(f"{name} layer L{length} {title} forward", lambda: f().detach(), 100)
                line(f"{name} layer L{length} {title} forward + backward", lambda: torch.autograd.grad(f(), used, dy), 100)


def parts(batch=8, width=1024, modes=32, lengths=(2048, 16384)):
    """Times the parts of a layer separately."""
    for length in lengths:
        u = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
        K = torch.randn(width, length, device="cuda") * torch.exp(-torch.arange(length, device="cuda") * 20 / length)
        D, n = torch.randn(width, device="cuda"), fft_length(length)
        p = conv_fused.forward(u, K, D, None, "gelu")[1]
        line(f"L{length} conv forward", lambda: conv_fused.forward(u, K, D, None, "gelu")[0])
        line(f"L{length} conv backward", lambda: conv_fused.backward(u, u, K, D, None, p, "gelu")[0])
        z = torch.randn(batch, width, n, device="cuda", dtype=torch.complex64)
        line(f"L{length} complex FFT of n = {n}, {batch * width} rows", lambda: torch.fft.fft(z))
        del z
    length = max(lengths)
    log_dt, log_decay, imag, P, _, C = given = [t.detach() for t in legs(width, modes)]
    g = torch.randn(width, length, device="cuda")
    size, turns, c = fused._prepare(log_dt, log_decay, imag, C)
    K = torch.empty_like(g)
    line("s4d: parameters to tables", lambda: fused._prepare(log_dt, log_decay, imag, C)[0])
    line("s4d: forward sums", lambda: fused._s4d_forward(size, turns, c, K))
    line("s4d: backward sums", lambda: fused._s4d_sums(g, size, turns))
    X, _, _, row = fused._system(log_dt, log_decay, imag, P, C)
    line("dplr: matrices", lambda: fused._system(log_dt, log_decay, imag, P, C)[0])
    rows, powers = fused._row_powers(row, X, length)
    line("dplr: powers", lambda: fused._row_powers(row, X, length)[0][-1])
    line("dplr: powers, backward", lambda: fused._row_powers_backward(row, rows, powers)[0])
    poles, w = fused._weights(given, rows[-1])
    del rows, powers
    node = fused._nodes(length, g.device)
    line("dplr: nodes", lambda: fused._nodes(length, g.device))
    line("dplr: spectrum", lambda: fused._sums(node, poles, w, quotients=False))
    line("dplr: spectrum and inverse FFT", lambda: fused._kernel(node, poles, w, length))
    line("dplr: backward sums with the quotients", lambda: fused._sums_backward(g, node, poles, w, length)[0])


def tune(batch=8, width=1024, modes=32, length=16384):
    """Times tiles other than the chosen ones."""

    def quick(name, f):
        line(name, f, 60, graph=False)

    u = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
    K = torch.randn(width, length, device="cuda") * torch.exp(-torch.arange(length, device="cuda") * 20 / length)
    D, p = torch.randn(width, device="cuda"), u
    for tile in ((64, 32, 4), (32, 64, 4), (64, 64, 8), (32, 32, 4), (64, 64, 4), (32, 128, 8)):
        conv_fused.BT, conv_fused.BD, conv_fused.WARPS = tile
        quick(f"conv {tile} forward", lambda: conv_fused.forward(u, K, D, None, "gelu")[0])
        quick(f"conv {tile} backward", lambda: conv_fused.backward(u, u, K, D, None, p, "gelu")[0])
    conv_fused.BT, conv_fused.BD, conv_fused.WARPS = 32, 64, 4
    for bits in (25, 26, 30):
        conv_fused.WORKSPACE = 1 << bits
        quick(f"conv workspace 2^{bits} forward", lambda: conv_fused.forward(u, K, D, None, "gelu")[0])
    log_dt, log_decay, imag, P, _, C = given = [t.detach() for t in legs(width, modes)]
    X, _, _, row = fused._system(log_dt, log_decay, imag, P, C)
    poles, w = fused._weights(given, fused._row_powers(row, X, length)[0][-1])
    node, g = fused._nodes(length, u.device), torch.randn(width, length, device="cuda")
    for fused.FREQUENCIES in (256, 512, 1024):
        quick(f"dplr spectrum, {fused.FREQUENCIES} frequencies", lambda: fused._sums(node, poles, w, quotients=False))
    fused.FREQUENCIES = 512
    for fused.BWD_TILE in ((32, 4), (16, 4), (16, 8), (32, 8), (8, 4)):
        quick(f"dplr backward, tile {fused.BWD_TILE}", lambda: fused._sums_backward(g, node, poles, w, length)[0])


def main(names):
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    for name in names or ("check", "kernels", "layer"):
        {"check": check, "kernels": kernels, "layer": layer, "parts": parts, "tune": tune}[name]()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Times S4's and S4D's kernels and a whole layer on the GPU at hand, after checking them there.

    python -m seqmix_kernels.s4_kernel.bench_gpu [check] [kernels] [layer] [parts]

check     relative errors against plain torch in float64, on the device: kernels and convolution, outputs and gradients
kernels   D 1024, N 64, L 16384: from parameters to K and back, beside the plain torch form that stores (D, N/2, L)
layer     B 8, D 1024, L 2048 and 16384, bf16 autocast: kernel, convolution, skip, GELU, gated linear unit; beside the same
          in plain torch
parts     where a layer's time goes

Medians of triton.testing.do_bench; memory is the peak above what was allocated before the call.
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
from . import fused, op, torch_forms
from .modes import discretize, times


def legs(width, modes, device="cuda"):
    """Parameters as a layer starts with them: Δ log-uniform, a spectrum of growing frequencies, P and B of its size."""
    r = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=r, device=device)

    log_dt = torch.empty(width, device=device).uniform_(math.log(1e-3), math.log(1e-1), generator=r)
    imag = math.pi * torch.arange(modes, device=device, dtype=torch.float32).repeat(width, 1)
    P, B = normal(width, modes, 2) * modes**0.5 / 2, normal(width, modes, 2) * modes**0.5
    parameters = log_dt, torch.full_like(imag, math.log(0.5)), imag, normal(width, modes, 2) * 0.5**0.5, P, B
    return [p.requires_grad_() for p in parameters]


def s4d(parameters, length, impl):
    """K from the parameters of S4D, zero-order hold."""
    log_dt, log_decay, imag, C, _, _ = parameters
    A = torch.stack((-log_decay.double().exp(), imag.double()), -1)
    log_a, B = discretize(log_dt.double().exp(), A, "zoh")
    return op.s4d_kernel(log_a, (2 * times(C.double(), B)).float(), length, impl)


def s4d_plain(parameters, length):
    """The same as papers' code has it: complex64, every power in memory."""
    log_dt, log_decay, imag, C, _, _ = parameters
    A = torch.complex(-log_decay.exp(), imag)
    dtA = A * log_dt.exp()[:, None]
    c = torch.view_as_complex(C) * (torch.exp(dtA) - 1) / A
    K = dtA[..., None] * torch.arange(length, device=A.device)
    return 2 * torch.einsum("dm,dml->dl", c, torch.exp(K)).real


def dplr(parameters, length, impl):
    """K from the parameters of S4, bilinear."""
    log_dt, log_decay, imag, C, P, B = parameters
    dt = log_dt.double().exp()[:, None, None]
    A = torch.stack((-log_decay.double().exp(), imag.double()), -1)
    return op.dplr_kernel(dt * A, dt.sqrt() * P.double(), dt * B.double(), C, length, impl)


CASES = {"s4d": (s4d, s4d_plain), "dplr": (dplr, lambda p, length: dplr(p, length, "reference"))}


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check():
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN: what is not written shows
    r = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=r, device="cuda")

    for width, modes, length in ((64, 32, 16384), (48, 32, 2048), (5, 3, 7), (3, 40, 1000), (2, 128, 4097), (1, 1, 1)):
        parameters = [p.detach() for p in legs(width, modes)]
        for name, (make, _) in CASES.items():
            g, out = normal(width, length), []
            for kind in ("fused", "fused", "wide", "torch"):
                leaves = [p.double() if kind == "wide" else p.clone() for p in parameters]
                leaves = [p.requires_grad_() for p in leaves]
                if kind == "wide":
                    K = wide(name, leaves, length)
                else:
                    K = make(leaves, length, kind)
                used = [p for p in leaves if name == "dplr" or p is not leaves[4] and p is not leaves[5]]
                out.append([K.detach(), *torch.autograd.grad(K, used, g.to(K.dtype))])
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


def wide(name, leaves, length):
    if name == "dplr":
        return dplr(leaves, length, "torch")
    log_dt, log_decay, imag, C, _, _ = leaves
    log_a, B = discretize(log_dt.exp(), torch.stack((-log_decay.exp(), imag), -1), "zoh")
    return op.s4d_kernel(log_a, 2 * times(C, B), length, "torch")


def measure(f, rep=150):
    """Median ms and peak MiB of a call."""
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = f()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    del kept
    return do_bench(f, warmup=25, rep=rep, return_mode="median"), peak


def line(name, f, rep=150):
    try:
        ms, peak = measure(f, rep)
        print(f"{name:60s} {ms:9.3f} ms {peak:8.0f} MiB", flush=True)
    except Exception as error:  # the other rows still count
        print(f"{name:60s} {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.empty_cache()


def kernels(width=1024, modes=32, length=16384):
    parameters = legs(width, modes)
    g = torch.randn(width, length, device="cuda")
    for name, (make, plain) in CASES.items():
        used = parameters if name == "dplr" else parameters[:4]
        forms = {impl: lambda impl=impl: make(parameters, length, impl) for impl in ("fused", "torch")}
        forms["plain (D, N/2, L)"] = lambda: plain(parameters, length)
        for form, f in forms.items():
            line(f"{name} {form} forward", lambda: f().detach())
            line(f"{name} {form} forward + backward", lambda: torch.autograd.grad(f(), used, g))


def plain_layer(x, K, D, weights, biases):
    """A layer after its kernel as it is written without ops of our own."""
    n = 2 * x.shape[1]
    u = x.float().mT
    y = torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(K, n), n)[..., : x.shape[1]] + D[:, None] * u
    return gated(F.gelu(y).mT, weights, biases)


def gated(y, weights, biases):
    return F.linear(y, weights[0], biases[0]) * torch.sigmoid(F.linear(y, weights[1], biases[1]))


def layer(batch=8, width=1024, modes=32, lengths=(2048, 16384)):
    parameters = legs(width, modes)
    D = torch.randn(width, device="cuda", requires_grad=True)
    weights, biases = ([torch.randn(*s, device="cuda").mul_(0.03).requires_grad_() for _ in range(2)] for s in ((width, width), (width,)))
    for length in lengths:
        x = torch.randn(batch, length, width, device="cuda", requires_grad=True)
        dy = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
        for name, (make, plain) in CASES.items():
            used = [*(parameters if name == "dplr" else parameters[:4]), D, *weights, *biases, x]

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
    """The pieces of a layer by themselves, and the FFTs that it might be made of."""
    for length in lengths:
        u = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
        K = torch.randn(width, length, device="cuda") * torch.exp(-torch.arange(length, device="cuda") * 20 / length)
        D = torch.randn(width, device="cuda")
        y, p = conv_fused.forward(u, K, D, None, "gelu")
        line(f"L{length} conv forward", lambda: conv_fused.forward(u, K, D, None, "gelu")[0])
        line(f"L{length} conv backward", lambda: conv_fused.backward(u, u, K, D, None, p, "gelu")[0])
        n = fft_length(length)
        z = torch.randn(batch, width, n, device="cuda", dtype=torch.complex64)
        x = torch.randn(batch, width, 2 * n, device="cuda")
        line(f"L{length} complex FFT of n = {n}, {batch * width} rows", lambda: torch.fft.fft(z))
        line(f"L{length} real FFT of n = {2 * n}", lambda: torch.fft.rfft(x))
        spectrum = torch.fft.rfft(x)
        line(f"L{length} inverse real FFT of n = {2 * n}", lambda: torch.fft.irfft(spectrum, 2 * n))
        del spectrum, x
        size, one = width * n, torch.randn(width, n, device="cuda", dtype=torch.complex64)
        line(f"L{length} pack + FFT", lambda: conv_fused._pack(u[..., :width], n))
        line(f"L{length} multiply", lambda: conv_fused.tk.multiply_kernel[(triton.cdiv(size, conv_fused.BLOCK),)](
            torch.view_as_real(z), torch.view_as_real(one), batch, size, 1.0 / n, BLOCK=conv_fused.BLOCK, num_warps=4))  # fmt: skip
        del z, one
    length = max(lengths)
    parameters = [t.detach() for t in legs(width, modes)]
    log_dt, log_decay, imag, C, P, B = parameters
    dt = log_dt.double().exp()[:, None, None]
    lam, P, B = dt * torch.stack((-log_decay.double().exp(), imag.double()), -1), dt.sqrt() * P.double(), dt * B.double()
    line("s4d: parameters to log a, B", lambda: discretize(log_dt.double().exp(), lam / dt, "zoh"))
    log_a, g = lam.contiguous(), torch.randn(width, length, device="cuda")
    line("s4d: fused kernel forward", lambda: fused.s4d_forward(log_a, C, length))
    line("s4d: fused kernel backward", lambda: fused.s4d_backward(g, log_a, C, length)[0])
    line("dplr: C (I - A^L)", lambda: op.truncated(lam, P, B, C, length))
    w = op.residues(lam, P, B, op.truncated(lam, P, B, C, length)).float()
    line("dplr: nodes", lambda: torch_forms.nodes(length, lam.device))
    line("dplr: fused kernel forward", lambda: fused.dplr_forward(lam, w, length))
    line("dplr: fused kernel backward", lambda: fused.dplr_backward(g, lam, w, length)[0])


def main(names):
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    for name in names or ("check", "kernels", "layer"):
        {"check": check, "kernels": kernels, "layer": layer, "parts": parts}[name]()


if __name__ == "__main__":
    main(sys.argv[1:])

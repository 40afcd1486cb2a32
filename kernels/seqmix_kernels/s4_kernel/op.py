"""The public convolution kernels: their contracts, the choice of an implementation, the registered ops."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ..fft_conv.torch_forms import fft_length
from . import reference, torch_forms
from .modes import conj, times, truncated

log = logging.getLogger(__name__)

IMPLS = ("auto", "reference", "torch", "fused")


def s4d_kernel(log_a: Tensor, c: Tensor, length: int, impl: str = "auto") -> Tensor:
    """K_l = Re Σ_n c_n ā_n^l for l < length: the convolution kernel of a diagonal state space.

    Gu, Gupta, Goel & Ré 2022, "On the Parameterization and Initialization of Diagonal State Space Models", §3.3.
    `discretize` makes log ā and B̄; for modes that stand for conjugate pairs c is 2 C B̄, for real ones C B̄.

    Args:
        log_a: (D, M, 2), real and imaginary part of log ā; float64 keeps the phase right to any length.
        c: (..., D, M, 2), float32 or float64, which is what the result is computed in.
        length: L >= 1.
        impl: one of IMPLS; "auto" is what `which_impl` answers.

    Returns:
        K (..., D, L) in c's dtype. Differentiable once in log_a and c ("reference": any number of times).

    Raises:
        ValueError: a shape, dtype or length that does not fit, a log_a on the CPU that is not finite, or an
            implementation that cannot run here.
    """
    _check_length(length)
    if c.dim() < 3 or c.shape[-1] != 2 or log_a.shape != c.shape[-3:]:
        wanted = "log_a must be (D, M, 2) and c (..., D, M, 2)"
        raise ValueError(f"{wanted}; got {tuple(log_a.shape)} and {tuple(c.shape)}")
    _check_numbers("log_a", log_a=log_a, c=c)
    name = _choose(c, impl)
    with torch.autocast(c.device.type, enabled=False):
        if name == "reference":
            return reference.s4d(log_a, c, length)
        return torch.ops.seqmix.s4d_kernel_fwd(log_a, c, length, name)


def dplr_kernel(lam: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int, impl: str = "auto") -> Tensor:
    """K_l = C Ā^l B̄ for l < length: the convolution kernel of S4, whose state matrix is diagonal minus rank one.

    Gu, Goel & Ré 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", §3 and C.3; bilinear rule.
    The step Δ is inside: for x' = (Λ - P P*) x + B u give Δ Λ, √Δ P and Δ B. Each of the M modes stands for itself and
    its conjugate, so K is real, and C is the row that reads the state: nothing of it depends on the length.

    Args:
        lam, P, B: (D, M, 2) pairs of real and imaginary part, Re lam < 0; float64 keeps poles and nodes apart.
        C: (D, M, 2), float32 or float64, which is what the sums are computed in. C (I - Ā^n) always is in float64.
        length: L >= 1. A length no FFT is fast at costs what the next good one does.
        impl: one of IMPLS; "auto" is what `which_impl` answers.

    Returns:
        K (D, L) in C's dtype. Differentiable once in all four ("reference": any number of times).

    Raises:
        ValueError: as for `s4d_kernel`.
    """
    _check_length(length)
    if C.dim() != 3 or C.shape[-1] != 2 or not lam.shape == P.shape == B.shape == C.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (lam, P, B, C))
        raise ValueError(f"lam, P, B and C must be (D, M, 2) all four; got {shapes}")
    _check_numbers("lam", lam=lam, P=P, B=B, C=C)
    name = _choose(C, impl)
    with torch.autocast(C.device.type, enabled=False):
        if name == "reference":
            return reference.dplr(lam, P, B, C, length)
        n = fft_length(length)
        wide = [t.double() for t in (lam, P, B)]
        return torch.ops.seqmix.dplr_kernel_fwd(wide[0], residues(*wide, truncated(*wide, C, n)).to(C.dtype), n, name)[
            :, :length
        ]


def residues(lam: Tensor, P: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Real weights of the four Cauchy sums, C B, C P, P* B and P* P: a of all four, then b. (D, M, 2) -> (D, M, 8)."""
    v = torch.stack((times(C, B), times(C, P), times(conj(P), B), times(conj(P), P)), -2)  # (D, M, 4, 2)
    return torch.cat(torch_forms.weights(lam[..., None, :], v).unbind(-1), -1)


def which_impl(c: Tensor) -> tuple[str, str]:
    """What "auto" takes for coefficients like these, and why."""
    if c.is_cuda:
        reason = why_not("fused", c)
        if reason is None:
            return "fused", "fused GPU kernel"
        return "torch", f"fused cannot run: {reason}"
    return "torch", "products of small matrices in plain torch"


def why_not(impl: str, c: Tensor) -> str | None:
    """Why `impl` cannot run on coefficients like these; None if it can."""
    if impl == "fused":
        try:
            return _fused().why_not(c)
        except ImportError as missing:
            return f"its kernel cannot be imported ({missing})"
    return None


def _fused():
    from . import fused  # imports Triton, which a machine without a GPU may lack

    return fused


def _choose(c: Tensor, impl: str) -> str:
    if impl == "auto":
        name, reason = which_impl(c)
        if not torch.compiler.is_compiling():
            _say_once(c.device.type, c.dtype, name, reason)
        return name
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    reason = why_not(impl, c)
    if reason:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return impl


@functools.cache
def _say_once(device: str, dtype: torch.dtype, name: str, reason: str) -> None:
    log.info("s4_kernel on %s in %s takes %s: %s", device, dtype, name, reason)


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")


def _check_numbers(poles: str, **tensors: Tensor) -> None:
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"{', '.join(tensors)} must be on one device; got {', '.join(sorted(devices))}")
    for name, t in tensors.items():
        if t.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be float32 or float64, in 16 bits a decay near 1 is 1; got {t.dtype}")
    # on a GPU this would wait for it at every call; there the guard on the loss finds it
    t = tensors[poles]
    if t.device.type == "cpu" and not torch.compiler.is_compiling() and not t.isfinite().all():
        raise ValueError(f"{poles} is not finite in {int((~t.isfinite()).sum())} of {t.numel()} numbers: is Δ?")


# ---- the registered ops ---------------------------------------------------------------------------------------------

torch.library.define("seqmix::s4d_kernel_fwd", "(Tensor log_a, Tensor c, int length, str backend) -> Tensor")
torch.library.define(
    "seqmix::s4d_kernel_bwd", "(Tensor dK, Tensor log_a, Tensor c, int length, str backend) -> (Tensor dlog_a, Tensor dc)"
)
torch.library.define("seqmix::dplr_kernel_fwd", "(Tensor lam, Tensor w, int length, str backend) -> Tensor")
torch.library.define(
    "seqmix::dplr_kernel_bwd", "(Tensor dK, Tensor lam, Tensor w, int length, str backend) -> (Tensor dlam, Tensor dw)"
)


def _backend(name: str):
    return torch_forms if name == "torch" else _fused()


@torch.library.impl("seqmix::s4d_kernel_fwd", "CompositeExplicitAutograd")
def _s4d_forward(log_a, c, length, backend):
    return _backend(backend).s4d_forward(log_a, c, length)


@torch.library.impl("seqmix::s4d_kernel_bwd", "CompositeExplicitAutograd")
def _s4d_backward(dK, log_a, c, length, backend):
    with torch.autocast(dK.device.type, enabled=False):  # a backward pass may be called under it
        return _backend(backend).s4d_backward(dK, log_a, c, length)


@torch.library.impl("seqmix::dplr_kernel_fwd", "CompositeExplicitAutograd")
def _dplr_forward(lam, w, length, backend):
    return _backend(backend).dplr_forward(lam, w, length)


@torch.library.impl("seqmix::dplr_kernel_bwd", "CompositeExplicitAutograd")
def _dplr_backward(dK, lam, w, length, backend):
    with torch.autocast(dK.device.type, enabled=False):  # a backward pass may be called under it
        return _backend(backend).dplr_backward(dK, lam, w, length)


@torch.library.register_fake("seqmix::s4d_kernel_fwd")
def _(log_a, c, length, backend):
    return c.new_empty((*c.shape[:-2], length))


@torch.library.register_fake("seqmix::dplr_kernel_fwd")
def _(lam, w, length, backend):
    return w.new_empty((w.shape[0], length))


@torch.library.register_fake("seqmix::s4d_kernel_bwd")
@torch.library.register_fake("seqmix::dplr_kernel_bwd")
def _(dK, first, second, length, backend):
    return first.new_empty(first.shape), second.new_empty(second.shape)


def _setup_context(ctx, inputs, output):
    first, second, ctx.length, ctx.backend = inputs
    ctx.save_for_backward(first, second)


def _make_backward(op):
    def backward(ctx, dK):
        return *op(dK, *ctx.saved_tensors, ctx.length, ctx.backend), None, None

    return backward


def _no_second_derivative(ctx, *_):
    raise NotImplementedError('this kernel has no second derivative; impl="reference" has one')


for _name in ("s4d_kernel", "dplr_kernel"):
    _op = getattr(torch.ops.seqmix, f"{_name}_bwd")
    torch.library.register_autograd(f"seqmix::{_name}_fwd", _make_backward(_op), setup_context=_setup_context)
    torch.library.register_autograd(f"seqmix::{_name}_bwd", _no_second_derivative)

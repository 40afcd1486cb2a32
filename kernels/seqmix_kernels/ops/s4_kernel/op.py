"""The public convolution kernels: their contracts, their implementations and the registered ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ... import frame
from ...frame import Impl, Operator
from ..fft_conv.torch_forms import fft_length
from . import reference, torch_forms
from .modes import conj, discretize, dplr_modes, times, truncated

OPERATOR = Operator(
    __package__,
    Impl("reference"),
    Impl("torch", says="products of small matrices in plain torch", module="torch_forms"),
    Impl("fused", "cuda", "fused GPU kernel", dtypes=(torch.float32,)),
    fallback="torch",
)
IMPLS = OPERATOR.names
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not  # what decides the choice: the coefficients c


def s4d_kernel(log_a: Tensor, c: Tensor, length: int, impl: str = "auto") -> Tensor:
    """K_l = Re Σ_n c_n ā_n^l for l < length: the convolution kernel of a diagonal state space.

    Gu, Gupta, Goel & Ré 2022, "On the Parameterization and Initialization of Diagonal State Space Models", §3.3.
    `discretize` returns log ā and B̄; c is 2 C B̄ for modes that represent conjugate pairs, C B̄ for real ones.

    Args:
        log_a: (D, M, 2), real and imaginary part of log ā; float64 keeps the phase accurate at any length.
        c: (..., D, M, 2), float32 or float64; the result is computed in its dtype.
        length: L >= 1.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        K (..., D, L) in c's dtype. Differentiable once in log_a and c ("reference": any number of times).

    Raises:
        ValueError: an invalid shape, dtype or length, a log_a on the CPU that is not finite, or an implementation that
            cannot run here.
    """
    _check_length(length)
    if c.dim() < 3 or c.shape[-1] != 2 or log_a.shape != c.shape[-3:]:
        wanted = "log_a must be (D, M, 2) and c (..., D, M, 2)"
        raise ValueError(f"{wanted}; got {tuple(log_a.shape)} and {tuple(c.shape)}")
    _check_numbers("log_a", log_a=log_a, c=c)
    name = OPERATOR.choose(impl, c)
    with frame.autocast_off(c.device.type):
        if name == "reference":
            return reference.s4d(log_a, c, length)
        return torch.ops.seqmix.s4d_kernel_fwd(log_a, c, length, name)


def s4d_layer_kernel(
    log_dt: Tensor, log_decay: Tensor, imag: Tensor | None, C: Tensor, length: int, method: str = "zoh", impl: str = "auto"
) -> Tensor:  # fmt: skip
    """`s4d_kernel` from the parameters of a layer: Δ = exp(log_dt), A = -exp(log_decay) + i imag, B = 1.

    It computes the same as `discretize` followed by `s4d_kernel`. On a GPU those take eighty small launches forward and
    backward, longer than the sums; with method "zoh" this takes five.

    Args:
        log_dt: (D,). log_decay, imag: (n, M); channel d uses row d mod n. imag None: real modes, which count once.
        C: (D, M, 2), or (D, M, 1) for real modes. All float32 or float64.
        length, impl: as in `s4d_kernel`. method: as in `discretize`.

    Returns:
        K (D, L) in C's dtype. Differentiable in all four.

    Raises:
        ValueError: as for `s4d_kernel`.
    """
    _check_length(length)
    if C.dim() != 3 or C.shape[2] != (1 if imag is None else 2):
        raise ValueError(f"C must be (D, M, 2), or (D, M, 1) for real modes; got {tuple(C.shape)}")
    width, modes = C.shape[:2]
    shapes = [tuple(t.shape) for t in (log_decay, log_decay if imag is None else imag)]
    if log_dt.shape != (width,) or width % max(1, len(log_decay)) or shapes != [(len(log_decay), modes)] * 2:
        raise ValueError(
            f"log_dt must be (D,), log_decay and imag (n, M), n a divisor of D, for C of {tuple(C.shape)}; "
            f"got {tuple(log_dt.shape)}, {shapes[0]} and {shapes[1]}"
        )
    name = OPERATOR.choose(impl, C)
    with frame.autocast_off(C.device.type):
        if name == "fused" and method == "zoh" and imag is not None and C.numel():
            _check_numbers("log_dt", log_dt=log_dt, log_decay=log_decay, imag=imag, C=C)
            given = (t.contiguous() for t in (log_dt, log_decay, imag, C))
            return torch.ops.seqmix.s4d_layer_kernel_fwd(*given, length)
        decay = -log_decay.double().exp()
        A = torch.stack((decay, torch.zeros_like(decay) if imag is None else imag.double()), -1)
        log_a, B = discretize(log_dt.double().exp(), A, method)
        pairs = torch.nn.functional.pad(C, (0, 1)) if imag is None else C
        c = ((1 if imag is None else 2) * times(pairs.double(), B)).to(C.dtype)
        return s4d_kernel(log_a, c, length, name)


def dplr_kernel(lam: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int, impl: str = "auto") -> Tensor:
    """K_l = C Ā^l B̄ for l < length: the convolution kernel of S4, whose state matrix is diagonal minus rank one.

    Gu, Goel & Ré 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", §3 and C.3; bilinear rule.
    The step Δ is part of the arguments: for x' = (Λ - P P*) x + B u pass Δ Λ, √Δ P and Δ B. Each of the M modes represents
    itself and its conjugate, so K is real. C is the row that reads the state and does not depend on the length.

    Args:
        lam, P, B: (D, M, 2) pairs of real and imaginary part, Re lam < 0; float64 resolves poles near nodes.
        C: (D, M, 2), float32 or float64; the sums are computed in its dtype, C (I - Ā^n) always in float64.
        length: L >= 1. A length for which FFTs are slow costs as much as the next fast one.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        K (D, L) in C's dtype. Differentiable once in all four ("reference": any number of times).

    Raises:
        ValueError: as for `s4d_kernel`.
    """
    _check_length(length)
    if C.dim() != 3 or C.shape[-1] != 2 or not lam.shape == P.shape == B.shape == C.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (lam, P, B, C))
        raise ValueError(f"lam, P, B and C must all be (D, M, 2); got {shapes}")
    _check_numbers("lam", lam=lam, P=P, B=B, C=C)
    name = OPERATOR.choose(impl, C)
    with frame.autocast_off(C.device.type):
        if name == "reference":
            return reference.dplr(lam, P, B, C, length)
        n = fft_length(length)
        wide = [t.double() for t in (lam, P, B)]
        return torch.ops.seqmix.dplr_kernel_fwd(wide[0], residues(*wide, truncated(*wide, C, n)).to(C.dtype), n, name)[
            :, :length
        ]


def dplr_layer_kernel(
    log_dt: Tensor, log_decay: Tensor, imag: Tensor, P: Tensor, B: Tensor, C: Tensor, length: int, impl: str = "auto"
) -> Tensor:  # fmt: skip
    """`dplr_kernel` from the parameters of a layer: Δ = exp(log_dt), Λ = -exp(log_decay) + i imag.

    It computes the same as `dplr_modes` followed by `dplr_kernel`; on a GPU in about eighty launches forward and
    backward instead of four hundred.

    Args:
        log_dt: (D,). log_decay, imag: (n, M). P, B: (n, M, 2); channel d uses row d mod n of these four. C: (D, M, 2).
            All float32 or float64.
        length, impl: as in `dplr_kernel`.

    Returns:
        K (D, L) in C's dtype. Differentiable in all six.

    Raises:
        ValueError: as for `dplr_kernel`.
    """
    _check_length(length)
    if C.dim() != 3 or C.shape[2] != 2:
        raise ValueError(f"C must be (D, M, 2); got {tuple(C.shape)}")
    (width, modes, _), n = C.shape, len(log_decay)
    wanted = {"log_dt": (width,), "log_decay": (n, modes), "imag": (n, modes), "P": (n, modes, 2), "B": (n, modes, 2)}
    for (name, shape), t in zip(wanted.items(), (log_dt, log_decay, imag, P, B), strict=True):
        if t.shape != shape or width % max(1, n):
            raise ValueError(f"{name} must be {shape}, {n} a divisor of D, for C of {tuple(C.shape)}; got {tuple(t.shape)}")
    name = OPERATOR.choose(impl, C)
    with frame.autocast_off(C.device.type):
        if name == "fused" and C.numel():
            _check_numbers("log_dt", log_dt=log_dt, log_decay=log_decay, imag=imag, P=P, B=B, C=C)
            given = (t.contiguous() for t in (log_dt, log_decay, imag, P, B, C))
            return torch.ops.seqmix.dplr_layer_kernel_fwd(*given, fft_length(length))[:, :length]
        return dplr_kernel(*dplr_modes(log_dt, log_decay, imag, P, B), C, length, name)


def residues(lam: Tensor, P: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Real weights of the four Cauchy sums, C B, C P, P* B and P* P: a for all four, then b. (D, M, 2) -> (D, M, 8)."""
    v = torch.stack((times(C, B), times(C, P), times(conj(P), B), times(conj(P), P)), -2)  # (D, M, 4, 2)
    return torch.cat(torch_forms.weights(lam[..., None, :], v).unbind(-1), -1)


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")


def _check_numbers(poles: str, **tensors: Tensor) -> None:
    devices = {str(t.device) for t in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"{', '.join(tensors)} must be on one device; got {', '.join(sorted(devices))}")
    for name, t in tensors.items():
        if t.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be float32 or float64, because in 16 bits a decay near 1 rounds to 1; got {t.dtype}")
    # on a GPU this would synchronize at every call; there the guard on the loss catches it
    t = tensors[poles]
    has_numbers = t.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(t, FakeTensor)
    if has_numbers and not t.isfinite().all():
        raise ValueError(f"{poles} is not finite in {int((~t.isfinite()).sum())} of {t.numel()} numbers: is Δ finite?")


# ---- the registered ops ---------------------------------------------------------------------------------------------


def _register(name: str, tensors: str, settings: str, fake, impl: str | None = None) -> None:
    """Registers an op from tensors and settings to K, and its backward. impl: see Operator.run."""
    count = len(tensors.split())
    inputs = ", ".join([f"Tensor {t}" for t in tensors.split()] + [settings])
    outputs = ", ".join(["Tensor"] * count)

    def fake_backward(dK, *args):
        return tuple(t.new_empty(t.shape) for t in args[:count])

    module, layer = name.split("_")[0], "_layer" if "_layer" in name else ""
    frame.register(f"{name}_fwd", f"({inputs}) -> Tensor", OPERATOR.run(f"{module}{layer}_forward", impl), fake)
    backward = OPERATOR.run(f"{module}{layer}_backward", impl)
    frame.register(f"{name}_bwd", f"(Tensor dK, {inputs}) -> ({outputs})", backward, fake_backward)
    frame.register_gradient(name, count, 1, 'this kernel has no second derivative; impl="reference" has one')


_register("s4d_kernel", "log_a c", "int length, str backend", lambda log_a, c, length, _: c.new_empty((*c.shape[:-2], length)))
_register("dplr_kernel", "lam w", "int length, str backend", lambda lam, w, length, _: w.new_empty((w.shape[0], length)))
# from the parameters of a layer, the last of which is C (D, M, 2): fused only
for _name, _tensors in (("s4d", "log_dt log_decay imag C"), ("dplr", "log_dt log_decay imag P B C")):
    _register(
        f"{_name}_layer_kernel", _tensors, "int length", lambda *args: args[-2].new_empty((len(args[-2]), args[-1])), "fused"
    )

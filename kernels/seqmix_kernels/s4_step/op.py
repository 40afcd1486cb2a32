"""The public operators: their contracts, the choice of an implementation and the registered ops."""

import functools
import logging
import os

import torch
from torch import Tensor

from .reference import gated, reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "reference", "fused")


def s4_step(
    u: Tensor,
    x: Tensor,
    log_dt: Tensor,
    log_decay: Tensor,
    imag: Tensor | None,
    C: Tensor,
    D: Tensor,
    P: Tensor | None = None,
    B: Tensor | None = None,
    method: str = "zoh",
    activation: str | None = "gelu",
    impl: str = "auto",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of an S4 (P and B given) or S4D layer, from its parameters: x = Ā x + B̄ u, y = φ(2 Re C x + D u).

    Δ = exp(log_dt), A = -exp(log_decay) + i imag, minus P P* if P is given; without P, B is 1.

    Args:
        u: (B, E); float32, bfloat16, float16 or float64.
        x: (B, E, M, 2), one mode per conjugate pair; (B, E, N, 1) for real modes. In the dtype of the parameters.
        log_dt, D: (E,). log_decay, imag: (n, M); P, B: (n, M, 2); channel e uses row e mod n of these four. imag None: real
            modes, which count once. C: (E, M, 2), or (E, N, 1) for real modes. All float32, or all float64.
        method: "zoh" or "bilinear"; with P always the latter.
        activation: φ, "gelu" or None.
        impl: one of IMPLS. "fused" has no gradient; "auto" selects what `which_impl` returns.
        in_place: the fused step overwrites the given state with the new one and returns it.

    Returns:
        y (B, E) in u's dtype, or the autocast dtype; the state after the step, with x's shape and dtype, a new tensor unless
        in_place.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    tensors = (u, x, log_dt, log_decay, imag, P, B, C, D)
    method = method if P is None else "bilinear"
    _check(*tensors, method, activation)
    device, dtype = u.device.type, u.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if _choose("s4_step", tensors, D, x.shape[2] * x.shape[3], impl) == "fused":
        if in_place and not torch.compiler.is_compiling():
            return _step(*tensors, method, activation, dtype, True)
        return torch.ops.seqmix.s4_step(*tensors, method, activation, dtype)
    if not torch.is_autocast_enabled(device):
        return reference(*tensors, method, activation, dtype)
    with torch.autocast(device, enabled=False):
        return reference(*tensors, method, activation, dtype)


def gated_projection(
    y: Tensor,
    gate_proj: Tensor,
    out_proj: Tensor,
    gate_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """(W_o y + b_o) ∘ sigmoid(W_g y + b_g) for one token per row: the gated linear unit (Dauphin et al. 2017) after an S4.

    Args:
        y: (B, E). gate_proj, out_proj: (O, E). gate_bias, out_bias: (O,). Weights are rounded to the dtype of the result.
        impl: one of IMPLS. "fused" has no gradient.

    Returns:
        (B, O) in y's dtype, or the autocast dtype.

    Raises:
        ValueError: an invalid shape, device or name, or an implementation that cannot run here.
    """
    weights = gate_proj, gate_bias, out_proj, out_bias
    if y.dim() != 2 or not y.is_floating_point():
        raise ValueError(f"y must be (B, E) of floating point; got shape {tuple(y.shape)} of {y.dtype}")
    wide = out_proj.shape[:1]
    for name, t, shape in (("gate_proj", gate_proj, (*wide, y.shape[1])), ("out_proj", out_proj, (*wide, y.shape[1])),
                           ("gate_bias", gate_bias, wide), ("out_bias", out_bias, wide)):  # fmt: skip
        if t is not None:
            _check_one(name, t, tuple(shape), y.device)
    device = y.device.type
    if y.dtype != torch.float64 and torch.is_autocast_enabled(device):
        y = y.to(torch.get_autocast_dtype(device))
    if _choose("gated_projection", (y, *weights), out_proj, 0, impl) == "fused":
        return torch.ops.seqmix.gated_projection(y, *weights)
    if not torch.is_autocast_enabled(device):
        return gated(y, *weights)
    with torch.autocast(device, enabled=False):
        return gated(y, *weights)


def which_impl(u: Tensor, states: int, needs_grad: bool) -> tuple[str, str]:
    """What "auto" selects for tensors like these, and why: ("fused", "fused GPU kernels"). states: those per channel."""
    reason = why_not("fused", u, states, needs_grad)
    return ("fused", "fused GPU kernels") if reason is None else ("reference", f"fused cannot run: {reason}")


def why_not(impl: str, u: Tensor, states: int, needs_grad: bool) -> str | None:
    """Why `impl` cannot run on tensors like these; None if it can."""
    if impl == "reference":
        return None
    if needs_grad:
        return "it has no gradient"
    if u.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "u is on cpu"  # known without importing Triton
    try:
        from . import fused
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused.why_not(u, states)


def _choose(op: str, tensors: tuple[Tensor | None, ...], like: Tensor, states: int, impl: str) -> str:
    """like: a parameter; if it is float64, it decides instead of the token."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    u = like if like.dtype == torch.float64 else tensors[0]
    if impl == "auto":
        impl, reason = which_impl(u, states, needs_grad)
        if not torch.compiler.is_compiling():
            _say_once(op, u.device.type, impl, reason)
    elif reason := why_not(impl, u, states, needs_grad):
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return impl


@functools.cache
def _say_once(op: str, device: str, name: str, reason: str) -> None:
    log.info("%s on %s uses %s: %s", op, device, name, reason)


# ---- the registered ops ---------------------------------------------------------------------------------------------

torch.library.define(
    "seqmix::s4_step",
    "(Tensor u, Tensor x, Tensor log_dt, Tensor log_decay, Tensor? imag, Tensor? P, Tensor? B, Tensor C, Tensor D, "
    "str method, str? activation, ScalarType dtype) -> (Tensor y, Tensor x)",
)
torch.library.define(
    "seqmix::gated_projection",
    "(Tensor y, Tensor gate_proj, Tensor? gate_bias, Tensor out_proj, Tensor? out_bias) -> Tensor",
)


def _step(*args):
    from . import fused

    with torch.autocast(args[0].device.type, enabled=False):
        return fused.step(*args)


def _gated(*args):
    from . import fused

    with torch.autocast(args[0].device.type, enabled=False):
        return fused.gated(*args)


torch.library.impl("seqmix::s4_step", "CompositeExplicitAutograd")(_step)
torch.library.impl("seqmix::gated_projection", "CompositeExplicitAutograd")(_gated)


@torch.library.register_fake("seqmix::s4_step")
def _fake_step(u, x, *args):
    return u.new_empty(u.shape, dtype=args[-1]), x.new_empty(x.shape)


@torch.library.register_fake("seqmix::gated_projection")
def _fake_gated(y, gate_proj, gate_bias, out_proj, out_bias):
    return y.new_empty(len(y), len(out_proj))


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(u, x, log_dt, log_decay, imag, P, B, C, D, method: str, activation: str | None) -> None:
    if u.dim() != 2 or not u.is_floating_point():
        raise ValueError(f"u must be (B, E) of floating point; got shape {tuple(u.shape)} of {u.dtype}")
    parts = 1 if imag is None else 2
    if C.dim() != 3 or C.shape[2] != parts:
        raise ValueError(f"C must be (E, M, 2), or (E, N, 1) for real modes (imag None); got {tuple(C.shape)}")
    if log_decay.dim() != 2 or not len(log_decay) or C.shape[0] % len(log_decay):
        raise ValueError(f"log_decay must be (n, M), n a divisor of E = {C.shape[0]}; got {tuple(log_decay.shape)}")
    if (P is None) != (B is None) or (P is not None and imag is None):
        raise ValueError("P and B must be given together, and with complex modes (imag)")
    (batch, width), (n, modes) = u.shape, log_decay.shape
    wanted = (
        ("x", x, (batch, width, modes, parts)), ("log_dt", log_dt, (width,)), ("imag", imag, (n, modes)),
        ("P", P, (n, modes, 2)), ("B", B, (n, modes, 2)), ("C", C, (width, modes, parts)), ("D", D, (width,)),
    )  # fmt: skip
    if D.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the parameters must be float32 or float64; got D of {D.dtype}")
    for name, t, shape in (*wanted, ("log_decay", log_decay, (n, modes))):
        if t is not None:
            _check_one(name, t, shape, u.device, D.dtype)
    if method not in ("zoh", "bilinear"):
        raise ValueError(f'method must be "zoh" or "bilinear"; got {method!r}')
    if activation not in (None, "gelu"):
        raise ValueError(f'activation must be "gelu" or None; got {activation!r}')


def _check_one(name: str, t: Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name} must be on {device} like the token; got {t.device}")
    if dtype is not None and t.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, as D is; got {t.dtype}")

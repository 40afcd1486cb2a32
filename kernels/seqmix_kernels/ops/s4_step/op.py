"""The public operators: their contracts, their implementations and the registered ops."""

import torch
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from .reference import gated, reference

MOST_STATES = 256  # of the kernels


def _limit(u: Tensor, states: int, needs_grad: bool) -> str | None:
    if needs_grad:
        return "it has no gradient"
    return f"it takes up to {MOST_STATES} numbers of state per channel, x has {states}" if states > MOST_STATES else None


OPERATOR = Operator(__package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", limit=_limit))
IMPLS = OPERATOR.names
# what decides the choice: u, the numbers of state per channel, whether a gradient is needed
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not


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
    dtype = frame.autocast_dtype(u) or u.dtype
    name = _choose(tensors, D, x.shape[2] * x.shape[3], impl)
    with frame.autocast_off(u.device.type):
        if name == "reference":
            return reference(*tensors, method, activation, dtype)
        if in_place and not torch.compiler.is_compiling():
            return _step(*tensors, method, activation, dtype, True)
        return torch.ops.seqmix.s4_step(*tensors, method, activation, dtype)


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
    y = y.to(frame.autocast_dtype(y) or y.dtype)
    if _choose((y, *weights), out_proj, 0, impl) == "fused":
        return torch.ops.seqmix.gated_projection(y, *weights)
    with frame.autocast_off(y.device.type):
        return gated(y, *weights)


def _choose(tensors: tuple[Tensor | None, ...], like: Tensor, states: int, impl: str) -> str:
    """like: a parameter; if it is float64, it decides instead of the token."""
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return OPERATOR.choose(impl, like if like.dtype == torch.float64 else tensors[0], states, needs_grad)


# ---- the registered ops ---------------------------------------------------------------------------------------------

_step = OPERATOR.run("step", "fused")
frame.register(
    "s4_step",
    "(Tensor u, Tensor x, Tensor log_dt, Tensor log_decay, Tensor? imag, Tensor? P, Tensor? B, Tensor C, Tensor D, "
    "str method, str? activation, ScalarType dtype) -> (Tensor y, Tensor x)",
    _step,
    lambda u, x, *args: (u.new_empty(u.shape, dtype=args[-1]), x.new_empty(x.shape)),
)
frame.register(
    "gated_projection",
    "(Tensor y, Tensor gate_proj, Tensor? gate_bias, Tensor out_proj, Tensor? out_bias) -> Tensor",
    OPERATOR.run("gated", "fused"),
    lambda y, gate_proj, gate_bias, out_proj, out_bias: y.new_empty(len(y), len(out_proj)),
)


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

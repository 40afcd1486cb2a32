"""The public long convolution: its contract, its implementations and the registered op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from . import torch_forms
from .reference import activate, reference

OPERATOR = Operator(
    __package__,
    Impl("reference"),
    Impl("torch", says="plain torch", module="torch_forms"),
    Impl("fused", "cuda", "fused GPU kernels around cuFFT"),
    fallback="torch",
)
IMPLS = OPERATOR.names
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not  # what decides the choice: u
ACTIVATIONS = (None, "gelu", "silu")


def fft_conv(
    u: Tensor,
    kernel: Tensor,
    D: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal convolution with a kernel as long as the sequence, in O(L log L), with its skip, activation and gate.

        y_t = act(Σ_{s<=t} kernel_{t-s} u_s + D u_t) ∘ gate_t

    Args:
        u: (B, L, D), channel-last, any strides; float32, bfloat16, float16 or float64.
        kernel: (D, K), float32, or float64 for u in float64; taps beyond L are not used, missing taps count as zero.
        D: (D,) float32 or float64, or None.
        activation: None, "gelu" (exact) or "silu".
        gate: (B, L, D) in u's dtype, or None.
        impl: one of IMPLS; "auto" selects what `which_impl` returns.

    Returns:
        y (B, L, D) in u's dtype. Transforms run in float32 whatever that dtype is (float64 for float64): 16-bit ones exist
        for powers of two only. Saved for the backward are the arguments and, with an activation or a gate, the value
        before it, in u's dtype, but no spectrum. Under autocast u and gate are cast to the autocast dtype.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    u, gate = _autocast(u, gate)
    _check(u, kernel, D, activation, gate)
    name = OPERATOR.choose(impl, u)
    kernel = kernel[:, : max(1, u.shape[1])]
    with frame.autocast_off(u.device.type):
        if u.numel() == 0:
            return _empty(u, kernel, D, gate)
        if name == "reference":
            return reference(u, kernel, D, activation, gate)
        y, _ = torch.ops.seqmix.fft_conv_fwd(u, kernel, D, gate, activation, name)
    return y


def fft_conv_carry(
    u: Tensor,
    kernel: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fft_conv` of a piece of a sequence. Its state carries the past, so that pieces of any lengths equal the whole.

    Args:
        state: (B, K-1, D) float32 (float64 for float64): what earlier inputs contribute to the next K-1 sums; zeros at
            the start. The other arguments are those of `fft_conv`; all taps count, whatever L is.

    It is computed in plain torch.

    Returns:
        y (B, L, D) and the state after it. Differentiable in all inputs, including the state.
    """
    u, gate = _autocast(u, gate)
    _check(u, kernel, D, activation, gate)
    acc, (batch, length, width) = torch.promote_types(u.dtype, torch.float32), u.shape
    wanted = (batch, kernel.shape[1] - 1, width)
    if state.shape != wanted or state.dtype != acc:
        raise ValueError(f"state must be {acc} of shape {wanted}; got {state.dtype} of {tuple(state.shape)}")
    if u.numel() == 0:
        return _empty(u, kernel, D, gate), state
    with frame.autocast_off(u.device.type):
        wide = u.to(acc)
        p = torch_forms.linear(wide.mT, kernel.to(acc)).mT + F.pad(state, (0, 0, 0, length))  # (B, L + K - 1, D)
        p, state = p.split((length, kernel.shape[1] - 1), dim=1)
        y = activate(p if D is None else p + D.to(acc) * wide, activation)
        return (y if gate is None else y * gate.to(acc)).to(u.dtype), state


def _empty(u: Tensor, *others: Tensor | None) -> Tensor:
    """u, which is empty, made to depend on the others too: their gradients are zeros instead of None."""
    return u + 0 * sum(t.sum() for t in others if t is not None)


def _autocast(u: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if dtype := frame.autocast_dtype(u):
        u, gate = u.to(dtype), None if gate is None else gate.to(dtype)
    return u, gate


# ---- the registered op ----------------------------------------------------------------------------------------------

_INPUTS = "Tensor u, Tensor kernel, Tensor? D, Tensor? gate"


def _fake_forward(u, kernel, D, gate, activation, backend):
    kept = (0,) if activation is None and gate is None else u.shape
    return u.new_empty(u.shape), u.new_empty(kept)


def _fake_backward(dy, u, kernel, D, gate, p, activation, backend):
    none = u.new_empty(0, dtype=torch.promote_types(u.dtype, torch.float32))
    return (
        u.new_empty(u.shape), kernel.new_empty(kernel.shape), none if D is None else D.new_empty(D.shape),
        none if gate is None else gate.new_empty(gate.shape),
    )  # fmt: skip


frame.register(
    "fft_conv_fwd",
    f"({_INPUTS}, str? activation, str backend) -> (Tensor y, Tensor p)",
    OPERATOR.run("forward"),
    _fake_forward,
)
frame.register(
    "fft_conv_bwd",
    f"(Tensor dy, {_INPUTS}, Tensor p, str? activation, str backend) -> (Tensor du, Tensor dkernel, Tensor dD, Tensor dgate)",
    OPERATOR.run("backward"),
    _fake_backward,
)
frame.register_gradient("fft_conv", 4, 1, 'this convolution has no second derivative; impl="reference" has one')


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(u, kernel, D, activation, gate) -> None:
    if u.dim() != 3:
        raise ValueError(f"u must be (B, L, D); got shape {tuple(u.shape)}")
    if not u.is_floating_point():
        raise ValueError(f"u must be float32, bfloat16, float16 or float64; got {u.dtype}")
    width = u.shape[2]
    if kernel.dim() != 2 or kernel.shape[0] != width or kernel.shape[1] < 1:
        raise ValueError(f"kernel must be (D, K) with D = {width} and K >= 1; got shape {tuple(kernel.shape)}")
    wanted = (("kernel", kernel, tuple(kernel.shape)), ("D", D, (width,)), ("gate", gate, tuple(u.shape)))
    for name, t, shape in wanted:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != u.device:
            raise ValueError(f"{name} must be on {u.device} like u; got {t.device}")
        allowed = (u.dtype,) if name == "gate" else (torch.promote_types(u.dtype, torch.float32),)
        if t.dtype not in allowed:
            raise ValueError(f"{name} must be {allowed[0]}; got {t.dtype}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None, 'gelu' or 'silu'; got {activation!r}")

"""The public operator: its contract, the choice of an implementation, the registered op."""

import functools
import logging

import torch
from torch import Tensor

from .reference import reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "reference", "fused")


def mamba_step(
    x: Tensor,
    z: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    conv_bias: Tensor | None = None,
    discretization: str = "euler",
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of a Mamba block, after its input projection and before its output projection.

    What `mamba_inner` does to a sequence, for one step (Gu and Dao 2023, algorithm 2 and figure 3).

    Args:
        x, z: (B, E), any strides; float32, bfloat16, float16 or float64.
        conv_state: (B, W-1, E), the inputs before, oldest first. ssm_state: (B, E, N), float32 (float64 where x is).
        conv: (E, W). x_proj: (R + 2N, E), δ before B before C. dt_proj: (E, R). conv_bias: (E,). In x's dtype or
            float32; the two products are made in x's dtype.
        dt_bias, D: (E,). A_log: (E, N), A = -exp(A_log). float32 (float64 where x is).
        discretization: "euler" or "zoh".
        impl: one of IMPLS. "fused" has no gradient; "auto" is what `which_impl` answers.

    Returns:
        y (B, E) in x's dtype, and the two states after the step, new tensors: (B, W-1, E) in x's dtype and (B, E, N).

    Under autocast x and z are cast to the autocast dtype.

    Raises:
        ValueError: a shape, dtype, device or name that does not fit, or an implementation that cannot run here.
    """
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, z = x.to(dtype), z.to(dtype)
    tensors = (x, z, conv_state, ssm_state, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D)
    _check(*tensors, discretization)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if impl == "auto":
        impl, reason = which_impl(x, conv, needs_grad)
        if not torch.compiler.is_compiling():
            _say_once(device, impl, reason)
    elif impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    elif impl == "fused" and (reason := why_not(x, conv, needs_grad)):
        raise ValueError(f"impl='fused' cannot run here: {reason}")
    if impl == "fused":
        return torch.ops.seqmix.mamba_step(*tensors, discretization)
    with torch.autocast(device, enabled=False):
        return reference(*tensors[:6], x_proj.to(x.dtype), dt_proj.to(x.dtype), *tensors[8:], discretization)


def which_impl(x: Tensor, conv: Tensor, needs_grad: bool) -> tuple[str, str]:
    """What "auto" takes for tensors like these, and why: ("fused", "fused GPU kernels")."""
    reason = why_not(x, conv, needs_grad)
    return ("fused", "fused GPU kernels") if reason is None else ("reference", f"fused cannot run: {reason}")


def why_not(x: Tensor, conv: Tensor, needs_grad: bool) -> str | None:
    """Why the fused step cannot run on tensors like these; None if it can."""
    if needs_grad:
        return "it has no gradient"
    try:
        from . import fused  # imports Triton, which a machine without a GPU may lack
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused.why_not(x, conv)


@functools.cache
def _say_once(device: str, name: str, reason: str) -> None:
    log.info("mamba_step on %s takes %s: %s", device, name, reason)


# ---- the registered op ----------------------------------------------------------------------------------------------

torch.library.define(
    "seqmix::mamba_step",
    "(Tensor x, Tensor z, Tensor conv_state, Tensor ssm_state, Tensor conv, Tensor? conv_bias, Tensor x_proj, "
    "Tensor dt_proj, Tensor dt_bias, Tensor A_log, Tensor D, str discretization) -> "
    "(Tensor y, Tensor conv_state, Tensor ssm_state)",
)


@torch.library.impl("seqmix::mamba_step", "CompositeExplicitAutograd")
def _step(*args):
    from . import fused

    return fused.step(*args)


@torch.library.register_fake("seqmix::mamba_step")
def _fake_step(x, z, conv_state, ssm_state, *_):
    return x.new_empty(x.shape), x.new_empty(conv_state.shape), ssm_state.new_empty(ssm_state.shape)


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(
    x, z, conv_state, ssm_state, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, discretization: str
) -> None:
    for name, t, dims, say in (("x", x, 2, "(B, E)"), ("conv", conv, 2, "(E, W)"), ("A_log", A_log, 2, "(E, N)"),
                               ("dt_proj", dt_proj, 2, "(E, R)")):  # fmt: skip
        if t.dim() != dims:
            raise ValueError(f"{name} must be {say}; got shape {tuple(t.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    (batch, width), taps, n, rank = x.shape, conv.shape[1], A_log.shape[1], dt_proj.shape[1]
    own = torch.float64 if x.dtype == torch.float64 else torch.float32
    wanted = (
        ("z", z, (batch, width), (x.dtype,)), ("conv_state", conv_state, (batch, taps - 1, width), None),
        ("ssm_state", ssm_state, (batch, width, n), (own,)), ("conv", conv, (width, taps), (x.dtype, own)),
        ("conv_bias", conv_bias, (width,), (x.dtype, own)), ("x_proj", x_proj, (rank + 2 * n, width), (x.dtype, own)),
        ("dt_proj", dt_proj, (width, rank), (x.dtype, own)), ("dt_bias", dt_bias, (width,), (own,)),
        ("A_log", A_log, (width, n), (own,)), ("D", D, (width,), (own,)),
    )  # fmt: skip
    for name, t, shape, dtypes in wanted:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x; got {t.device}")
        if dtypes and t.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dict.fromkeys(dtypes)))}; got {t.dtype}")
    if discretization not in ("euler", "zoh"):
        raise ValueError(f'discretization must be "euler" or "zoh"; got {discretization!r}')

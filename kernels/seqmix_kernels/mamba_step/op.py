"""The public operator: its contract, the choice of an implementation and the registered op."""

import functools
import logging
import os

import torch
from torch import Tensor

from .reference import reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "reference", "fused")


def mamba_step(
    u: Tensor,
    in_proj: Tensor,
    conv: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    out_proj: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    in_bias: Tensor | None = None,
    conv_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    discretization: str = "euler",
    impl: str = "auto",
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `mamba_inner` computes for a sequence, for one token (Gu and Dao 2023, algorithm 2 and figure 3).

    Args:
        u: (B, M); float32, bfloat16, float16 or float64.
        in_proj: (2E, M), x, then z. conv: (E, W). x_proj: (R + 2N, E), δ, then B, then C. dt_proj: (E, R).
            out_proj: (M, E). in_bias: (2E,). conv_bias: (E,). out_bias: (M,). In u's dtype, or in float32 under
            autocast and for conv.
        dt_bias, D: (E,). A_log: (E, N), A = -exp(A_log). float32 (float64 if u is).
        conv_state: (B, W-1, E), the previous inputs, oldest first. ssm_state: (B, E, N), float32 (float64 if u is).
        discretization: "euler" or "zoh".
        impl: one of IMPLS. "fused" has no gradient; "auto" selects what `which_impl` returns.
        in_place: the fused step overwrites the given states with the new ones and returns them.

    Returns:
        out (B, M), and the two states after the step, with the shapes and dtypes of those given; new tensors, unless in_place.

    Products and out are in u's dtype, or in the autocast dtype.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    device, dtype = u.device.type, u.dtype
    if u.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    tensors = (u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state,
               ssm_state)  # fmt: skip
    _check(*tensors, discretization, dtype)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if impl == "auto":
        impl, reason = which_impl(u, conv, needs_grad)
        if not torch.compiler.is_compiling():
            _say_once(device, impl, reason)
    elif impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    elif reason := why_not(impl, u, conv, needs_grad):
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    if impl == "fused":
        if in_place and not torch.compiler.is_compiling():
            return _step(*tensors, discretization, dtype, True)
        return torch.ops.seqmix.mamba_step(*tensors, discretization, dtype)
    if not torch.is_autocast_enabled(device):  # entering a context would take a tenth of a small step's time
        return reference(*tensors, discretization)
    with torch.autocast(device, enabled=False):
        return reference(u.to(dtype), *tensors[1:], discretization)


def which_impl(u: Tensor, conv: Tensor, needs_grad: bool) -> tuple[str, str]:
    """What "auto" selects for tensors like these, and why: ("fused", "fused GPU kernels")."""
    reason = why_not("fused", u, conv, needs_grad)
    return ("fused", "fused GPU kernels") if reason is None else ("reference", f"fused cannot run: {reason}")


def why_not(impl: str, u: Tensor, conv: Tensor, needs_grad: bool) -> str | None:
    """Why `impl` cannot run on tensors like these; None if it can."""
    if impl == "reference":
        return None
    if needs_grad:
        return "it has no gradient"
    if u.device.type == "cpu" and not _interpreting():
        return "u is on cpu"  # known without importing Triton
    try:
        from . import fused
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused.why_not(u, conv)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _say_once(device: str, name: str, reason: str) -> None:
    log.info("mamba_step on %s uses %s: %s", device, name, reason)


# ---- the registered op ----------------------------------------------------------------------------------------------

torch.library.define(
    "seqmix::mamba_step",
    "(Tensor u, Tensor in_proj, Tensor? in_bias, Tensor conv, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, "
    "Tensor dt_bias, Tensor A_log, Tensor D, Tensor out_proj, Tensor? out_bias, Tensor conv_state, Tensor ssm_state, "
    "str discretization, ScalarType dtype) -> (Tensor out, Tensor conv_state, Tensor ssm_state)",
)


def _step(*args):
    from . import fused

    with torch.autocast(args[0].device.type, enabled=False):
        return fused.step(*args)


torch.library.impl("seqmix::mamba_step", "CompositeExplicitAutograd")(_step)


@torch.library.register_fake("seqmix::mamba_step")
def _fake_step(u, *args):
    *_, conv_state, ssm_state, _, dtype = args
    return u.new_empty(u.shape, dtype=dtype), conv_state.new_empty(conv_state.shape), ssm_state.new_empty(ssm_state.shape)


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(
    u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state, ssm_state,
    discretization: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    for name, t, axes in (("u", u, "(B, M)"), ("conv", conv, "(E, W)"), ("A_log", A_log, "(E, N)"),
                          ("dt_proj", dt_proj, "(E, R)")):  # fmt: skip
        if t.dim() != 2:
            raise ValueError(f"{name} must be {axes}; got shape {tuple(t.shape)}")
    if not u.is_floating_point():
        raise ValueError(f"u must be float32, bfloat16, float16 or float64; got {u.dtype}")
    (batch, d_model), (width, n), rank, taps = u.shape, A_log.shape, dt_proj.shape[1], conv.shape[1]
    own = torch.float64 if u.dtype == torch.float64 else torch.float32
    products = (u.dtype,) if dtype == u.dtype else (dtype, torch.float32)
    either = (u.dtype, dtype, own)
    wanted = (
        ("in_proj", in_proj, (2 * width, d_model), products), ("in_bias", in_bias, (2 * width,), products),
        ("conv", conv, (width, taps), either), ("conv_bias", conv_bias, (width,), either),
        ("x_proj", x_proj, (rank + 2 * n, width), products), ("dt_proj", dt_proj, (width, rank), products),
        ("dt_bias", dt_bias, (width,), (own,)), ("A_log", A_log, (width, n), (own,)), ("D", D, (width,), (own,)),
        ("out_proj", out_proj, (d_model, width), products), ("out_bias", out_bias, (d_model,), products),
        ("conv_state", conv_state, (batch, taps - 1, width), either), ("ssm_state", ssm_state, (batch, width, n), (own,)),
    )  # fmt: skip
    for name, t, shape, dtypes in wanted:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != u.device:
            raise ValueError(f"{name} must be on {u.device} like u; got {t.device}")
        if t.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dict.fromkeys(dtypes)))}; got {t.dtype}")
    if discretization not in ("euler", "zoh"):
        raise ValueError(f'discretization must be "euler" or "zoh"; got {discretization!r}')

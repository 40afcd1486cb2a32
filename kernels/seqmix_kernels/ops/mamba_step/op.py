"""The public operator: its contract, its implementations and the registered op."""

import torch
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from .reference import reference

MAX_TAPS = 8  # of the kernels


def _limit(u: Tensor, conv: Tensor, needs_grad: bool) -> str | None:
    if needs_grad:
        return "it has no gradient"
    return f"it takes up to {MAX_TAPS} taps, conv has {conv.shape[1]}" if conv.shape[1] > MAX_TAPS else None


OPERATOR = Operator(__package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels", limit=_limit))
IMPLS = OPERATOR.names
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not  # what decides the choice: u, conv, whether a gradient is needed


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
    cast = frame.autocast_dtype(u)
    dtype = cast or u.dtype
    tensors = (u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state,
               ssm_state)  # fmt: skip
    _check(*tensors, discretization, dtype, cast is not None)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    name = OPERATOR.choose(impl, u, conv, needs_grad)
    with frame.autocast_off(u.device.type):
        if name == "reference":
            return reference(u.to(dtype), *tensors[1:], discretization)
        if in_place and not torch.compiler.is_compiling():
            return _step(*tensors, discretization, dtype, True)
        return torch.ops.seqmix.mamba_step(*tensors, discretization, dtype)


# ---- the registered op ----------------------------------------------------------------------------------------------


_step = OPERATOR.run("step", "fused")


def _fake_step(u, *args):
    *_, conv_state, ssm_state, _, dtype = args
    return u.new_empty(u.shape, dtype=dtype), conv_state.new_empty(conv_state.shape), ssm_state.new_empty(ssm_state.shape)


frame.register(
    "mamba_step",
    "(Tensor u, Tensor in_proj, Tensor? in_bias, Tensor conv, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, "
    "Tensor dt_bias, Tensor A_log, Tensor D, Tensor out_proj, Tensor? out_bias, Tensor conv_state, Tensor ssm_state, "
    "str discretization, ScalarType dtype) -> (Tensor out, Tensor conv_state, Tensor ssm_state)",
    _step,
    _fake_step,
)


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(
    u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias, conv_state, ssm_state,
    discretization: str, dtype: torch.dtype, autocast: bool,
) -> None:  # fmt: skip
    for name, t, axes in (("u", u, "(B, M)"), ("conv", conv, "(E, W)"), ("A_log", A_log, "(E, N)"),
                          ("dt_proj", dt_proj, "(E, R)")):  # fmt: skip
        if t.dim() != 2:
            raise ValueError(f"{name} must be {axes}; got shape {tuple(t.shape)}")
    if not u.is_floating_point():
        raise ValueError(f"u must be float32, bfloat16, float16 or float64; got {u.dtype}")
    (batch, d_model), (width, n), rank, taps = u.shape, A_log.shape, dt_proj.shape[1], conv.shape[1]
    own = torch.float64 if u.dtype == torch.float64 else torch.float32
    products = (dtype, torch.float32) if autocast else (dtype,)
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

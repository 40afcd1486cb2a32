"""The public short convolution: its contract and the choice of an implementation."""

import torch
from torch import Tensor

from .reference import reference

IMPLS = ("auto", "reference")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, from a state to a state.

        y_t = act(bias + Σ_w weight[:, w] · x_{t-W+1+w})        w = 0 .. W-1

    Args:
        x: (B, L, D), channel-last, any strides; float32, bfloat16, float16 or float64.
        weight: (D, W), W >= 1, in x's dtype or float32; its last tap meets the present step.
        bias: (D,), the same dtypes.
        activation: None or "silu".
        initial_state: (B, W-1, D), the inputs before the first, oldest first; zeros if None.
        seq_idx: (B, L) integers. Where it changes from t-1 to t a new document starts, and nothing before t is seen
            from t on. The initial state belongs to the document of position 0.
        impl: one of IMPLS.

    Returns:
        y (B, L, D) in x's dtype and the final state (B, W-1, D) in x's dtype: the last W-1 inputs, padded on the left
        with the old state. With seq_idx only inputs of the last document are kept, the others are zero, so that the
        state continues that document. All is differentiable, the states too.

    Under autocast x and the state are cast to the autocast dtype; the sum runs in float32 in any case.

    Raises:
        ValueError: a shape, dtype, device or name that does not fit, or an implementation that cannot run here.
    """
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if initial_state is not None and initial_state.dtype != x.dtype:
        initial_state = initial_state.to(x.dtype)
    _check(x, weight, bias, activation, initial_state, seq_idx)
    _choose(x, impl)
    with torch.autocast(device, enabled=False):
        return reference(x, weight, bias, activation, initial_state, seq_idx)


def which_impl(x: Tensor) -> tuple[str, str]:
    """What "auto" takes for a tensor like x, and why."""
    return "reference", "plain torch"


def _choose(x: Tensor, impl: str) -> str:
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    return which_impl(x)[0] if impl == "auto" else impl


def _check(x, weight, bias, activation, initial_state, seq_idx) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be (B, L, D); got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    batch, length, width = x.shape
    if weight.dim() != 2 or weight.shape[0] != width or weight.shape[1] < 1:
        raise ValueError(f"weight must be (D, W) with D = {width}; got shape {tuple(weight.shape)}")
    wanted = (
        ("weight", weight, tuple(weight.shape)), ("bias", bias, (width,)),
        ("initial_state", initial_state, (batch, weight.shape[1] - 1, width)), ("seq_idx", seq_idx, (batch, length)),
    )  # fmt: skip
    for name, t, shape in wanted:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x; got {t.device}")
        if name == "seq_idx":
            if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
                raise ValueError(f"{name} must hold integers; got {t.dtype}")
        elif t.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} must be {x.dtype} or float32; got {t.dtype}")
    if activation not in (None, "silu"):
        raise ValueError(f'activation must be None or "silu"; got {activation!r}')

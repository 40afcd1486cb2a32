"""The public short convolution: its contract, its implementations and the registered op."""

import torch
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from .reference import reference


def _up_to(taps: int):
    def limit(x: Tensor, weight: Tensor) -> str | None:
        return f"it takes up to {taps} taps, weight has {weight.shape[1]}" if weight.shape[1] > taps else None

    return limit


OPERATOR = Operator(
    __package__,
    Impl("reference"),
    Impl("cpu", "cpu", "C kernel compiled on this machine", limit=_up_to(4)),
    Impl("fused", "cuda", "fused GPU kernel", limit=_up_to(8)),
    double=("reference", "float64 is for checking: the equation in plain torch"),
)
IMPLS = OPERATOR.names
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not  # what decides the choice: x, weight


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution that takes an initial state and returns the final one.

        y_t = act(bias + Σ_w weight[:, w] · x_{t-W+1+w})        w = 0 .. W-1

    Args:
        x: (B, L, D), channel-last, any strides; float32, bfloat16, float16 or float64.
        weight: (D, W), W >= 1, in x's dtype or float32; the last tap multiplies the current step.
        bias: (D,), in x's dtype or float32.
        activation: None or "silu".
        initial_state: (B, W-1, D), the inputs before the first step, oldest first; zeros if None.
        seq_idx: (B, L) integers. Where it changes from t-1 to t a new document starts, and steps from t on do not
            see those before t. The initial state belongs to the document of position 0.
        impl: one of IMPLS. "auto" selects what `which_impl` returns.

    Returns:
        y (B, L, D) in x's dtype and the final state (B, W-1, D) in x's dtype: the last W-1 inputs, padded on the left
        with the old state. With seq_idx only inputs of the last document are kept and the others are zero, so that
        the state continues that document. Differentiable in all float inputs, including the initial state.

    Under autocast x and the state are cast to the autocast dtype; sums are always in float32.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    x = x.to(frame.autocast_dtype(x) or x.dtype)
    if initial_state is not None and initial_state.dtype != x.dtype:
        initial_state = initial_state.to(x.dtype)
    _check(x, weight, bias, activation, initial_state, seq_idx)
    name = OPERATOR.choose(impl, x, weight)
    if name == "reference":
        with frame.autocast_off(x.device.type):
            return reference(x, weight, bias, activation, initial_state, seq_idx)
    return torch.ops.seqmix.causal_conv1d_fwd(x, weight, bias, initial_state, seq_idx, activation == "silu", name)


# ---- the registered op ----------------------------------------------------------------------------------------------

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, bool silu, str backend"


def _fake_forward(x, weight, bias, initial_state, seq_idx, silu, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


def _fake_backward(dy, dfinal, x, weight, bias, initial_state, seq_idx, silu, backend):
    def like(t):
        return x.new_empty(0, dtype=torch.float32) if t is None else t.new_empty(t.shape)

    return x.new_empty(x.shape), weight.new_empty(weight.shape), like(bias), like(initial_state)


frame.register("causal_conv1d_fwd", f"({_INPUTS}) -> (Tensor y, Tensor final)", OPERATOR.run("forward"), _fake_forward)
frame.register(
    "causal_conv1d_bwd",
    f"(Tensor dy, Tensor? dfinal, {_INPUTS}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial)",
    OPERATOR.run("backward"),
    _fake_backward,
)
frame.register_gradient("causal_conv1d", 5, 2, 'the compiled convolution has no second derivative; impl="reference" has one')


# ---- contract -------------------------------------------------------------------------------------------------------


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

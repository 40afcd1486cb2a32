"""The public short convolution: its contract, the choice of an implementation and the registered op."""

import functools
import logging

import torch
from torch import Tensor

from .. import autograd
from . import cpu
from .reference import reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "reference", "cpu", "fused")


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
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if initial_state is not None and initial_state.dtype != x.dtype:
        initial_state = initial_state.to(x.dtype)
    _check(x, weight, bias, activation, initial_state, seq_idx)
    name = _choose(x, weight, impl)
    if name == "reference":
        with torch.autocast(device, enabled=False):
            return reference(x, weight, bias, activation, initial_state, seq_idx)
    return torch.ops.seqmix.causal_conv1d_fwd(x, weight, bias, initial_state, seq_idx, activation == "silu", name)


def which_impl(x: Tensor, weight: Tensor) -> tuple[str, str]:
    """What "auto" selects for tensors like these, and why: ("cpu", "C kernel, ...")."""
    if x.dtype == torch.float64:
        return "reference", "float64 is for checking: the equation in plain torch"
    best = "fused" if x.is_cuda else "cpu"
    reason = why_not(best, x, weight)
    if reason is None:
        return best, "fused GPU kernel" if x.is_cuda else "C kernel compiled on this machine"
    return "reference", f"{best} cannot run: {reason}"


def why_not(impl: str, x: Tensor, weight: Tensor) -> str | None:
    """Why `impl` cannot run on tensors like these; None if it can."""
    if impl == "cpu":
        if x.device.type != "cpu":
            return f"x is on {x.device}"
        if x.dtype == torch.float64:
            return "it computes in float32, x is float64"
        if weight.shape[1] > cpu.MAX_TAPS:
            return f"it takes up to {cpu.MAX_TAPS} taps, weight has {weight.shape[1]}"
        return cpu.why_not()
    if impl == "fused":
        try:
            return _fused().why_not(x, weight)
        except ImportError as missing:
            return f"its kernel cannot be imported ({missing})"
    return None


# torch.compile must treat the result as a constant: tracing must not run a C compiler. torch.compiler.assume_constant_result
# only sets this attribute, but calling it imports the whole compiler, and Triton with it
cpu.why_not._dynamo_marked_constant = True


def _fused():
    from . import fused  # imports Triton, which a machine without a GPU may lack

    return fused


def _choose(x: Tensor, weight: Tensor, impl: str) -> str:
    if impl == "auto":
        name, reason = which_impl(x, weight)
        if not torch.compiler.is_compiling():
            _say_once(x.device.type, x.dtype == torch.float64, weight.shape[1], name, reason)
        return name
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    reason = why_not(impl, x, weight)
    if reason:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return impl


@functools.cache
def _say_once(device: str, double: bool, taps: int, name: str, reason: str) -> None:
    log.info("causal_conv1d on %s uses %s: %s", device, name, reason)


# ---- the registered op ----------------------------------------------------------------------------------------------

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, bool silu, str backend"
torch.library.define("seqmix::causal_conv1d_fwd", f"({_INPUTS}) -> (Tensor y, Tensor final)")
torch.library.define(
    "seqmix::causal_conv1d_bwd",
    f"(Tensor dy, Tensor? dfinal, {_INPUTS}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial)",
)


def _backend(name: str):
    return cpu if name == "cpu" else _fused()


@torch.library.impl("seqmix::causal_conv1d_fwd", "CompositeExplicitAutograd")
def _forward(*args):
    *args, backend = args
    return _backend(backend).forward(*args)


@torch.library.impl("seqmix::causal_conv1d_bwd", "CompositeExplicitAutograd")
def _backward_op(*args):
    *args, backend = args
    return _backend(backend).backward(*args)


@torch.library.register_fake("seqmix::causal_conv1d_fwd")
def _fake_forward(x, weight, bias, initial_state, seq_idx, silu, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[2])


@torch.library.register_fake("seqmix::causal_conv1d_bwd")
def _fake_backward(dy, dfinal, x, weight, bias, initial_state, seq_idx, silu, backend):
    def like(t):
        return x.new_empty(0, dtype=torch.float32) if t is None else t.new_empty(t.shape)

    return x.new_empty(x.shape), weight.new_empty(weight.shape), like(bias), like(initial_state)


_below_autograd = autograd.below(torch.ops.seqmix.causal_conv1d_fwd)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = _below_autograd(*inputs)
        *tensors, ctx.silu, ctx.backend = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx, dy, dfinal):
        x, weight, bias, initial_state, seq_idx = ctx.saved_tensors
        if dy is None:
            dy = x.new_zeros(1, 1, 1).expand(x.shape)
        args = (x, weight, bias, initial_state, seq_idx, ctx.silu, ctx.backend)
        dx, dweight, dbias, dinitial = torch.ops.seqmix.causal_conv1d_bwd(dy, dfinal, *args)
        optional = (None if bias is None else dbias), (None if initial_state is None else dinitial)
        return dx, dweight, *optional, None, None, None


autograd.register(
    "causal_conv1d", _Convolution.apply, autograd.needs_gradient,
    'the compiled convolution has no second derivative; impl="reference" has one',
)  # fmt: skip


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

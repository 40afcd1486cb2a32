"""The public operator: its contract, the choice of an implementation and the registered op."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import frame
from ..causal_conv1d.op import OPERATOR as CONVOLUTION
from ..selective_scan.op import OPERATOR as SCAN
from . import inner
from .inner import Given, Saved
from .reference import reference

LEVELS = (0, 1, 2)


def mamba_inner(
    u: Tensor,
    in_proj: Tensor,
    conv: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    out_proj: Tensor,
    in_bias: Tensor | None = None,
    conv_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
    conv_state: Tensor | None = None,
    ssm_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    discretization: str = "euler",
    level: int = 1,
    scan: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The inside of a Mamba block, from u to out; it takes and returns states (Gu and Dao 2023, figure 3).

    With a compiled scan ("cpu", "fused") it is one autograd node, whose level decides what is saved and recomputed:

        level 0   saves everything that is expensive to compute
        level 1   recomputes the convolution's output and Δ: one convolution, one product with W_Δ
        level 2   saves only u and recomputes the forward

    `saved_bytes` counts the saved bytes. With a scan in plain torch it is the composition in reference.py; levels 1 and 2
    then save only the inputs (torch.utils.checkpoint).

    Args:
        u: (B, L, M); float32, bfloat16, float16 or float64.
        in_proj: (2E, M), x, then z. conv: (E, W). x_proj: (R + 2N, E), δ, then B, then C. dt_proj: (E, R).
            out_proj: (M, E). in_bias: (2E,). conv_bias: (E,). out_bias: (M,). All in u's dtype, or in float32
            under autocast and for conv.
        dt_bias, D: (E,). A_log: (E, N), A = -exp(A_log). float32 (float64 if u is).
        conv_state: (B, W-1, E), see `causal_conv1d`. ssm_state: (B, E, N), see `selective_scan`. Zeros if None.
        seq_idx: (B, L) integers; where it changes both states are reset.
        discretization: "euler" or "zoh".
        level: one of LEVELS.
        scan: an implementation of `selective_scan`; the convolution uses the matching one.

    Returns:
        out (B, L, M) in u's dtype, and the two states after the last step. Differentiable in all float inputs, including the
        states.

    Under autocast u and the states of the convolution are cast to the autocast dtype, and so is each weight where it is
    used; each gradient has the dtype of its input.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or a scan that cannot run here.
    """
    u = u.to(frame.autocast_dtype(u) or u.dtype)
    given = Given(u, in_proj, in_bias, conv, conv_bias, x_proj, dt_proj, dt_bias, A_log, D, out_proj, out_bias,
                  conv_state, ssm_state, seq_idx)  # fmt: skip
    _check(given, discretization, level)
    name = _compiled(u, conv, scan)
    if name is not None:
        if conv_state is not None:
            given = given._replace(conv_state=conv_state.to(u.dtype))
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        return torch.ops.seqmix.mamba_inner_fwd(*given, discretization, level, save, name)[:3]
    if level == 0 or not torch.is_grad_enabled():
        return reference(*given, discretization, scan)
    return checkpoint(reference, *given, discretization, scan, use_reentrant=False, preserve_rng_state=False)


def _compiled(u: Tensor, conv: Tensor, scan: str) -> str | None:
    """The backend of the node; None where the composition is used: for a scan in plain torch, or for more taps than the
    compiled convolution supports."""
    if scan == "auto":
        scan, _ = SCAN.which_impl(u)
    else:
        SCAN.require(scan, u, option="scan")
    return scan if scan in ("cpu", "fused") and CONVOLUTION.why_not(scan, u, conv) is None else None


def which_impls(u: Tensor, conv: Tensor, scan: str = "auto") -> dict[str, str]:
    """What computes the parts of `mamba_inner` for tensors like these, and why; it raises the same ValueError."""
    name = _compiled(u, conv, scan)
    scan_name, reason = SCAN.which_impl(u) if scan == "auto" else (scan, "asked for")
    used = {"selective_scan": f"{scan_name} ({reason})"}
    if name is not None:
        return used | {"causal_conv1d": f"{name} (as the scan)", "mamba_inner": f"{name} (one autograd node)"}
    used["causal_conv1d"] = "{} ({})".format(*CONVOLUTION.which_impl(u, conv))
    return used | {"mamba_inner": f"reference (the composition of its parts: scan {scan_name}, {conv.shape[1]} taps)"}


def saved_bytes(d_model: int, width: int, n: int, rank: int, itemsize: int, level: int, state_bytes: float) -> float:
    """Bytes per token that the node saves for its backward, including u (which the previous block may hold anyway).

    width: E. itemsize: of u. state_bytes: of the scan's states per (b, t, d); see `saved_specs` of its backends. The
    parameters that it saves belong to the caller.
    """
    kept = d_model * itemsize
    if level <= 1:
        kept += (2 * width + width + rank + 2 * n) * itemsize + width * state_bytes
    if level == 0:
        kept += 2 * width * itemsize
    return kept


# ---- the registered op ----------------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor u, Tensor in_proj, Tensor? in_bias, Tensor conv, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj, "
    "Tensor dt_bias, Tensor A_log, Tensor D, Tensor out_proj, Tensor? out_bias, Tensor? conv_state, Tensor? ssm_state, "
    "Tensor? seq_idx, "
)
_SAVED = "Tensor xz, Tensor x, Tensor dt, Tensor dbc, Tensor y, Tensor boundary, Tensor gate"


def _forward(*args):
    *given, discretization, level, save, backend = args
    *results, saved = inner.forward(Given(*given), level, save, inner.operators(backend, discretization))
    return (*results, *saved)


def _backward(dout, dconv_final, dssm_final, *args):
    *tensors, discretization, level, backend = args
    given, saved = Given(*tensors[: len(Given._fields)]), Saved(*tensors[len(Given._fields) :])
    run = inner.operators(backend, discretization)
    grads = inner.backward(dout, dconv_final, dssm_final, given, saved, level, run)
    return tuple(dout.new_empty(0) if grad is None else grad for grad in grads)


def _fake_forward(*args):
    *given, discretization, level, save, backend = args
    g = Given(*given)
    batch, length, _ = g.u.shape
    width, n = g.A_log.shape
    wide, narrow = g.u.new_empty(batch, length, width), g.u.new_empty(batch, length, g.x_proj.shape[0])
    keep = save and level < 2
    # the scan's fake implementation gives the shapes of its saved tensors
    states, final = narrow[..., :n].unsqueeze(2), g.A_log.new_empty(batch, width, n)
    _, _, boundary, gate = torch.ops.seqmix.selective_scan_fwd(
        wide, wide, g.A_log, states, states, g.D, wide, g.dt_bias, None, None, True, discretization, None, keep, backend
    )
    saved = Saved(g.u.new_empty(batch, length, 2 * width), wide, wide.clone(), narrow, wide.clone(), boundary, gate)
    dropped = Saved._fields if not keep else ("x", "dt") if level >= 1 else ()
    saved = saved._replace(**{name: g.u.new_empty(0) for name in dropped})
    return g.u.new_empty(g.u.shape), g.u.new_empty(batch, g.conv.shape[1] - 1, width), final, *saved


def _fake_backward(dout, dconv_final, dssm_final, *args):
    given = Given(*args[: len(Given._fields)])
    return tuple(dout.new_empty(0) if t is None else t.new_empty(t.shape) for t in given[:-1])


frame.register(
    "mamba_inner_fwd",
    f"({_INPUTS}str discretization, int level, bool save, str backend) -> "
    f"(Tensor out, Tensor conv_final, Tensor ssm_final, {_SAVED})",
    _forward,
    _fake_forward,
)
frame.register(
    "mamba_inner_bwd",
    f"(Tensor dout, Tensor? dconv_final, Tensor? dssm_final, {_INPUTS}{_SAVED}, str discretization, int level, str backend)"
    f" -> ({', '.join(['Tensor'] * (len(Given._fields) - 1))})",
    _backward,
    _fake_backward,
)
frame.register_gradient(
    "mamba_inner",
    len(Given._fields),
    3,
    'the Mamba node has no second derivative; scan="sequential" has one',
    saves=True,
)


# ---- contract -------------------------------------------------------------------------------------------------------


def _check(g: Given, discretization: str, level: int) -> None:
    """Checks what the matrix products would accept silently, or reject without naming the argument."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(str, LEVELS))}; got {level!r}")
    if discretization not in ("euler", "zoh"):
        raise ValueError(f'discretization must be "euler" or "zoh"; got {discretization!r}')
    if g.u.dim() != 3:
        raise ValueError(f"u must be (B, L, M); got shape {tuple(g.u.shape)}")
    if g.A_log.dim() != 2:
        raise ValueError(f"A_log must be (E, N); got shape {tuple(g.A_log.shape)}")
    if g.dt_proj.dim() != 2 or g.conv.dim() != 2:
        name, t = ("dt_proj", g.dt_proj) if g.dt_proj.dim() != 2 else ("conv", g.conv)
        raise ValueError(f"{name} must have two dimensions; got shape {tuple(t.shape)}")
    (batch, length, d_model), (width, n), rank, taps = g.u.shape, g.A_log.shape, g.dt_proj.shape[1], g.conv.shape[1]
    if not 1 <= n <= 256:
        raise ValueError(f"A_log must have N from 1 to 256 states per channel; got {n}")
    if taps < 1:
        raise ValueError(f"conv must be (E, W), W at least 1; got shape {tuple(g.conv.shape)}")
    autocast = torch.is_autocast_enabled(g.u.device.type)
    own = torch.float64 if g.u.dtype == torch.float64 else torch.float32
    shapes = Given(
        (batch, length, d_model), (2 * width, d_model), (2 * width,), (width, taps), (width,), (rank + 2 * n, width),
        (width, rank), (width,), (width, n), (width,), (d_model, width), (d_model,), (batch, taps - 1, width),
        (batch, width, n), (batch, length),
    )  # fmt: skip
    for name, t, shape in zip(Given._fields, g, shapes, strict=True):
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != g.u.device:
            raise ValueError(f"{name} must be on {g.u.device} like u; got {t.device}")
        if name == "seq_idx":
            if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
                raise ValueError(f"{name} must hold integers; got {t.dtype}")
        elif name in ("dt_bias", "A_log", "D", "ssm_state"):
            if t.dtype != own:
                raise ValueError(f"{name} must be {own} where u is {g.u.dtype}; got {t.dtype}")
        elif name in ("conv", "conv_bias", "conv_state") or autocast:
            if not t.is_floating_point():
                raise ValueError(f"{name} must hold real numbers; got {t.dtype}")
        elif t.dtype != g.u.dtype:
            raise ValueError(f"{name} must be {g.u.dtype} like u; got {t.dtype}")

"""The public operator: its contract, the choice of an implementation, and the registered ops behind the compiled ones."""

import functools
import logging

import torch
from torch import Tensor

from . import family, reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "sequential", "blelloch", "kogge_stone", "chunked", "cpu", "fused")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH_CHUNK = 16  # of the `chunked` form


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    discretization: str = "euler",
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence over a sequence, from a state to a state (Gu and Dao 2023, §3.2, algorithm 2).

        Δ_t = softplus(dt_t + dt_bias)                            without softplus: Δ_t = dt_t + dt_bias
        h_t = exp(Δ_t A) h_{t-1} + B̄_t x_t
        y_t = (C_t · h_t + D x_t) · silu(z_t)
        B̄_t = Δ_t B_t ("euler") or (exp(Δ_t A) - 1)/A · B_t ("zoh", Δ_t B_t where A = 0)

    Args:
        x, dt, z: (B, L, D), channel-last, any strides, of one dtype: float32, bfloat16, float16; float64 in the torch
            implementations.
        A: (D, N), real, negative where the state is to decay. float32 like every parameter and state below (float64
            where x is).
        B, C: (B, L, G, N) in x's dtype; channel d uses group d // (D // G). N from 1 to 256.
        D, dt_bias: (D,).
        initial_state: (B, D, N), zeros if None.
        seq_idx: (B, L) integers. Where it changes from t-1 to t the state is forgotten before t (decay 0). Position 0
            keeps the initial state. Negative values have no special meaning.
        chunk: steps between the states kept for the backward (of one parallel scan in "chunked"); None: chosen.
        impl: one of IMPLS; README.md gives depth and work of each. "auto" is what `which_impl` answers.

    Returns:
        y (B, L, D) in x's dtype and the final state (B, D, N). Everything real is differentiable, the states too.

    Under autocast x, dt, z, B, C are cast to the autocast dtype and the rest stays float32.

    Raises:
        ValueError: a shape, dtype, device or name that does not fit, or an implementation that cannot run here.
    """
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, dt, B, C = x.to(dtype), dt.to(dtype), B.to(dtype), C.to(dtype)
        z = None if z is None else z.to(dtype)
    _check(x, dt, A, B, C, D, z, dt_bias, discretization, initial_state, seq_idx, chunk)
    name = _choose(x, impl)
    args = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, discretization, initial_state, seq_idx)
    with torch.autocast(device, enabled=False):
        if name == "sequential":
            return reference.sequential(*args)
        if name == "chunked":
            return family.chunked(*args, chunk=chunk or TORCH_CHUNK)
        return family.parallel(*args, scan=getattr(family, name))


def which_impl(x: Tensor) -> tuple[str, str]:
    """What "auto" takes for a tensor like x, and why: ("cpu", "...")."""
    if x.dtype == torch.float64:
        return "sequential", "float64 is for checking: the plain recurrence"
    return "sequential", "no compiled implementation"


def why_not(impl: str, x: Tensor) -> str | None:
    """Why `impl` cannot run on a tensor like x; None if it can."""
    if impl in ("cpu", "fused"):
        return "not built"
    return None


def _choose(x: Tensor, impl: str) -> str:
    if impl == "auto":
        name, reason = which_impl(x)
        if not torch.compiler.is_compiling():
            _say_once(x.device.type, name, reason)
        return name
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    reason = why_not(impl, x)
    if reason:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return impl


@functools.cache
def _say_once(device: str, name: str, reason: str) -> None:
    log.info("selective_scan on %s: %s (%s)", device, name, reason)


def _check(x, dt, A, B, C, D, z, dt_bias, discretization, initial_state, seq_idx, chunk) -> None:
    if x.dim() != 3:
        raise ValueError(f"x must be (B, L, D); got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES and x.dtype != torch.float64:
        raise ValueError(f"x must be float32, bfloat16, float16 or float64; got {x.dtype}")
    batch, length, width = x.shape
    state_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if A.dim() != 2 or A.shape[0] != width:
        raise ValueError(f"A must be (D, N) with D = {width}; got shape {tuple(A.shape)}")
    n = A.shape[1]
    if not 1 <= n <= 256:
        raise ValueError(f"A must have N from 1 to 256 states a channel; got {n}")
    if B.dim() != 4 or B.shape[2] < 1 or width % B.shape[2]:
        raise ValueError(f"B must be (B, L, G, N) with G dividing D = {width}; got shape {tuple(B.shape)}")
    grouped = (batch, length, B.shape[2], n)
    wanted = (
        ("dt", dt, (batch, length, width), x.dtype), ("A", A, (width, n), state_dtype), ("B", B, grouped, x.dtype),
        ("C", C, grouped, x.dtype), ("D", D, (width,), state_dtype), ("z", z, (batch, length, width), x.dtype),
        ("dt_bias", dt_bias, (width,), state_dtype), ("initial_state", initial_state, (batch, width, n), state_dtype),
        ("seq_idx", seq_idx, (batch, length), None),
    )  # fmt: skip
    for name, t, shape, dtype in wanted:
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x; got {t.device}")
        if dtype is None:
            if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
                raise ValueError(f"{name} must hold integers; got {t.dtype}")
        elif t.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} where x is {x.dtype}; got {t.dtype}")
    if discretization not in ("euler", "zoh"):
        raise ValueError(f'discretization must be "euler" or "zoh"; got {discretization!r}')
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")

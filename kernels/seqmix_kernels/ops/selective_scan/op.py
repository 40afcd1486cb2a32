"""The public operator: its contract, its implementations and the registered ops of the compiled ones."""

import torch
from torch import Tensor

from ... import frame
from ...frame import Impl, Operator
from . import family, reference

DISCRETIZATIONS = ("euler", "zoh", "euler_signed", "zoh_signed")


def _no_signs(x: Tensor, discretization: str = "euler") -> str | None:
    """The backward of each kernel takes exp(Δ A) for the decay, and where the GPU kernels split L they compose decays as
    exp(A ΣΔ); neither is written for 2 exp(Δ A) - 1 yet."""
    return f"it has no discretization={discretization!r}" if discretization.endswith("_signed") else None


OPERATOR = Operator(
    __package__,
    Impl("sequential"),
    Impl("blelloch"),
    Impl("kogge_stone"),
    Impl("chunked"),
    Impl("cpu", "cpu", "C kernel compiled on this machine", limit=_no_signs),
    Impl("fused", "cuda", "fused GPU kernel", limit=_no_signs),
    fallback="chunked",
    slow=True,
    double=("sequential", "float64 is for checking: the plain recurrence"),
)
IMPLS = OPERATOR.names
which_impl, why_not = OPERATOR.which_impl, OPERATOR.why_not  # what decides the choice: x, discretization
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH_CHUNK = 16  # steps per chunk in `chunked`


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
    """Mamba's recurrence over a sequence; it takes and returns a state (Gu and Dao 2023, §3.2, algorithm 2).

        Δ_t = softplus(dt_t + dt_bias)                            without softplus: Δ_t = dt_t + dt_bias
        h_t = exp(Δ_t A) h_{t-1} + B̄_t x_t
        y_t = (C_t · h_t + D x_t) · silu(z_t)
        B̄_t = Δ_t B_t ("euler") or (exp(Δ_t A) - 1)/A · B_t ("zoh", Δ_t B_t where A = 0)

    "euler_signed" and "zoh_signed" have the decay 2 exp(Δ_t A) - 1 instead, between -1 and 1, and the same B̄ (Grazzi et al.
    2024, arXiv 2411.12537, §4.2); only the implementations in plain torch have them.

    Args:
        x, dt, z: (B, L, D), channel-last, any strides, all of one dtype: float32, bfloat16, float16, or float64 in the
            torch implementations.
        A: (D, N), real, negative where the state should decay. float32 like every parameter and state below (float64
            if x is).
        B, C: (B, L, G, N) in x's dtype; channel d uses group d // (D // G). N from 1 to 256.
        D, dt_bias: (D,).
        initial_state: (B, D, N), zeros if None.
        seq_idx: (B, L) integers. Where it changes from t-1 to t the state is reset before t (decay 0). Position 0
            keeps the initial state. Negative values have no special meaning.
        chunk: steps between the states saved for the backward (in "chunked": steps per parallel scan); None: a default.
        impl: one of IMPLS; README.md gives their depth and work. "auto" selects what `which_impl` returns.

    Returns:
        y (B, L, D) in x's dtype and the final state (B, D, N). Differentiable in all float inputs, including the
        initial state.

    Under autocast x, dt, z, B, C are cast to the autocast dtype and the other inputs stay float32.

    Raises:
        ValueError: an invalid shape, dtype, device or name, or an implementation that cannot run here.
    """
    if dtype := frame.autocast_dtype(x):
        x, dt, B, C = x.to(dtype), dt.to(dtype), B.to(dtype), C.to(dtype)
        z = None if z is None else z.to(dtype)
    _check(x, dt, A, B, C, D, z, dt_bias, discretization, initial_state, seq_idx, chunk)
    name = OPERATOR.choose(impl, x, discretization)
    if name in ("cpu", "fused"):
        # the registered op takes its tensors first, in one order for all backends
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        return torch.ops.seqmix.selective_scan_fwd(*tensors, dt_softplus, discretization, chunk, save, name)[:2]
    args = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, discretization, initial_state, seq_idx)
    with frame.autocast_off(x.device.type):
        if name == "sequential":
            return reference.sequential(*args)
        if name == "chunked":
            return family.chunked(*args, chunk=chunk or TORCH_CHUNK)
        return family.parallel(*args, scan=getattr(family, name))


# ---- the registered ops: what torch.compile, autograd and the backends see ------------------------------------------

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? seq_idx, "
)
_SETTINGS = "bool dt_softplus, str discretization, SymInt? chunk"


def _fake_forward(
    x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, discretization, chunk, save, backend
):  # fmt: skip
    final = A.new_empty(x.shape[0], x.shape[2], A.shape[1])
    specs = _saved_specs(x, A, B, z, discretization, chunk, save, backend)
    return x.new_empty(x.shape), final, *(x.new_empty(shape, dtype=dtype) for shape, dtype in specs)


def _fake_backward(
    dy, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, y, boundary, gate, dt_softplus, discretization,
    chunk, backend,
):  # fmt: skip
    def like(t, other):
        return other.new_empty(0 if t is None else t.shape)

    parameters = like(D, A), like(z, x), like(dt_bias, A), like(initial_state, A)
    return like(x, x), like(dt, x), like(A, A), like(B, x), like(C, x), *parameters


_saved_specs = OPERATOR.run("saved_specs")
frame.register(
    "selective_scan_fwd",
    f"({_INPUTS}{_SETTINGS}, bool save, str backend) -> (Tensor y, Tensor final, Tensor boundary, Tensor gate)",
    OPERATOR.run("forward"),
    _fake_forward,
)
frame.register(
    "selective_scan_bwd",
    f"(Tensor dy, Tensor? dfinal, {_INPUTS}Tensor y, Tensor boundary, Tensor gate, {_SETTINGS}, str backend) -> "
    "(Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dinitial)",
    OPERATOR.run("backward"),
    _fake_backward,
)
frame.register_gradient(
    "selective_scan",
    10,
    2,
    'the compiled selective scan has no second derivative; impl="sequential" has one',
    saves=True,
    # saving y costs no memory while a later op holds it; it is saved only where the gate's gradient is computed from it
    saved=lambda y, final, boundary, gate: (y if gate.dtype == torch.int8 else gate, boundary, gate),
)


# ---- contract ------------------------------------------------------------------------------------------------------


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
        raise ValueError(f"A must have N from 1 to 256 states per channel; got {n}")
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
    if discretization not in DISCRETIZATIONS:
        raise ValueError(f"discretization must be one of {', '.join(DISCRETIZATIONS)}; got {discretization!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")

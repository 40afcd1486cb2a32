"""The public operator: its contract, the choice of an implementation and the registered ops of the compiled ones."""

import functools
import logging

import torch
from torch import Tensor

from .. import autograd
from . import cpu, family, reference

log = logging.getLogger(__name__)

IMPLS = ("auto", "sequential", "blelloch", "kogge_stone", "chunked", "cpu", "fused")
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
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, dt, B, C = x.to(dtype), dt.to(dtype), B.to(dtype), C.to(dtype)
        z = None if z is None else z.to(dtype)
    _check(x, dt, A, B, C, D, z, dt_bias, discretization, initial_state, seq_idx, chunk)
    name = _choose(x, impl)
    if name in ("cpu", "fused"):
        # the registered op takes its tensors first, in one order for all backends
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        settings = (dt_softplus, discretization, chunk, save, name)
        if torch.compiler.is_compiling() or not _ordinary(tensors):
            return torch.ops.seqmix.selective_scan_fwd(*tensors, *settings)[:2]
        direct = _backend(name).forward
        return (_apply(direct, settings, *tensors) if save else direct(*tensors, *settings[:-1]))[:2]
    args = (x, dt, A, B, C, D, z, dt_bias, dt_softplus, discretization, initial_state, seq_idx)
    with torch.autocast(device, enabled=False):
        if name == "sequential":
            return reference.sequential(*args)
        if name == "chunked":
            return family.chunked(*args, chunk=chunk or TORCH_CHUNK)
        return family.parallel(*args, scan=getattr(family, name))


def which_impl(x: Tensor) -> tuple[str, str]:
    """What "auto" selects for a tensor like x, and why: ("cpu", "C kernel, ...")."""
    if x.dtype == torch.float64:
        return "sequential", "float64 is for checking: the plain recurrence"
    best = "fused" if x.is_cuda else "cpu"
    reason = why_not(best, x)
    if reason is None:
        return best, "fused GPU kernel" if x.is_cuda else "C kernel compiled on this machine"
    return "chunked", f"{best} cannot run: {reason}"


def why_not(impl: str, x: Tensor) -> str | None:
    """Why `impl` cannot run on a tensor like x; None if it can."""
    if impl == "cpu":
        if x.device.type != "cpu":
            return f"x is on {x.device}"
        return "it computes in float32, x is float64" if x.dtype == torch.float64 else cpu.why_not()
    return _fused_why_not(x) if impl == "fused" else None


# torch.compile must treat the result as a constant: tracing must not run a C compiler. torch.compiler.assume_constant_result
# only sets this attribute, but calling it imports the whole compiler, and Triton with it
cpu.why_not._dynamo_marked_constant = True


def _fused():
    from . import fused  # imports Triton, which a machine without a GPU may lack

    return fused


def _fused_why_not(x: Tensor) -> str | None:
    try:
        fused = _fused()
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return fused.why_not(x, x, x.new_empty(0, 1), x, x)


_choices: dict = {}  # on a GPU a choice is valid for the life of the process; querying the driver takes 10 us per call


def _choose(x: Tensor, impl: str) -> str:
    if not x.is_cuda or torch.compiler.is_compiling():
        return _chosen(x, impl)
    key = impl, x.dtype, x.device
    if key not in _choices:
        _choices[key] = _chosen(x, impl)
    return _choices[key]


def _chosen(x: Tensor, impl: str) -> str:
    if impl == "auto":
        name, reason = which_impl(x)
        if not torch.compiler.is_compiling():
            _say_once(x.device.type, x.dtype == torch.float64, name, reason)
        return name
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    reason = why_not(impl, x)
    if reason:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return impl


@functools.cache
def _say_once(device: str, double: bool, name: str, reason: str) -> None:
    slow = name == "chunked"
    log.log(logging.WARNING if slow else logging.INFO, "selective_scan on %s uses %s: %s", device, name, reason)


# ---- the registered ops: what torch.compile, autograd and the backends see ------------------------------------------

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? seq_idx, "
)
_SETTINGS = "bool dt_softplus, str discretization, SymInt? chunk"
torch.library.define(
    "seqmix::selective_scan_fwd",
    f"({_INPUTS}{_SETTINGS}, bool save, str backend) -> (Tensor y, Tensor final, Tensor boundary, Tensor gate)",
)
torch.library.define(
    "seqmix::selective_scan_bwd",
    f"(Tensor dy, Tensor? dfinal, {_INPUTS}Tensor y, Tensor boundary, Tensor gate, {_SETTINGS}, str backend) -> "
    "(Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, Tensor ddt_bias, Tensor dinitial)",
)


def _backend(name: str):
    return cpu if name == "cpu" else _fused()


@torch.library.impl("seqmix::selective_scan_fwd", "CompositeExplicitAutograd")
def _forward(*args):
    *args, backend = args
    return _backend(backend).forward(*args)


@torch.library.impl("seqmix::selective_scan_bwd", "CompositeExplicitAutograd")
def _backward_op(*args):
    *args, backend = args
    return _backend(backend).backward(*args)


@torch.library.register_fake("seqmix::selective_scan_fwd")
def _fake_forward(
    x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, discretization, chunk, save, backend
):  # fmt: skip
    final = A.new_empty(x.shape[0], x.shape[2], A.shape[1])
    specs = _backend(backend).saved_specs(x, A, B, z, discretization, chunk, save)
    return x.new_empty(x.shape), final, *(x.new_empty(shape, dtype=dtype) for shape, dtype in specs)


@torch.library.register_fake("seqmix::selective_scan_bwd")
def _fake_backward(
    dy, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, y, boundary, gate, dt_softplus, discretization,
    chunk, backend,
):  # fmt: skip
    def like(t, other):
        return other.new_empty(0 if t is None else t.shape)

    parameters = like(D, A), like(z, x), like(dt_bias, A), like(initial_state, A)
    return like(x, x), like(dt, x), like(A, A), like(B, x), like(C, x), *parameters


_below_autograd = autograd.below(torch.ops.seqmix.selective_scan_fwd)


class _Scan(torch.autograd.Function):
    """run computes the forward: the op below autograd, or its backend directly where nothing needs to see the op."""

    @staticmethod
    def forward(ctx, run, settings, *tensors):
        ctx.direct = run is not _below_autograd
        output = run(*tensors, *(settings[:-1] if ctx.direct else settings))
        y, _, boundary, gate = output
        *ctx.settings, _, ctx.backend = settings
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(boundary, gate)
        # saving y costs no memory while a later op holds it; it is saved only where the gate's gradient is computed from it
        ctx.save_for_backward(*tensors, y if gate.dtype == torch.int8 else gate, boundary, gate)
        return output

    @staticmethod
    def backward(ctx, dy, dfinal, *_):
        saved = ctx.saved_tensors
        x, D, z, dt_bias, initial_state = saved[0], *saved[5:9]
        if dy is None:
            dy = x.new_zeros(1, 1, 1).expand(x.shape)
        # double backward goes through the op, which raises; saved tensors have their old class, unless a hook replaced them
        if ctx.direct and not torch.is_grad_enabled() and _ordinary((dy, dfinal)) and _TYPES.issuperset(map(type, saved)):
            made = _backend(ctx.backend).backward(dy, dfinal, *saved, *ctx.settings)
        else:
            made = torch.ops.seqmix.selective_scan_bwd(dy, dfinal, *saved, *ctx.settings, ctx.backend)
        *grads, dD, dz, dbias, dh0 = made
        optional = ((D, dD), (z, dz), (dt_bias, dbias), (initial_state, dh0))
        # nothing for run, settings and seq_idx
        return None, None, *grads, *(None if given is None else grad for given, grad in optional), None


autograd.register(
    "selective_scan",
    lambda *inputs: _Scan.apply(_below_autograd, inputs[10:], *inputs[:10]),  # settings, tensors
    lambda inputs: inputs[-2],  # save
    'the compiled selective scan has no second derivative; impl="sequential" has one',
)


# ---- without the dispatcher ----------------------------------------------------------------------------------------


# An op in Python crosses the dispatcher four times in a forward and backward. Where the dispatcher would only call autograd
# and the kernel, they are called directly.
def _keys(*names: str) -> int:
    """A set of dispatch keys, as a number."""
    made = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        made = made | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return made.raw_repr()


# the key sets of a thread and of a tensor; the shorter ones apply in inference mode
_EAGER = frozenset((_keys("BackendSelect", "ADInplaceOrView"), _keys("BackendSelect")))
_DENSE = frozenset(
    _keys(*some)
    for device in ("CPU", "CUDA")
    for some in ((device, f"Autocast{device}", f"Autograd{device}", "ADInplaceOrView"), (device, f"Autocast{device}"))
)
_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))
_apply = super(torch.autograd.Function, _Scan).apply  # skips the search for functorch's wrappers: there are none


def _ordinary(tensors) -> bool:
    """Whether these are plain dense tensors, and no mode, transform, tracer or lazy negation (each of which is a dispatch key)
    and no __torch_function__ mode is active."""
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _EAGER or torch._C._len_torch_function_stack():
        return False
    if not _TYPES.issuperset(map(type, tensors)):
        return False
    keys = torch._C._dispatch_keys
    return all([t is None or keys(t).raw_repr() in _DENSE for t in tensors])


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
    if discretization not in ("euler", "zoh"):
        raise ValueError(f'discretization must be "euler" or "zoh"; got {discretization!r}')
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1; got {chunk}")

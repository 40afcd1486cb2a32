"""What every operator shares: an operator declares its implementations, and this module chooses between them, refuses what
cannot run, logs the choice, and registers ops and their gradients with torch.

    OPERATOR = Operator(__package__, Impl("reference"), Impl("fused", "cuda", "fused GPU kernels"))
    name = OPERATOR.choose(impl, x)

Importing an operator needs torch alone: Triton is imported when a call could first run it.
"""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

LOW = (torch.float32, torch.bfloat16, torch.float16)  # what kernels take that compute in float32
FUSES = "torch.compile fuses it by itself"


class CannotRun(ValueError):
    """An implementation that was asked for by name cannot run on these tensors or on this machine; `reason` says why.

    choice: how it was asked for: "impl='fused'"."""

    def __init__(self, choice: str, reason: str):
        super().__init__(choice, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]} cannot run here: {self.reason}"


class Impl(NamedTuple):
    """One implementation of an operator. Only the name is given for one in plain torch, which runs everywhere."""

    name: str
    device: str | None = None  # the type of device it needs: "cuda" (Triton, also in its interpreter) or "cpu" (C)
    says: str | None = None  # the reason that is reported where "auto" selects it
    dtypes: tuple[torch.dtype, ...] = LOW  # of all tensors that decide the choice, where it needs a device
    limit: Callable[..., str | None] | None = None  # why it cannot run on what decides the choice
    module: str | None = None  # the module of the operator's folder that computes it; None: of its own name
    plain_tensors: bool = False  # whether it reads memory outside a registered op: no FakeTensor, no DTensor


class Operator:
    """The implementations of one operator and the choice between them.

    What decides a choice ("like") is the same for `choose`, `which_impl` and `why_not`: the tensors whose device and dtype
    count, the first of them first, and whatever the limits of the implementations read.

    package: the operator's folder; its name is that of the operator, unless a `name` is given.
    impls: in the order in which they are listed to users; "auto" takes the first that needs a device and can run.
    fallback: what "auto" takes otherwise. slow: whether that deserves a warning.
    double: what "auto" takes in float64, and why.
    compiled: why "auto" takes the fallback under torch.compile; None if it does not.
    """

    def __init__(
        self, package: str, *impls: Impl, name: str | None = None, fallback: str = "reference", slow: bool = False,
        double: tuple[str, str] | None = None, compiled: str | None = None,
    ):  # fmt: skip
        self.package, self.name = package, name or package.rpartition(".")[2]
        self.fallback, self.slow, self.double, self.compiled = fallback, slow, double, compiled
        self.impls = {impl.name: impl for impl in impls}
        self.fast = tuple(impl for impl in impls if impl.device is not None)
        self.names = ("auto", *self.impls)

    def choose(self, impl: str, *like) -> str:
        """The name of the implementation to run: `impl`, or what "auto" selects, which is logged once.

        ValueError: an unknown name. CannotRun: an implementation that cannot run."""
        if impl != "auto":
            self.require(impl, *like)
            return impl
        name, reason = self.which_impl(*like)
        if not torch.compiler.is_compiling():
            say_once(self.name, like[0].device.type, name, reason, self.slow and name == self.fallback)
        return name

    def require(self, impl: str, *like, option: str = "impl") -> None:
        """Raises what `choose` raises for an implementation given by name. option: what the caller calls it."""
        require(impl, self.names, self.why_not, *like, option=option)

    def which_impl(self, *like) -> tuple[str, str]:
        """What "auto" selects and why: ("fused", "fused GPU kernels")."""
        if self.compiled is not None and torch.compiler.is_compiling():
            return self.fallback, self.compiled
        if self.double is not None and like[0].dtype == torch.float64:
            return self.double
        refused = []
        for impl in self.fast:
            reason = self.why_not(impl.name, *like)
            if reason is None:
                return impl.name, impl.says or "it can run"
            refused.append((impl.device == like[0].device.type, f"{impl.name} cannot run: {reason}"))
        here = [text for meant_for_it, text in refused if meant_for_it]
        says = self.impls[self.fallback].says
        return self.fallback, "; ".join(here) or says or "; ".join([text for _, text in refused])

    def why_not(self, impl: str, *like) -> str | None:
        """Why `impl` cannot run on tensors like these; None if it can."""
        given = self.impls[impl]
        reason = None if given.limit is None else given.limit(*like)
        if reason is not None or given.device is None:
            return reason
        tensors = [t for t in like if isinstance(t, Tensor)]
        if given.plain_tensors:
            for t in tensors:  # a FakeTensor has no memory, and a DTensor only its local shard
                if type(t) not in (Tensor, torch.nn.Parameter):
                    return f"it takes plain tensors, not {type(t).__name__}"
        reason = wrong_device(given.device, tensors[0].device)
        if reason is not None:
            return reason
        for t in tensors:
            if t.dtype not in given.dtypes:
                *most, last = [str(dtype)[6:] for dtype in given.dtypes]
                return f"it takes {', '.join(most)}{' and ' if most else ''}{last}, not {t.dtype}"
        return not_ready(given.device, f"{self.package}.{given.module or impl}")

    def run(self, function: str, impl: str | None = None) -> Callable:
        """`function` of the module of an implementation, which is imported at the first call. impl None: the last argument
        names it."""

        def run(*args):
            name, args = (args[-1], args[:-1]) if impl is None else (impl, args)
            module = importlib.import_module(f"{self.package}.{self.impls[name].module or name}")
            return getattr(module, function)(*args)

        return run


def require(impl: str, names: tuple[str, ...], why_not: Callable[..., str | None], *like, option: str = "impl") -> None:
    if impl not in names:
        raise ValueError(f"{option} must be one of {', '.join(names)}; got {impl!r}")
    if reason := why_not(impl, *like):
        raise CannotRun(f"{option}={impl!r}", reason)


def named(impl: str, which_impl: Callable[..., tuple[str, str]], why_not: Callable[..., str | None], *like) -> str:
    """What computes an operator: "fused (asked for)", or what "auto" selects and why. CannotRun for what cannot run."""
    if impl == "auto":
        return "{} ({})".format(*which_impl(*like))
    if reason := why_not(impl, *like):
        raise CannotRun(f"impl={impl!r}", reason)
    return f"{impl} (asked for)"


def say(operator: str, where: str, impl: str, reason: str, slow: bool) -> None:
    """Logs a choice of "auto", as a warning where it is slow."""
    log.log(logging.WARNING if slow else logging.INFO, "%s on %s uses %s: %s", operator, where, impl, reason)


say_once = functools.cache(say)


def constant(function: Callable) -> Callable:
    """Marks a function whose result torch.compile must treat as a constant, because it compiles C, imports or asks a driver.
    torch.compiler.assume_constant_result only sets this attribute, but calling it imports the whole compiler, and Triton with
    it."""
    function._dynamo_marked_constant = True
    return function


@constant
def wrong_device(wanted: str, device: torch.device) -> str | None:
    """Why a kernel for `wanted` ("cpu" or "cuda") cannot run on `device`; None if it can."""
    if wanted == "cpu":
        return None if device.type == "cpu" else f"it needs the CPU, the tensors are on {device.type}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None if device.type == "cpu" else "Triton's interpreter is on and the tensors are not on the CPU"
    if device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {device.type}"
    if torch.version.cuda and _capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    return None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)  # takes the driver 10 us


@constant
def not_ready(device: str, module: str) -> str | None:
    """Why a module of kernels cannot be used on this machine, which may lack Triton or a C compiler; None if it can."""
    try:
        found = importlib.import_module(module)
    except ImportError as missing:
        return f"Triton cannot be imported ({missing})"
    return found.why_not() if device == "cpu" else None


# ---- autocast -------------------------------------------------------------------------------------------------------


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts t and what is computed with it; None where it is off, or t is float64."""
    device = t.device.type
    return torch.get_autocast_dtype(device) if t.dtype != torch.float64 and torch.is_autocast_enabled(device) else None


def autocast_off(device: str) -> contextlib.AbstractContextManager:
    """Disables autocast, so that every tensor keeps its dtype; entered only if it is on, because entering costs time."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


# ---- registered ops -------------------------------------------------------------------------------------------------


def register(name: str, schema: str, run: Callable, fake: Callable) -> None:
    """Defines the op seqmix::{name}, computed by `run` on any device with autocast off: a backward may run under autocast."""

    def without_autocast(*args):
        with autocast_off(args[0].device.type):
            return run(*args)

    torch.library.define(f"seqmix::{name}", schema)
    torch.library.impl(f"seqmix::{name}", "CompositeExplicitAutograd", without_autocast)
    torch.library.register_fake(f"seqmix::{name}", fake)


def register_gradient(
    name: str, tensors: int, results: int, refusal: str, saves: bool = False, saved: Callable | None = None
) -> None:
    """Makes seqmix::{name}_fwd differentiable once, by seqmix::{name}_bwd.

    The forward takes `tensors` tensors, then settings. It returns `results` results, then what is saved for the backward.
    The backward takes a gradient per result (None for an unused one, except the first), the tensors, what was saved, and the
    settings. It returns the gradients of the tensors; for one that is None, anything, and for integers at the end, nothing.

    refusal: the text of the NotImplementedError that a second derivative raises.
    saves: whether the last setting but one tells the forward to save something; the backward does not take it.
    saved: of the outputs of the forward, what is saved; None: those after the results.
    """
    backward = getattr(torch.ops.seqmix, f"{name}_bwd")

    def keep(ctx, inputs, output):
        output = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[results:])
        ctx.save_for_backward(*inputs[:tensors], *(saved(*output) if saved else output[results:]))
        ctx.settings = (*inputs[tensors:-2], inputs[-1]) if saves else inputs[tensors:]
        ctx.rest, ctx.shape, ctx.dtype = len(inputs) - tensors, output[0].shape, output[0].dtype

    def gradients(ctx, *upstream):
        first, *others = upstream[:results]
        kept = ctx.saved_tensors  # may be unpacked only once under activation checkpointing
        if first is None:
            first = kept[0].new_zeros((), dtype=ctx.dtype).expand(ctx.shape)
        made = backward(first, *others, *kept, *ctx.settings)
        made = [None if t is None else gradient for t, gradient in zip(kept[:tensors], made, strict=False)]
        return *made, *(None,) * (tensors - len(made) + ctx.rest)

    def refuse(ctx, *_):
        raise NotImplementedError(refusal)

    torch.library.register_autograd(f"seqmix::{name}_fwd", gradients, setup_context=keep)
    torch.library.register_autograd(f"seqmix::{name}_bwd", refuse)


def refuse_twice(name: str) -> None:
    """Raises an error in the backward of a torch.autograd.Function under create_graph=True. once_differentiable would not, if
    the incoming gradient is a constant: it ignores that gradients depend on tensors saved in the forward."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} is differentiable once, not with create_graph=True; impl='reference' is differentiable twice"
        )

"""Every operator of seqmix_kernels by every implementation that can run here, and installed peers, beside the floors.

A floor is the least time in which this card can do what has to be done, whatever the algorithm's details:

    memory       bytes of each input and output, once, over the data sheet's HBM bandwidth
    products     FLOPs over the dense peak of the dtype
    specials     exponentials, one per (b, t, d, n) of a scan and per score of attention, over the special-function units:
                 16 per clock and multiprocessor

% of floor is the largest of the three over the measured time: 100 is perfect. fwd+bwd floors count what a backward that keeps
nothing but its inputs must read, write, multiply and exponentiate again.

What is measured is declared in each operator's folder (seqmix_kernels/benchmark.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqmix.costs import PEAK_FLOPS, WrongError
from seqmix.measure import Sensors, synchronizer, time_calls
from seqmix.memory import MIB, PeakMemory, out_of_memory
from seqmix_kernels.benchmark import Op, Work, operators

OPS = operators()
L2_BYTES = 256 * 2**20  # zeroed before each call, so that inputs come from memory
# bytes per second of HBM by data sheets; special-function operations per second: 16 per clock, multiprocessors, boost clock
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
SPECIALS = {"H200": 16 * 132 * 1.98e9, "H100": 16 * 132 * 1.98e9, "A100": 16 * 108 * 1.41e9}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}  # relative error of the output; gradients are for the tests
LONG = 16384  # steps of a default shape from which on only compiled implementations are measured


class Case(NamedTuple):
    """An implementation of an operator at a shape, such as "B8 L2048 D3072 N16 bfloat16"."""

    op: str
    impl: str
    shape: str

    @property
    def sizes(self) -> dict[str, int]:
        return {word[0]: int(word[1:]) for word in self.shape.split()[:-1]}

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.shape.split()[-1])


def cases(
    device: str, ops: Sequence[str] | None = None, impls: Sequence[str] | None = None, shapes: Sequence[str] | None = None
) -> list[Case]:
    """Every implementation and shape of those asked for, None: of the default ones. What cannot run on the device says so when
    it is measured. ValueError for an operator, an implementation or a shape that none has."""
    for name in ops or ():
        if name not in OPS:
            raise ValueError(f"kernels.ops must be of {', '.join(OPS)}, got {name!r}")
    for shape in shapes or ():
        if not re.fullmatch(r"([A-Z][1-9][0-9]* )+(bfloat16|float16|float32)", shape):
            raise ValueError(f"kernels.shapes must be such as 'B8 L2048 D3072 N16 bfloat16', got {shape!r}")
    chosen = {name: op for name, op in OPS.items() if (op.shapes if ops is None else name in ops)}
    found = []
    for name, op in chosen.items():
        given = op.shapes.get(device, ()) if shapes is None else [shape for shape in shapes if _fits(op, shape)]
        if not given and shapes is None:
            raise ValueError(f"{name} has no default shapes: set kernels.shapes to shapes with {_letters(op)}")
        found += [Case(name, impl, shape) for shape in given for impl in _implementations(op, shape, impls, shapes is None)]
    letters = "; ".join(f"{name}: {_letters(op)}" for name, op in chosen.items())
    for shape in shapes or ():
        if not any(_fits(op, shape) for op in chosen.values()):
            raise ValueError(f"kernels.shapes: {shape!r} fits none of the operators ({letters})")
    for impl in impls or ():
        if not any(impl in (*op.impls, *op.peers) for op in chosen.values()):
            raise ValueError(f"kernels.impls must be of {', '.join(_names(chosen.values()))}, got {impl!r}")
    return found


def _letters(op: Op) -> str:
    letters = [*inspect.signature(op.inputs).parameters.values()][2:]  # after normal and dtype
    return ", ".join(p.name if p.default is p.empty else f"{p.name} (optional)" for p in letters)


def _fits(op: Op, shape: str) -> bool:
    try:
        inspect.signature(op.inputs).bind(None, None, **Case("", "", shape).sizes)
    except TypeError:
        return False
    return True


def _names(ops: Sequence[Op]) -> dict[str, None]:
    return dict.fromkeys(name for op in ops for name in (*op.impls, *op.peers))


def _implementations(op: Op, shape: str, impls: Sequence[str] | None, default_shape: bool) -> list[str]:
    installed = [name for name, peer in op.peers.items() if peer.package and importlib.util.find_spec(peer.package)]
    if impls is not None:
        for name in impls:
            package = op.peers[name].package if name in op.peers else None
            if package and name not in installed:
                raise ValueError(f"kernels.impls: {name} needs the package {package}, which is not installed")
        return [name for name in impls if name in (*op.impls, *op.peers)]
    # a loop over so many steps in plain torch takes minutes, and is known from shorter ones
    own = [name for name in op.impls if name != "auto"]
    if default_shape and Case("", "", shape).sizes.get("L", 1) >= LONG:
        own = [name for name in own if name == "fused"]
    return own + installed


def kernel_cost(case: Case, device: torch.device, seconds: float) -> dict:
    """Milliseconds and MiB above the inputs of a forward (no gradients wanted) and of forward and backward; floors; error.

    On a GPU the milliseconds are those of a replayed graph where one can be captured (`*_launched`), so without the host's
    time; `*_eager_ms`, the first call and MiB are those of a call by the host. `kept_mib`: what is held between forward and
    backward, without the output."""
    case = Case(*case)
    op, dtype = OPS[case.op], case.dtype
    random = torch.Generator(device).manual_seed(0)
    tensors = op.inputs(lambda *shape: torch.randn(*shape, generator=random, device=device), dtype, **case.sizes)
    own, run = tensors, lambda *given: op.run(case.impl, *given)
    if case.impl in op.peers:
        own, run = op.peers[case.impl].arrange(*tensors), op.peers[case.impl].run
    numbers = {"shape": case.shape}
    scratch = torch.empty(L2_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    peak, sensors = PeakMemory(device), Sensors(device)
    held = peak.allocated if device.type == "cuda" else peak.host

    def timed(call: Callable[[], object]) -> dict:
        before = None

        def settle() -> None:
            nonlocal before
            if device.type == "cpu" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
                trim(0)  # glibc keeps freed memory resident, which would hide what a call needs
            peak.reset()
            before = held()

        eager = time_calls(
            {"call": call}, device, seconds=seconds / 2, before=scratch.zero_, after_warmup=settle, between=sensors
        )
        most = held()
        mib = None if before is None or most is None else most - before
        found = {"mib": mib, "first_ms": eager.first_ms, "eager_ms": eager.whole.median, "launched": "eager"}
        timing = eager
        if device.type == "cuda" and (replay := graph_of(call)):
            timing = time_calls({"call": replay}, device, seconds=seconds / 2, before=scratch.zero_, between=sensors)
            found["launched"] = "graph"
        return dict(zip(("ms", "ms_iqr", "calls"), timing.whole, strict=True)) | found

    wait = synchronizer(device)
    wait()
    started = time.perf_counter()
    with torch.no_grad():
        y = run(*own)
        wait()
        first_ms = 1e3 * (time.perf_counter() - started)
        got, want = op.check(tensors, y)
    del y
    error = float((got.double() - want).norm() / want.norm())
    del got, want
    if not error <= TOLERANCE[dtype]:
        raise WrongError(f"{case.op} by {case.impl} is {error:.1e} from the equation in float64, relatively")
    numbers["check_error"] = error

    def forward() -> None:
        with torch.no_grad():
            run(*own)

    numbers |= {f"forward_{name}": v for name, v in timed(forward).items()}
    numbers["forward_first_ms"] = first_ms  # that of the check, before
    once, twice = op.work(dtype.itemsize, **case.sizes)
    numbers |= floors(device, dtype, once, "forward_ms", numbers, "")
    if twice is not None:
        leaves = [t.detach().requires_grad_() if _differentiable(t) else t for t in own]
        given = [t for t in leaves if _differentiable(t)]
        dy = None

        def both() -> None:
            torch.autograd.grad(run(*leaves), given, dy)

        try:
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            y = run(*leaves)
            if device.type == "cuda":
                numbers["kept_mib"] = (torch.cuda.memory_allocated() - before - y.nbytes) / MIB
            dy = torch.randn_like(y.detach())
            del y
            numbers |= {f"both_{name}": v for name, v in timed(both).items()}
        except (NotImplementedError, RuntimeError) as error:
            # the forward's numbers stay
            numbers["no_backward"] = "oom" if out_of_memory(error) else " ".join(str(error).split())[:200]
        else:
            numbers |= floors(device, dtype, twice, "both_ms", numbers, "both_")
    return numbers | sensors.summary()


def _differentiable(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def graph_of(call: Callable[[], object]) -> Callable[[], object] | None:
    """Replays `call` as a CUDA graph: the time of the GPU's work alone, however slowly the host launches it. None where the
    call waits for the device, does what cannot be captured, or has not the memory: a graph keeps all that it allocates."""
    torch.cuda.empty_cache()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return graph.replay


def floors(device: torch.device, dtype: torch.dtype, work: Work, key: str, numbers: dict, prefix: str) -> dict:
    """The largest floor, which it is, and its share of the time; nothing on a card not in the tables."""
    if device.type != "cuda":
        return {}
    name = torch.cuda.get_device_name(device)
    card = next((card for card in BANDWIDTH if card in name), None)
    if card is None:
        return {}
    found = {
        "memory": 1e3 * work.bytes / BANDWIDTH[card],
        "products": 1e3 * work.flops / PEAK_FLOPS[card, dtype],
        "specials": 1e3 * work.specials / SPECIALS[card],
    }
    of = max(found, key=found.get)
    return {
        f"{prefix}floors_ms": found,
        f"{prefix}floor_ms": found[of],
        f"{prefix}floor_of": of,
        f"{prefix}percent_of_floor": 100 * found[of] / numbers[key],
    }

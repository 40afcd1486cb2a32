"""Every op of seqmix_kernels by every implementation that can run here, and peers that are installed; beside the floors.

A floor is the least time in which this card can do what has to be done, whatever the algorithm's details:

    memory       bytes of each input and output, once, over the data sheet's HBM bandwidth
    products     multiply-adds over the dense peak of the dtype
    specials     exponentials, one a (b, t, d, n) of a scan and one a score of attention, over the special-function units:
                 16 a clock a multiprocessor

% of floor is the largest of the three over the measured time: 100 is perfect. fwd+bwd floors count what a backward that keeps
nothing but its inputs must read, write, multiply and exponentiate again.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import torch

from seqmix.bench.ops import OPS, PEERS, SHAPES, Case, Work, peer, shape_of
from seqmix.costs import PEAK_FLOPS, WrongError
from seqmix.measure import Sensors, synchronizer, time_calls
from seqmix.memory import PeakMemory, out_of_memory

L2_BYTES = 256 * 2**20  # zeroed before each call, so that inputs come from memory
# HBM bytes a second of data sheets; special-function operations a second: 16 a clock, multiprocessors, boost clock
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
SPECIALS = {"H200": 16 * 132 * 1.98e9, "H100": 16 * 132 * 1.98e9, "A100": 16 * 108 * 1.41e9}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}  # relative error of the output; gradients are for the tests
LONG = 16384  # steps from which on the loops in plain torch are not measured


def cases(device: str, ops: list[str] | None = None) -> list[Case]:
    """Every implementation and shape of `ops`, None: of all; what cannot run on the device says so when it is measured.
    ValueError for an op that is none."""
    for name in ops or ():
        if name not in OPS:
            raise ValueError(f"kernels.ops must be of {', '.join(OPS)}, got {name!r}")
    found = []
    for name, shapes in SHAPES[device].items():
        if ops is not None and name not in ops:
            continue
        impls = [*OPS[name].impls]
        if name in PEERS and importlib.util.find_spec(PEERS[name]):
            impls.append(PEERS[name])
        # a loop over so many steps in plain torch is minutes, and is known from shorter ones
        compiled = [impl for impl in impls if impl in ("fused", PEERS.get(name))]
        found += [Case(name, impl, *shape) for shape in shapes for impl in (impls if shape[0] < LONG else compiled)]
    return found


def kernel_cost(case: Case, device: torch.device, seconds: float) -> dict:
    """Milliseconds and MiB above the inputs of a forward (no gradients wanted) and of forward and backward; floors; error.

    On a GPU the milliseconds are of a replayed graph where there can be one (`*_launched`), first call and MiB of the call."""
    case = Case(*case)
    op, dtype = OPS[case.op], getattr(torch, case.dtype)
    random = torch.Generator(device).manual_seed(0)
    tensors = op.inputs(case, lambda *shape: torch.randn(*shape, generator=random, device=device), dtype)
    own, run = tensors, lambda *given: op.run(case, given)
    if case.impl == PEERS.get(case.op):
        turn, run = peer(case.op)
        own = turn(*tensors)
    numbers = {"shape": shape_of(case)}
    scratch = torch.empty(L2_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    peak, sensors = PeakMemory(device), Sensors(device)

    def timed(call: Callable[[], object]) -> tuple[float, float, int, float | None, float, str]:
        before = 0.0

        def settle() -> None:
            nonlocal before
            peak.reset()
            before = peak.allocated() or 0.0

        eager = time_calls(
            {"call": call}, device, seconds=seconds / 2, before=scratch.zero_, after_warmup=settle, between=sensors
        )
        mib = None if peak.allocated() is None else peak.allocated() - before
        replay = graph_of(call) if device.type == "cuda" else None
        if replay is None:
            return *eager.whole, mib, eager.first_ms, "eager"
        timing = time_calls({"call": replay}, device, seconds=seconds / 2, before=scratch.zero_, between=sensors)
        return *timing.whole, mib, eager.first_ms, "graph"

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

    names = ("ms", "ms_iqr", "calls", "mib", "first_ms", "launched")
    numbers |= {f"forward_{name}": v for name, v in zip(names, timed(forward), strict=True)}
    numbers["forward_first_ms"] = first_ms  # that of the check, before
    once, twice = op.work(case, dtype.itemsize)
    numbers |= floors(case, device, dtype, once, "forward_ms", numbers, "")
    if twice is not None:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in own]
        given = [t for t in leaves if t.requires_grad]
        dy = None

        def both() -> None:
            torch.autograd.grad(run(*leaves), given, dy)

        try:
            dy = torch.randn_like(run(*leaves).detach())
            numbers |= {f"both_{name}": v for name, v in zip(names, timed(both), strict=True)}
        except (NotImplementedError, RuntimeError) as error:
            # the forward's numbers stay
            numbers["no_backward"] = "oom" if out_of_memory(error) else " ".join(str(error).split())[:200]
        else:
            numbers |= floors(case, device, dtype, twice, "both_ms", numbers, "both_")
    return numbers | sensors.summary()


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


def floors(case: Case, device: torch.device, dtype: torch.dtype, work: Work, key: str, numbers: dict, prefix: str) -> dict:
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

"""Timing, memory and counting primitives. Pure: clocks and allocators are handed in, so that tests can lie about them.

A run is timed in windows of several steps. The device is synchronised where a window opens or closes, and nowhere else:

    step  1 | 2 .. w | w+1 ........ | ........ |      w warm-up steps, then windows of n steps
    window  |        |<- sample 1 ->|  evaluation, logging, a checkpoint  |<- sample 2 -> ...

A speed is the median over windows, quoted with its interquartile range and the number of windows.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

MIB = 2**20


class Spread(NamedTuple):
    """Of a sample: its median, its interquartile range (both in the unit of the values, None if empty), its size."""

    median: float | None
    iqr: float | None
    count: int


def spread(values: Iterable[float]) -> Spread:
    """Median and interquartile range (linear interpolation between order statistics); a single value has range 0."""
    values = sorted(values)
    if not values:
        return Spread(None, None, 0)
    if len(values) == 1:
        return Spread(values[0], 0.0, 1)
    q1, q2, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(q2, q3 - q1, len(values))


def synchronizer(device: torch.device) -> Callable[[], None]:
    """A function that waits until `device` has done all work queued on it."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


class Window(NamedTuple):
    """What a closed window held: seconds on the clock, of which waiting for data, optimizer steps, tokens."""

    seconds: float
    data_seconds: float
    steps: int
    tokens: int


class WindowTimer:
    """Seconds, steps and tokens of one window, with pauses.

        resume ... data_wait() ... add(steps, tokens) ... pause      (evaluation, a checkpoint: not on the clock)
        resume ... add(steps, tokens) ... close() -> Window

    clock gives seconds; synchronize waits for the device, and runs at every pause and close, so that work queued inside
    the window is paid inside it. The one who opens the first window synchronises before it.
    """

    def __init__(self, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter):
        self.synchronize = synchronize
        self.clock = clock
        self.discard()

    @property
    def running(self) -> bool:
        return self._started is not None

    def resume(self) -> None:
        """Start the clock; does nothing if it runs."""
        if not self.running:
            self._started = self.clock()

    def pause(self) -> None:
        """Stop the clock once the device is idle; does nothing if it stands."""
        if self.running:
            self.synchronize()
            self._seconds += self.clock() - self._started
            self._started = None

    def add(self, *, steps: int = 0, tokens: int = 0, data_seconds: float = 0.0) -> None:
        self.steps += steps
        self.tokens += tokens
        self._data_seconds += data_seconds

    def close(self) -> Window:
        """Pause, hand back what the window held, and start from nothing."""
        self.pause()
        window = Window(self._seconds, self._data_seconds, self.steps, self.tokens)
        self.discard()
        return window

    def discard(self) -> None:
        """Forget everything and stand still, without waiting for the device."""
        self._started: float | None = None
        self._seconds = self._data_seconds = 0.0
        self.steps = self.tokens = 0


class PeakMemory:
    """Largest memory since `reset`, in MiB; None where it cannot be known, never 0 for "unknown".

        allocated()   of tensors on the accelerator    reserved()   held by the caching allocator (None on a CPU)
        rss()         resident set of this process (None on an accelerator, where it is not what limits a run)

    allocator is torch.cuda, or anything with its max_memory_allocated, max_memory_reserved and reset_peak_memory_stats.
    """

    def __init__(self, device: torch.device, allocator=torch.cuda, host: HostPeak | None = None):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.allocator = allocator
        self.host = host or HostPeak()

    def reset(self) -> None:
        if self.on_gpu:
            self.allocator.reset_peak_memory_stats(self.device)
        else:
            self.host.reset()

    def allocated(self) -> float | None:
        return self.allocator.max_memory_allocated(self.device) / MIB if self.on_gpu else None

    def reserved(self) -> float | None:
        return self.allocator.max_memory_reserved(self.device) / MIB if self.on_gpu else None

    def rss(self) -> float | None:
        return None if self.on_gpu else self.host.read()


class HostPeak:
    """Peak resident set of this process since `reset`, in MiB.

    The kernel keeps one high-water mark a process, so a small run after a large one would show the large one's. Linux
    can lower the mark (proc(5), clear_refs); where that is refused, a mark that did not move since `reset` is unknown:
    None.
    """

    def __init__(self, high_water: Callable[[], float | None] | None = None, lower: Callable[[], bool] | None = None):
        self._high_water = high_water or _high_water_mib
        self._lower = lower or _lower_high_water
        self._floor: float | None = None

    def reset(self) -> None:
        self._floor = None if self._lower() else self._high_water()

    def read(self) -> float | None:
        peak = self._high_water()
        return None if peak is None or (self._floor is not None and peak <= self._floor) else peak


def _high_water_mib() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 2**10


def _lower_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def tensors(tree: object) -> Iterable[Tensor]:
    """Every tensor in nested tuples, NamedTuples, lists and dicts, in order; other leaves are passed over."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)


def state_bytes(state: object) -> int:
    """Bytes of the elements of every tensor in `state`, whatever the nesting; a storage shared by two counts twice.

    A view counts its own elements, not what it was cut from: what a state is, not how the allocator holds it.
    """
    return sum(t.numel() * t.element_size() for t in tensors(state))


class ParameterCount(NamedTuple):
    total: int
    non_embedding: int


def parameter_count(module: nn.Module) -> ParameterCount:
    """Numbers of parameters; a tied one counts once. Non-embedding leaves out the weights of every nn.Embedding."""
    total = sum(p.numel() for p in module.parameters())
    embeddings = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return ParameterCount(total, total - sum(p.numel() for p in embeddings))


def first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Name of the first tensor that holds a NaN or an infinity; None if all are finite. Waits for the device."""
    for name, tensor in named:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def all_finite(values: list[Tensor]) -> Tensor:
    """bool scalar on the device of the first: whether every element of every tensor is finite. Does not wait for it.

    The extreme elements are finite exactly when all are; a 2-norm could overflow on finite elements.
    """
    values = [torch.view_as_real(v) if v.is_complex() else v for v in values if v.numel() > 0]
    if not values:
        return torch.tensor(True)
    wide = torch.float64 if any(v.dtype == torch.float64 for v in values) else torch.float32
    if values[0].device.type == "cpu":  # where torch has no fast infinity norm: 20 times slower than this
        extremes = [bound for v in values for bound in torch.aminmax(v)]
    else:
        extremes = torch._foreach_norm(values, math.inf)  # a few launches for all of them
    return torch.stack([bound.to(wide) for bound in extremes]).isfinite().all()


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Facts that a number depends on: device and its name, versions, CPU model, threads. Names no host and no path."""
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "lightning": _version("lightning"),
        "triton": _version("triton"),
        "wandb": _version("wandb"),
    }


def cpu_model() -> str:
    """The processor's own name where Linux gives it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

"""Timing and counting primitives. Pure: clocks are handed in, so that tests can lie about them.

A run is timed in windows of several steps. The device is synchronised where a window opens or closes, and nowhere else:

    step  1 | 2 .. w | w+1 ........ | ........ |      w warm-up steps, then windows of n steps
    window  |        |<- sample 1 ->|  evaluation, logging, a checkpoint  |<- sample 2 -> ...

A call is timed by itself, between marks on the device's own queue:

    first call | warm-up calls | mark forward mark backward mark optimizer mark | mark forward mark ...

A speed is the median over windows or calls, quoted with its interquartile range and their number.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn


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

        resume ... add(data_seconds) ... add(steps, tokens) ... pause      (evaluation, a checkpoint: not on the clock)
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

    def resume(self, at: float) -> None:
        """Start the clock, which showed `at`; does nothing if it runs."""
        if not self.running:
            self._started = at

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


class WallMarks:
    """Moments on the host's clock: where a call has returned, its work is done, as on a CPU."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.mark = clock

    def milliseconds(self, before: float, after: float) -> float:
        return 1e3 * (after - before)


class EventMarks:
    """Moments in the work queued on a GPU's current stream: between two of them is the work queued between them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        after.synchronize()
        return before.elapsed_time(after)


class Timing(NamedTuple):
    """Milliseconds of a call. first_ms: of the very first, with compiling, tuning, loading of libraries; phases: of its
    parts, by name, whose medians need not add up to that of the whole."""

    first_ms: float
    whole: Spread
    phases: dict[str, Spread]


def time_calls(
    phases: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    seconds: float = 1.0,
    least: int = 3,
    most: int = 200,
    warmup: int = 1,
    limit: float = 7.0,
    before: Callable[[], object] | None = None,
    after_warmup: Callable[[], object] | None = None,
    between: Callable[[], object] | None = None,
    marks: WallMarks | EventMarks | None = None,
    synchronize: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time a call made of `phases`, run in their order, for about `seconds`: `least` to `most` times.

    The first call, then `warmup` more, are not among the timed ones. Where these and `least` would take over `limit` seconds
    there is no further warm-up, and as many are timed as fit into it, one at least. `before` runs before every call, outside
    its time (a cold cache, a state put back). `after_warmup` runs where the timed calls begin (peaks are reset); `between`
    after every timed call, outside its time (sensors are read). marks, synchronize, clock: the device's, unless handed in.

    On a GPU the host runs ahead of the device, as in use: it waits before the timed calls and after them, and between them
    only where they are so long that it has to see how many fit.
    """
    marks = marks or (EventMarks() if device.type == "cuda" else WallMarks())
    synchronize = synchronize or synchronizer(device)

    def call() -> list:
        if before is not None:
            before()
        taken = [marks.mark()]
        for run in phases.values():
            run()
            taken.append(marks.mark())
        return taken

    def on_the_clock() -> float:
        synchronize()
        started = clock()
        call()
        synchronize()
        return clock() - started

    def begin() -> None:
        if after_warmup is not None:
            after_warmup()

    def timed() -> list:
        marked = call()
        if between is not None:
            between()
        return marked

    def timed_on_the_clock() -> tuple[list, float]:
        started = clock()
        marked = timed()
        synchronize()
        return marked, clock() - started

    first = last = on_the_clock()
    if first * (warmup + least) <= limit:
        for _ in range(warmup):
            last = on_the_clock()
        begin()
        taken = []
    else:
        begin()
        marked, last = timed_on_the_clock()
        taken, left = [marked], limit - last
        if last * (warmup + least) <= limit:  # the first alone was long, with what is compiled in it: this one was the warm-up
            begin()
            taken = []
        while 0 < len(taken) < least and last <= left:
            marked, last = timed_on_the_clock()
            taken.append(marked)
            left -= last
    if not taken:
        taken = [timed() for _ in range(max(least, min(most, int(seconds / max(last, 1e-9)))))]
    synchronize()
    parts = [[marks.milliseconds(a, b) for a, b in itertools.pairwise(at)] for at in taken]
    return Timing(
        1e3 * first,
        spread(sum(part) for part in parts),
        {name: spread(part[i] for part in parts) for i, name in enumerate(phases)},
    )


class Sensors:
    """Clock, power and temperature of a GPU while something is timed; nothing where there is no GPU, or no pynvml.

    read: gives {"sm_mhz": ..., "watts": ..., "celsius": ...}; at most one reading in `every` seconds is taken.
    """

    def __init__(
        self, device: torch.device, read: Callable[[], dict[str, float]] | None = None, every: float = 0.1,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self._read = read or (lambda: _read_gpu(device))
        self._clock, self._every, self._next = clock, every, -math.inf
        self._readings: list[dict[str, float]] = []

    def __call__(self) -> None:
        if self._clock() >= self._next:
            self._readings.append(self._read())
            self._next = self._clock() + self._every

    def summary(self) -> dict[str, float]:
        """Median of each over the readings; {} where there were none."""
        names = {name for reading in self._readings for name in reading}
        return {name: spread(r[name] for r in self._readings if name in r).median for name in sorted(names)}


def _read_gpu(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(device),
            "watts": torch.cuda.power_draw(device) / 1e3,
            "celsius": torch.cuda.temperature(device),
        }
    except (ModuleNotFoundError, RuntimeError):  # no pynvml; or a driver that tells nothing
        return {}


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

    The extreme elements are finite exactly when all are; a 2-norm could overflow on finite elements. Of a tensor shared out
    over ranks (DTensor) this rank's share is judged.
    """
    values = [v.to_local() if hasattr(v, "to_local") else v for v in values]
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

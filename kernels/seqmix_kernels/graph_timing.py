"""Times the GPU's work without the host's launches: a few calls are captured in one CUDA graph and replayed.

A forward and backward through autograd takes the host some hundred microseconds, often longer than the kernels; timing call by
call would measure that.
"""

import statistics
from collections.abc import Callable

import torch


def graph_milliseconds(call: Callable[[], object], count: int = 20, calls: int = 10) -> float:
    """Median time per call over `count` replays of a graph of `calls` calls, by CUDA events. Results are discarded: a call may
    overwrite those of the previous one. Inputs larger than the L2 cache are read from memory."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):  # compilation and loading at the first call must not be captured
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for i in range(count + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop) / calls)
    return statistics.median(times)


def eager_milliseconds(call: Callable[[], object], count: int = 20) -> float:
    """Median over `count` calls from an idle GPU to an idle GPU, including all of the host's work."""
    times = []
    for i in range(count + 3):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def memory_bandwidth() -> float:
    """Bytes per second of one kernel that reads a large tensor and writes another, counting both."""
    a = torch.ones(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / graph_milliseconds(lambda: torch.neg(a, out=b), 5, 2) * 1e3


def beside_copy(
    run: Callable, leaves: list, upstream: list, moved: tuple[int, int], bandwidth: float, count: int
) -> dict[str, float]:
    """Milliseconds of `run(*leaves)` without gradients (fwd) and with its backward from `upstream` (fwd_bwd), and for
    each the fraction of that time in which its bytes, `moved`, could be copied at `bandwidth` (see memory_bandwidth)."""

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, upstream)

    with torch.no_grad():
        forward = graph_milliseconds(lambda: run(*leaves), count)
    times = {"fwd": forward, "fwd_bwd": graph_milliseconds(both, count)}
    floors = {name: 1e3 * size / bandwidth for name, size in zip(times, moved, strict=True)}
    return {f"{k}_ms": ms for k, ms in times.items()} | {f"{k}_of_copy": floors[k] / ms for k, ms in times.items()}

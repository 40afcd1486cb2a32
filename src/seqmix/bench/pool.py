"""A process a point, one after the other, so that no peak, fragment or fault of one is seen by the next.

A server that has imported torch, and has touched no GPU, is forked for each: a process costs its CUDA context rather than
ten seconds of imports. What a process could not say itself is read from how it ended.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from seqmix.bench import point as worker
from seqmix.bench.grid import Point

# none of them touches a GPU when it is imported
PRELOADED = [
    "seqmix.bench.point", "seqmix.bench.__main__", "seqmix.bench.kernels", "seqmix.mixers.mamba", "seqmix.mixers.attention",
]  # fmt: skip


def run(
    points: Sequence[Point],
    patience: float,
    time_limit: float | None = None,
    *,
    serve: Callable = worker.serve,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Point, dict]]:
    """(point, its row) one by one. patience: seconds for one point; after that it is ended, its status is `slow`, and longer
    ones of its curve are not begun. time_limit: seconds after which none is begun."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    began = clock()
    slow: dict[tuple, int] = {}
    for point in points:
        at = slow.get(point.curve)
        if at is not None and point.length > at:
            yield point, {"status": "slow", "error": f"not begun: at length {at} it took over {patience:g} s"}
        elif time_limit is not None and clock() - began > time_limit:
            yield point, {"status": "not run", "error": f"not begun in {time_limit:g} s"}
        else:
            row = _one(context, point, patience, serve)
            if row["status"] == "slow":
                slow[point.curve] = point.length
            yield point, row


def _one(context, point: Point, patience: float, serve: Callable) -> dict:
    started = time.perf_counter()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(point, there), daemon=True)
    process.start()
    there.close()
    row = None
    try:
        if here.poll(patience):
            row = here.recv()
    except EOFError:  # it ended without a word
        pass
    else:
        if row is None:
            process.kill()
            row = {"status": "slow", "error": f"not done in {patience:g} s"}
    process.join()
    if row is None:
        row = _last_word(process.exitcode)
    here.close()
    return row | {"process_seconds": round(time.perf_counter() - started, 2)}


def _last_word(code: int) -> dict:
    if code == -signal.SIGKILL:
        return {"status": "oom", "error": "SIGKILL: by the system for want of memory, or by hand"}
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"status": "failed", "error": f"the process ended without a word: {name}"}

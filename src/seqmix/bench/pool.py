"""A process a point, one after the other, so that no peak, fragment or fault of one is seen by the next.

A server that has imported torch, and has touched no GPU, is forked for each: a process costs its CUDA context rather than
ten seconds of imports. What a process could not say itself is read from how it ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe

from seqmix import preload
from seqmix.bench import point as worker
from seqmix.bench.grid import Point
from seqmix.fork_server import Server

PRELOADED = ("seqmix.bench.__main__", "seqmix.bench.kernels", "seqmix.bench.point", "seqmix.channel_mixers")
PRELOADED += ("torch.profiler", "torch.utils.flop_counter")
# shares of the patience that a call, a step or a prompt, may take: it has to run twice, compiled before
DEAR = 1 / 10  # after a point whose call took longer, the longer ones of its curve wait for all others
HOPELESS = 1 / 5  # and where it took longer than this, those of FAR times its length are not begun
FAR = 4
_server: Server | None = None  # of this process


def start() -> None:
    """Start the server, which then imports beside what the caller does; `run` would start it, too."""
    global _server
    if _server is None or not _server.is_alive():
        _server = Server(preload.load, *PRELOADED)


def run(
    points: Sequence[Point],
    patience: float,
    time_limit: float | None = None,
    *,
    serve: Callable = worker.serve,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[Point, dict]]:
    """(point, its row) one by one, in the order given, but those that will be DEAR last. patience: seconds for one point; after
    that it is ended, its status is `slow`, and longer ones of its curve are not begun, nor what is HOPELESS. time_limit: of all
    points; after it none is begun, and what runs is ended: both are `not run`."""
    start()
    _server.start(_nothing).poll(None)  # that the server is ready is no point's time
    began = clock()
    slow: dict[tuple, int] = {}
    dear: dict[tuple, tuple[int, float]] = {}  # length, seconds of a call
    known: dict = {}

    def row_of(point: Point) -> dict:
        at = slow.get(point.curve)
        if at is not None and point.length > at:
            return {"status": "slow", "error": f"not begun: at length {at:,} it took over {patience:g} s"}
        at, took = dear.get(point.curve, (math.inf, 0.0))
        if took > HOPELESS * patience and point.length >= FAR * at:
            return {
                "status": "slow",
                "error": f"not begun: at length {at:,} a call took {took:.3g} s, {patience:g} s are for all",
            }
        left = math.inf if time_limit is None else time_limit - (clock() - began)
        if left <= 0:
            return {"status": "not run", "error": f"not begun in the {time_limit:g} s of the whole"}
        row, found = _one(point, known, min(patience, left), serve)
        known.update(found)
        if row["status"] == "slow" and left < patience:
            return row | {"status": "not run", "error": f"not done in the {time_limit:g} s of the whole"}
        if row["status"] == "slow":
            slow[point.curve] = point.length
        elif (took := _call_seconds(row)) > DEAR * patience:
            dear[point.curve] = point.length, took
        return row

    waiting = []
    for point in points:
        if point.length > dear.get(point.curve, (math.inf, 0.0))[0]:
            waiting.append(point)
        else:
            yield point, row_of(point)
    for point in waiting:
        yield point, row_of(point)


def _call_seconds(row: Mapping) -> float:
    return max(row.get("step_ms", 0.0), row.get("prefill_ms", 0.0)) / 1e3


def _nothing() -> None:
    pass


def _answer(serve: Callable, point: Point, known: Mapping, descriptor: int) -> None:
    serve(point, known, Connection(descriptor, readable=False))


def _one(point: Point, known: Mapping, patience: float, serve: Callable) -> tuple[dict, dict]:
    """The row, and what the process found out of use to later ones."""
    started = time.perf_counter()
    start()
    here, there = Pipe(duplex=False)
    with there:
        process = _server.start(_answer, serve, point, known, descriptors=[there.fileno()])
    row, found = None, {}
    try:
        if here.poll(patience):
            row, found = here.recv()
    except EOFError:  # it ended without a word
        pass
    else:
        if row is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)
            row = {"status": "slow", "error": f"not done in {patience:g} s"}
    code = process.poll(None)
    if row is None:
        row = _last_word(code)
    here.close()
    return row | {"process_seconds": round(time.perf_counter() - started, 2)}, found


def _last_word(code: int) -> dict:
    if code == -signal.SIGKILL:
        return {"status": "oom", "error": "SIGKILL: by the system for want of memory, or by hand"}
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"status": "failed", "error": f"the process ended without a word: {name}"}

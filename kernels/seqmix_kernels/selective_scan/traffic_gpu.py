"""Measures bytes to and from the GPU's memory (DRAM) by hardware counters: what fusing saves, and how it grows with N and L.

    python -m seqmix_kernels.selective_scan.traffic_gpu

Runs Nsight Compute's `ncu`, which must be on the PATH and allowed to read counters, over one forward and one forward +
backward per case, B1 D1536 bfloat16 with D, z and dt_bias. ncu empties the caches before every kernel, so what one kernel
leaves in L2 for the next is read from memory again: the counts are upper bounds, the same for all. It prints one JSON line per
case, then a table. Floor: each input and output that the method must access, once.
"""

import csv
import io
import itertools
import json
import shutil
import subprocess
import sys

import torch

from .bench_gpu import gradients, inputs
from .op import selective_scan

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
BETWEEN = "spin_kernel"  # the kernel of torch.cuda._sleep, launched between the cases to separate them in ncu's list
WIDTH = 1536
# implementation, L, N: the fused kernel against N and L, and the implementations in torch
CASES = (
    ("fused", 4096, 4), ("fused", 4096, 16), ("fused", 4096, 64), ("fused", 4096, 256),
    ("fused", 1024, 16), ("fused", 16384, 16),
    ("kogge_stone", 4096, 16), ("blelloch", 4096, 16), ("kogge_stone", 4096, 64),
)  # fmt: skip
RUNS = tuple(itertools.product(CASES, (False, True)))


def child() -> None:
    """Runs each case between the profiler's start and stop, after one that compiles."""
    for (impl, length, n), both in RUNS:
        args = inputs(1, length, WIDTH, n, without=("initial_state",))
        dy, dfinal = torch.randn_like(args[0]), torch.zeros(1, *args[2].shape, device="cuda")

        def call(args=args, impl=impl, both=both, dy=dy, dfinal=dfinal):
            if not both:
                with torch.no_grad():
                    return selective_scan(*args[:8], impl=impl)
            return gradients(args, lambda t: selective_scan(*t[:8], impl=impl), dy, dfinal)

        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counted() -> list[dict]:
    """Kernels, bytes read and bytes written of each run. Raises RuntimeError with ncu's last output if it could not count."""
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "seqmix_kernels.selective_scan.traffic_gpu", "child"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    head = next((i for i, text in enumerate(lines) if text.startswith('"ID"')), None)
    if done.returncode or head is None:
        raise RuntimeError(" ".join((done.stdout[-300:] + done.stderr[-300:]).split()))
    return split(csv.DictReader(io.StringIO("\n".join(lines[head:]))))


def split(rows) -> list[dict]:
    """Sums ncu's rows, one per kernel and metric, for each run."""
    found: list[dict] = []
    names = dict(zip(METRICS, ("read_bytes", "written_bytes"), strict=True))
    last = None
    for row in rows:
        if BETWEEN in row["Kernel Name"]:
            if row["ID"] != last:
                found.append({"kernels": 0, "read_bytes": 0.0, "written_bytes": 0.0})
        else:
            found[-1]["kernels"] += row["ID"] != last
            found[-1][names[row["Metric Name"]]] += float(row["Metric Value"].replace(",", ""))
        last = row["ID"]
    return found


def floor(length: int, n: int, both: bool) -> float:
    """Bytes of x, dt, z, B, C read and y written once; with the backward those read again with dy, and their gradients."""
    wide, narrow = 2.0 * length * WIDTH, 2.0 * length * n
    return 4 * wide + 2 * narrow + both * (7 * wide + 4 * narrow)


def main(argv: list[str]) -> None:
    if argv == ["child"]:
        return child()
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on the PATH")
    about = {
        "batch": 1,
        "width": WIDTH,
        "dtype": "bfloat16",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    rows = []
    for ((impl, length, n), both), count in zip(RUNS, counted(), strict=True):
        row = (
            {"impl": impl, "length": length, "n": n, "backward": both} | about | count | {"floor_bytes": floor(length, n, both)}
        )
        row["one_unfused_array_bytes"] = 4 * length * WIDTH * n
        print(json.dumps(row), flush=True)
        rows.append(row)
    titles = ("read MB", "written", "floor", "one (B, L, D, N)")
    print(f"{'impl':12s}{'L':>7s}{'N':>5s} {'pass':8s}{'kernels':>8s}" + "".join(f"{title:>18s}" for title in titles))
    for r in rows:
        sizes = (r["read_bytes"], r["written_bytes"], r["floor_bytes"], r["one_unfused_array_bytes"])
        print(f"{r['impl']:12s}{r['length']:7d}{r['n']:5d} {'fwd+bwd' if r['backward'] else 'fwd':8s}{r['kernels']:8d}"
              + "".join(f"{size / 1e6:18.1f}" for size in sizes))  # fmt: skip
    return None


if __name__ == "__main__":
    main(sys.argv[1:])

"""Stands in for train.py where the queue alone is tested: does what FAKE, a JSON of seed -> behaviours, says next."""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from seqmix.sweep.script import execute


def prepare(script, kernels):
    """In the server that forks these jobs: what they import, and no more."""
    execute(script, "__mp_main__")


def facts(path):
    """In a child of the server of real jobs: what it has of its own."""
    import torch

    from seqmix import tracking

    found = {"source read": tracking.source_state.cache_info().currsize}
    found |= {"cuda": torch.cuda.is_initialized() or torch.cuda._cached_device_count is not None}
    found |= {"asked": torch.get_num_threads(), "before": len(os.listdir("/proc/self/task"))}
    torch.ones(4096, 512).exp()  # no backward: with a GPU, autograd has threads of its own
    found |= {"after": len(os.listdir("/proc/self/task"))}
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").item()
    Path(path).write_text(json.dumps(found))


def main():
    typed = dict(argument.split("=", 1) for argument in sys.argv[1:])
    folder, seed = Path(typed["hydra.run.dir"].strip("'")), typed["seed"]
    events = folder.parent / "events"

    def note(what):
        with events.open("a") as file:
            file.write(json.dumps([what, seed, time.monotonic(), dict(os.environ), sys.argv[1:]]) + "\n")

    def end(status, code=0, **more):
        found = {"status": status, "best/val/loss": 0.5, "test/token_accuracy": 0.75} | more
        (folder / "summary.json").write_text(json.dumps(found))
        note(status)
        sys.exit(code)

    signal.signal(signal.SIGINT, lambda *_: end("interrupted", 130))
    note("start")
    attempt = sum(json.loads(line)[:2] == ["start", seed] for line in events.read_text().splitlines())
    behaviours = json.loads(os.environ["FAKE"]).get(seed, ["complete"])
    behaviour = behaviours[min(attempt, len(behaviours)) - 1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if behaviour in ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"):
        os.kill(os.getpid(), getattr(signal, behaviour))
    elif behaviour == "kills its parent":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGKILL)
        behaviour = "slow"
    elif behaviour == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note("deaf")
        time.sleep(60)
    elif behaviour == "waits":
        time.sleep(60)
    elif behaviour == "gpu fault":
        end("failed", 1, gpu_fault=True, error="CUDA error: an illegal memory access was encountered")
    elif behaviour.startswith("exit"):
        print("the last word")
        sys.exit(int(behaviour[4:]))
    time.sleep(1.0 if behaviour == "slow" else 0.05)
    status = "complete" if behaviour == "slow" else behaviour
    end(status, int(status != "complete"))


if __name__ == "__main__":
    main()

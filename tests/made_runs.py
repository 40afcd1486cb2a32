"""Run folders as train.py leaves them, without training: keys and files of the real ones, numbers made up.

test_report.py holds the keys against those of a real run.
"""

from __future__ import annotations

import copy
import csv
import functools
import json
import math
import random
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from seqmix.config import compose_run

CONF = Path(__file__).parent.parent / "conf"
ENVIRONMENT = {
    "device": "cuda", "device_name": "NVIDIA H200", "cpu": "AMD EPYC", "cpus": 16, "threads": 8, "platform": "Linux-x86_64",
    "python": "3.11.7", "torch": "2.13.0", "cuda": "13.0", "lightning": "2.6.6", "triton": "3.7.1", "wandb": "0.31.0",
}  # fmt: skip
SOURCE = {"commit": "554999a01b27d5024c761642b8045260d1d970c0", "diff_sha256": None}
# how far each gets on these made-up tasks (in powers of two of length), steps to get there, ms a token, state bytes
NATURE = {
    "transformer": (9.2, 900, 0.05, lambda L: 1024 * L),
    "mamba": (13.0, 1300, 0.035, lambda L: 19456),
    "s4": (6.6, 1900, 0.02, lambda L: 32768),
    "lstm": (7.3, 2300, 0.06, lambda L: 1024),
    "rnn": (5.2, 2600, 0.045, lambda L: 512),
}
ERRORS = {
    "oom": "OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 139.81 GiB",
    "diverged": "NonFiniteError: not finite after 812 steps: loss (lr 0.00873, gradient norm inf; losses [nan])",
    "interrupted": "KeyboardInterrupt: ",
    "failed": 'RuntimeError: <boom> & "quotes" | pipes',
}


@functools.cache
def _composed(model: str, task: str) -> dict:
    cfg = compose_run([f"model={model}", f"task={task}", "logger=csv", "trainer.accelerator=cpu"], CONF, "/elsewhere/run")
    return OmegaConf.to_container(cfg)


def make_run(
    folder: Path,
    model: str = "mamba",
    task: str = "selective_copy",
    seq_len: int = 64,
    seed: int = 0,
    lr: float = 2e-3,
    *,
    status: str = "complete",
    accuracy: float | None = None,
    rows: int = 40,
    steps: int = 4000,
    changes: dict | None = None,
    summary: dict | None = None,
    source: dict | None = SOURCE,
    environment: dict = ENVIRONMENT,
    data: dict | None = None,
) -> Path:
    """One run folder. status: as train.py writes it; "killed": as the sweep's launcher does; "unfinished": no summary.json.

    accuracy: of test and validation, or None for what NATURE makes of it. changes: flat keys of config.yaml, also typed
    as overrides. summary: keys of summary.json that are to be others.
    """
    folder.mkdir(parents=True)
    rng = random.Random(f"{model} {task} {seq_len} {seed} {lr}")
    reach, slow, ms, state = NATURE[model]
    config = copy.deepcopy(_composed(model, task))
    set_ = {"task.seq_len": seq_len, "seed": seed, "task.seed": seed, "optimizer.lr": lr, "trainer.max_steps": steps}
    for key, value in (set_ | (changes or {})).items():
        node = config
        *parents, last = key.split(".")
        for part in parents:
            node = node[part]
        node[last] = value
    overrides = [f"model={model}", f"task={task}", f"task.seq_len={seq_len}", f"seed={seed}", f"optimizer.lr={lr}"]
    overrides += [f"{key}={value}" for key, value in (changes or {}).items()]
    (folder / ".hydra").mkdir()
    _dump(folder / ".hydra/overrides.yaml", overrides)
    _dump(folder / ".hydra/config.yaml", config)
    choices = {"model": model, "task": task, "size": (changes or {}).get("size", "tiny"), "optimizer": "adamw"}
    _dump(folder / ".hydra/hydra.yaml", {"hydra": {"runtime": {"choices": choices}}})
    _dump(folder / "config.yaml", config)
    (folder / "train.log").write_text("[seqmix][INFO] - building the model\n[seqmix][INFO] - step 100\n")

    off = abs(math.log10(lr / 2e-3))
    best = 1 / (1 + math.exp((math.log2(seq_len) - reach) * 1.6)) * math.exp(-1.2 * off)
    best = min(1.0, max(0.05, best * (1 - 0.06 * rng.random()))) if accuracy is None else accuracy
    chance = 1 / 14
    curve = []
    for i in range(rows):
        step = (i + 1) * steps // rows - 1
        far = 1 / (1 + math.exp(-(step - slow * (0.9 + 0.2 * rng.random())) / 260))
        value = chance + (max(best, chance) - chance) * far
        curve.append((step, value, -math.log(max(value, 1e-3)) + 0.01 * rng.random()))
    _write_metrics(folder / "metrics.csv", curve, lr, status, seq_len / ms, rng)
    if status in ("killed", "unfinished"):
        with (folder / "metrics.csv").open("a") as file:
            file.write("0,39")
        if status == "killed":  # in a sweep, by the launcher
            told = {"status": status, "folder": str(folder), "error": "SIGKILL: by hand, or by the system when memory ran out"}
            (folder / "summary.json").write_text(json.dumps(told | {"job": {"attempts": 1, "exit_code": -9}}))
        return folder

    step_ms = 4 + ms * seq_len * (seq_len / 512 if model == "transformer" else 1) * (0.98 + 0.04 * rng.random())
    peak = 40 + 0.6 * seq_len + (seq_len**2 / 900 if model == "transformer" else 0)
    params = {"transformer": 91000, "mamba": 68000, "s4": 45000, "lstm": 66000, "rnn": 17000}[model]
    done = status == "complete"
    loss = curve[-1][2]
    accuracies = {"token_accuracy": best, "sequence_accuracy": best**16, "perplexity": math.exp(loss)}
    out = {"status": status, "folder": str(folder), "resumed_from": None}
    if done:
        for split in ("train", "val", "test"):
            out |= {f"{split}/loss": loss} | {f"{split}/{name}": value for name, value in accuracies.items()}
        out["train/lr"] = lr * 0.1
    else:
        out["error"] = ERRORS[status]
    out |= {
        "steps": steps if done else 812,
        "seconds": round(steps * step_ms / 1e3, 1),
        "chance/token_accuracy": chance,
        "chance/sequence_accuracy": chance**16,
        "data": data or {"task": task, "row_length": seq_len + 16, "vocab_size": 16, "eval_rows": 2048},
        "environment": environment,
        "source": source,
        "speed/tokens_per_second": None if status == "oom" else 32 * seq_len / step_ms * 1e3,
        "speed/step_ms": None if status == "oom" else step_ms,
        "speed/step_ms_iqr": None if status == "oom" else 0.02 * step_ms,
        "speed/windows": 0 if status == "oom" else 78,
        "speed/data_wait_fraction": None if status == "oom" else 0.01,
        "speed/first_step_s": 0.9,
        "memory/peak_allocated_mib": peak if environment["device"] == "cuda" else None,
        "memory/peak_reserved_mib": peak * 1.1 if environment["device"] == "cuda" else None,
        "memory/peak_host_mib": None if environment["device"] == "cuda" else peak,
        "memory/predicted_mib": 0.8 * peak,
        "memory/state_bytes": state(seq_len) if done else None,
        "memory/params": params,
        "memory/params_non_embedding": params - 1024,
        "best/val/loss": loss if done else None,
        "best/step": steps if done else None,
    }
    (folder / "summary.json").write_text(json.dumps(out | (summary or {}), indent=2) + "\n")
    return folder


def _write_metrics(path: Path, curve: list, lr: float, status: str, speed: float, rng: random.Random) -> None:
    names = ["loss", "lr", "perplexity", "sequence_accuracy", "token_accuracy"]
    tested = [f"test/{n}" for n in names if n != "lr" and status == "complete"]
    header = [
        "epoch",
        "step",
        "speed/data_wait_fraction",
        "speed/step_ms",
        "speed/tokens_per_second",
        *tested,
        *(f"train/{n}" for n in names),
    ]
    header += [f"val/{n}" for n in names if n != "lr"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        for i, (step, accuracy, loss) in enumerate(curve):
            if status != "complete" and i > 0.4 * len(curve):
                break
            noisy = max(0.0, accuracy + 0.02 * rng.gauss(0, 1))
            row = {"epoch": 0, "step": step, "train/loss": loss * (1 + 0.1 * rng.random()), "train/lr": lr,
                   "train/token_accuracy": noisy, "train/sequence_accuracy": noisy**16, "train/perplexity": math.exp(loss),
                   "speed/tokens_per_second": speed, "speed/step_ms": 10.0, "speed/data_wait_fraction": 0.01}  # fmt: skip
            writer.writerow(row)
            if i % 2:
                writer.writerow({"epoch": 0, "step": step, "val/loss": loss, "val/perplexity": math.exp(loss),
                                 "val/token_accuracy": accuracy, "val/sequence_accuracy": accuracy**16})  # fmt: skip
        if tested:
            writer.writerow({"epoch": 1, "step": curve[-1][0] + 1} | dict.fromkeys(tested, curve[-1][1]))
        if status == "diverged":
            writer.writerow({"epoch": 0, "step": curve[-1][0], "train/loss": math.nan})


def _dump(path: Path, value: object) -> None:
    path.write_text(yaml.dump(value, sort_keys=False, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))


def make_sweep(root: Path, models=("transformer", "s4", "mamba", "lstm"), tasks=("selective_copy",), lengths=(64, 128, 256),
               seeds=(0, 1), lrs=(2e-3,), failing: dict[int, str] | None = None, rows: int = 40) -> Path:  # fmt: skip
    """One folder a job, numbered, as a multirun makes them. failing: job number -> status."""
    jobs = [(m, t, n, lr, s) for t in tasks for m in models for n in lengths for lr in lrs for s in seeds]
    for number, (model, task, length, lr, seed) in enumerate(jobs):
        status = (failing or {}).get(number, "complete")
        make_run(root / str(number), model, task, length, seed, lr, status=status, rows=rows)
    (root / "multirun.yaml").write_text("hydra: {}\n")
    return root

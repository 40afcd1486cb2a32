"""What makes two runs the same run. There are three questions, and their answers differ on purpose:

    resume   may this run resume from the other's checkpoint, when `ckpt=last` chooses one?    seqmix.config
    job      is it the same job of a sweep: same folder, skipped when it is complete?          seqmix.sweep.names
    cell     may the numbers of both be averaged, as two seeds of one result?                  seqmix.report.results

MATTERS lists the questions for which a key of the config matters, and the reason. The longest entry that names the key or a
group above it decides. A key without an entry matters for all three, so that no setting is overlooked.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

QUESTIONS = ("resume", "job", "cell")
MATTERS = {
    "hydra": ("", "folders, launcher and sweeper"),
    "logger": ("", "where numbers are sent"),
    "show": ("", "prints a batch and trains nothing"),
    "seed": ("resume job", "the report averages over seeds"),
    "optimizer.lr": ("resume job", "the report chooses it on validation, within a cell"),
    "ckpt": ("job", "for a cell the settings before the resume count (resumed_over), not the name of a file"),
    "resumed_over": ("cell", "settings that differed before the run was resumed; train() records them"),
    "test": ("job", "adds test scores and does not change training"),
    "eval": ("job", "adds test scores at other lengths and does not change training"),
    "compile": ("job cell", "rounding and speed; a checkpoint does not depend on it"),
    "cuda_graph": ("job cell", "only speed, but a cell averages speeds, too"),
    "matmul_precision": ("job cell", "rounding and speed; a checkpoint does not depend on it"),
    "micro_batch_size": ("job", "the same rows per step; on_oom=halve lowers it for one seed, and the report says so"),
    "task.num_workers": ("job", "only speed"),
    "task.make_on": ("job", "the rows are the same wherever they are made"),
    "task.eval_batch_size": ("job", "scores are sums over rows"),
    "callbacks": ("job", "they only observe a run"),
    "callbacks.checkpoint.monitor": ("job cell", "decides which weights are tested"),
    "callbacks.checkpoint.mode": ("job cell", "decides which weights are tested"),
    "callbacks.solved": ("job cell", "may end a run before its budget is used"),
    "trainer": ("job cell", "budget and machine: a resumed run may have more steps, or another machine"),
    "trainer.precision": ("resume job cell", "changes the updates"),
    "trainer.accelerator": ("job", "the report compares the devices that were recorded"),
    "trainer.log_every_n_steps": ("job", "only observes a run"),
    "trainer.profiler": ("job", "only observes a run"),
    "trainer.detect_anomaly": ("job", "only observes a run"),
    "trainer.enable_checkpointing": ("job", "only observes a run"),
    "trainer.enable_progress_bar": ("job", "only observes a run"),
    "trainer.enable_model_summary": ("job", "only observes a run"),
    "trainer.num_sanity_val_steps": ("job", "only observes a run"),
}


def matters(key: str, question: str) -> bool:
    """Whether a dotted key of the config matters for `question`, one of QUESTIONS."""
    assert question in QUESTIONS, question
    while key not in MATTERS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return True
    return question in MATTERS[key][0].split()


def flat(config: Mapping, prefix: str = "") -> dict[str, object]:
    """{"task": {"seq_len": 64}} -> {"task.seq_len": 64}; a list stays one value, as JSON; an empty mapping is None."""
    out: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            empty = isinstance(value, Mapping)
            out[f"{prefix}{key}"] = None if empty else json.dumps(value) if isinstance(value, list) else value
    return out


def settings(config: Mapping[str, object], question: str) -> dict[str, object]:
    """The keys of a flat, resolved config that matter for a question, with their values."""
    return {key: value for key, value in config.items() if matters(key, question)}


def changed(before: Mapping[str, object], now: Mapping[str, object], *questions: str) -> dict[str, object]:
    """Each key in which two flat, resolved configs differ -> its value in `before`, if it matters for any of `questions`.

    A key that one of them lacks has the value None there.
    """
    keys = [key for key in {**before, **now} if any(matters(key, question) for question in questions)]
    return {key: before.get(key) for key in keys if before.get(key) != now.get(key)}


def cell_config(config: Mapping[str, object]) -> dict[str, object]:
    """The settings that two runs of one cell share: `settings(config, "cell")`, with evaluation batches counted in rows."""
    out = settings(config, "cell")
    if out.get("task.seed") == config.get("seed"):
        out.pop("task.seed", None)
    if out.get("callbacks.solved.patience") is None:  # no run is ended
        out = {key: value for key, value in out.items() if not key.startswith("callbacks.solved.")}
    for split in ("val", "test"):
        limit = out.get(f"trainer.limit_{split}_batches")
        if isinstance(limit, int):
            out[f"trainer.limit_{split}_batches"] = f"{limit * config.get('task.eval_batch_size', 1)} rows"
    return out


def checkpoint_mark(path: Path) -> str:
    """Identifies the content of a checkpoint, wherever the file is: the checksums that torch stores beside its tensors. They
    are read in milliseconds.

    For a file that is not a zip archive, its size and the time of its last change; "missing" if there is no file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return " ".join(f"{member.CRC:08x}" for member in archive.infolist())
    except zipfile.BadZipFile:
        return f"{path.stat().st_size} {path.stat().st_mtime_ns}"
    except OSError:
        return "missing"

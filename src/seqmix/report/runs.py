"""Run folders, read back. Nothing is trusted to be there: a killed job leaves what it had written until then."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import yaml

from seqmix.identity import flat

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where PyYAML has it: ten times as fast
NOT_RUNS = {"wandb", "checkpoints", ".hydra", ".submitit", "report"}  # folders in which no run folder lies
STATUSES = ("complete", "diverged", "oom", "killed", "interrupted", "failed", "unfinished")
PATHS = re.compile(rf"(?<![\w./-]){re.escape(str(Path.home()))}(?=/|\b)") if str(Path.home()) != "/" else None


class Run(NamedTuple):
    """One run folder.

    name: its path under the folder that was asked for. config: flat, `{"task.seq_len": 64, ...}`, resolved.
    choices: of each config group. overrides: as typed, or None where nothing has recorded them. status: one of STATUSES;
    "unfinished" where no summary.json tells the end. curves: metric -> [(step, value)], non-finite values as they are.
    """

    name: str
    folder: Path
    config: dict[str, object]
    choices: dict[str, str]
    overrides: tuple[str, ...] | None
    summary: dict
    status: str
    error: str
    curves: dict[str, list[tuple[int, float]]]
    written: float  # seconds since the epoch of the last word about its state

    @property
    def model(self) -> str:
        return self.choices.get("model") or _module(self.config.get("model._target_"))

    @property
    def task(self) -> str:
        return self.choices.get("task") or _module(self.config.get("task._target_"))

    @property
    def size(self) -> str:
        return self.choices.get("size") or "?"

    @property
    def seq_len(self) -> int | None:
        return self.config.get("task.seq_len")

    @property
    def lr(self) -> float | None:
        return self.config.get("optimizer.lr")

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def knows_its_facts(self) -> bool:
        """Whether data, code and environment are recorded; a run that was killed, or never got to training, has none."""
        return "environment" in self.summary

    @property
    def command(self) -> str | None:
        """What to type to have this run again, or None where the overrides are not known."""
        return None if self.overrides is None else command(self.overrides)

    def number(self, name: str) -> float | None:
        """A number of the summary, or None where it is missing or not finite."""
        value = self.summary.get(name)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return value if ok else None


def command(overrides: Iterable[str], multirun: bool = False) -> str:
    return " ".join(["python train.py", *["-m"][:multirun], *map(shlex.quote, overrides)])


def find_runs(places: Iterable[Path]) -> list[Run]:
    """Every run in `places` (run folders, sweeps, or folders of those), in natural order of the paths.

    ValueError for a place that is not there, and where there is no run at all.
    """
    places = [Path(place) for place in places]
    found: dict[Path, str] = {}
    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place} is not a folder")
        for folder in _walk(place):
            inside = folder.relative_to(place).as_posix()
            name = inside if inside != "." else place.resolve().name
            found.setdefault(folder.resolve(), name if len(places) == 1 else f"{place.resolve().name}/{inside}")
    if not found:
        raise ValueError(f"no run folder (one with config.yaml or .hydra/config.yaml) in {', '.join(map(str, places))}")
    return [read_run(folder, name) for folder, name in found.items()]


def _walk(place: Path) -> list[Path]:
    folders = []
    for folder, children, files in os.walk(place):
        if "config.yaml" in files or "summary.json" in files or (Path(folder) / ".hydra/config.yaml").is_file():
            folders.append(Path(folder))
            children.clear()
        children[:] = [child for child in children if child not in NOT_RUNS]
    return sorted(folders, key=lambda path: [(int(p), "") if p.isdigit() else (math.inf, p) for p in _parts(path)])


def _parts(path: Path) -> list[str]:
    return re.split(r"(\d+)", path.as_posix())


def not_started(places: Iterable[Path]) -> list[str]:
    """Jobs that the sweeps in `places` have recorded (sweep.json) and that have no folder yet: what tells each apart."""
    missing = []
    for place in map(Path, places):
        for record in sorted({*place.glob("sweep.json"), *place.glob("*/sweep.json")}):
            jobs = json.loads(record.read_text(encoding="utf-8")).get("jobs", [])
            common = set.intersection(*({*job["overrides"]} for job in jobs)) if len(jobs) > 1 else set()
            for job in jobs:
                if not (record.parent / Path(job["folder"]).name).is_dir():
                    missing.append(" ".join(override for override in job["overrides"] if override not in common))
    return missing


def read_run(folder: Path, name: str) -> Run:
    """The run in `folder`. ValueError where a config cannot be parsed: then nothing can be said about it."""
    resolved = folder / "config.yaml"
    composed = folder / ".hydra/config.yaml"
    config = flat(_yaml(resolved)) if resolved.is_file() else _resolve(flat(_yaml(composed)) if composed.is_file() else {})
    hydra = _yaml(folder / ".hydra/hydra.yaml") if (folder / ".hydra/hydra.yaml").is_file() else {}
    overrides = _yaml(folder / ".hydra/overrides.yaml") if (folder / ".hydra/overrides.yaml").is_file() else None
    chosen = dict(hydra.get("hydra", {}).get("runtime", {}).get("choices", {}))
    typed = dict(text.lstrip("+").split("=", 1) for text in overrides or [] if "=" in text)
    choices = {g: str(chosen.get(g) or typed.get(g)) for g in ("model", "task", "size") if chosen.get(g) or typed.get(g)}
    summary, status, error = _summary(folder)
    marks = [folder / "summary.json", folder / "metrics.csv", resolved]
    return Run(
        name=name,
        folder=folder,
        config=config,
        choices=choices,
        overrides=None if overrides is None else tuple(map(str, overrides)),
        summary=summary,
        status=status,
        error=error,
        curves=read_curves(folder / "metrics.csv"),
        written=next((path.stat().st_mtime for path in marks if path.is_file()), 0.0),
    )


def _summary(folder: Path) -> tuple[dict, str, str]:
    path = folder / "summary.json"
    if not path.is_file():
        last = _last_line(folder / "train.log") or _last_line(folder / "output.log") or "(nothing)"
        return {}, "unfinished", f"no summary.json; the log ends: {last}"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        status = summary.get("status", "unfinished")
    except (json.JSONDecodeError, AttributeError) as error:
        return {}, "unfinished", f"summary.json cannot be read ({error})"
    return summary, str(status), tidy(str(summary.get("error") or ""))


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return tidy(next((line.strip() for line in reversed(lines) if line.strip()), ""))[:300]


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.csv by column. A last line cut short by a kill is left out."""
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    if not rows:
        return {}
    header = rows[0]
    if "step" not in header:
        return {}
    curves: dict[str, list[tuple[int, float]]] = {}
    at = header.index("step")
    for row in rows[1:]:
        if len(row) != len(header):
            continue
        for name, value in zip(header, row, strict=True):
            if value and name not in ("step", "epoch"):
                curves.setdefault(name, []).append((int(row[at]), float(value)))
    return curves


def _resolve(config: dict[str, object]) -> dict[str, object]:
    """`${seed}` and the like, of a run that ended before it wrote its config resolved; `${name:}` is left as it is."""
    whole = re.compile(r"^\$\{([\w.]+)\}$")
    for _ in range(3):
        for key, value in config.items():
            if isinstance(value, str) and (match := whole.match(value)) and match[1] in config:
                config[key] = config[match[1]]
    return config


def tidy(text: str) -> str:
    return PATHS.sub("~", text) if PATHS else text


def _yaml(path: Path):
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error


def _module(target: object) -> str:
    """seqmix.mixers.lstm.LSTM -> lstm"""
    parts = str(target or "").split(".")
    return parts[-2] if len(parts) > 1 else "?"

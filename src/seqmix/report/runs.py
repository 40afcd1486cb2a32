"""Reads run folders. Any file may be missing, because a killed job leaves only what it had written until then.

A broken file affects its own run only: the run is `unreadable`, or lacks what the file should contain; an error names the file.
"""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from seqmix.folders import read_file, walk
from seqmix.identity import flat

STATUSES = ("complete", "diverged", "oom", "killed", "interrupted", "failed", "unfinished", "unreadable")
FACTS = ("data", "code", "environment")  # what a run records beside its config
AVERAGED = ("code", "environment")  # those of them that the caller may ask to average over
# keys whose values must be numbers, because the report calculates with them
NUMBERS = ("seed", "optimizer.lr", "task.seq_len", "task.batch_size", "task.eval_batch_size", "trainer.max_steps",
           "trainer.val_check_interval")  # fmt: skip
PATHS = re.compile(rf"(?<![\w./-]){re.escape(str(Path.home()))}(?=/|\b)") if str(Path.home()) != "/" else None


class Run(NamedTuple):
    """One run folder.

    name: its path under the folder that the user named. config: flat, `{"task.seq_len": 64, ...}`, resolved.
    choices: config group -> choice. overrides: as typed, or None if they were not recorded. status: one of STATUSES;
    "unfinished" if no summary.json records how the run ended, "unreadable" if a file that describes the run cannot be read
    (`error` names it). curves: metric -> [(step, value)], including non-finite values. left_out: the first value of
    metrics.csv that is not a number, with its line, or "".
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
    written: float  # when its status was last written, seconds since the epoch
    left_out: str = ""

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
        """Whether data, code and environment are recorded; they are not if the run was killed or never began training."""
        return "environment" in self.summary

    @property
    def command(self) -> str | None:
        """The command that repeats this run, or None if the overrides are not known."""
        return None if self.overrides is None else command(self.overrides)

    def number(self, name: str) -> float | None:
        """A number of the summary, or None if it is missing or not finite."""
        value = self.summary.get(name)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return value if ok else None


def still_improving(run: Run) -> bool:
    """Whether the best validation in the last fifth of a run's steps is clearly better than the best before: by more than a
    percentage point of token accuracy, or, for text, by more than 1 % of the loss. Such a run ended too early to say where it
    would arrive."""
    of_text = run.number("val/bits_per_byte") is not None
    curve = [(step, -v if of_text else v) for step, v in run.curves.get("val/loss" if of_text else "val/token_accuracy", [])]
    bound = 0.8 * max((step for step, _ in curve), default=0)
    early, late = ([v for step, v in curve if (step > bound) == is_late and math.isfinite(v)] for is_late in (False, True))
    if not early or not late:
        return False
    return max(late) - max(early) > (0.01 * abs(max(early)) if of_text else 0.01)


def command(overrides: Iterable[str], multirun: bool = False) -> str:
    return " ".join(["python train.py", *["-m"][:multirun], *map(shlex.quote, overrides)])


def find_runs(places: Iterable[Path]) -> list[Run]:
    """Every run in `places` (run folders, sweeps, or folders of those), in natural order of the paths.

    ValueError if a place does not exist, if it has no run, or if no run can be read.
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
    runs = [_read_or_not(folder, name) for folder, name in found.items()]
    if all(run.status == "unreadable" for run in runs):
        raise ValueError(runs[0].error)
    return runs


def _read_or_not(folder: Path, name: str) -> Run:
    try:
        return read_run(folder, name)
    except ValueError as error:
        said = str(error).replace(f"{folder}/", f"{name}/")
        return Run(name, folder, {}, {}, None, {}, "unreadable", tidy(said), {}, 0.0)


def _walk(place: Path) -> list[Path]:
    folders = []
    for folder, children, files in walk(place):
        if "config.yaml" in files or "summary.json" in files or (folder / ".hydra/config.yaml").is_file():
            folders.append(folder)
            children.clear()
    return sorted(folders, key=lambda path: [(int(p), "") if p.isdigit() else (math.inf, p) for p in _parts(path)])


def _parts(path: Path) -> list[str]:
    return re.split(r"(\d+)", path.as_posix())


def not_started(places: Iterable[Path]) -> list[str]:
    """Notices about the jobs that sweep.json in `places` records and that have no folder yet."""
    missing, notices = [], []
    for place in map(Path, places):
        for record in sorted({*place.glob("sweep.json"), *place.glob("*/sweep.json")}):
            try:
                jobs = read_file(record)["jobs"]
                common = set.intersection(*({*job["overrides"]} for job in jobs)) if len(jobs) > 1 else set()
                for job in jobs:
                    if not (record.parent / Path(job["folder"]).name).is_dir():
                        missing.append(" ".join(override for override in job["overrides"] if override not in common))
            except (ValueError, KeyError, TypeError) as error:
                why = error if isinstance(error, ValueError) else f"{record} is not the record of a sweep"
                notices.append(f"It is not known which jobs have not started: {tidy(str(why))}.")
    if missing:
        jobs = "1 job" if len(missing) == 1 else f"{len(missing)} jobs"
        notices.insert(0, f"{jobs} of the sweep not started yet: {'; '.join(missing[:3])}{' …' * (len(missing) > 3)}.")
    return notices


def read_run(folder: Path, name: str) -> Run:
    """The run in `folder`. ValueError, which names the file, if a file that describes the run cannot be read."""
    resolved = folder / "config.yaml"
    composed = folder / ".hydra/config.yaml"
    config = flat(read_file(resolved)) if resolved.is_file() else _resolve(flat(_optional(composed, dict)))
    for key in NUMBERS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{resolved if resolved.is_file() else composed}: {key} is {value!r}, not a number")
    hydra = flat(_optional(folder / ".hydra/hydra.yaml", dict))
    overrides = _optional(folder / ".hydra/overrides.yaml", list) if (folder / ".hydra/overrides.yaml").is_file() else None
    choices = "hydra.runtime.choices."
    chosen = {key.removeprefix(choices): value for key, value in hydra.items() if key.startswith(choices)}
    typed = dict(text.lstrip("+").split("=", 1) for text in map(str, overrides or []) if "=" in text)
    choices = {g: str(chosen.get(g) or typed.get(g)) for g in ("model", "task", "size") if chosen.get(g) or typed.get(g)}
    summary, status, error = _summary(folder)
    curves, left_out = read_curves(folder / "metrics.csv")
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
        curves=curves,
        written=next((path.stat().st_mtime for path in marks if path.is_file()), 0.0),
        left_out=left_out,
    )


def _summary(folder: Path) -> tuple[dict, str, str]:
    path = folder / "summary.json"
    if not path.is_file():
        last = _last_line(folder / "train.log") or _last_line(folder / "output.log") or "(nothing)"
        return {}, "unfinished", f"no summary.json; the log ends: {last}"
    try:
        summary = read_file(path)
    except ValueError as error:
        return {}, "unfinished", str(error).replace(f"{folder}/", "")
    return summary, str(summary.get("status", "unfinished")), tidy(str(summary.get("error") or ""))


def _optional(path: Path, kind: type) -> dict | list:
    return read_file(path, kind) if path.is_file() else kind()


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    return tidy(next((line.strip() for line in reversed(lines) if line.strip()), ""))[:300]


def read_curves(path: Path) -> tuple[dict[str, list[tuple[int, float]]], str]:
    """metrics.csv by column, and the first value in it that is not a number. Such values are left out, and so is an incomplete
    last line of a killed run.
    """
    if not path.is_file():
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.reader(text[: text.rfind("\n") + 1].splitlines())
    curves: dict[str, list[tuple[int, float]]] = {}
    left_out = ""
    try:
        header = next(rows, [])
        at = header.index("step") if "step" in header else None
        for row in rows:
            if at is None or len(row) != len(header):
                continue
            for name, value in zip(header, row, strict=True):
                if value and name not in ("step", "epoch"):
                    try:
                        curves.setdefault(name, []).append((int(row[at]), float(value)))
                    except ValueError:
                        left_out = left_out or f"line {rows.line_num}, {name}={value!r} at step={row[at]!r}"
    except csv.Error as error:
        left_out = left_out or f"line {rows.line_num}: {error}"
    return curves, left_out


def _resolve(config: dict[str, object]) -> dict[str, object]:
    """Resolve `${seed}` and the like, for a run that ended before it wrote its resolved config; `${name:}` is left as it is."""
    whole = re.compile(r"^\$\{([\w.]+)\}$")
    for _ in range(3):
        for key, value in config.items():
            if isinstance(value, str) and (match := whole.match(value)) and match[1] in config:
                config[key] = config[match[1]]
    return config


def tidy(text: str) -> str:
    return PATHS.sub("~", text) if PATHS else text


def _module(target: object) -> str:
    """seqmix.mixers.lstm.LSTM -> lstm"""
    parts = str(target or "").split(".")
    return parts[-2] if len(parts) > 1 else "?"

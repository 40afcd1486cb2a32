"""Runs -> results. The unit of a result is (learning rate, picked on validation) x seeds.

    runs of one config, but for seed and learning rate      a cell
    learning rate of a cell     the smallest median of the best val/loss over the seeds that all rates have (where they share
                                none, over all); a seed that diverged counts as infinite
    number of a cell            median over the seeds at that rate, with a 95 % bootstrap interval of the median
                                (percentile method, Efron & Tibshirani 1993, §13.3; 2000 resamples from a fixed seed)

A seed without a finite number is left out of the median, and the result says so: `2 of 3 finite`. Runs that differ in
anything else than seed and learning rate, which includes the data they saw, the budget, the commit and the machine, are
never in one cell; `average_over` may say otherwise for code and environment, and then the cell is marked.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seqmix.identity import cell_config
from seqmix.report.notices import find_notices
from seqmix.report.runs import AVERAGED, FACTS, Run, command

RESAMPLES = 2000


class Metric(NamedTuple):
    """name: key in files and page. kind: accuracy, loss or cost. scale: from the summary's unit to the one shown."""

    name: str
    kind: str
    label: str
    unit: str
    better: str  # higher, lower, or neither
    scale: float
    log: bool
    read: Callable[[Run], float | None]


class Result(NamedTuple):
    """Of one number over the seeds of a cell; low and high are None where there are fewer than two finite values."""

    median: float | None
    low: float | None
    high: float | None
    values: tuple[float | None, ...]

    @property
    def finite(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass
class Cell:
    """One result. tried: learning rate -> its runs; lr: the one picked (None if every rate failed); used: its runs."""

    task: str
    model: str
    size: str
    seq_len: int | None
    config: dict[str, object]  # without seed, learning rate and what only watches; with the three facts
    runs: list[Run]
    tried: dict[float | None, list[Run]] = field(default_factory=dict)
    lr: float | None = None
    used: list[Run] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    variant: str = ""
    # eval.lengths: length -> metric -> its result there
    at_lengths: dict[int, dict[str, Result]] = field(default_factory=dict)
    mixed: tuple[str, ...] = ()  # facts that differ within, because the caller asked to average over them

    @property
    def series(self) -> str:
        return f"{self.model} {self.variant}".strip()

    @property
    def complete(self) -> int:
        return sum(run.status == "complete" for run in self.used)

    @property
    def statuses(self) -> dict[str, int]:
        """Of the runs at the rate that was picked, or of all where none was."""
        return dict(Counter(run.status for run in self.used))


class Difference(NamedTuple):
    """A key with several values in one task. by: what explains them. expected: part of what `model=` is to change."""

    task: str
    key: str
    by: str  # model, length, "model and length", or variant
    values: dict[str, str]  # of each model, length, ... : its value
    expected: bool


@dataclass
class Report:
    title: str
    runs: list[Run]
    cells: list[Cell]
    metrics: list[Metric]
    split: str  # test, or val where no run was tested
    differences: list[Difference]
    shared: dict[str, object]
    environments: list[tuple[dict, dict | None, int]]  # (environment, source, runs)
    notices: list[str]

    @property
    def statuses(self) -> dict[str, int]:
        return dict(Counter(run.status for run in self.runs).most_common())

    @property
    def failures(self) -> list[Run]:
        return [run for run in self.runs if run.status != "complete"]

    @property
    def models(self) -> list[str]:
        return sorted({cell.model for cell in self.cells})

    @property
    def tasks(self) -> list[str]:
        return sorted({cell.task for cell in self.cells})

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.seq_len for cell in self.cells if cell.seq_len is not None})


def build_report(runs: list[Run], title: str, average_over: Iterable[str] = (), notices: Iterable[str] = ()) -> Report:
    """notices: what else the reader must know, told first. ValueError for an `average_over` not of AVERAGED."""
    average_over = tuple(average_over)
    if unknown := [name for name in average_over if name not in AVERAGED]:
        raise ValueError(f"average_over must be of {', '.join(AVERAGED)}, got {unknown[0]!r}")
    kept, repeated = _newest([run for run in runs if run.status != "unreadable"])
    cells = _cells(kept, average_over)
    split = "test" if any(run.number("test/loss") is not None for run in kept) else "val"
    metrics = [m for m in _metrics(split) if any(m.read(run) is not None for run in kept)]
    for cell in cells:
        _pick_rate(cell)
        for metric in metrics:
            cell.results[metric.name] = summarize(_value(metric, run, cell) for run in cell.used)
        cell.at_lengths = _at_lengths(cell)
    differences = []
    for task in sorted({cell.task for cell in cells}):
        differences += _differences(task, [cell for cell in cells if cell.task == task])
    _name_variants(cells, differences)
    cells.sort(key=lambda c: (c.task, c.model, c.variant, c.seq_len or 0))
    environments = _environments(kept)
    report = Report(title, runs, cells, metrics, split, differences, _shared(cells), environments, [])
    report.notices = [*notices, *find_notices(report, repeated)]
    return report


def _value(metric: Metric, run: Run, cell: Cell) -> float | None:
    """None for a run that did not finish, even where a part of its numbers is known, and where no rate could be picked."""
    return metric.read(run) if run.status == "complete" and cell.lr in cell.tried else None


def _at_lengths(cell: Cell) -> dict[int, dict[str, Result]]:
    """What the complete runs of a cell scored at other lengths; a length at which all ran out of memory has no finite value."""
    runs = [run for run in cell.used if run.status == "complete"]
    lengths = {int(match[1]) for run in runs for key in run.summary if (match := re.fullmatch(r"length/(\d+)/.*", key))}
    names = ("token_accuracy", "sequence_accuracy")
    return {n: {name: summarize(run.number(f"length/{n}/{name}") for run in runs) for name in names} for n in sorted(lengths)}


def summarize(values: Iterable[float | None]) -> Result:
    """Median and 95 % bootstrap interval of the finite ones among `values`; None and non-finite ones are counted."""
    values = tuple(v if v is not None and math.isfinite(v) else None for v in values)
    finite = np.array([v for v in values if v is not None], dtype=np.float64)
    if len(finite) == 0:
        return Result(None, None, None, values)
    low = high = None
    if len(finite) > 1:
        low, high = np.percentile(np.median(finite[_resamples(len(finite))], axis=1), [2.5, 97.5]).tolist()
    return Result(float(np.median(finite)), low, high, values)


@functools.cache
def _resamples(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, n, size=(RESAMPLES, n))  # (R, n)


def _metrics(split: str) -> list[Metric]:
    def of(name: str) -> Callable[[Run], float | None]:
        return lambda run: run.number(name)

    def peak(run: Run) -> float | None:
        on_gpu = run.number("memory/peak_allocated_mib")
        return run.number("memory/peak_host_mib") if on_gpu is None else on_gpu

    token, whole = f"{split}/token_accuracy", f"{split}/sequence_accuracy"
    return [
        Metric("token_accuracy", "accuracy", f"Token accuracy ({split})", "%", "higher", 100.0, False, of(token)),
        Metric("sequence_accuracy", "accuracy", f"Sequence accuracy ({split})", "%", "higher", 100.0, False, of(whole)),
        Metric("loss", "loss", f"Loss ({split})", "nats per token", "lower", 1.0, False, of(f"{split}/loss")),
        Metric("bits_per_byte", "loss", f"Bits per byte ({split})", "bits", "lower", 1.0, False, of(f"{split}/bits_per_byte")),
        Metric("tokens_per_second", "cost", "Training speed", "tokens/s", "higher", 1.0, True, of("speed/tokens_per_second")),
        Metric("step_ms", "cost", "Time per step", "ms", "lower", 1.0, True, of("speed/step_ms")),
        Metric("peak_memory", "cost", "Peak memory", "MiB", "lower", 1.0, True, peak),
        Metric("state_bytes", "cost", "State", "bytes per row", "lower", 1.0, True, of("memory/state_bytes")),
        Metric("params", "cost", "Parameters", "", "neither", 1.0, True, of("memory/params")),
        Metric("seconds", "cost", "Run time", "s", "lower", 1.0, True, of("seconds")),
        Metric("steps_to_99", "cost", "Steps to 99 % of val tokens", "", "lower", 1.0, True, of("steps_to/0.99")),
    ]


# Runs into cells


def _newest(runs: list[Run]) -> tuple[list[Run], int]:
    """One run of each config, seed, rate and facts: the newest complete one, else the newest; and how many are left out.

    A run that left no facts behind is an unfinished try of one that did.
    """
    same = defaultdict(list)
    for run in runs:
        same[_frozen(_identity(run)), run.lr, run.seed].append(run)
    chosen = set()
    for group in same.values():
        by_facts = defaultdict(list)
        for run in group:
            if run.knows_its_facts or not any(other.knows_its_facts for other in group):
                by_facts[json.dumps([run.summary.get(name) for name in ("data", "source", "environment")])].append(run)
        chosen |= {id(max(tries, key=lambda run: (run.status == "complete", run.written))) for tries in by_facts.values()}
    kept = [run for run in runs if id(run) in chosen]
    return kept, len(runs) - len(kept)


def _identity(run: Run) -> dict[str, object]:
    """What makes two runs the same experiment, but for seed and rate."""
    return cell_config(run.config) | {"model": run.model, "task": run.task}


def _frozen(config: dict[str, object]) -> tuple:
    return tuple(sorted((key, repr(value)) for key, value in config.items()))


def _cells(runs: list[Run], average_over: tuple[str, ...]) -> list[Cell]:
    same_config = defaultdict(list)
    for run in runs:
        same_config[_frozen(_identity(run))].append(run)
    name_data = _DataNames()
    cells = []
    for group in same_config.values():
        parts = defaultdict(list)
        for run in group:
            facts = {"data": name_data(run), "code": code_name(run.summary), "environment": environment_name(run.summary)}
            apart = tuple((k, v) for k, v in facts.items() if k not in average_over)
            parts[apart if run.knows_its_facts else None].append(run)
        loose = parts.pop(None, [])  # left no facts behind: they belong to their siblings
        if loose:
            parts[max(parts, key=lambda key: len(parts[key])) if parts else tuple((name, None) for name in FACTS)] += loose
        for facts, members in parts.items():
            first = members[0]
            config = _identity(first) | dict(facts)
            named = {"code": code_name, "environment": environment_name}
            mixed = [k for k in average_over if len({named[k](run.summary) for run in members if run.knows_its_facts}) > 1]
            cells.append(Cell(first.task, first.model, first.size, first.seq_len, config, members, mixed=tuple(mixed)))
    return cells


class _DataNames:
    """The data of a task's definition: "1", or "2", "3" where the same definition met other data (a file that changed)."""

    def __init__(self):
        self.seen: dict[tuple, list[str]] = defaultdict(list)

    def __call__(self, run: Run) -> str:
        definition = _frozen({k: v for k, v in _identity(run).items() if k.startswith("task.")})
        facts = json.dumps(run.summary.get("data"), sort_keys=True)
        if facts not in self.seen[definition]:
            self.seen[definition].append(facts)
        return str(self.seen[definition].index(facts) + 1)


def code_name(summary: dict) -> str | None:
    """554999a, with +b261a1 after it where the working tree differed from the commit; None where it is not known."""
    source = summary.get("source")
    if not isinstance(source, dict) or not source.get("commit"):
        return None
    diff = source.get("diff_sha256")
    return source["commit"][:7] + (f"+{diff[:6]}" if diff else "")


def environment_name(summary: dict) -> str | None:
    facts = summary.get("environment")
    if not isinstance(facts, dict):
        return None
    cuda = f", CUDA {facts['cuda']}" if facts.get("cuda") and facts.get("device") != "cpu" else ""
    return f"{facts.get('device_name')}, torch {facts.get('torch')}{cuda}, triton {facts.get('triton')}"


def _pick_rate(cell: Cell) -> None:
    tried = defaultdict(list)
    for run in cell.runs:
        tried[run.lr].append(run)
    cell.tried = {lr: sorted(tried[lr], key=lambda r: (r.seed is None, r.seed)) for lr in sorted(tried, key=lambda x: x or 0)}
    common = set.intersection(*({run.seed for run in runs} for runs in cell.tried.values()))
    losses = {lr: rate_loss([r for r in runs if r.seed in common or not common]) for lr, runs in cell.tried.items()}
    ranked = sorted((loss, -len(cell.tried[lr]), lr) for lr, loss in losses.items() if loss is not None)
    if ranked and math.isfinite(ranked[0][0]):
        cell.lr = ranked[0][2]
    elif len(cell.tried) == 1:
        cell.lr = next(iter(cell.tried))
    cell.used = cell.tried[cell.lr] if cell.lr in cell.tried else cell.runs


def best_validation(run: Run) -> float | None:
    best = run.number("best/val/loss")
    return run.number("val/loss") if best is None else best


def rate_loss(runs: list[Run]) -> float | None:
    """Median over seeds of the best validation loss, infinite for a diverged one; None where no seed has come to an end."""
    losses = []
    for run in runs:
        if run.status in ("complete", "diverged"):
            loss = best_validation(run) if run.status == "complete" else None
            losses.append(math.inf if loss is None else loss)
    return statistics.median(losses) if losses else None


# What differs


EXPLAINED_BY = {
    "model": lambda cell: cell.model,
    "length": lambda cell: f"L={cell.seq_len}",
    "model and length": lambda cell: f"{cell.model}, L={cell.seq_len}",
}


def _values(cells: list[Cell], key: str, by: str) -> dict[str, set[str]]:
    values = defaultdict(set)
    for cell in cells:
        values[EXPLAINED_BY[by](cell)].add(show(cell.config.get(key)))
    return values


def _differences(task: str, cells: list[Cell]) -> list[Difference]:
    found = []
    keys = sorted({key for cell in cells for key in cell.config} - {"task.seq_len", "model", "task"})
    for key in keys:
        with_key = [c for c in cells if not (key in FACTS and c.config.get(key) is None)]  # not known is no difference
        if len({repr(c.config.get(key)) for c in with_key}) < 2:
            continue
        explained = (by for by in EXPLAINED_BY if all(len(v) == 1 for v in _values(with_key, key, by).values()))
        by = next(explained, "variant")
        values = _values(with_key, key, "model" if by == "variant" else by)
        listed = {name: ", ".join(sorted(values[name])) for name in sorted(values, key=_natural)}
        found.append(Difference(task, key, by, listed, key.startswith(("model.", "channel_mixer")) and by == "model"))
    return found


def designs(cells: list[Cell]) -> dict[str, dict[str, str]]:
    """What `model=` has set, by model: keys of conf/model, without those that are null or only Hydra's."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        for key, value in cell.config.items():
            if key.startswith(("model.", "channel_mixer")) and value is not None and not key.endswith("._partial_"):
                name = {"model._target_": "mixer", "channel_mixer._target_": "channel_mixer"}.get(
                    key, key.removeprefix("model.")
                )
                text = show(value).removeprefix("seqmix.mixers.").removeprefix("seqmix.channel_mixers.")
                found[cell.model][name].add(text)
    first = ("mixer", "channel_mixer")
    return {
        model: {name: " | ".join(sorted(values[name])) for name in sorted(values, key=lambda n: (n not in first, n))}
        for model, values in sorted(found.items())
    }


def show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _natural(text: str) -> tuple:
    digits = "".join(ch for ch in text.split("L=")[-1] if ch.isdigit())
    return text.split("L=")[0], int(digits or 0), text


def _name_variants(cells: list[Cell], differences: list[Difference]) -> None:
    """A cell's variant names the values that neither its model nor its length explains."""
    open_keys = defaultdict(list)
    for difference in differences:
        if difference.by == "variant":
            open_keys[difference.task].append(difference.key)
    for cell in cells:
        keys = open_keys[cell.task]
        # `small` says what size.d_model=128 and size.n_layer=4 do, where no size has two meanings
        mates = [c for c in cells if c.task == cell.task]
        meaning = {(c.size, tuple(show(c.config.get(k)) for k in keys if k.startswith("size."))) for c in mates}
        by_name = any(k.startswith("size.") for k in keys) and len(meaning) == len({name for name, _ in meaning})
        words = [cell.size] if by_name else []
        for key in keys:
            if by_name and key.startswith("size."):
                continue
            # of a key that only some models have, the others have nothing to say
            if key in cell.config and not (key in FACTS and cell.config[key] is None):
                words.append(f"{key.split('.')[-1]}={show(cell.config[key])}")
        cell.variant = " ".join(words)


def _shared(cells: list[Cell]) -> dict[str, object]:
    keys = set.intersection(*({*cell.config} for cell in cells)) - {*FACTS, "model", "task", "task.seq_len"}
    return {key: cells[0].config[key] for key in sorted(keys) if len({repr(cell.config[key]) for cell in cells}) == 1}


def _environments(runs: list[Run]) -> list[tuple[dict, dict | None, int]]:
    count: Counter = Counter()
    for run in runs:
        if isinstance(run.summary.get("environment"), dict):
            count[json.dumps([run.summary["environment"], run.summary.get("source")], sort_keys=False)] += 1
    return [(*json.loads(text), n) for text, n in count.most_common()]


def commands(cell: Cell) -> list[str]:
    """What to type for the runs of a cell: one multirun where the seed alone differs, else one line a run."""
    known = [run for run in cell.used if run.overrides is not None]
    if len(known) > 1:
        rest = {tuple(o for o in run.overrides if not o.startswith("seed=")) for run in known}
        seeds = [next((o.removeprefix("seed=") for o in run.overrides if o.startswith("seed=")), None) for run in known]
        if len(rest) == 1 and None not in seeds:
            return [command([*rest.pop(), f"seed={','.join(seeds)}"], multirun=True)]
    return [run.command for run in known]


def fingerprint(report: Report) -> str:
    """Of everything the report says about its runs, for a stable id."""
    said = [[c.series, c.seq_len, c.lr, [r._asdict() for r in c.results.values()]] for c in report.cells]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]

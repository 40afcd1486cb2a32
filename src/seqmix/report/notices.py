"""What the reader of a report must be told, in sentences: runs left out, and what makes its numbers hard to compare."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from seqmix.report.runs import AVERAGED, FACTS, still_improving

if TYPE_CHECKING:
    from seqmix.report.results import Cell, Report


def find_notices(report: Report, repeated: int) -> list[str]:
    """repeated: how many runs were left out because a newer one has the same config and seed."""
    cells, out = report.cells, []
    if broken := [run.error for run in report.runs if run.status == "unreadable"]:
        out.append(f"Runs that cannot be read are in no cell: {_some(broken, 3, '; ')}.")
    if broken := [f"{run.name}/metrics.csv ({run.left_out})" for run in report.runs if run.left_out]:
        out.append(f"Values that are not numbers are left out of the curves: {_some(broken, 3, '; ')}.")
    out += _unlike(report)
    for name in AVERAGED:
        if mixed := [c for c in cells if name in c.mixed]:
            out.append(f"{_count(len(mixed), 'cell')} averaged over different {name}, as asked; marked ‡.")
    if any(c.config.get("code") is None and "code" not in c.mixed and c.complete for c in cells):
        out.append("Some runs have no commit recorded: whether they ran the same code is not known.")
    if part := [f"{_at(c)} {c.complete} of {len(c.used)}" for c in cells if 0 < c.complete < len(c.used)]:
        out.append(f"Seeds without a finite result: {_some(part, 6)}. Medians are of the others.")
    steps = {id(c): sorted({run.number("steps") for run in c.used if run.status == "complete"} - {None}) for c in cells}
    if uneven := [f"{_at(c)} {steps[id(c)][0]:.0f} to {steps[id(c)][-1]:.0f}" for c in cells if len(steps[id(c)]) > 1]:
        out.append(f"Seeds of one cell were trained for different numbers of steps: {_some(uneven, 6)}.")
    growing = {id(c): sum(map(still_improving, c.used)) for c in cells}
    if named := [f"{_at(c)} {growing[id(c)]} of {len(c.used)}" for c in cells if growing[id(c)]]:
        out.append(f"Still improving in the last fifth of their steps, so that more steps would give more: {_some(named, 12)}.")
    if shared := sum(bool(run.summary.get("job", {}).get("mps")) for c in cells for run in c.used):
        why = "shared a GPU with other jobs (MPS), so that their speeds and run times are not those of a run alone"
        out.append(f"{_count(shared, 'run')} {why}.")
    if halved := [run.name for run in report.runs if "micro_batch" in run.summary]:
        why = "ran in smaller micro-batches after running out of memory: same steps, other costs"
        out.append(f"{_count(len(halved), 'run')} {why} ({_some(halved, 4)}).")
    sizes = Counter(len(c.used) for c in cells if c.lr in c.tried)
    if len(sizes) > 1:
        named = ", ".join(f"{_count(n, 'cell')} with {seeds}" for seeds, n in sorted(sizes.items()))
        out.append(f"Cells have different numbers of seeds: {named}.")
    elif max(sizes, default=0) == 1:
        out.append("One seed a cell: there are no intervals, and a small difference means nothing.")
    out += _about_rates(cells)
    if repeated:
        why = "repeat the config and seed of another and are left out; the newest complete one counts"
        out.append(f"{_count(repeated, 'run')} {why}.")
    return out


def _unlike(report: Report) -> list[str]:
    """Data, code, machine, budget and size that are not the same throughout."""
    out = []
    for d in report.differences:
        where = f"{d.task}: " if len(report.tasks) > 1 else ""
        values = "; ".join(f"{name}: {value}" for name, value in d.values.items())
        if d.key in FACTS:
            what = {"data": "data", "code": "code", "environment": "hardware or library versions"}[d.key]
            if d.by == "variant":
                out.append(f"{where}runs with different {what} are kept apart, not averaged ({values}).")
            else:
                out.append(f"{where}{what} differs with the {d.by}: it is not the {d.by} alone that is compared ({values}).")
        elif "model" in d.by and not d.expected:
            out.append(f"{where}`{d.key}` is not the same for all models ({values}).")
    sizes = defaultdict(set)
    for cell in report.cells:
        sizes[cell.model] |= {run.number("memory/params") for run in cell.runs} - {None}
    ranges = {model: (min(some), max(some)) for model, some in sorted(sizes.items()) if some}
    if len(ranges) > 1 and max(high for _, high in ranges.values()) > 1.1 * min(low for low, _ in ranges.values()):
        named = [f"{m} {low:,.0f}" + (f" to {high:,.0f}" if high > low else "") for m, (low, high) in ranges.items()]
        out.append(f"Models are not matched in parameters: {', '.join(named)}.")
    return out


def _about_rates(cells: list[Cell]) -> list[str]:
    out, grids = [], defaultdict(set)
    for c in cells:
        grids[c.series] |= c.tried.keys() - {None}
    if len({frozenset(grid) for grid in grids.values()}) > 1:
        named = "; ".join(f"{name}: {', '.join(f'{lr:g}' for lr in sorted(grid))}" for name, grid in grids.items())
        out.append(f"Not every model was tried with the same learning rates ({named}).")
    at_edge = [c for c in cells if len(c.tried) > 1 and c.lr is not None and c.lr in (min(c.tried), max(c.tried))]
    if at_edge:
        edges = Counter((c.series, c.lr) for c in at_edge)
        named = ", ".join(f"{series} {lr:g} ({_count(n, 'cell')})" for (series, lr), n in sorted(edges.items()))
        out.append(f"The best learning rate is the smallest or largest tried, so a better one may lie beyond: {named}.")
    return out


def _some(names: list[str], most: int, between: str = ", ") -> str:
    return between.join(names[:most]) + (" …" if len(names) > most else "")


def _at(cell: Cell) -> str:
    return f"{cell.series} L={cell.seq_len}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"

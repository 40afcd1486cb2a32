"""A Report as Markdown, figures and CSV."""

from __future__ import annotations

import csv
import io

from seqmix.figures import figure
from seqmix.report.results import Cell, Metric, Report, Result, code_name, commands, designs
from seqmix.report.runs import still_improving

LABELS = {
    "oom": "out of memory",
    "diverged": "diverged",
    "killed": "killed",
    "interrupted": "interrupted",
    "failed": "failed",
    "unfinished": "unfinished",
    "unreadable": "unreadable",
}


def number(value: float | None, metric: Metric) -> str:
    """`value` in the metric's unit: percentages with one decimal, 262k tokens/s, bytes and parameters in full."""
    if value is None:
        return "–"
    value *= metric.scale
    if metric.unit == "%":
        return f"{value:.1f}"
    if metric.name == "tokens_per_second" and value >= 1e4:
        return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value < 1e5 else f"{value / 1e3:.0f}k"
    if metric.name in ("state_bytes", "params") or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{digits}f}" if abs(value) >= 0.001 else f"{value:.2g}"


def interval(result: Result, metric: Metric) -> str:
    """`[95.0, 98.8]`; "" if there is none, or if both ends are equal as printed."""
    if result.low is None:
        return ""
    low, high = number(result.low, metric), number(result.high, metric)
    return "" if low == high else f"[{low}, {high}]"


def words(result: Result, metric: Metric, cell: Cell) -> str:
    """`97.3 [95.0, 98.8]`, with `(2 of 3 finite)` if some values are missing; the statuses of the runs if there is no value."""
    if result.finite == 0:
        return statuses(cell) if cell.complete == 0 else "–"
    mark = "‡" if cell.mixed else ""
    part = finite(result, metric, cell)
    return " ".join(filter(None, [number(result.median, metric) + mark, interval(result, metric), part and f"({part})"]))


def finite(result: Result, metric: Metric, cell: Cell) -> str:
    """`2 of 3 finite`; "" if all are, and for a cost that all complete runs have, since the column of runs counts these."""
    if result.finite == len(result.values) or (metric.kind == "cost" and result.finite == cell.complete):
        return ""
    return f"{result.finite} of {len(result.values)} finite"


def statuses(cell: Cell) -> str:
    counts = {LABELS.get(status, status): n for status, n in cell.statuses.items()}
    return next(iter(counts), "") if len(counts) == 1 else ", ".join(f"{n} {label}" for label, n in counts.items())


def headline(report: Report) -> str:
    """`24 runs: 22 complete, 1 killed, 1 out of memory`"""
    parts = ", ".join(f"{n} {LABELS.get(status, status)}" for status, n in report.statuses.items())
    return f"{len(report.runs)} run{'s' * (len(report.runs) != 1)}: {parts}"


def markdown(report: Report) -> str:
    """A matrix of accuracy per task, all cells with their costs, then what differs, the failures, and the commands."""
    out = [f"# {report.title}", "", headline(report) + ".", ""]
    out += [f"> {notice}  " for notice in report.notices] + [""] * bool(report.notices)
    out += [
        "Medians over seeds at the learning rate with the best validation loss; 95 % bootstrap intervals of the median.",
        "",
    ]
    for name in figures(report):
        out += [f"![{name.removesuffix('.svg')}]({name})", ""]
    for task in report.tasks:
        mine = [cell for cell in report.cells if cell.task == task]
        shown = [m for m in report.metrics if m.kind == "accuracy"] or [m for m in report.metrics if m.kind == "loss"]
        for metric in [m for m in shown if any(c.results[m.name].finite for c in mine)][:2]:
            lengths = sorted({c.seq_len for c in mine if c.seq_len is not None})
            out += [f"## {task}: {_title(metric)}", "", *_row(["", *(f"L={n}" for n in lengths)])]
            out += _row(["---", *("--:" for _ in lengths)])
            for series in sorted({c.series for c in mine}):
                at = {c.seq_len: c for c in mine if c.series == series}
                out += _row([series, *(words(at[n].results[metric.name], metric, at[n]) if n in at else "" for n in lengths)])
            out.append("")
    for (task, trained), cells in _extrapolations(report).items():
        lengths = sorted({n for cell in cells for n in cell.at_lengths})
        for metric in [m for m in report.metrics if m.kind == "accuracy"]:
            out += [f"## {task}, trained at L={trained}: {_title(metric)} at other lengths", ""]
            out += _row(["", *(f"L={n}" for n in lengths)]) + _row(["---", *("--:" for _ in lengths)])
            for cell in cells:
                at = {n: results[metric.name] for n, results in cell.at_lengths.items()}
                out += _row([cell.series, *(_beyond(at.get(n), metric) for n in lengths)])
            out.append("")
    out += ["## All cells", "", *_row(["task", "model", "L", "lr", "runs", *map(_title, report.metrics)])]
    out += _row(["---", "---", "--:", "--:", "--:", *("--:" for _ in report.metrics)])
    for cell in report.cells:
        values = [words(cell.results[m.name], m, cell) for m in report.metrics]
        lr = "–" if cell.lr is None else f"{cell.lr:g}" + (f" of {len(cell.tried)}" if len(cell.tried) > 1 else "")
        out += _row([cell.task, cell.series, cell.seq_len, lr, f"{cell.complete} of {len(cell.used)}", *values])
    out += ["", "## What `model=` sets", "", *_row(["model", "values"]), *_row(["---"] * 2)]
    for model, values in designs(report.cells).items():
        out += _row([model, ", ".join(f"{key}={value}" for key, value in values.items())])
    if also := [d for d in report.differences if not d.expected]:
        out += ["", "## Other differences", "", *_row(["task", "key", "varies with", "values"]), *_row(["---"] * 4)]
        for d in also:
            out += _row([d.task, f"`{d.key}`", d.by, "; ".join(f"{name}: {value}" for name, value in d.values.items())])
    if report.failures:
        out += ["", "## Runs without a result", "", *_row(["run", "settings", "status", "error"]), *_row(["---"] * 4)]
        for run in report.failures:
            what = f"{run.model} {run.task} L={run.seq_len} seed={run.seed}"
            out += _row([f"`{run.name}`", what, LABELS.get(run.status, run.status), run.error[:200]])
    out += ["", "## Environment", "", *_row(["runs", "device", "threads", "versions", "code"]), *_row(["--:", *["---"] * 4])]
    for facts, source, n in report.environments:
        versions = ", ".join(f"{k} {facts[k]}" for k in ("python", "torch", "cuda", "triton", "lightning") if facts.get(k))
        code = code_name({"source": source}) or "not recorded"
        out += _row([n, facts.get("device_name"), facts.get("threads"), versions, code])
    out += ["", "## Commands", "", "```"]
    for cell in report.cells:
        out += commands(cell) or [f"# {cell.series} {cell.task} L={cell.seq_len}: command not recorded"]
    return "\n".join([*out, "```", ""])


def _beyond(result: Result | None, metric: Metric) -> str:
    if result is None:
        return ""
    if result.median is None:
        return LABELS["oom"]
    return f"{number(result.median, metric)} {interval(result, metric)}".rstrip()


def _extrapolations(report: Report) -> dict[tuple[str, int], list[Cell]]:
    """(task, training length) -> the cells whose weights were tested at other lengths, too (eval.lengths)."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in report.cells:
        if cell.at_lengths and cell.seq_len is not None:
            found.setdefault((cell.task, cell.seq_len), []).append(cell)
    return found


def figures(report: Report) -> dict[str, str]:
    """File name -> an SVG of the first accuracy of a task: against the length that runs were trained at, where there are
    several, and against the lengths that weights were tested at."""
    drawn = {}
    for metric in [m for m in report.metrics if m.kind == "accuracy"][:1]:
        for task in report.tasks:
            cells = [c for c in report.cells if c.task == task and c.seq_len is not None]
            if len({c.seq_len for c in cells if c.results[metric.name].finite}) < 2:
                continue
            points = [(c.series, c.seq_len, c.results[metric.name], statuses(c)) for c in cells]
            seeds = sorted({len(c.used) for c in cells})
            many = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' * (seeds[0] != 1)}"
            caption = [f"Medians of {many} at the best learning rate; bars: 95 % bootstrap intervals of the median."]
            curves, missing, bars = _curves(points, metric)
            title = f"{task}: {metric.label.lower()}"
            svg = figure(title, "length, log scale", metric.unit, curves, missing, caption, bars, percent=True)
            drawn[f"{metric.name}_{task}.svg"] = svg
        for (task, trained), cells in _extrapolations(report).items():
            points = [(c.series, trained, c.results[metric.name], statuses(c)) for c in cells if trained not in c.at_lengths]
            points += [(c.series, n, at[metric.name], LABELS["oom"]) for c in cells for n, at in c.at_lengths.items()]
            caption = ["Medians over seeds of weights trained at one length; bars: 95 % bootstrap intervals of the median."]
            curves, missing, bars = _curves(points, metric)
            mark, title = (trained, "training length"), f"{task}, trained at L={trained}: {metric.label.lower()}"
            axis = "length in the test, log scale"
            svg = figure(title, axis, metric.unit, curves, missing, caption, bars, percent=True, mark=mark)
            drawn[f"{metric.name}_{task}_trained_at_{trained}.svg"] = svg
    return drawn


def _curves(points: list[tuple[str, int, Result, str]], metric: Metric) -> tuple[dict, dict, dict]:
    """(series, length, result, why there is none) -> curves, what is missing, and intervals, as `figure` takes them."""
    curves, missing, intervals = ({series: {} for series, *_ in points} for _ in range(3))
    for series, length, result, why in points:
        if result.median is None:
            missing[series][length] = why
        else:
            curves[series][length] = metric.scale * result.median
        if result.low is not None:
            intervals[series][length] = metric.scale * result.low, metric.scale * result.high
    return curves, missing, intervals


def _title(metric: Metric) -> str:
    return f"{metric.label}, {metric.unit}" if metric.unit else metric.label


def _row(values: list) -> list[str]:
    return ["| " + " | ".join(" ".join(str(v).replace("|", "\\|").split()) for v in values) + " |"]


def cells_csv(report: Report) -> str:
    """One row per cell: median, interval and number of finite seeds of every metric, in the units of summary.json."""
    names = [m.name for m in report.metrics]
    head = ["task", "model", "variant", "size", "seq_len", "lr", "rates_tried", "seeds", "complete", "still_improving"]
    head.append("status")
    head += [f"{name}{end}" for name in names for end in ("", "_low", "_high", "_finite")]
    rows = []
    for cell in report.cells:
        row = [cell.task, cell.model, cell.variant, cell.size, cell.seq_len, cell.lr, len(cell.tried), len(cell.used)]
        row += [cell.complete, sum(map(still_improving, cell.used))]
        row.append(" ".join(f"{status}:{n}" for status, n in cell.statuses.items()))
        for name in names:
            r = cell.results[name]
            row += [r.median, r.low, r.high, r.finite]
        rows.append(row)
    return _csv(head, rows)


def runs_csv(report: Report) -> str:
    """One row per run, including those without a result: its name, settings, status, numbers and command."""
    head = ["run", "task", "model", "size", "seq_len", "seed", "lr", "status", "steps", "code"]
    head += [*(m.name for m in report.metrics), "error", "command"]
    rows = []
    for run in report.runs:
        row = [run.name, run.task, run.model, run.size, run.seq_len, run.seed, run.lr, run.status, run.summary.get("steps")]
        rows.append([*row, code_name(run.summary), *(m.read(run) for m in report.metrics), run.error, run.command])
    return _csv(head, rows)


def _csv(head: list[str], rows: list[list]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return file.getvalue()

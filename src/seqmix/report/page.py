"""A Report as one self-contained HTML page: style, script and numbers are written into it.

This file makes the tables as HTML, so that they work without JavaScript and can be searched and printed. page.js draws the
charts as SVG at the width of the screen, from the numbers in `payload`: text keeps its size on a phone, and scales follow the
filters. There is no plotting library: the page needs 300 lines of one, and a library has from 50 kB to 4.5 MB.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from seqmix.report import tables
from seqmix.report.results import Cell, Metric, Report, best_validation, code_name, commands, designs, show, summarize
from seqmix.report.runs import Run

HERE = Path(__file__).parent
CURVES = ("val/token_accuracy", "val/sequence_accuracy", "val/loss", "val/bits_per_byte", "train/loss")
MAX_POINTS = 160  # of one curve
MAX_NUMBERS = 400_000  # of all curves together: 2.5 MB


def page(report: Report, command: str) -> str:
    """The page. command: the command that made it, shown at the end of the page."""
    parts = {
        "title": _text(report.title),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "headline": _headline(report),
        "notices": _notices(report),
        "table": _table(report),
        "failures": _failures(report),
        "fairness": _fairness(report),
        "environment": _environment(report),
        "command": _text(command),
        # `<` would let a text end the script element
        "data": json.dumps(payload(report), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    return re.sub(r"<!--(\w+)-->", lambda slot: parts[slot[1]], (HERE / "page.html").read_text(encoding="utf-8"))


# Numbers for the charts


def payload(report: Report) -> dict:
    """The numbers that page.js draws, in the units shown, with 5 digits; the CSV files have all digits."""
    number_of = {id(cell): i for i, cell in enumerate(report.cells)}
    return {
        "tasks": report.tasks,
        "models": report.models,
        "lengths": report.lengths,
        "metrics": [{key: value for key, value in m._asdict().items() if key not in ("read", "scale")} for m in report.metrics],
        "cells": [_cell(report, cell) for cell in report.cells],
        "chance": _chance(report.cells),
        "curves": _curves(report.cells),
        "rates": [
            {"cell": number_of[id(cell)], "points": [_rate(lr, runs) for lr, runs in cell.tried.items() if lr is not None]}
            for cell in report.cells
            if len(cell.tried) > 1
        ],
    }


def _cell(report: Report, cell: Cell) -> dict:
    values = {}
    for m in report.metrics:
        r = cell.results[m.name]
        if r.finite:
            values[m.name] = [_short(v, m.scale) for v in (r.median, r.low, r.high)] + [[_short(v, m.scale) for v in r.values]]
    return {
        "task": cell.task,
        "model": cell.model,
        "series": cell.series,
        "length": cell.seq_len,
        "lr": cell.lr,
        "seeds": [run.seed for run in cell.used],
        "complete": cell.complete,
        "status": tables.statuses(cell) if cell.complete < len(cell.used) else "",
        "mixed": bool(cell.mixed),
        "values": values,
    }


def _short(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else float(f"{value * scale:.5g}")


def _chance(cells: list[Cell]) -> dict[str, dict[str, dict[str, float]]]:
    """task -> token_accuracy or sequence_accuracy -> length -> %"""
    out: dict = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        for name in ("token_accuracy", "sequence_accuracy"):
            for run in cell.used:
                if (value := run.number(f"chance/{name}")) is not None:
                    out[cell.task][name][str(cell.seq_len)] = _short(value, 100)
    return out


def _rate(lr: float, runs: list[Run]) -> list:
    """[lr, median, low, high, finite, of] of the best validation loss; only complete runs have one."""
    r = summarize(best_validation(run) if run.status == "complete" else None for run in runs)
    return [lr, *map(_short, r[:3]), r.finite, len(runs)]


def _curves(cells: list[Cell]) -> list[dict]:
    names = [name for name in CURVES if any(name in run.curves for cell in cells for run in cell.used)]
    points = max(24, min(MAX_POINTS, MAX_NUMBERS // max(1, 5 * len(cells) * len(names))))
    out = []
    for i, cell in enumerate(cells):
        for name in names:
            if curve := band([run.curves.get(name, []) for run in cell.used], points, 100 if "accuracy" in name else 1):
                out.append({"cell": i, "name": name, "of": len(cell.used), **curve})
    return out


def band(curves: list[list[tuple[int, float]]], points: int, scale: float = 1.0) -> dict[str, list] | None:
    """Median, minimum and maximum over seeds at each step where a seed has a finite value; None if there is no such step.

    At most `points` steps are kept, evenly spaced, including the first and the last. "n" is the number of seeds per step.
    """
    steps = sorted({step for curve in curves for step, _ in curve})
    if len(steps) > points:
        steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, points).round().astype(int))]
    at = {step: column for column, step in enumerate(steps)}
    values = np.full((len(curves), len(steps)), np.nan)  # (seeds, steps)
    for row, curve in enumerate(curves):
        for step, value in curve:
            if step in at:
                values[row, at[step]] = value * scale
    values[~np.isfinite(values)] = np.nan
    some = np.isfinite(values).any(0)
    if not some.any():
        return None
    values = values[:, some]
    shorten = lambda array: [float(f"{v:.4g}") for v in array.tolist()]  # noqa: E731
    out = {"x": [step for step, ok in zip(steps, some.tolist(), strict=True) if ok], "mid": shorten(np.nanmedian(values, 0))}
    if len(curves) > 1:
        out |= {"low": shorten(np.nanmin(values, 0)), "high": shorten(np.nanmax(values, 0))}
        out["n"] = np.isfinite(values).sum(0).tolist()
    return out


# HTML


def _text(value: object) -> str:
    return html.escape("" if value is None else str(value))


def _code(text: str) -> str:
    """Escaped text, with `x` as <code>."""
    parts = _text(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _pair(name: object, value: object) -> str:
    return f'<span class="pair">{_text(name)} <b>{_text(value)}</b></span>'


def _pairs(values: Mapping[str, object]) -> str:
    return " ".join(_pair(name, value) for name, value in values.items())


def _status(run: Run) -> str:
    return _text(tables.LABELS.get(run.status, run.status))


def _copy(command: str | None) -> str:
    return f'<div class="copy"><code>{_text(command)}</code><button>copy</button></div>' if command else ""


def _plain(rows: Iterable[str], head: str = "", id: str = "") -> str:
    """A table. head: columns like `Runs:num|Device`, each with its CSS class after a colon."""
    cells = "".join(f'<th class="{kind}">{name}</th>' for name, _, kind in (h.partition(":") for h in head.split("|")))
    thead = f"<thead><tr>{cells}</tr></thead>" if head else ""
    name = f' id="{id}"' if id else ""
    return f'<div class="scroll"><table class="plain"{name}>{thead}<tbody>{"".join(rows)}</tbody></table></div>'


def _headline(report: Report) -> str:
    parts = [f"<b>{len(report.runs)}</b> run{'s' * (len(report.runs) != 1)}"]
    for status, n in report.statuses.items():
        label = _text(tables.LABELS.get(status, status))
        parts.append(f'<span class="{"good" if status == "complete" else "bad"}">{n} {label}</span>')
    if seeds := sorted({len(cell.used) for cell in report.cells if cell.lr in cell.tried}):
        parts.append(f"{'–'.join(map(str, sorted({seeds[0], seeds[-1]})))} seed{'s' * (seeds[-1] != 1)} per cell")
    return " · ".join(parts)


def _notices(report: Report) -> str:
    items = "".join(f"<li>{_code(notice)}</li>" for notice in report.notices)
    return f'<aside class="notices"><h2>Read this first</h2><ul>{items}</ul></aside>' if items else ""


def _table(report: Report) -> str:
    sort = '<th scope="col" class="{}" aria-sort="none"><button>{}</button></th>'
    head = sort.format("", "Model") + "".join(sort.format("num", name) for name in ("Length", "Rate", "Runs"))
    for m in report.metrics:
        unit = f"<small>{_text(m.unit)}</small>" if m.unit else ""
        head += sort.format("num", _text(m.label) + {"higher": " ↑", "lower": " ↓", "neither": ""}[m.better] + unit)
    head += '<th><span class="away">Details</span></th>'
    rows = "".join(_rows(report, cell) for cell in report.cells)
    return f'<table id="cells"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _rows(report: Report, cell: Cell) -> str:
    """The row of a cell, and the row of details below it, which the button opens."""
    keys = f'data-task="{_text(cell.task)}" data-model="{_text(cell.model)}" data-length="{cell.seq_len}"'
    task = f"<small>{_text(cell.task)}</small>" if len(report.tasks) > 1 else ""
    name = _swatch(report, cell.model) + _text(cell.series) + ("‡" if cell.mixed else "") + task
    rates = f"<small>of {len(cell.tried)}</small>" if len(cell.tried) > 1 else ""
    less = f'<small class="bad">{_text(tables.statuses(cell))}</small>' if cell.complete < len(cell.used) else ""
    row = f'<th scope="row" data-v="{_text(cell.series)}">{name}</th>'
    row += f'<td class="num" data-v="{cell.seq_len or ""}">{_text(cell.seq_len)}</td>'
    row += f'<td class="num" data-v="{cell.lr or ""}">{"–" if cell.lr is None else f"{cell.lr:g}"}{rates}</td>'
    row += f'<td class="num" data-v="{cell.complete}">{cell.complete} of {len(cell.used)}{less}</td>'
    row += "".join(_value(cell, m, i == 0) for i, m in enumerate(report.metrics))
    row += '<td><button class="open" aria-expanded="false">details</button></td>'
    more = f'<td colspan="{5 + len(report.metrics)}">{_more(report, cell)}</td>'
    return f'<tr class="cell" {keys}>{row}</tr><tr class="more" hidden>{more}</tr>'


def _swatch(report: Report, model: str) -> str:
    return f'<i class="swatch" data-model="{report.models.index(model) % 8}"></i>'


def _value(cell: Cell, metric: Metric, first: bool) -> str:
    """One number of a cell. Without a number: a dash, or in the first column the status of the runs if none is complete."""
    r = cell.results[metric.name]
    if r.median is None:
        kind, label = ("none", tables.statuses(cell)) if cell.complete == 0 and first else ("", "–")
        return f'<td class="num {kind}" data-v=""><span>{_text(label)}</span></td>'
    small = " ".join(filter(None, [tables.interval(r, metric), tables.finite(r, metric, cell)]))
    small = f"<small>{_text(small)}</small>" if small else ""
    return f'<td class="num" data-v="{r.median!r}">{tables.number(r.median, metric)}{small}</td>'


def _more(report: Report, cell: Cell) -> str:
    typed = "".join(map(_copy, commands(cell)))
    typed = typed or "<p>The command was not recorded: there is no <code>.hydra/overrides.yaml</code>.</p>"
    shown = [m for m in report.metrics if m.kind != "cost"][:2]
    items = []
    for run in cell.runs:
        numbers = ", ".join(f"{m.label} {tables.number(m.read(run), m)}" for m in shown if m.read(run) is not None)
        what = _text(numbers) if run.status == "complete" else f'<span class="bad">{_status(run)}</span> {_text(run.error)}'
        other = "" if run in cell.used else " (another learning rate)"
        items.append(f"<li><code>{_text(run.name)}</code> seed {run.seed}, lr {show(run.lr)}{other}: {what}</li>")
    return f'{typed}<ul class="runs">{"".join(items)}</ul>'


def _failures(report: Report) -> str:
    if not report.failures:
        return "<p>All runs are complete.</p>"
    rows = []
    for run in report.failures:
        keys = f'data-task="{_text(run.task)}" data-model="{_text(run.model)}" data-length="{run.seq_len}"'
        what = f"{_text(run.model)}<small>{_text(run.task)}, L={run.seq_len}, seed {run.seed}, lr {show(run.lr)}</small>"
        rows.append(
            f'<tr {keys}><td><code>{_text(run.name)}</code></td><th scope="row">{what}</th>'
            f'<td><span class="chip bad">{_status(run)}</span></td>'
            f'<td class="why">{_text(run.error[:400])}{_copy(run.command)}</td></tr>'
        )
    return '<p class="empty" hidden>None with these filters.</p>' + _plain(rows, "Run|Settings|Status|Error", "failures")


def _fairness(report: Report) -> str:
    rows = []
    for model, values in designs(report.cells).items():
        runs = [run for cell in report.cells if cell.model == model for run in cell.runs]
        counts = sorted({run.number("memory/params") for run in runs} - {None})
        counted = {"parameters": " | ".join(f"{n:,.0f}" for n in counts[:6])} if counts else {}
        name = f'<th scope="row">{_swatch(report, model)}{_text(model)}</th>'
        rows.append(f'<tr data-model="{_text(model)}">{name}<td>{_pairs(values | counted)}</td></tr>')
    out = f"<h3>Settings of each model</h3>{_plain(rows)}<h3>Other differences</h3>"
    rows = [
        f'<tr data-task="{_text(d.task)}"><th scope="row"><code>{_text(d.key)}</code><small>{_text(d.task)}</small></th>'
        f"<td>varies with the {_text(d.by)}</td><td>{_pairs(d.values)}</td></tr>"
        for d in report.differences
        if not d.expected
    ]
    out += _plain(rows) if rows else "<p>Runs of a task differ only in model, length, seed and learning rate.</p>"
    same = _pairs({key: show(value) for key, value in report.shared.items()})
    return f"{out}<details><summary>{len(report.shared)} settings are the same in every run</summary><p>{same}</p></details>"


def _environment(report: Report) -> str:
    if not report.environments:
        return "<p>No run recorded its environment.</p>"
    rows = []
    for facts, source, n in report.environments:
        names = ("python", "torch", "cuda", "triton", "lightning", "wandb")
        versions = _pairs({name: facts[name] for name in names if facts.get(name)})
        code = code_name({"source": source})
        note = "<small>the working tree differed from the commit</small>" if code and "+" in code else ""
        host = f"{facts.get('cpu')}, {facts.get('cpus')} CPUs, {facts.get('threads')} threads, {facts.get('platform')}"
        device = f'<th scope="row">{_text(facts.get("device_name"))}<small>{_text(host)}</small></th>'
        code = f"<td><code>{_text(code or 'not recorded')}</code>{note}</td>"
        rows.append(f'<tr><td class="num">{n}</td>{device}<td>{versions}</td>{code}</tr>')
    return _plain(rows, "Runs:num|Device|Versions|Code")

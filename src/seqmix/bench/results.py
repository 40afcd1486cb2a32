"""Rows of points.jsonl -> curves, crossings, the report."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Row = Mapping
Curve = dict[float, float]  # x -> value, of the cells that have one


class Measure(NamedTuple):
    """One number of the rows of a part, against an axis. more_is_better: which way a model passes another."""

    name: str
    part: str
    key: str
    axis: str  # length or batch
    title: str
    unit: str
    more_is_better: bool = False
    scale: float = 1.0  # of the number in the row, to the unit
    instead: tuple[str, ...] = ()  # keys of rows that lack `key`, the first that is there


MEASURES = (
    Measure("training_speed", "training", "tokens_per_second", "length", "Training: tokens per second", "tokens/s", True),
    Measure("training_memory", "training", "peak_allocated_mib", "length", "Training: peak memory", "GiB", scale=1 / 1024,
            instead=("peak_host_mib", "peak_rss_mib")),  # the latter is the whole resident set, which older rows have
    Measure("decode_speed", "context", "graph_tokens_per_second", "length", "Decoding, batch 1: tokens per second", "tokens/s",
            True, instead=("eager_tokens_per_second",)),
    Measure("state_bytes", "context", "state_bytes", "length", "State of one row", "MiB", scale=1 / 2**20),
    Measure("prefill", "context", "prefill_ms", "length", "A prompt, batch 1: milliseconds", "ms"),
    Measure("decode_batch", "decode", "graph_tokens_per_second", "batch", "Decoding: tokens per second against batch",
            "tokens/s", True, instead=("eager_tokens_per_second",)),
)  # fmt: skip
MEMORY = " Memory is that of the process, without libraries and mapped files; about 0.3 GiB of imports are in it."
# what the tables show beside the measures: part -> (key, heading, scale)
ALSO = {
    "training": (
        ("forward_ms", "forward ms", 1), ("backward_ms", "backward ms", 1), ("optimizer_ms", "optimizer ms", 1),
        ("step_ms", "step ms", 1), ("step_ms_iqr", "its IQR", 1), ("mfu", "MFU %", 100),
        ("first_call_ms", "first step s", 1e-3),
    ),
    "context": (
        ("eager_ms", "eager token ms", 1), ("graph_ms", "graph token ms", 1), ("prefill_ms_iqr", "prefill IQR", 1),
        ("state_bytes_measured", "state measured MiB", 2**-20), ("prefill_first_ms", "first prefill s", 1e-3),
    ),
    "decode": (
        ("eager_ms", "eager token ms", 1), ("graph_ms", "graph token ms", 1), ("graph_ms_iqr", "its IQR", 1),
        ("eager_tokens_per_second", "eager tokens/s", 1), ("capture_ms", "first replays ms", 1),
    ),
}  # fmt: skip


EQUAL = 0.02  # two numbers closer than this, relatively, lead neither


class Crossing(NamedTuple):
    """Between two measured lengths, where `better` passes `worse`: `at` is read off the straight line between them, on
    logarithmic axes. None: it is better all along, from the first length on."""

    better: str
    worse: str
    at: float | None
    between: tuple[float, float] | None


def read(path: Path) -> list[dict]:
    """The rows of points.jsonl. ValueError, which names file and line, for a line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line:
            try:
                row = json.loads(line)
                row["part"], row["status"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}, is not a point ({type(error).__name__}: {error})") from error
            rows.append(row)
    return rows


def value(row: Row, measure: Measure) -> float | None:
    if row["status"] != "ok":
        return None
    number = _first(row, measure.key, *measure.instead)
    return None if number is None else number * measure.scale


def _first(row: Row, *keys: str) -> float | None:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def series(row: Row, sizes: int) -> str:
    return row["model"] if sizes < 2 else f"{row['model']} {row['size']}"


def curves(rows: Iterable[Row], measure: Measure) -> dict[str, Curve]:
    """Series -> its points, in the order in which the rows name them."""
    rows = [row for row in rows if row["part"] == measure.part]
    sizes = len({row["size"] for row in rows})
    found: dict[str, Curve] = {}
    for row in rows:
        curve = found.setdefault(series(row, sizes), {})
        number = value(row, measure)
        if number is not None:
            curve[row[measure.axis]] = number
    return found


def missing(rows: Iterable[Row], measure: Measure) -> dict[str, dict[float, str]]:
    """Series -> x -> the status of a cell that was tried and has no number: out of memory is a result."""
    rows = [row for row in rows if row["part"] == measure.part]
    sizes = len({row["size"] for row in rows})
    found: dict[str, dict[float, str]] = {}
    for row in rows:
        if row["status"] not in ("ok", "not run"):
            found.setdefault(series(row, sizes), {})[row[measure.axis]] = row["status"]
    return found


def crossings(one: Curve, other: Curve, names: tuple[str, str], more_is_better: bool) -> list[Crossing]:
    """Where one curve passes the other, over the x that both have and where they are not EQUAL; [Crossing(at=None)] where none
    does; [] under two x, and where they are equal at all."""
    xs = sorted(one.keys() & other.keys())
    if len(xs) < 2:
        return []
    sign = 1 if more_is_better else -1
    lead = {x: sign * (math.log(one[x]) - math.log(other[x])) for x in xs}  # above 0: the first is better
    lead = {x: by for x, by in lead.items() if abs(by) > EQUAL}
    if not lead:
        return []
    found = []
    for (a, before), (b, after) in itertools.pairwise(lead.items()):
        if (before > 0) != (after > 0):
            part = before / (before - after)
            at = math.exp(math.log(a) + part * (math.log(b) - math.log(a)))
            better, worse = names if after > 0 else names[::-1]
            found.append(Crossing(better, worse, at, (a, b)))
    if not found:
        better, worse = names if next(iter(lead.values())) > 0 else names[::-1]
        return [Crossing(better, worse, None, None)]
    return found


def all_crossings(rows: Sequence[Row]) -> dict[str, list[Crossing]]:
    """Measure title -> crossings of each pair of series, for the measures against length."""
    out = {}
    for measure in MEASURES:
        if measure.axis == "length":
            found = curves(rows, measure)
            pairs = itertools.combinations(found, 2)
            passed = [c for a, b in pairs for c in crossings(found[a], found[b], (a, b), measure.more_is_better)]
            if passed:
                out[measure.title] = passed
    return out


def crossing_lines(rows: Sequence[Row]) -> list[str]:
    """Of each measure: who passes whom, where; then who leads whom all along."""
    lines = []
    for title, found in all_crossings(rows).items():
        lines.append(f"{title}:")
        for c in found:
            if c.at is not None:
                lines.append(f"  {c.better} passes {c.worse} at {c.at:,.0f} (between {c.between[0]:,} and {c.between[1]:,})")
        never = {}
        for c in found:
            if c.at is None:
                never.setdefault(c.better, []).append(c.worse)
        lines += [f"  {better} leads {', '.join(worse)} at every length measured" for better, worse in never.items()]
    return lines


# The report


def markdown(rows: Sequence[Row], figures: Sequence[str]) -> str:
    """report.md: conditions, figures, a table a number, crossings, kernels, what has no number and why."""
    lines = ["# What each architecture costs", "", conditions(rows), "", *(f"`{c}`  " for c in commands(rows)), ""]
    lines += [f"![{name.removesuffix('.svg')}]({name})" for name in figures] + [""]
    for part, heading in (("training", "Training, a step"), ("context", "Inference at batch 1"), ("decode", "Decoding")):
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            lines += [f"## {heading}", "", *_about(part, of_part), ""]
            keys = [(m.key, m.title, m.scale, m.instead, m.unit, m.axis) for m in MEASURES if m.part == part]
            keys += [(key, name, scale, (), "", _axis(part)) for key, name, scale in ALSO[part]]
            for key, title, scale, instead, unit, axis in keys:
                lines += [f"**{title}{f' ({unit})' if unit and unit not in title else ''}**", ""]
                lines += [*_table(of_part, key, scale, instead, axis), ""]
    lines += _capacity([row for row in rows if row["part"] == "capacity"])
    lines += _kernels([row for row in rows if row["part"] == "kernels"])
    passed = crossing_lines(rows)
    if passed:
        lines += ["## Where one passes another", "", "```", *passed, "```", ""]
    without = [row for row in rows if row["status"] != "ok"]
    if without:
        lines += ["## Cells without a number", ""]
        lines += [f"- {_cell_name(row)}: {row['status']}, {row.get('error', '')}" for row in without] + [""]
    lines += _kernels_used(rows)
    eager = sorted({(row["model"], row["no_graph"]) for row in rows if row.get("no_graph")})
    if eager:
        lines += ["## Decoded eagerly alone", ""] + [f"- {model}: {reason}" for model, reason in eager] + [""]
    return "\n".join(lines)


def conditions(rows: Sequence[Row]) -> str:
    """What the numbers mean nothing without, in a line or two."""
    measured = next((row for row in rows if row["status"] == "ok"), None)
    if measured is None:
        return "Nothing was measured."
    env = measured["environment"]
    clocks = sorted(row["sm_mhz"] for row in rows if row.get("sm_mhz"))
    watts = sorted(row["watts"] for row in rows if row.get("watts"))
    parts = [
        f"{env['device_name']}, torch {env['torch']}" + (f", Triton {env['triton']}" if env["triton"] else ""),
        f"products in {measured.get('autocast') or 'float32'}, {env['threads']} CPU threads, {measured['date'][:10]}",
        f"commit {', '.join(dict.fromkeys(row['commit'] or 'unknown' for row in rows if row['status'] == 'ok'))}",
    ]
    if clocks:
        parts.append(f"SM clock {clocks[0]:.0f} to {clocks[-1]:.0f} MHz")
    if watts:
        parts.append(f"{watts[0]:.0f} to {watts[-1]:.0f} W while timed")
    spent = [row["process_seconds"] for row in rows if "process_seconds" in row]
    if spent:
        parts.append(f"{len(spent)} points, whose processes took {sum(spent):.0f} s")
    return "; ".join(parts) + ". Medians; a process a point; warm-up and first call not among the timed ones."


def commands(rows: Sequence[Row]) -> list[str]:
    """What was typed for these rows, each once."""
    return list(dict.fromkeys(row["command"] for row in rows))


def caption(rows: Sequence[Row], part: str) -> list[str]:
    """Under a figure of a part: the command; card and date."""
    rows = [row for row in rows if row["part"] == part]
    measured = next((row for row in rows if row["status"] == "ok"), rows[0])
    precision, env = measured.get("autocast") or "float32", measured.get("environment", {})
    where = f"{env.get('device_name')}, torch {env.get('torch')}, {precision}, {measured['date'][:10]}"
    return ["; ".join(commands(rows)), where]


def _about(part: str, rows: Sequence[Row]) -> list[str]:
    done = [row for row in rows if row["status"] == "ok"]
    sizes = {row["model"]: row["params"] for row in done if "params" in row}
    of = ", ".join(f"{model} {n / 1e6:.4g} M" for model, n in sizes.items())
    text = {
        "training": "A step is forward and loss, backward, AdamW; the tokens of a step are the same at every length. "
        "MFU: FLOPs of the products with weights and of all of attention's scores, also what causal kernels skip, but of "
        "no scan and no FFT, over the data sheet's dense peak.",
        "context": "The prompt's logits are computed for its last token alone. A token: taken in, the likeliest drawn.",
        "decode": f"After a prompt of {rows[0]['length']:,} tokens.",
    }[part]
    tokens = f" {done[0]['tokens']:,} tokens a step." if part == "training" and done else ""
    if done and "peak_allocated_mib" in done[0] and done[0]["peak_allocated_mib"] is None:
        whole = "peak_rss_mib" in done[0]
        tokens += " Memory is the resident set of the process, about 0.4 GiB of imports in it." if whole else MEMORY
    worst = max((row["check_error"] for row in done if row.get("check_error") is not None), default=None)
    checked = "" if worst is None else f" Logits against float64, worst of all points: {worst:.1e}."
    return [f"Parameters: {of}. {text}{tokens}{checked}"]


def _axis(part: str) -> str:
    return "batch" if part == "decode" else "length"


def _table(rows: Sequence[Row], key: str, scale: float, instead: tuple[str, ...], axis: str) -> list[str]:
    sizes = len({row["size"] for row in rows})
    xs = sorted({row[axis] for row in rows})
    names = list(dict.fromkeys(series(row, sizes) for row in rows))
    cells = {}
    for row in rows:
        number = _first(row, key, *instead)
        shown = row["status"] if row["status"] != "ok" else "" if number is None else show(number * scale)
        cells[series(row, sizes), row[axis]] = shown
    if not any(cells.values()):
        return ["not on this device"]
    head = "| " + " | ".join([axis, *(f"{x:,}" for x in xs)]) + " |"
    body = ["| " + " | ".join([name, *(cells.get((name, x), "") for x in xs)]) + " |" for name in names]
    return [head, "|---" + "|---:" * len(xs) + "|", *body]


def _capacity(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = ["## The largest batch", "", "| model | context | limit GiB | state of a row MiB | rows, counted | rows, tried |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        if row["status"] == "ok":
            tried = "" if row["rows_tried"] is None else f"{row['rows_tried']:,}"
            tried += " and more" if row["rows_tried"] == row.get("rows_most", 0) else ""
            size = f"{row['limit_bytes'] / 2**30:.4g} | {show(row['state_bytes'] / 2**20)}"
            lines.append(f"| {row['model']} | {row['length']:,} | {size} | {row['rows_counted']:,} | {tried} |")
        else:
            lines.append(f"| {row['model']} | {row['length']:,} | | | {row['status']} | |")
    return [*lines, ""]


def _kernels(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "## Kernels", "",
        "A floor is the least time that what must be moved, multiplied or exponentiated needs on this card; % of it: the "
        "largest of the three over the time. fwd+bwd is through autograd. launched: as a CUDA graph, so without the host's "
        "time, or eagerly, where no graph could be made.", "",
        "| op | implementation | shape | fwd ms | fwd+bwd ms | launched | fwd MiB | fwd+bwd MiB | floor fwd ms | % of floor "
        "fwd | fwd+bwd | error |",
        "|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in rows:
        name = f"| {row['model']} | {row['size']} | {row.get('shape', '')} | "
        if row["status"] != "ok":
            lines.append(name + f"{row['status']} | | | | | | | | |")
            continue
        floor = row.get("floor_ms")
        keys = ("forward_ms", "both_ms", "forward_mib", "both_mib")
        cells = [show(row[key]) if row.get(key) is not None else "" for key in keys]
        cells[1] = cells[1] or ("oom" if row.get("no_backward") == "oom" else "")
        launched = (row[key] for key in ("forward_launched", "both_launched") if key in row)
        cells.insert(2, ", ".join(dict.fromkeys(launched)))
        cells.append("" if floor is None else f"{show(floor)} ({row['floor_of']})")
        percents = (row.get(f"{prefix}percent_of_floor") for prefix in ("", "both_"))
        cells += ["" if percent is None else f"{percent:.0f}" for percent in percents]
        lines.append(name + " | ".join([*cells, f"{row['check_error']:.0e}"]) + " |")
    return [*lines, ""]


def _kernels_used(rows: Sequence[Row]) -> list[str]:
    """Which implementation ran where one was chosen, and why: a line a model, operator and reason."""
    found: dict[tuple, dict[str, list[str]]] = {}
    for row in rows:
        axis = _axis(row["part"])
        for op, why in (row.get("kernels") or {}).items():
            places = found.setdefault((row["model"], op, why), {}).setdefault(f"{row['part']}, {axis}", [])
            places.append(f"{row[axis]:,}")
    lines = []
    for (model, op, why), parts in found.items():
        where = "; ".join(f"{part} {', '.join(dict.fromkeys(places))}" for part, places in parts.items())
        lines.append(f"- {model}, {op}: {why} [{where}]")
    return ["## What was chosen", "", *lines, ""] if lines else []


def _cell_name(row: Row) -> str:
    return f"{row['part']} {row['model']} {row['size']}, length {row['length']:,}, batch {row['batch']:,}"


def show(number: float) -> str:
    """Three digits and no more zeros than needed: 0.00123, 1.23, 1,230."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    number = float(f"{number:.3g}")
    return f"{number:,.{max(0, 2 - math.floor(math.log10(abs(number))))}f}"

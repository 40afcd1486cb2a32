"""python -m seqmix.reproduce NAME: run a published result, and say whether it came out.

python -m seqmix.reproduce                      what there is, with minutes
python -m seqmix.reproduce parity_small         runs experiment=repro/parity_small, writes its report and a verdict
python -m seqmix.reproduce all
python -m seqmix.reproduce parity_small trainer.max_steps=20     with overrides: to try it out

conf/reproduce/NAME.yaml says what must come out. Exit code 0: it did; 1: it did not, or a run failed; 2: no such name. The same
command again resumes the sweep in outputs/reproduce/NAME, and skips what is complete.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from seqmix import display
from seqmix.folders import read_file
from seqmix.report.results import Cell, build_report
from seqmix.report.runs import find_runs

ROOT = Path(__file__).parents[2]
WANTED = ROOT / "conf" / "reproduce"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m seqmix.reproduce", description="Run a published result and judge it.")
    parser.add_argument("name", nargs="?", help="a file of conf/reproduce, or all; none: list them")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    asked = parser.parse_args(arguments)
    found = {path.stem: read_file(path) for path in sorted(WANTED.glob("*.yaml"))}
    if asked.name is None or asked.name == "all":
        for name, wanted in found.items():
            minutes = "not run yet" if wanted["minutes"] is None else f"{wanted['minutes']} min"
            print(f"{name:20} {minutes:12} {wanted['source']}")
        if asked.name is None:
            return
    elif asked.name not in found:
        display.refuse(f"{asked.name!r} is not one of all, {', '.join(found)}")
    names = list(found) if asked.name == "all" else [asked.name]
    good = [reproduce(name, found[name]["expect"], asked.overrides) for name in names]
    raise SystemExit(0 if all(good) else 1)


def reproduce(name: str, expect: Sequence[Mapping], overrides: Sequence[str]) -> bool:
    """Run the sweep, write its report and verdict.json beside it, print the verdict; whether everything came out."""
    folder = Path("outputs") / "reproduce" / name
    line = [sys.executable, str(ROOT / "train.py"), "-m", f"experiment=repro/{name}", f"hydra.sweep.dir={folder}", *overrides]
    complete = subprocess.run(line).returncode == 0
    subprocess.run([sys.executable, "-m", "seqmix.report", str(folder), "--title", name], stdout=subprocess.DEVNULL)
    verdict = judge(build_report(find_runs([folder]), name).cells, expect)
    (folder / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    table = Table(title=f"{name}: median over seeds")
    for column in ("where", "metric", "expected", "obtained", "verdict"):
        table.add_column(column, overflow="fold")
    for row in verdict:
        word = Text("pass", "green") if row["pass"] else Text("fail", "red")
        obtained = "–" if row["median"] is None else f"{row['median']:.4g} of {row['runs']} runs"
        table.add_row(row["where"], row["metric"], row["expected"], obtained, word)
    console = display.console()
    console.print(table)
    console.print(f"{folder / 'report' / 'index.html'}", soft_wrap=True)
    return complete and all(row["pass"] for row in verdict)


def judge(cells: Sequence[Cell], expect: Sequence[Mapping]) -> list[dict]:
    """One row per expectation and cell it is about: {"where", "metric", "expected", "median", "runs", "pass"}.

    An expectation names a metric of summary.json, `at_least` or `at_most`, and `where`: values of the config. One that no
    cell fits fails.
    """
    rows = []
    for wanted in expect:
        where = {key: json.dumps(value) if isinstance(value, list) else value for key, value in wanted["where"].items()}
        about = [cell for cell in cells if all(cell.config.get(key) == value for key, value in where.items())]
        sign, bound = (">=", wanted["at_least"]) if "at_least" in wanted else ("<=", wanted["at_most"])
        for cell in about or [None]:
            runs = [] if cell is None else [run for run in cell.used if run.status == "complete"]
            values = [value for run in runs if (value := run.number(wanted["metric"])) is not None]
            median = statistics.median(values) if values else None
            good = median is not None and (median >= bound if sign == ">=" else median <= bound)
            place = ", ".join(f"{key}={value}" for key, value in where.items()) or ("" if cell is None else cell.series)
            row = {"where": place, "metric": wanted["metric"], "expected": f"{sign} {bound}"}
            rows.append(row | {"median": median, "runs": len(values), "pass": good})
    return rows


if __name__ == "__main__":
    display.guard_standard_streams()
    main()

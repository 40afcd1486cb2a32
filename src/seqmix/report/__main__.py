"""python -m seqmix.report outputs/sweeps/NAME: tables and one page from run folders, and with --wandb also in wandb.

python -m seqmix.report outputs/sweeps/NAME                     writes outputs/sweeps/NAME/report/
python -m seqmix.report outputs/runs outputs/sweeps/A --out out
python -m seqmix.report outputs/sweeps/NAME --average-over code
python -m seqmix.report outputs/sweeps/NAME --wandb ENTITY/PROJECT
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from seqmix import display
from seqmix.report.page import page
from seqmix.report.results import build_report
from seqmix.report.runs import AVERAGED, find_runs, not_started, tidy
from seqmix.report.tables import cells_csv, figures, headline, markdown, runs_csv


def main(arguments: list[str] | None = None) -> None:
    """Write index.html, report.md, two CSV files and figures. Exits with code 2 and a one-line error if the input is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser("python -m seqmix.report", description="Compare runs, reading only their folders.")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, sweeps, or folders that contain these")
    parser.add_argument("--out", type=Path, help="folder to write to; default: report/ in the first of FOLDERS")
    parser.add_argument("--title", help="title of the report; default: the names of FOLDERS")
    averaged = f"one of {', '.join(AVERAGED)}: average over runs that differ in it, and mark their cells"
    parser.add_argument("--average-over", action="append", default=[], choices=AVERAGED, metavar="WHAT", help=averaged)
    wandb = "also log a summary run, and save a wandb Report and Workspace"
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help=wandb)
    asked = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        if asked.wandb:
            from seqmix.report import dashboards

            dashboards.split_place(asked.wandb)
        runs = find_runs(asked.folders)
        title = asked.title or ", ".join(folder.resolve().name for folder in asked.folders)
        report = build_report(runs, title, asked.average_over, not_started(asked.folders))
    except ImportError as error:
        display.refuse(f"--wandb needs wandb and wandb-workspaces: pip install -e '.[report]' ({error})")
    except ValueError as error:
        display.refuse(str(error))
    out = asked.out or asked.folders[0] / "report"
    typed = tidy(" ".join(["python -m seqmix.report", *map(shlex.quote, arguments)]))
    files = {
        "index.html": page(report, typed),
        "report.md": markdown(report),
        "cells.csv": cells_csv(report),
        "runs.csv": runs_csv(report),
    } | figures(report)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        display.refuse(f"cannot write to {out}: {error.strerror} ({error.filename})")
    print(f"{headline(report)}; {len(report.cells)} cells, {time.perf_counter() - started:.1f} s")
    for notice in report.notices:
        print(display.visible(f"  {notice}"))
    for name in files:
        print(out / name)
    if asked.wandb:
        try:
            said = dashboards.publish(report, asked.wandb, out)
        except dashboards.REFUSED as error:
            parser.exit(1, f"wandb: {' '.join(str(error).split())}\n")
        print("\n".join(said))


if __name__ == "__main__":
    display.guard_standard_streams()
    main()

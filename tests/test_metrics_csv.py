"""metrics.csv, which needs no wandb: what is logged again after a resume, what cannot be gone on with."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from seqmix import tracking


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}


def test_a_run_that_goes_on_in_its_folder_goes_on_in_its_file(tmp_path):
    first = tracking.CSVLogger(tmp_path)
    for step in range(4):
        first.log_metrics({"train/loss": 1.0 + step, "epoch": 0.0}, step)
    first.log_metrics({"val/loss": 9.0, "epoch": 0.0}, 1)
    first.log_metrics({"val/loss": 8.0, "epoch": 0.0}, 3)
    first.save()
    again = tracking.CSVLogger(tmp_path)  # from a checkpoint after step 1
    again.log_metrics({"train/loss": 30.0, "new": 5.0}, 2)
    again.save()
    again.log_metrics({"train/loss": 40.0}, 3)
    again.finalize("success")
    rows = read_csv(tmp_path / "metrics.csv")
    assert column(rows, "train/loss") == {0: 1.0, 1: 2.0, 2: 30.0, 3: 40.0}
    assert column(rows, "val/loss") == {1: 9.0, 3: 8.0}
    assert column(rows, "new") == {2: 5.0}
    assert len(rows) == 6, "rows that hold nothing any more are gone"
    test_only = tracking.CSVLogger(tmp_path)
    test_only.log_metrics({"test/loss": 0.5, "epoch": 0.0}, 0)
    test_only.save()
    assert column(read_csv(tmp_path / "metrics.csv"), "train/loss") == {0: 1.0, 1: 2.0, 2: 30.0, 3: 40.0}


@pytest.mark.parametrize("text", ["epoch,step,x\n0,first,1.0\n", "epoch,x\n0,1.0\n", "step,x\n\n0,1.0\n0,\n,1\n"])
def test_a_metrics_file_that_cannot_be_gone_on_with_is_named_before_the_run(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.csv, line \d"):
        tracking.CSVLogger(tmp_path)


@pytest.mark.parametrize("tail", ["0", "0,3", "0,3,0.5", "0,3,0.5,"])
def test_a_line_cut_short_by_a_kill_does_not_stop_a_resume(tmp_path, tail):
    (tmp_path / "metrics.csv").write_text(f"epoch,step,x,y\n0,2,0.25,\n{tail}")
    log = tracking.CSVLogger(tmp_path)
    log.log_metrics({"x": 1.0, "epoch": 0}, 3)
    log.save()
    assert column(read_csv(tmp_path / "metrics.csv"), "x") == {2: 0.25, 3: 1.0}


def test_csv_needs_no_wandb_installed(tmp_path):
    code = (
        "import sys, importlib.metadata as m; sys.modules['wandb'] = None;"
        "from seqmix.tracking import CSVLogger, closing; log = CSVLogger(sys.argv[1]);"
        "log.log_metrics({'x': 1.0}, 0); log.finalize('success')\n"
        "with closing([log]): pass"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert column(read_csv(tmp_path / "metrics.csv"), "x") == {0: 1.0}

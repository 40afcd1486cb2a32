"""The report in wandb: offline runs against the local files, value by value; Report and Workspace as JSON."""

from __future__ import annotations

import csv
import json
import os

import pytest
import runs as real
from made_runs import make_sweep
from offline import Read

from seqmix.report.__main__ import main
from seqmix.report.results import build_report
from seqmix.report.runs import find_runs

wandb = pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
dashboards = pytest.importorskip("seqmix.report.dashboards")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning"),  # wandb-workspaces 0.4.13 under pydantic 2.14
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
STEP = "trainer/global_step"


@pytest.fixture(autouse=True)
def no_wandb_settings(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    if wandb.run is not None:  # of a test that failed; the next would find it open
        wandb.finish()


@pytest.fixture
def report(tmp_path):
    return build_report(find_runs([make_sweep(tmp_path / "s", failing={5: "killed", 22: "oom"})]), "s")


def read_csv(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_offline_run_of_training_equals_its_local_files_value_by_value(tmp_path):
    folder = tmp_path / "run"
    wandb_on = ["logger=wandb", "logger.wandb.mode=offline"]
    real.start(folder, "model=lstm", "task=selective_copy", *real.SELECTIVE_COPY, "trainer.max_steps=14", *wandb_on)
    back, local, summary = Read(folder), read_csv(folder / "metrics.csv"), json.loads((folder / "summary.json").read_text())
    names = {name for row in local for name in row} - {"epoch", "step"}
    assert {"train/loss", "val/loss", "val/token_accuracy", "test/loss", "speed/step_ms"} <= names
    for name in names:
        here = {int(row["step"]): float(row[name]) for row in local if row[name]}
        there = {row[STEP]: row[name] for row in back.history if name in row}
        assert here and here == there, name
    best = {"val/loss", "val/perplexity", "val/token_accuracy", "val/sequence_accuracy"}  # wandb keeps the best of these
    for name, value in summary.items():
        if name not in {"folder", "data", "environment", "source"} | best:
            assert back.summary[name] == value, name
    (run,) = find_runs([folder])
    for name, points in run.curves.items():
        assert dict(points) == {row[STEP]: row[name] for row in back.history if name in row}, name
    for key, value in run.config.items():
        node = back.config
        for part in key.split("."):
            node = node[part]
        assert (json.dumps(node) if isinstance(node, list) else node) == value or str(folder) in str(value), key


def test_the_summary_run_holds_the_numbers_of_the_report(tmp_path, report):
    said = dashboards.log_summary_run(report, tmp_path, "team", "compare", "offline")
    back = Read(tmp_path)
    assert "wandb sync" in said and back.exit_code == 0
    assert (back.run.project, back.run.entity, back.run.job_type) == ("compare", "team", "report")
    assert back.run.host == "" and str(tmp_path) not in json.dumps([back.history, back.config, back.summary])
    lines = {row["seq_len"]: row for row in back.history if "seq_len" in row}
    assert sorted(lines) == [64, 128, 256]
    for cell in report.cells:
        for m in report.metrics:
            name = f"selective_copy/{m.name}/{cell.model}"
            assert lines[cell.seq_len][name] == pytest.approx(cell.results[m.name].median * m.scale, rel=1e-15), name
    assert back.metrics["selective_copy/step_ms/mamba"].step_metric == "seq_len"
    files = {path.name.split("_")[0]: json.loads(path.read_text()) for path in (back.folder / "files").rglob("*.table.json")}
    cells, runs = files["results"], files["runs"]
    rows = [dict(zip(cells["columns"], row, strict=True)) for row in cells["data"]]
    for row, cell in zip(rows, report.cells, strict=True):
        result = cell.results["token_accuracy"]
        assert (row["model"], row["seq_len"], row["complete"]) == (cell.model, cell.seq_len, cell.complete)
        assert (row["token_accuracy"], row["token_accuracy_low"]) == (result.median, result.low)
        assert row["command"].startswith("python train.py -m model=")
    statuses = [dict(zip(runs["columns"], row, strict=True))["status"] for row in runs["data"]]
    assert sorted(set(statuses)) == ["complete", "killed", "oom"] and len(statuses) == 24
    charts = [path for path in (back.folder / "files").rglob("*.table.json") if "against length" in str(path)]
    assert len(charts) == len(report.metrics), "one line series a metric"


def test_a_chart_has_one_line_a_model_with_its_lengths_and_values(report):
    lengths, values, names = dashboards.line_series(report, "selective_copy", "token_accuracy")
    assert names == ["lstm", "mamba", "s4", "transformer"] and lengths == [[64, 128, 256]] * 4
    by_cell = {(c.model, c.seq_len): c.results["token_accuracy"].median * 100 for c in report.cells}
    assert values == [[by_cell[name, n] for n in (64, 128, 256)] for name in names]
    assert dashboards.line_series(report, "copy", "token_accuracy") is None


def test_the_same_report_has_the_same_run_and_another_has_another(report, tmp_path):
    first = dashboards.fingerprint(report)
    again = build_report(find_runs([tmp_path / "s"]), "other title")
    fewer = build_report(find_runs([tmp_path / "s"])[:20], "s")
    assert dashboards.fingerprint(again) == first != dashboards.fingerprint(fewer)


def panels_of(model) -> list:
    return [
        panel
        for block in model.spec.blocks
        if block.type == "panel-grid"
        for panel in block.metadata.panel_bank_section_config.panels
    ]


def test_the_report_and_the_workspace_are_valid_and_hold_the_panels(report):
    wr = pytest.importorskip("wandb_workspaces.reports.v2", reason="needs wandb-workspaces: pip install -e '.[report]'")
    import wandb_workspaces.workspaces as ws

    dashboard = dashboards.build_dashboard(report, "team", "compare")
    text = dashboards.as_json(dashboard)
    model = type(dashboard._to_model()).model_validate_json(text)
    assert (model.project.entity_name, model.project.name, model.display_name) == ("team", "compare", "seqmix: s")
    kinds = [panel.view_type for panel in panels_of(model)]
    assert kinds.count("Scatter Plot") >= 6 and "Run Comparer" in kinds and "Bar Chart" in kinds
    assert "Parallel Coordinates Plot" in kinds and kinds.count("Run History Line Plot") == len(report.metrics) + 4
    back = wr.Report._from_model(model)
    assert len(back.blocks) == len(dashboard.blocks) and back.title == dashboard.title

    spec = json.loads(text)["spec"]
    flat = json.dumps(spec)
    for name in ("selective_copy/token_accuracy/mamba", "config:task.value.seq_len", "summary:test/token_accuracy",
                 "summary:memory/state_bytes", "model.value._target_"):  # fmt: skip
        assert name in flat, name
    logged = {name for row in dashboards.lines_by_length(report) for name in row}
    lines = [m for p in panels_of(model) if p.view_type == "Run History Line Plot" for m in p.config.metrics]
    trained = {name for run in report.runs for name in run.curves}
    assert set(lines) <= logged | trained, "no panel shows what no run logs"
    filters = [
        block["metadata"]["runSets"][0]["filters"]["filters"] for block in spec["blocks"] if block["type"] == "panel-grid"
    ]
    assert [(f["op"], f["value"]) for (f,) in filters] == [("=", "report")] + [("!=", "report")] * 5
    assert "1 killed, 1 out of memory" in flat and "1 of 2" in flat and "python train.py -m model=lstm" in flat

    workspace = dashboards.build_workspace(report, "team", "compare")
    view = type(workspace._to_model()).model_validate_json(dashboards.as_json(workspace))
    again = ws.Workspace._from_model(view)
    assert [section.name for section in again.sections] == [section.name for section in workspace.sections]
    assert [len(s.panels) for s in again.sections] == [len(s.panels) for s in workspace.sections]
    assert [key.name for key in again.runset_settings.groupby] == ["model._target_", "task.seq_len"]


def test_without_a_key_the_command_leaves_a_run_to_sync_and_two_files(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb_workspaces", reason="needs wandb-workspaces: pip install -e '.[report]'")
    make_sweep(tmp_path / "s", lengths=(64,), seeds=(0,))
    monkeypatch.chdir(tmp_path)
    main(["s", "--wandb", "team/compare"])
    out = capsys.readouterr().out
    assert "wandb sync s/report/wandb/offline-run-" in out and out.count("not saved, there is no key") == 2
    assert Read(tmp_path / "s/report").exit_code == 0
    assert json.loads((tmp_path / "s/report/wandb-report.json").read_text())["displayName"] == "seqmix: s"
    assert json.loads((tmp_path / "s/report/wandb-workspace.json").read_text())["displayName"] == "seqmix: s"


def test_a_key_is_found_where_wandb_looks(tmp_path, monkeypatch):
    assert not dashboards.has_key()
    host = dashboards.urlsplit(str(wandb.Settings().base_url)).netloc
    netrc = tmp_path / "home/.netrc"
    netrc.write_text(f"machine {host} login user password {'k' * 40}\n")
    netrc.chmod(0o600)
    assert dashboards.has_key()
    netrc.write_text("machine example.org login user password p\n")
    assert not dashboards.has_key()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert dashboards.has_key()


def test_without_the_extra_it_is_said_in_a_line_after_the_page_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.reports.v2", None)
    make_sweep(tmp_path / "s", lengths=(64,), seeds=(0,))
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "s"), "--wandb", "team/compare"])
    assert stop.value.code == 1 and "pip install -e '.[report]'" in capsys.readouterr().err
    assert (tmp_path / "s/report/index.html").is_file()

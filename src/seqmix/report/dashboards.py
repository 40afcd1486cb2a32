"""The report in wandb: a run with its tables and lines, a Report, and a saved Workspace. Needs the extra `report`.

wandb-workspaces builds and checks its objects (pydantic) without a network; only `save` needs a key. Pitfalls of version
0.4.13: a Runset with a project asks the server for it at once, so it is left out, and the report's project is used;
`_to_model` is private, but nothing else returns the JSON.

    training runs        x: task.seq_len, y: values of their summaries        one dot per run
    the summary run      x: seq_len, y: <task>/<metric>/<model>               one line per model, medians over seeds
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import wandb

from seqmix.report import tables
from seqmix.report.results import Report, code_name, commands, fingerprint

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

STEP = "trainer/global_step"  # the x-axis of what training logs
MODEL = "model._target_"  # the key of a run's config that `model=` sets
JOB_TYPE = "report"  # distinguishes the summary run from training runs
ALL_BUT_SUMMARY = f'Metric("JobType") != "{JOB_TYPE}"'
REFUSED = (ValueError, OSError, wandb.Error)  # errors of the network, the server, or a missing package
ONLY_SUMMARY = f'Metric("JobType") == "{JOB_TYPE}"'


def publish(report: Report, place: str, folder: Path) -> list[str]:
    """Log the summary run and save Report and Workspace to `place`, ENTITY/PROJECT; returns lines to print.

    Without a key nothing leaves the machine: the run is offline in `folder`/wandb, for `wandb sync`, and the other two are
    JSON files in `folder`. Raises one of REFUSED if `place` is not ENTITY/PROJECT, if wandb-workspaces is not installed, or
    if the server refuses.
    """
    entity, project = split_place(place)
    try:
        views = {"report": build_dashboard(report, entity, project), "workspace": build_workspace(report, entity, project)}
    except ImportError as error:
        raise ValueError(f"--wandb needs wandb-workspaces: pip install -e '.[report]' ({error})") from error
    folder.mkdir(parents=True, exist_ok=True)
    online = has_key()
    said = [f"wandb: {log_summary_run(report, folder, entity, project, 'online' if online else 'offline')}"]
    for name, view in views.items():
        if online:
            view.save()
            said.append(f"wandb {name}: {view.url}")
        else:
            path = folder / f"wandb-{name}.json"
            path.write_text(as_json(view), encoding="utf-8")
            said.append(f"wandb {name}: not saved, there is no key (WANDB_API_KEY, or `wandb login`); its JSON is in {path}")
    return said


def split_place(place: str) -> tuple[str, str]:
    """("entity", "project"). ValueError unless `place` is two names with a slash between them."""
    parts = place.split("/")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"--wandb takes ENTITY/PROJECT, got {place!r}")
    return parts[0], parts[1]


def has_key() -> bool:
    """Whether wandb can log in without a prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    host = urlsplit(str(wandb.Settings().base_url)).netloc
    try:
        return path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False


def as_json(view: wr.Report | ws.Workspace) -> str:
    return view._to_model().model_dump_json(by_alias=True, exclude_none=True)


# The summary run


def log_summary_run(report: Report, folder: Path, entity: str, project: str, mode: str) -> str:
    """Log one run with the tables of the report and its numbers against length; returns its address.

    mode: online or offline. The run's id is a hash of the report, so logging the same report twice gives one run.
    """
    with _run(report, folder, entity, project, mode) as run:
        rows = lines_by_length(report)
        for name in {name for row in rows for name in row} - {"seq_len"}:
            run.define_metric(name, step_metric="seq_len")
        for row in rows:
            run.log(row)
        run.log({"results": results_table(report), "runs": runs_table(report)})
        for task in report.tasks:
            for metric in report.metrics:
                if series := line_series(report, task, metric.name):
                    lengths, values, names = series
                    title = f"{task}: {metric.label}" + (f", {metric.unit}" if metric.unit else "")
                    chart = wandb.plot.line_series(lengths, values, names, title, "sequence length, tokens")
                    run.log({f"{task}/{metric.name} against length": chart})
        run.summary.update({"headline": tables.headline(report), "notices": report.notices})
        return (
            run.url if mode == "online" else f"offline; upload later with: wandb sync {os.path.relpath(Path(run.dir).parent)}"
        )


@contextmanager
def _run(report: Report, folder: Path, entity: str, project: str, mode: str) -> Iterator[wandb.Run]:
    assert wandb.run is None, f"wandb run {wandb.run.id} is still open: finish it before opening another"
    run = wandb.init(
        entity=entity,
        project=project,
        id=f"report-{fingerprint(report)}",
        resume="allow" if mode == "online" else None,
        name=f"report: {report.title}",
        job_type=JOB_TYPE,
        dir=str(folder.resolve()),  # absolute, because wandb's service may run in another folder
        mode=mode,
        settings=wandb.Settings(  # as for training runs: only what is logged here is sent
            silent=True, console="off", save_code=False, disable_code=True, disable_git=True, disable_job_creation=True,
            host="", x_disable_meta=True, x_disable_machine_info=True, x_disable_stats=True, x_save_requirements=False,
            symlink=False,
        ),
    )  # fmt: skip
    code = 1
    try:
        yield run
        code = 0
    finally:
        run.finish(exit_code=code)


def line_name(task: str, metric: str, series: str) -> str:
    """selective_copy/token_accuracy/mamba-d_state_64: without spaces and characters that wandb's expressions interpret."""
    return "/".join(re.sub(r"[^\w.+-]+", "_", part) for part in (task, metric, series))


def lines_by_length(report: Report) -> list[dict[str, float]]:
    """One row per length: {"seq_len": 64, "<task>/<metric>/<model>": median in the unit of the page, ...}."""
    rows: dict[int, dict[str, float]] = {}
    for cell in report.cells:
        for m in report.metrics:
            median = cell.results[m.name].median
            if cell.seq_len is not None and median is not None:
                row = rows.setdefault(cell.seq_len, {"seq_len": cell.seq_len})
                row[line_name(cell.task, m.name, cell.series)] = median * m.scale
    return [rows[length] for length in sorted(rows)]


def line_series(report: Report, task: str, metric: str) -> tuple[list[list[int]], list[list[float]], list[str]] | None:
    """(lengths, values, names) of the models that have a number; None if none has one."""
    scale = next(m.scale for m in report.metrics if m.name == metric)
    found: dict[str, dict[int, float]] = {}
    for cell in report.cells:
        median = cell.results[metric].median
        if cell.task == task and cell.seq_len is not None and median is not None:
            found.setdefault(cell.series, {})[cell.seq_len] = median * scale
    if not found:
        return None
    return [list(at) for at in found.values()], [list(at.values()) for at in found.values()], list(found)


def results_table(report: Report) -> wandb.Table:
    """One row per cell, as in cells.csv, with the command."""
    columns = ["task", "model", "seq_len", "lr", "complete", "of", "status"]
    columns += [f"{m.name}{end}" for m in report.metrics for end in ("", "_low", "_high")] + ["command"]
    rows = []
    for cell in report.cells:
        row = [cell.task, cell.series, cell.seq_len, cell.lr, cell.complete, len(cell.used), tables.statuses(cell)]
        for m in report.metrics:
            r = cell.results[m.name]
            row += [r.median, r.low, r.high]
        rows.append([*row, "\n".join(commands(cell))])
    return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)


def runs_table(report: Report) -> wandb.Table:
    """One row per run, including those without a result."""
    columns = ["run", "task", "model", "seq_len", "seed", "lr", "status", "code", *(m.name for m in report.metrics), "error"]
    rows = [
        [run.name, run.task, run.model, run.seq_len, run.seed, run.lr, run.status, code_name(run.summary)]
        + [m.read(run) for m in report.metrics]
        + [run.error]
        for run in report.runs
    ]
    return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)


# Report and Workspace


def _summary_names(report: Report) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(name in a run's summary, title) of the quality metrics and of the cost metrics that any run has."""
    quality = [f"{report.split}/{name}" for name in ("token_accuracy", "sequence_accuracy", "bits_per_byte", "loss")]
    costs = {
        "memory/state_bytes": "State, bytes per row",
        "speed/step_ms": "Time per step, ms",
        "memory/peak_allocated_mib": "Peak memory, MiB",
        "memory/peak_host_mib": "Peak memory (process), MiB",
        "speed/tokens_per_second": "Training speed, tokens/s",
    }
    known = {name for run in report.runs for name in run.summary if run.number(name) is not None}
    return (
        [(name, name.replace("/", ": ").replace("_", " ")) for name in quality if name in known],
        [(name, title) for name, title in costs.items() if name in known],
    )


def _panels(report: Report) -> dict[str, list]:
    """Section -> panels. The first section shows the summary run, the others show the training runs."""
    import wandb_workspaces.reports.v2 as wr

    quality, costs = _summary_names(report)
    length, model = wr.Config("task.seq_len"), wr.Config(MODEL)
    medians = [
        wr.LinePlot(
            title=f"{task}: {m.label}" + (f", {m.unit}" if m.unit else ""),
            x="seq_len",
            y=[line_name(task, m.name, name) for name in series[2]],
            title_x="sequence length, tokens",
            log_x=True,
            log_y=m.log,
            range_y=(0, 100) if m.unit == "%" else (None, None),
        )
        for task in report.tasks
        for m in report.metrics
        if (series := line_series(report, task, m.name))
    ]
    dots = [
        wr.ScatterPlot(title=f"{title} against length", x=length, y=wr.SummaryMetric(name), log_x=True, log_y=log)
        for log, names in ((False, quality), (True, costs))
        for name, title in names
    ]
    trade_offs = [
        wr.ScatterPlot(title=f"{shown} against {title.lower()}", x=wr.SummaryMetric(cost), y=wr.SummaryMetric(name), log_x=True)
        for name, shown in quality[:1]
        for cost, title in costs
    ]
    curves = [
        wr.LinePlot(
            title=name, x=STEP, y=[name], log_y=name.endswith("loss"), title_x="optimizer step",
            groupby=model, groupby_aggfunc="median", groupby_rangefunc="minmax",
        )
        for name in ("val/token_accuracy", "val/sequence_accuracy", "val/loss", "train/loss")
        if any(name in run.curves for run in report.runs)
    ]  # fmt: skip
    bars = [
        wr.BarPlot(
            title=f"{title} by model", metrics=[wr.SummaryMetric(name)], groupby=model,
            groupby_aggfunc="median", groupby_rangefunc="minmax",
        )
        for name, title in quality[:1]
    ]  # fmt: skip
    columns = [wr.Config("optimizer.lr"), wr.Config("seed"), length, wr.SummaryMetric("best/val/loss")]
    columns += [wr.SummaryMetric(name) for name, _ in quality[:1]]
    parallel = wr.ParallelCoordinatesPlot(columns=[wr.ParallelCoordinatesPlotColumn(metric=c) for c in columns])
    return {
        "Results by sequence length: medians over seeds": medians,
        "Results by sequence length: every run": dots,
        "Accuracy against cost": trade_offs,
        "Learning curves": curves,
        "Models, learning rates and seeds": [*bars, parallel],
        "Differences between runs": [wr.RunComparer(diff_only="split")],
    }


def build_dashboard(report: Report, entity: str, project: str) -> wr.Report:
    """The wandb Report: notices first, then the panels. ImportError without wandb-workspaces."""
    import wandb_workspaces.reports.v2 as wr

    blocks: list = [wr.P(tables.headline(report))]
    if report.notices:
        blocks.append(wr.UnorderedList(items=list(report.notices)))
    for title, panels in _panels(report).items():
        from_summary = title.endswith("medians over seeds")
        name, filters = ("medians", ONLY_SUMMARY) if from_summary else ("runs", ALL_BUT_SUMMARY)
        if panels:
            across = 8 if len(panels) > 1 else 24
            for i, panel in enumerate(panels):
                panel.layout = wr.Layout(x=(i * across) % 24, y=(i * across) // 24 * 7, w=across, h=7)
            blocks += [wr.H2(title), wr.PanelGrid(runsets=[wr.Runset(name=name, filters=filters)], panels=panels)]
    typed = "\n".join(line for cell in report.cells for line in commands(cell))
    blocks += [wr.H2("Commands"), wr.CodeBlock(code=typed, language="yaml")]  # wandb has no highlighting for shell
    return wr.Report(entity=entity, project=project, title=f"seqmix: {report.title}", width="fluid", blocks=blocks)


def build_workspace(report: Report, entity: str, project: str) -> ws.Workspace:
    """The saved view of the project: one section per group of panels, and runs grouped by model and length."""
    import wandb_workspaces.workspaces as ws

    sections = [ws.Section(name=title, panels=panels, is_open=True) for title, panels in _panels(report).items() if panels]
    grouped = [ws.Config(MODEL), ws.Config("task.seq_len")]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"seqmix: {report.title}",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP),
        runset_settings=ws.RunsetSettings(groupby=grouped),
    )

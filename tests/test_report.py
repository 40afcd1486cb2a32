"""The report, on run folders made up in the format of real ones; the first test holds them to it."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import sys
import time
from xml.etree import ElementTree

import made_runs
import numpy as np
import pytest
import runs as real
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from made_runs import ENVIRONMENT, SOURCE, make_run, make_sweep

from seqmix.report.__main__ import main
from seqmix.report.page import band, page, payload
from seqmix.report.results import build_report, commands, summarize
from seqmix.report.runs import find_runs, flat, read_run
from seqmix.report.tables import cells_csv, figures, headline, markdown, runs_csv


def report_of(folder, **options):
    return build_report(find_runs([folder]), "t", **options)


def the_cell(report):
    (cell,) = report.cells
    return cell


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def said(report, *words: str) -> bool:
    return any(all(word in notice for word in words) for notice in report.notices)


def test_made_runs_have_the_keys_of_real_ones(tmp_path):
    summary = real.start(tmp_path / "real", "model=lstm", "task=selective_copy", *real.SELECTIVE_COPY, "trainer.max_steps=14")
    made = read_run(make_run(tmp_path / "made", "lstm"), "made")
    true = read_run(tmp_path / "real", "real")
    assert true.status == "complete" and true.summary == json.loads(json.dumps(summary))
    assert made.summary.keys() <= true.summary.keys(), "no key is made up"
    assert {k for k in true.summary if k.split("/")[0] in ("test", "val", "speed", "memory", "chance")} <= made.summary.keys()
    assert made.summary["environment"].keys() == true.summary["environment"].keys()
    assert made.summary["source"].keys() == true.summary["source"].keys()
    assert made.curves.keys() == true.curves.keys()
    assert made.config.keys() == true.config.keys()
    assert (true.model, true.task, true.seq_len, true.lr, true.seed) == ("lstm", "selective_copy", 12, 2e-3, 0)
    # and the report reads the real one right
    cell = the_cell(build_report([true], "t"))
    assert cell.results["token_accuracy"].median == summary["test/token_accuracy"]
    assert cell.results["peak_memory"].median == summary["memory/peak_host_mib"]
    steps, losses = zip(*true.curves["val/loss"], strict=True)
    assert {step: value for step, value in zip(steps, losses, strict=True)} == {
        step: float(text) for step, text in real.metrics(tmp_path / "real", "val/loss").items()
    }


def test_the_sweep_of_24_with_one_killed_and_one_out_of_memory(tmp_path):
    report = report_of(make_sweep(tmp_path / "s", failing={5: "killed", 22: "oom"}))
    assert headline(report) == "24 runs: 22 complete, 1 killed, 1 out of memory"
    assert len(report.cells) == 12 and {run.name for run in report.failures} == {"5", "22"}
    broken = {(c.model, c.seq_len): c.statuses for c in report.cells if c.complete < 2}
    assert broken == {("transformer", 256): {"complete": 1, "killed": 1}, ("lstm", 256): {"oom": 1, "complete": 1}}
    assert said(report, "lstm L=256 1 of 2", "transformer L=256 1 of 2")
    text = markdown(report)
    assert "(1 of 2 finite)" in text and "| `5` | transformer selective_copy L=256 seed=1 | killed |" in text
    by_run = {row["run"]: row for row in rows_of(runs_csv(report))}
    assert len(by_run) == 24 and by_run["22"]["status"] == "oom" and by_run["22"]["token_accuracy"] == ""
    for run in report.runs:
        if run.status == "complete":
            assert float(by_run[run.name]["token_accuracy"]) == run.summary["test/token_accuracy"], "no digit is lost"
            assert float(by_run[run.name]["step_ms"]) == run.summary["speed/step_ms"]


# What a run folder tells


@pytest.mark.parametrize("status", ["diverged", "oom", "interrupted", "failed", "killed", "unfinished"])
def test_a_run_without_a_result_has_its_status_and_no_number(tmp_path, status):
    make_run(tmp_path / "s/0", status=status)
    report = report_of(tmp_path / "s")
    cell = the_cell(report)
    assert cell.statuses == {status: 1} and all(r.median is None for r in cell.results.values())
    assert headline(report).startswith("1 run: 1 ")
    label = {"oom": "out of memory"}.get(status, status)
    assert f'<span class="chip bad">{label}</span>' in page(report, "") and f"| {label} |" in markdown(report)


def test_a_file_cut_short_costs_its_end_only(tmp_path):
    folder = make_run(tmp_path / "s/0", rows=10)
    whole = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(whole[:-7])
    before, after = read_run(folder, "x").curves, flat({"a": 1})
    assert after and sum(map(len, before.values())) < whole.count(",") and before["train/loss"][-1][0] == 3999
    (folder / "summary.json").write_text('{"status": "comp')
    run = read_run(folder, "x")
    assert run.status == "unfinished" and "cannot be read" in run.error
    (folder / "summary.json").unlink()
    assert read_run(folder, "x").error.endswith("step 100"), "the last word of train.log"
    (folder / "metrics.csv").write_text("")
    assert read_run(folder, "x").curves == {}


def test_a_run_that_never_wrote_its_config_resolved_is_placed_all_the_same(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"s/{seed}", seed=seed)
    early = make_run(tmp_path / "s/2", seed=2, status="unfinished")
    config = yaml.safe_load((early / "config.yaml").read_text())
    config["task"]["seed"] = "${seed}"
    config["trainer"]["accelerator"] = "${accelerator:}"
    (early / ".hydra/config.yaml").write_text(yaml.dump(config))
    (early / "config.yaml").unlink()
    cell = the_cell(report_of(tmp_path / "s"))
    assert [run.seed for run in cell.used] == [0, 1, 2] and cell.complete == 2


def test_places_are_folders_of_runs_at_any_depth_in_the_order_people_count(tmp_path):
    for n in (10, 9, 100):
        make_run(tmp_path / f"sweeps/a/{n}", seed=n)
    make_run(tmp_path / "runs/x", seed=1)
    (tmp_path / "sweeps/a/9/wandb/offline-run-1/files").mkdir(parents=True)
    (tmp_path / "sweeps/a/9/wandb/offline-run-1/files/config.yaml").write_text("a: 1")
    assert [run.name for run in find_runs([tmp_path / "sweeps"])] == ["a/9", "a/10", "a/100"]
    two = find_runs([tmp_path / "sweeps/a", tmp_path / "runs"])
    assert [run.name for run in two] == ["a/9", "a/10", "a/100", "runs/x"]
    assert len(find_runs([tmp_path / "sweeps", tmp_path / "sweeps/a"])) == 3, "once, however often it is named"
    assert [run.name for run in find_runs([tmp_path / "runs/x"])] == ["x"]
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        find_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run folder"):
        find_runs([tmp_path / "empty"])


def test_jobs_that_have_not_started_are_told(tmp_path, capsys):
    make_run(tmp_path / "s/0-a")
    jobs = [
        {"folder": f"outputs/sweeps/s/{name}", "overrides": ["size=tiny", f"seed={name}"]} for name in ("0-a", "1-b", "2-c")
    ]
    (tmp_path / "s/sweep.json").write_text(json.dumps({"jobs": jobs}))
    main([str(tmp_path / "s")])
    assert "2 jobs of the sweep not started yet: seed=1-b; seed=2-c." in capsys.readouterr().out


# One broken file


BROKEN = {"list": "- a\n- b\n", "no YAML": "a: [b\n", "empty": "", "word": None, "binary": "\udcff\udcfe"}


@pytest.mark.parametrize("how", BROKEN)
def test_a_run_whose_config_cannot_be_read_is_left_out_by_name_and_the_others_are_reported(tmp_path, capsys, how):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"s/{seed}", seed=seed)
    path = tmp_path / "s/1/config.yaml"
    text = BROKEN[how] if BROKEN[how] is not None else path.read_text().replace("lr: 0.002", "lr: fast")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    main([str(tmp_path / "s")])
    said_once = capsys.readouterr().out
    assert "3 runs: 2 complete, 1 unreadable; 1 cells" in said_once
    (line,) = [line for line in said_once.splitlines() if "1/config.yaml" in line]
    assert "'fast'" in line if how == "word" else line
    report = (tmp_path / "s/report/report.md").read_text()
    assert "| unreadable | 1/config.yaml" in report and str(tmp_path) not in report
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "s/1")])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "1/config.yaml" in message and message.count("\n") == 1, "one named folder is refused"


@pytest.mark.parametrize("name", ["overrides.yaml", "hydra.yaml"])
def test_hydras_files_may_be_broken_too(tmp_path, name):
    for seed in (0, 1):
        make_run(tmp_path / f"s/{seed}", seed=seed)
    (tmp_path / "s/0/.hydra" / name).write_text("a: [b\n")
    report = report_of(tmp_path / "s")
    assert [run.status for run in report.runs] == ["unreadable", "complete"] and said(report, f"0/.hydra/{name}")


def test_a_word_among_numbers_costs_itself(tmp_path):
    folder = make_run(tmp_path / "s/0", rows=10)
    before = read_run(folder, "0")
    path = folder / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    at = lines[0].strip().split(",").index("train/loss")
    fields = lines[1].split(",")
    fields[at] = "oops"
    path.write_text("".join([lines[0], ",".join(fields), *lines[2:]]))
    after = read_run(folder, "0")
    assert after.curves["train/loss"] == before.curves["train/loss"][1:] and after.summary == before.summary
    assert {**after.curves, "train/loss": []} == {**before.curves, "train/loss": []}
    assert said(report_of(tmp_path / "s"), "0/metrics.csv (line 2, train/loss='oops'")


@pytest.mark.parametrize("text", ["{", "[]", '{"jobs": [{"folder": 3}]}', '{"jobs": 5}', "{}"])
def test_a_broken_record_of_a_sweep_is_named_and_its_runs_are_reported(tmp_path, capsys, text):
    make_run(tmp_path / "s/0-a")
    (tmp_path / "s/sweep.json").write_text(text)
    main([str(tmp_path / "s")])
    said_once = capsys.readouterr().out
    assert "1 run: 1 complete" in said_once and said_once.count("sweep.json") == 1


@pytest.mark.parametrize("text", ["[1]", '"text"', "\x00"])
def test_a_summary_that_is_no_summary_is_named(tmp_path, text):
    (make_run(tmp_path / "s/0") / "summary.json").write_text(text)
    report = report_of(tmp_path / "s")
    assert report.runs[0].status == "unfinished" and report.runs[0].error.startswith("summary.json")


def test_runs_are_found_through_links_and_in_folders_of_any_name(tmp_path):
    for name in ("report", "wandb", "checkpoints"):
        make_run(tmp_path / f"elsewhere/{name}/x", seed=len(name))
    of_wandb = tmp_path / "elsewhere/report/wandb/offline-run-20261130_101112-abc/files"
    of_wandb.mkdir(parents=True)
    (of_wandb / "config.yaml").write_text("wandb_version: 1\n")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/runs").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/loop").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/latest").symlink_to(tmp_path / "elsewhere/report/x")
    found = [run.name for run in find_runs([tmp_path / "outputs"])]
    assert found == ["runs/checkpoints/x", "runs/report/x", "runs/wandb/x"]


def test_wandb_asked_for_where_it_is_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "s/0")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "seqmix.report.dashboards", raising=False)
    monkeypatch.delattr("seqmix.report.dashboards", raising=False)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "s"), "--wandb", "a/b"])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "pip install" in message and message.count("\n") == 1


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, capsys):
    make_run(tmp_path / "s/0")
    (tmp_path / "s/report").write_text("a file in the way")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "s")])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.startswith("error: cannot write to") and message.count("\n") == 1


def test_seeds_of_one_cell_that_took_different_numbers_of_steps_are_told(tmp_path):
    for seed, steps in ((0, 271), (1, 283)):  # max_time has ended both
        make_run(tmp_path / f"s/{seed}", seed=seed, summary={"steps": steps})
    assert said(report_of(tmp_path / "s"), "different numbers of steps", "mamba L=64 271 to 283")
    make_run(tmp_path / "t/0", seed=0, summary={"steps": 271})
    make_run(tmp_path / "t/1", seed=1, status="oom", summary={"steps": 100})
    assert not said(report_of(tmp_path / "t"), "numbers of steps"), "the one that failed has no number"


# The unit of a result


def loss(value: float) -> dict:
    return {"best/val/loss": value, "val/loss": value}


def test_the_rate_is_picked_on_validation_and_a_diverged_seed_counts_against_it(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"s/a{seed}", lr=1e-3, seed=seed, accuracy=0.8, summary=loss(0.5 + seed / 100))
        # the better test accuracy must not count
        make_run(tmp_path / f"s/b{seed}", lr=2e-3, seed=seed, accuracy=0.9, summary=loss(0.6))
        # the smallest loss of all, but two of three diverged
        make_run(tmp_path / f"s/c{seed}", lr=4e-3, seed=seed, status="diverged" if seed else "complete", summary=loss(0.1))
    cell = the_cell(report_of(tmp_path / "s"))
    assert cell.lr == 1e-3 and [run.lr for run in cell.used] == [1e-3] * 3 and list(cell.tried) == [1e-3, 2e-3, 4e-3]
    assert cell.results["token_accuracy"].median == 0.8


def test_rates_are_compared_on_the_seeds_that_all_of_them_have(tmp_path):
    """Further seeds of the rate that was picked do not change the pick."""
    for name, lr, seed, value in (("a", 1e-3, 0, 0.5), ("b", 2e-3, 0, 0.4), ("b1", 2e-3, 1, 0.9), ("b2", 2e-3, 2, 0.8)):
        make_run(tmp_path / f"s/{name}", lr=lr, seed=seed, summary=loss(value))
    cell = the_cell(report_of(tmp_path / "s"))
    assert cell.lr == 2e-3 and len(cell.used) == 3


@pytest.mark.parametrize(
    ("name", "values", "improving"),
    [
        ("val/token_accuracy", [0.3, 0.5, 0.6, 0.6, 0.62], True),
        ("val/token_accuracy", [0.3, 0.5, 0.6, 0.62, 0.625], False),  # less than a percentage point
        ("val/token_accuracy", [0.3, 0.5, 0.9, 0.7, 0.8], False),  # its best was earlier
        ("val/token_accuracy", [0.3, math.nan, math.nan, math.nan, 0.9], True),
        ("val/token_accuracy", [0.9], False),
        ("val/loss", [3.0, 2.0, 1.5, 1.4, 1.38], True),
        ("val/loss", [3.0, 2.0, 1.5, 1.4, 1.39], False),  # less than 1 %
    ],
)
def test_a_cell_whose_runs_were_still_improving_is_told(tmp_path, name, values, improving):
    summary = {"val/bits_per_byte": 1.0} if name == "val/loss" else {}
    folder = make_run(tmp_path / "s/0", summary=summary)
    rows = [f"{100 * (i + 1)},{value}" for i, value in enumerate(values)]
    (folder / "metrics.csv").write_text("\n".join([f"step,{name}", *rows, ""]))
    report = report_of(tmp_path / "s")
    assert said(report, "Still improving", "mamba L=64 1 of 1") is improving
    assert rows_of(cells_csv(report))[0]["still_improving"] == str(int(improving))


def test_runs_that_shared_a_gpu_are_told_and_steps_to_99_are_shown(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"s/{seed}", seed=seed, summary={"steps_to/0.99": 100 * (seed + 1), "job": {"mps": seed > 0}})
    report = report_of(tmp_path / "s")
    assert said(report, "2 runs shared a GPU") and the_cell(report).results["steps_to_99"].median == 200


def test_where_every_rate_failed_there_is_no_result_and_no_mix_of_rates(tmp_path):
    for i, lr in enumerate((1e-2, 1e-1)):
        make_run(tmp_path / f"s/{i}", lr=lr, status="diverged")
    cell = the_cell(report_of(tmp_path / "s"))
    assert cell.lr is None and cell.statuses == {"diverged": 2} and not any(r.finite for r in cell.results.values())


def test_g08_two_of_three_finite_is_marked_and_is_no_nan(tmp_path):
    for seed, accuracy in enumerate((0.5, 0.7)):
        make_run(tmp_path / f"s/{seed}", seed=seed, accuracy=accuracy)
    make_run(tmp_path / "s/2", seed=2, status="diverged")
    report = report_of(tmp_path / "s")
    result = the_cell(report).results["token_accuracy"]
    assert result.median == pytest.approx(0.6) and result.values == (0.5, 0.7, None) and result.finite == 2
    assert "60.0 [50.0, 70.0] (2 of 3 finite)" in markdown(report)
    (row,) = rows_of(cells_csv(report))
    assert (row["seeds"], row["complete"], row["token_accuracy_finite"]) == ("3", "2", "2")
    assert "2 of 3 finite" in page(report, "")


def test_a_complete_run_with_a_number_that_is_not_finite_is_marked_too(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"s/{seed}", seed=seed, accuracy=0.5, summary={"test/loss": None} if seed == 1 else {})
    cell = the_cell(report_of(tmp_path / "s"))
    assert cell.results["loss"].finite == 2 and cell.results["token_accuracy"].finite == 3


def test_the_interval_is_the_bootstraps_of_the_median():
    assert summarize([None, math.nan])[:3] == (None, None, None) and summarize([3.0])[:3] == (3.0, None, None)
    assert summarize([1.0, 2.0])[1:3] == (1.0, 2.0), "two values: each is drawn twice a quarter of the time"
    values = np.random.default_rng(1).normal(size=401)
    r = summarize(values)
    assert r == summarize(values), "seeded"
    # a median of n normal values has a standard error of sqrt(pi / 2 / n); the bootstrap's own spread is some 15 %
    width = 2 * 1.96 * math.sqrt(math.pi / 2 / 401)
    assert (r.high - r.low) == pytest.approx(width, rel=0.35) and r.low < np.median(values) < r.high
    shifted = summarize(values + 5)
    assert (shifted.low, shifted.high) == pytest.approx((r.low + 5, r.high + 5))


# What is never averaged

OTHER = {
    "code": {"source": SOURCE | {"commit": "a" * 40}},
    "code, by the diff": {"source": SOURCE | {"diff_sha256": "b261a1eb807c6ec5"}},
    "data": {"data": {"task": "selective_copy", "row_length": 80, "sha256": "other"}},
    "hardware": {"environment": ENVIRONMENT | {"device_name": "NVIDIA A100"}},
    "library": {"environment": ENVIRONMENT | {"torch": "2.12.0"}},
    "trainer.max_steps": {"steps": 8000},
    "task.batch_size": {"changes": {"task.batch_size": 64}},
    "weight_decay": {"changes": {"optimizer.weight_decay": 0.0}},
    "checkpoint.monitor": {"changes": {"callbacks.checkpoint.monitor": "val/token_accuracy"}},
}


@pytest.mark.parametrize("what", OTHER)
def test_runs_that_differ_are_not_averaged_and_the_difference_is_told(tmp_path, what):
    make_run(tmp_path / "s/0", seed=0, accuracy=0.2)
    make_run(tmp_path / "s/1", seed=1, accuracy=0.8, **OTHER[what])
    report = report_of(tmp_path / "s")
    assert sorted(c.results["token_accuracy"].median for c in report.cells) == [0.2, 0.8]
    assert len({c.series for c in report.cells}) == 2, "two lines, not one with two points"
    (difference,) = [d for d in report.differences if d.by == "variant"]
    key = {"hardware": "environment", "library": "environment"}.get(what, what.split(",")[0])
    assert key in difference.key and difference.key in page(report, "")
    if key in ("code", "data", "environment"):
        assert said(report, "kept apart, not averaged")


@pytest.mark.parametrize("what", ["code", "hardware"])
def test_averaging_over_code_or_machine_is_asked_for_and_marked(tmp_path, what):
    make_run(tmp_path / "s/0", seed=0, accuracy=0.2)
    make_run(tmp_path / "s/1", seed=1, accuracy=0.8, **OTHER[what])
    report = report_of(tmp_path / "s", average_over=["code" if what == "code" else "environment"])
    assert the_cell(report).results["token_accuracy"].median == 0.5
    assert said(report, "as asked") and "50.0‡" in markdown(report) and "‡" in page(report, "")
    with pytest.raises(ValueError, match="'data'"):
        report_of(tmp_path / "s", average_over=["data"])


def test_a_difference_between_models_in_budget_or_code_is_told_and_in_their_design_is_not(tmp_path):
    make_run(tmp_path / "s/0", "mamba")
    make_run(tmp_path / "s/1", "lstm", steps=1000, source=SOURCE | {"commit": "b" * 40})
    report = report_of(tmp_path / "s")
    assert {c.series for c in report.cells} == {"mamba", "lstm"}, "the model explains it: no variant"
    assert said(report, "`trainer.max_steps` is not the same for all models (lstm: 1000; mamba: 4000)")
    assert said(report, "code differs with the model")
    assert not said(report, "d_state") and not said(report, "channel_mixer")
    assert all(d.expected for d in report.differences if d.key.startswith("model."))


def test_a_key_that_follows_the_length_does_not_cut_the_line(tmp_path):
    for i, (length, batch) in enumerate(((64, 32), (128, 16))):
        make_run(tmp_path / f"s/{i}", seq_len=length, changes={"task.batch_size": batch})
    report = report_of(tmp_path / "s")
    assert {c.series for c in report.cells} == {"mamba"}
    (difference,) = report.differences
    assert difference[1:4] == ("task.batch_size", "length", {"L=64": "32", "L=128": "16"})


def test_sizes_and_options_are_lines_of_their_own(tmp_path):
    small = {"size": "small", "size.d_model": 128, "size.n_layer": 4}
    for i, (model, size) in enumerate((("mamba", None), ("mamba", small), ("lstm", None), ("lstm", small))):
        made = {key: value for key, value in (size or {}).items() if key != "size"}
        make_run(tmp_path / f"s/{i}", model, changes=made)
        if size:
            hydra = tmp_path / f"s/{i}/.hydra/hydra.yaml"
            hydra.write_text(hydra.read_text().replace("size: tiny", "size: small"))
    make_run(tmp_path / "t/0", "mamba")
    make_run(tmp_path / "t/1", "mamba", changes={"model.d_state": 64})
    assert {c.series for c in report_of(tmp_path / "s").cells} == {"mamba tiny", "mamba small", "lstm tiny", "lstm small"}
    assert {c.series for c in report_of(tmp_path / "t").cells} == {"mamba d_state=16", "mamba d_state=64"}


def test_a_halved_micro_batch_is_the_same_step_and_is_told(tmp_path):
    make_run(tmp_path / "s/0", seed=0)
    halves = {"micro_batch_size": 16, "task.eval_batch_size": 128}
    make_run(tmp_path / "s/1", seed=1, changes=halves, summary={"micro_batch": {"halvings": 1}})
    report = report_of(tmp_path / "s")
    assert len(the_cell(report).used) == 2 and said(report, "1 run ran in smaller micro-batches")


def test_the_newest_of_two_tries_counts_and_a_dead_try_goes_with_its_repeat(tmp_path):
    make_run(tmp_path / "s/0", accuracy=0.3)
    time.sleep(0.02)
    make_run(tmp_path / "s/1", accuracy=0.4)
    make_run(tmp_path / "s/2", status="killed")
    report = report_of(tmp_path / "s")
    assert the_cell(report).results["token_accuracy"].values == (0.4,) and said(report, "2 runs repeat")


def test_rates_and_seeds_that_are_unlike_are_told(tmp_path):
    for i, (model, seed, lr) in enumerate((("mamba", 0, 1e-3), ("mamba", 0, 2e-3), ("mamba", 1, 2e-3), ("s4", 0, 2e-3))):
        make_run(tmp_path / f"s/{i}", model, seed=seed, lr=lr, summary=loss(1e-3 / lr))
    report = report_of(tmp_path / "s")
    assert said(report, "different numbers of seeds", "1 cell with 1", "1 cell with 2")
    assert said(report, "Not every model was tried", "mamba: 0.001, 0.002")
    assert said(report, "smallest or largest", "mamba 0.002 (1 cell)")
    assert said(report, "not matched in parameters", "mamba 68,000", "s4 45,000")


# Commands


def test_commands_are_those_that_were_typed_and_hydra_reads_them(tmp_path):
    odd = {"task.source": "notes/*.txt", "task.split": "[0.8,0.1,0.1]"}
    for seed in (0, 1):
        make_run(tmp_path / f"s/{seed}", seed=seed)
        path = tmp_path / f"s/{seed}/.hydra/overrides.yaml"
        path.write_text(yaml.dump(yaml.safe_load(path.read_text()) + [f"{k}={v}" for k, v in odd.items()]))
    report = report_of(tmp_path / "s")
    (line,) = commands(the_cell(report))
    assert line.startswith("python train.py -m model=mamba") and line.endswith("seed=0,1")
    assert "'task.source=notes/*.txt'" in line and "'task.split=[0.8,0.1,0.1]'" in line
    single = shlex.split(report.runs[0].command)
    assert single[:2] == ["python", "train.py"] and single[2:] == list(report.runs[0].overrides)
    OverridesParser.create().parse_overrides(shlex.split(line)[3:])
    assert line in markdown(report) and line.replace("'", "&#x27;") in page(report, "")


def test_an_unknown_command_is_said_to_be_unknown(tmp_path):
    (make_run(tmp_path / "s/0") / ".hydra/overrides.yaml").unlink()
    report = report_of(tmp_path / "s")
    assert commands(the_cell(report)) == [] and "not recorded" in markdown(report) and "not recorded" in page(report, "")


# Curves, page, command line


def test_a_band_is_over_the_finite_seeds_of_each_step():
    a, b = [(0, 1.0), (10, 2.0), (20, 3.0)], [(0, 3.0), (10, math.nan)]
    assert band([a, b], 100) == {"x": [0, 10, 20], "mid": [2, 2, 3], "low": [1, 2, 3], "high": [3, 2, 3], "n": [2, 1, 1]}
    assert band([[(0, math.nan)]], 100) is None and band([[], []], 100) is None
    long = band([[(i, float(i)) for i in range(1001)]], 160)
    assert len(long["x"]) == 160 and long["x"][0] == 0 and long["x"][-1] == 1000 and long["mid"] == long["x"]


def test_numbers_in_the_page_are_those_of_the_runs(tmp_path):
    report = report_of(make_sweep(tmp_path / "s", lengths=(64,), models=("mamba",), seeds=(0, 1, 2)))
    data = json.loads(json.dumps(payload(report), allow_nan=False))
    (cell,) = data["cells"]
    values = [run.summary["test/token_accuracy"] * 100 for run in report.runs]
    assert cell["values"]["token_accuracy"][3] == pytest.approx(values, rel=1e-4)
    assert cell["values"]["token_accuracy"][0] == pytest.approx(np.median(values), rel=1e-4)
    curve = next(c for c in data["curves"] if c["name"] == "val/loss")
    finals = [run.curves["val/loss"][-1][1] for run in report.runs]
    assert curve["mid"][-1] == pytest.approx(np.median(finals), rel=1e-3)
    assert (curve["low"][-1], curve["high"][-1]) == pytest.approx((min(finals), max(finals)), rel=1e-3)


def test_a_text_of_a_run_cannot_end_the_script_or_start_an_element(tmp_path):
    make_run(tmp_path / "s/0", status="failed", summary={"error": "</script><img src=x onerror=alert(1)> <!--data-->"})
    out = page(report_of(tmp_path / "s"), "<b>")
    assert (
        "<img" not in out and out.count("</script>") == 2 and "&lt;img src=x" in out and "<b>" not in out.split("<footer>")[1]
    )


def test_a_task_of_several_lengths_has_a_figure(tmp_path):
    """A point per cell with its interval, a cross with the status where there is no number; no figure for a single length."""
    for length, seed in ((64, 0), (64, 1), (128, 0), (128, 1)):
        make_run(tmp_path / f"s/{length}-{seed}", "s4", seq_len=length, seed=seed, accuracy=0.5 + 0.2 * seed)
        make_run(
            tmp_path / f"s/l{length}-{seed}", "lstm", seq_len=length, seed=seed, status="oom" if length > 64 else "complete"
        )
    make_run(tmp_path / "s/copy", task="copy")
    ((name, svg),) = figures(report_of(tmp_path / "s")).items()
    assert name == "token_accuracy_selective_copy.svg" and name in markdown(report_of(tmp_path / "s"))
    drawn = ElementTree.fromstring(svg)
    heights = [float(mark.get("cy")) for mark in drawn.findall("{*}circle")][1:]  # the first is the legend's
    assert len(heights) == 1 and "lstm: out of memory" in svg
    bars = [line for line in drawn.findall("{*}line") if "line" in line.get("class") and line.get("x1") == line.get("x2")]
    assert len(bars) == 3 and "Medians of 2 seeds" in svg


def test_without_a_test_the_validation_is_reported_as_such(tmp_path):
    none = {f"test/{name}": None for name in ("loss", "token_accuracy", "sequence_accuracy", "perplexity")}
    make_run(tmp_path / "s/0", accuracy=0.5, summary=none)
    report = report_of(tmp_path / "s")
    assert report.split == "val" and "Token accuracy (val)" in markdown(report) and "(test)" not in markdown(report)


def test_the_command_writes_four_files_that_name_no_place_of_this_machine(tmp_path, monkeypatch, capsys):
    make_sweep(tmp_path / "outputs/sweeps/s", lengths=(64,), failing={0: "unfinished", 3: "oom"})
    monkeypatch.chdir(tmp_path)
    main(["outputs/sweeps/s"])
    out = tmp_path / "outputs/sweeps/s/report"
    assert {path.name for path in out.iterdir()} == {"index.html", "report.md", "cells.csv", "runs.csv"}
    assert "8 runs: 6 complete, 1 unfinished, 1 out of memory; 4 cells" in capsys.readouterr().out
    for path in out.iterdir():
        assert str(tmp_path) not in path.read_text(), path.name
    assert "python -m seqmix.report outputs/sweeps/s" in (out / "index.html").read_text()
    first = (out / "index.html").read_bytes()
    main(["outputs/sweeps/s"])
    assert (out / "index.html").read_bytes() == first, "the same runs, the same page; and the report is no run"
    for wrong in (["nowhere"], ["outputs/sweeps/s", "--average-over", "data"], ["outputs/sweeps/s", "--wandb", "noslash"]):
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2


def test_five_hundred_runs_take_seconds_and_the_page_stays_small(tmp_path):
    models = tuple(made_runs.NATURE)
    rates = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    make_sweep(tmp_path / "s", models=models, lengths=(64, 128, 256, 512), seeds=range(5), lrs=rates, rows=100)
    assert len([*(tmp_path / "s").glob("*/summary.json")]) == 500
    began = time.process_time()  # of this process: the machine may be busy with others
    main([str(tmp_path / "s")])
    assert time.process_time() - began < 5
    assert (tmp_path / "s/report/index.html").stat().st_size < 6e6

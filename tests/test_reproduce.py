"""python -m seqmix.reproduce: the presets can run, and the verdict is computed."""

import json

import pytest
from made_runs import make_run
from omegaconf import OmegaConf
from runs import CONF

from seqmix import reproduce
from seqmix.config import check, compose_run
from seqmix.report.results import build_report
from seqmix.report.runs import find_runs

NAMES = sorted(path.stem for path in (CONF / "reproduce").glob("*.yaml"))
SIGNED = {"model.eigen_range": [-1, 1]}


def test_every_preset_has_an_expectation_and_the_other_way_round():
    assert NAMES == sorted(path.stem for path in (CONF / "experiment/repro").glob("*.yaml")) and "parity_small" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_can_be_at_full_and_at_smoke_size_and_measures_what_is_expected(name):
    first = [
        f"{key}={str(listed).split('],')[0]}]" if str(listed).startswith("[") else f"{key}={str(listed).split(',')[0]}"
        for key, listed in OmegaConf.load(CONF / f"experiment/repro/{name}.yaml").hydra.sweeper.params.items()
    ]
    cfg = compose_run([f"experiment=repro/{name}", *first], CONF, "x")
    check(cfg)
    check(compose_run([f"experiment=repro/{name}", "debug=smoke", *first], CONF, "x"))
    wanted = OmegaConf.to_container(OmegaConf.load(CONF / f"reproduce/{name}.yaml"))
    assert (wanted["source"] and wanted["minutes"] is None) or wanted["minutes"] > 0
    for expectation in wanted["expect"]:
        _, length, metric = expectation["metric"].split("/")
        assert int(length) in cfg.eval.lengths and metric == "token_accuracy"
        assert len({"at_least", "at_most"} & expectation.keys()) == 1
        assert all(OmegaConf.select(cfg, key) is not None for key in expectation["where"])


@pytest.fixture
def cells(tmp_path):
    for seed, value in enumerate((1.0, 0.99, 0.2)):
        make_run(tmp_path / f"s/a{seed}", seed=seed, changes=SIGNED, summary={"length/16/token_accuracy": value})
        make_run(tmp_path / f"s/b{seed}", seed=seed, summary={"length/16/token_accuracy": value / 2})
    make_run(tmp_path / "s/a3", seed=3, changes=SIGNED, status="failed", summary={"length/16/token_accuracy": 0.0})
    return build_report(find_runs([tmp_path / "s"]), "s").cells


def test_the_verdict_is_of_the_median_over_complete_runs(cells):
    low = {"model.eigen_range": [0, 1]}
    one, two, three, none, missing = reproduce.judge(
        cells,
        [
            {"metric": "length/16/token_accuracy", "at_least": 0.99, "where": SIGNED},
            {"metric": "length/16/token_accuracy", "at_most": 0.4, "where": low},
            {"metric": "length/16/token_accuracy", "at_most": 0.5, "where": low},
            {"metric": "length/16/token_accuracy", "at_least": 0.0, "where": {"model.d_state": 7}},
            {"metric": "length/99/token_accuracy", "at_most": 1.0, "where": low},
        ],
    )
    assert one == {"where": "model.eigen_range=[-1, 1]", "metric": "length/16/token_accuracy", "expected": ">= 0.99",
                   "median": 0.99, "runs": 3, "pass": True}  # fmt: skip
    assert (two["median"], two["pass"], three["pass"]) == (0.495, False, True)
    assert (none["median"], none["pass"], missing["median"], missing["pass"]) == (None, False, None, False)


@pytest.mark.parametrize(("bound", "code"), [(0.9, 0), (0.995, 1)])
def test_the_exit_code_is_the_verdict(tmp_path, monkeypatch, capsys, bound, code):
    monkeypatch.chdir(tmp_path)
    commands = []

    def run(line, **_):
        commands.append(line)
        if "-m" in line[1:3] and "train.py" in line[1]:
            for seed in (0, 1):
                place = tmp_path / f"outputs/reproduce/parity_small/{seed}"
                make_run(place, seed=seed, changes=SIGNED, summary={"length/16/token_accuracy": 0.99})
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    expect = [{"metric": "length/16/token_accuracy", "at_least": bound, "where": SIGNED}]
    assert reproduce.reproduce("parity_small", expect, ["seed=0,1"]) == (code == 0)
    folder = "outputs/reproduce/parity_small"
    assert commands[0][2:] == ["-m", "experiment=repro/parity_small", f"hydra.sweep.dir={folder}", "seed=0,1"]
    (row,) = json.loads((tmp_path / "outputs/reproduce/parity_small/verdict.json").read_text())
    assert row["pass"] == (code == 0) and ("fail" in capsys.readouterr().out) == (code == 1)
    monkeypatch.setattr(reproduce, "reproduce", lambda *_: code == 0)
    with pytest.raises(SystemExit) as end:
        reproduce.main(["parity_small"])
    assert end.value.code == code


def test_names_are_listed_with_minutes_and_an_unknown_one_is_refused(capsys):
    reproduce.main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    with pytest.raises(SystemExit) as end:
        reproduce.main(["parity_tiny"])
    assert end.value.code == 2 and "parity_small" in capsys.readouterr().err


def test_the_committed_verdict_is_a_pass():
    verdict = json.loads((CONF.parent / "outputs/report/parity_small/verdict.json").read_text())
    wanted = OmegaConf.to_container(OmegaConf.load(CONF / "reproduce/parity_small.yaml"))["expect"]
    assert len(verdict) == len(wanted) and all(row["pass"] and row["runs"] == 3 for row in verdict)

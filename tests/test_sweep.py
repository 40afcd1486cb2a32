"""Multiruns: what ends a job ends that job alone, and what is done stays done (cases E17, E18, F01, F02, F09, F11)."""

import fcntl
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_job
import pytest
import torch
from hydra import compose
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from rich.console import Console
from runs import CONF, ROOT, SELECTIVE_COPY, SMALL, command, metrics, small, start

from seqmix.command_line import check_command_line
from seqmix.config import check, compose_run, hydra_at, register_resolvers
from seqmix.fork_server import Server
from seqmix.sweep import script, table
from seqmix.sweep.callback import SweepTable, jobs_of_folders
from seqmix.sweep.jobs import Job, halved, objective, outcome, quoted, read_summary
from seqmix.sweep.names import resolved, run_id
from seqmix.sweep.queue import Queue, Settings
from seqmix.tasks.selective_copy import SelectiveCopy

register_resolvers()
FAKE = Path(fake_job.__file__)
DEFAULTS = dict(OmegaConf.load(CONF / "hydra/launcher/queue.yaml"))
DEFAULTS.pop("_target_")


def jobs_of(place):
    (record,) = place.rglob("sweep.json")
    return json.loads(record.read_text())["jobs"]


def composed(*overrides):
    with hydra_at(CONF):
        return compose("train", overrides=list(overrides), return_hydra_config=True)


# Names


def test_a_run_is_named_by_what_decides_its_result():
    base = run_id(composed())
    assert base == run_id(composed("logger=csv", "hydra.job.name=x")) == run_id(composed("model=mamba"))
    others = (
        "seed=1",
        "model=lstm",
        "task.seq_len=65",
        "optimizer.lr=1e-3",
        "trainer.max_steps=5",
        "callbacks.nonfinite.patience=2",
        "ckpt=last",
        "+model.bias=true",
    )
    assert len({base, *(run_id(composed(other)) for other in others)}) == 1 + len(others)


def test_a_job_is_named_by_what_the_checkpoint_holds_that_it_resumes_from(tmp_path):
    def name(path, weights):
        torch.save({"weights": weights}, path)
        return run_id(composed(f"ckpt='{path}'"))

    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    first = name(tmp_path / "a.ckpt", ones)
    assert len({run_id(composed()), run_id(composed("ckpt=nowhere.ckpt")), first, name(tmp_path / "b.ckpt", twos)}) == 4
    assert name(tmp_path / "copy.ckpt", ones) == first, "wherever it lies"
    assert name(tmp_path / "a.ckpt", twos) != first, "the file has changed"


def test_a_run_folder_is_short_and_has_no_odd_characters():
    """Case F09."""
    many = [f"task.source='/a/b{'/c' * 100}/d=e f.txt'", "task=lm"]
    name = str(composed(*many).hydra.sweep.subdir)
    assert re.fullmatch(r"[\w.-]{1,100}", name) and name.startswith("mamba-lm-L256-s0-")


def test_a_sweep_is_named_by_what_was_typed_in_any_order():
    def name(*overrides):
        with hydra_at(CONF):
            loader = GlobalHydra.instance().config_loader()
            return Path(str(loader.load_configuration("train", list(overrides), RunMode.MULTIRUN).hydra.sweep.dir)).name

    one = name("model=lstm,mamba", "task.seq_len=8,16", "size=tiny")
    assert one.startswith("model-seq_len-")
    assert one == name("task.seq_len=8,16", "size=tiny", "logger=csv", "model=lstm,mamba", "hydra.launcher.n_jobs=2")
    assert one != name("model=lstm,mamba", "task.seq_len=8,16", "size=tiny", "ckpt=last")
    assert one != name("model=lstm,mamba", "task.seq_len=8,32", "size=tiny")
    assert one != name("model=lstm,mamba", "task.seq_len=8,16", "size=tiny", "seed=1")
    assert name("experiment=length_sweep").startswith("length_sweep-")


# How a process ended


@pytest.mark.parametrize(
    ("code", "summary", "status", "word"),
    [
        (0, {"status": "complete"}, "complete", None),
        (1, {"status": "diverged", "error": "NaN"}, "diverged", "NaN"),
        (-signal.SIGKILL, {}, "killed", "memory"),
        (137, {}, "killed", "memory"),
        (-signal.SIGSEGV, {}, "failed", "SIGSEGV; last"),
        (-signal.SIGINT, {}, "interrupted", "SIGINT"),
        (143, {}, "interrupted", "SIGTERM"),
        (3, {}, "failed", "exit code 3 and no summary.json; last"),
        (0, {}, "failed", "exit code 0"),
    ],
)
def test_an_end_is_the_jobs_own_word_or_its_exit_code(code, summary, status, word):
    found, error = outcome(code, summary, "last")
    assert found == status and (error is None if word is None else word in error)


def test_what_a_search_minimises():
    assert objective({"status": "complete", "best/val/loss": 0.25}) == 0.25
    for summary in ({}, {"status": "diverged", "best/val/loss": 0.25}, {"status": "complete", "best/val/loss": None}):
        assert objective(summary) == math.inf


# The queue, with jobs that are quick


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """run(seeds, or whole overrides, settings, fake) -> (return values, events); in a sweep folder of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(script, "prepare", fake_job.prepare)
    folder = tmp_path / "a sweep"

    def run(asked, fake=None, gpus=(), **settings):
        monkeypatch.setenv("FAKE", json.dumps(fake or {}))
        with hydra_at(CONF):
            cfg = compose("train", overrides=[f"hydra.sweep.dir='{folder}'"], return_hydra_config=True)
            context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
            q = Queue(Settings(**(DEFAULTS | settings)), cfg, context, FAKE)
            if gpus:
                q.gpus = list(gpus)
            (folder / "events").unlink(missing_ok=True)
            returns = q.run([[f"seed={job}"] if isinstance(job, int) else job for job in asked], 0)
        return [r.return_value for r in returns], events(folder)

    run.folder = folder
    return run


def events(folder):
    path = folder / "events"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def statuses(folder):
    return [job["status"] for job in jobs_of(folder)]


def test_jobs_run_in_order_and_no_more_at_once_than_asked_for(queue, capsys):
    _, happened = queue(range(9), {str(seed): ["slow"] for seed in range(4)}, n_jobs=3, threads=2)
    assert re.findall(r"^start +seed=(\d+)$", capsys.readouterr().err, re.M) == [str(n) for n in range(9)]
    running, most = 0, 0
    for what, *_ in sorted(happened, key=lambda event: event[2]):
        running += 1 if what == "start" else -1
        most = max(most, running)
    assert most == 3
    assert {event[3]["OMP_NUM_THREADS"] for event in happened} == {"2"}
    assert statuses(queue.folder) == ["complete"] * 9
    assert queue(range(9))[1] == [], "all are skipped"
    _, happened = queue(range(10))
    assert [event[1] for event in happened if event[0] == "start"] == ["9"], "a longer sweep runs what is new"


def test_each_job_has_a_gpu_of_its_own_and_a_wandb_run(queue):
    queue(range(4), n_jobs=2, gpus=("0", "GPU-b"))
    happened = events(queue.folder)
    live = {}
    for what, seed, _, env, _ in sorted(happened, key=lambda event: event[2]):
        if what == "start":
            assert env["CUDA_VISIBLE_DEVICES"] not in live.values()
            live[seed] = env["CUDA_VISIBLE_DEVICES"]
        else:
            del live[seed]
    envs = [event[3] for event in happened if event[0] == "start"]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in envs} == {"0", "GPU-b"}
    assert {env["WANDB_RUN_GROUP"] for env in envs} == {"a sweep"} and {env["WANDB_JOB_TYPE"] for env in envs} == {"train"}
    ids = [env["WANDB_RUN_ID"] for env in envs]
    assert len(set(ids)) == 4 and {i.split("-")[0] for i in ids} == {job["run_id"] for job in jobs_of(queue.folder)}


@pytest.mark.parametrize("runner", [[], ["-u"]])  # forked; started anew
def test_failures_stay_alone_and_are_recorded(queue, runner):
    ends = {
        "1": ["SIGKILL"],
        "2": ["SIGSEGV"],
        "3": ["exit0"],
        "4": ["oom"],
        "5": ["diverged"],
        "6": ["exit3"],
        "7": ["SIGTERM"],
    }
    values, _ = queue(range(9), fake=ends, n_jobs=2, runner=runner)
    assert values == [0.5, *[math.inf] * 7, 0.5]
    expected = ["complete", "killed", "failed", "failed", "oom", "diverged", "failed", "interrupted", "complete"]
    assert statuses(queue.folder) == expected
    for job, status in zip(jobs_of(queue.folder), expected, strict=True):
        summary = json.loads((Path(job["folder"]) / "summary.json").read_text())
        assert summary["status"] == status and summary["job"]["exit_code"] == job["exit_code"]
        assert (Path(job["folder"]) / "config.yaml").is_file() and (Path(job["folder"]) / ".hydra/overrides.yaml").is_file()
    assert "the last word" in jobs_of(queue.folder)[6]["error"]
    _, happened = queue(range(9), skip=["complete", "diverged"])
    assert [event[1] for event in happened if event[0] == "start"] == ["1", "2", "3", "4", "6", "7"]
    assert statuses(queue.folder) == ["skipped" if s in ("complete", "diverged") else "complete" for s in expected]


def test_retries_and_max_failures(queue):
    fake = {"0": ["SIGKILL", "exit1", "complete"], "1": ["diverged", "complete"], "2": ["exit1"], "3": ["exit1"]}
    with pytest.raises(SystemExit) as stop:
        queue(range(6), fake=fake, retries=2, max_failures=2)
    assert stop.value.code == 1
    assert [(job["status"], job["attempts"]) for job in jobs_of(queue.folder)] == [
        ("complete", 3), ("diverged", 1), ("failed", 3), *[("queued", 0)] * 3,
    ]  # fmt: skip


def test_a_job_runs_again_where_its_checkpoint_has_changed(queue, tmp_path):
    """A sweep over checkpoints runs a job for each; the same sweep without them does not stand for it."""

    def save(name, value):
        torch.save({"weights": torch.full((3,), value)}, tmp_path / name)

    def ran(*names):
        jobs = [["seed=5"] if name is None else ["seed=5", f"ckpt={quoted(str(tmp_path / name))}"] for name in names]
        return sum(event[0] == "start" for event in queue(jobs)[1])

    save("a.ckpt", 1.0), save("b.ckpt", 2.0), save("it's.ckpt", 3.0)
    assert ran(None) == 1 and ran("a.ckpt", "b.ckpt", "it's.ckpt", None) == 3 and ran("b.ckpt", "a.ckpt") == 0
    save("a.ckpt", 4.0)
    assert ran("a.ckpt", "b.ckpt") == 1


def test_a_job_runs_again_where_its_data_have_changed(queue, tmp_path, monkeypatch):
    """A task says what its files look like (`file_facts`); those of a task whose rows are made do not change."""
    facts = [("text.txt", 5, 0)]
    monkeypatch.setattr(SelectiveCopy, "file_facts", lambda self: facts, raising=False)

    def ran():
        return [event[1] for event in queue([1, 2])[1] if event[0] == "start"]

    assert ran() == ["1", "2"] and ran() == []
    facts = [("text.txt", 6, 0)]
    assert ran() == ["1", "2"] and ran() == []
    facts = [("text.txt", 5, 0)]
    assert ran() == [], "what was run on the same data is there"


def test_a_config_may_name_the_number_of_its_job(queue):
    _, happened = queue([["seed=7", "+logger.csv.name=job-${hydra:job.num}"], ["seed=8", "matmul_precision=${hydra:job.id}"]])
    assert {event[1]: {word for word in event[4] if "hydra.job" in word} for event in happened if event[0] == "start"} == {
        "7": {"++hydra.job.num=0", "++hydra.job.id=0"},
        "8": {"++hydra.job.num=1", "++hydra.job.id=1"},
    }


def test_a_config_asked_for_twice_runs_once(queue):
    values, happened = queue([1, 1, 2])
    assert values == [0.5] * 3 and [event[1] for event in happened if event[0] == "start"] == ["1", "2"]


@pytest.mark.parametrize("runner", [[], ["-u"]])
@pytest.mark.parametrize(("behaviour", "signals", "status"), [("waits", 1, "interrupted"), ("deaf", 2, "killed")])
def test_ctrl_c_ends_the_jobs_and_a_second_one_kills(queue, behaviour, signals, status, runner):
    def press():
        for _n in range(signals):
            ready = "start" if behaviour == "waits" else "deaf"
            while sum(event[0] == ready for event in events(queue.folder)) < 2:
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(SystemExit) as stop:
        queue(range(3), fake={"0": [behaviour], "1": [behaviour]}, n_jobs=2, runner=runner)
    thread.join()
    assert stop.value.code == 130 and statuses(queue.folder) == [status, status, "queued"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_job_has_the_environment_of_one_started_anew(queue, monkeypatch):
    """Its own, whatever the server or an earlier job had."""
    monkeypatch.setenv("TO_BE_GONE", "1")
    envs = []
    for seeds, runner in (([1, 2], []), ([3], ["-u"])):
        _, happened = queue(seeds, gpus=("0",), runner=runner)
        envs += [event[3] for event in happened if event[0] == "start"]
    assert len({env.pop("WANDB_RUN_ID") for env in envs}) == 3 and envs[0]["TO_BE_GONE"] == "1"
    assert envs[0] == envs[1] == envs[2]


def test_all_jobs_run_the_code_of_the_start(queue, monkeypatch, tmp_path):
    edited = tmp_path / "job.py"
    edited.write_text(FAKE.read_text().replace("    main()", f"    Path({str(edited)!r}).write_text('an edit')\n    main()"))
    monkeypatch.setattr(sys.modules[__name__], "FAKE", edited)
    queue(range(2))
    assert statuses(queue.folder) == ["complete"] * 2 and edited.read_text() == "an edit"


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
def test_where_the_server_ends_jobs_are_started_anew(queue, caplog):
    queue(range(3), {"0": ["kills its parent"]})
    assert caplog.text.count("has ended with exit code -9; each further job imports for itself") == 1
    assert statuses(queue.folder) == ["complete"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
def test_a_forked_job_has_its_own_threads_and_may_open_a_gpu(tmp_path):
    """The server has run nothing in parallel (libgomp's threads do not survive a fork) and has asked for no GPU."""
    server = Server(script.prepare, str(ROOT / "train.py"), True, env=os.environ | {"OMP_NUM_THREADS": "2"})
    assert server.start(fake_job.facts, str(tmp_path / "facts")).poll(90) == 0
    facts = json.loads((tmp_path / "facts").read_text())
    threads = min(2, os.cpu_count())
    assert facts == {"source read": 1, "cuda": False, "asked": threads, "before": 1, "after": threads}


@pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fork can use the GPU here")
def test_a_job_whose_fork_cannot_use_its_gpu_is_a_new_python_in_the_same_process(tmp_path):
    job = tmp_path / "job.py"
    held = "any(os.path.realpath(f'/proc/self/fd/{n}') == sys.argv[1] for n in os.listdir('/proc/self/fd'))"
    job.write_text(f"import json, os, sys; print(json.dumps([os.getpid(), sys.orig_argv[1] == sys.argv[0], {held}]))")
    server = Server(script.prepare, str(ROOT / "train.py"), False)
    for devices, is_new in (("0", True), ("", False)):
        with (tmp_path / "lock").open("w") as lock, (tmp_path / "output").open("w+") as output:
            env = os.environ | {"CUDA_VISIBLE_DEVICES": devices}
            child = server.start(script.run, str(job), [lock.name], env, descriptors=[output.fileno(), lock.fileno()])
            assert child.poll(90) == 0
            output.seek(0)
            assert json.loads(output.read()) == [child.pid, is_new, True]


def test_two_sweeps_do_not_share_a_folder(queue, capsys):
    queue.folder.mkdir()
    with (queue.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit) as stop:
            queue([1])
    assert stop.value.code == 2 and "is writing to" in capsys.readouterr().err
    assert [path.name for path in queue.folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"jobs": [{"number": 1}]}'])
def test_a_broken_record_is_refused_by_name_before_a_job_is_run(tmp_path, capsys, monkeypatch, text):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/sweep.json").write_text(text)
    cfg = composed(f"hydra.sweep.dir={tmp_path}/s")
    with pytest.raises(SystemExit) as stop:
        SweepTable().on_multirun_start(cfg)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "s/sweep.json" in message and message.count("\n") == 1
    assert (tmp_path / "s/sweep.json").read_text() == text


def test_a_broken_summary_is_named_and_its_job_run_again(queue, caplog):
    queue(range(3))
    broken = Path(jobs_of(queue.folder)[1]["folder"]) / "summary.json"
    broken.write_text("[1, 2]")
    _, happened = queue(range(3))
    assert [event[1] for event in happened if event[0] == "start"] == ["1"]
    assert caplog.text.count(str(broken)) == 1


def test_a_folder_that_cannot_be_read_is_left_out_of_the_table_by_name(tmp_path, caplog):
    for name, text in (("a", "[seed=0]"), ("b", "a: ["), ("c", "seed: 1")):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra/overrides.yaml").write_text(text)
    assert [job.overrides for job in jobs_of_folders(tmp_path)] == [["seed=0"]]
    assert caplog.text.count("b/.hydra/overrides.yaml") == caplog.text.count("c/.hydra/overrides.yaml") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_jobs", 0),
        ("n_jobs", True),
        ("gpus_per_job", None),
        ("retries", -1),
        ("on_oom", "half"),
        ("max_failures", 1.5),
        ("skip", "complete"),  # which is a list of its letters
        ("skip", ["complet"]),
        ("skip", []),
        ("skip", ["diverged"]),  # complete jobs would be resumed at their end, and lose their numbers
        ("runner", "-m torch.distributed.run"),
        ("grace_seconds", -1),
    ],
)
def test_settings_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"hydra.launcher.{name}"):
        Settings(**(DEFAULTS | {name: value}))
    assert Settings(**(DEFAULTS | {"skip": ["complete", "diverged"], "n_jobs": None, "runner": ["-m", 2]}))


@pytest.mark.parametrize("folder", ["a b", "it's", "a\\b", "\\", "\\'", "a=b,c", "${x}", "\\${x}", '"', "[x]", "ä"])
def test_any_folder_can_be_handed_to_a_job(folder):
    value = OverridesParser.create().parse_override(f"hydra.run.dir={quoted(folder)}").value()
    assert OmegaConf.create({"dir": value}).dir == folder


def test_the_table_in_a_terminal_and_after(tmp_path, monkeypatch, capsys):
    jobs = [Job(n, str(n), str(tmp_path / str(n)), [f"seed={n}", "model=lstm"]) for n in range(3)]
    live = table.Live(tmp_path, jobs, 1, {"0": 9, "1": 9, "2": -1}, " under MPS")
    live.console = Console(force_terminal=True, width=400, record=True)
    with live:
        jobs[0].status, jobs[0].seconds = "complete", 2.0
        live.ended(jobs[0])
        jobs[1].status = "running"
        jobs[1].path.mkdir()
        (jobs[1].path / "output.log").write_text("noise\nstep 3/9 (33%)\nmore noise\n")
        live.started(jobs[1])  # it resumes at step 3 of 9
        (jobs[1].path / "output.log").write_text("step 3/9 (33%)\nstep 6/9 (67%)\n")
        live.began = time.monotonic() - 30  # in which 1.5 of 3 jobs were done
        live.drawn = 0.0
        live.refresh()
    shown = " ".join(capsys.readouterr().out.split())
    assert "steps/s, at most 1 at once under MPS" in shown
    assert "1/3 done, 1 running, 1 queued" in shown and "0:00:30 < 0:00:30 0 " in shown and "step 6/9 (67%)" in shown
    jobs[1].status, jobs[1].error = "oom", "[no] markup"
    table.show(tmp_path, jobs)
    shown = capsys.readouterr().err
    assert "[no] markup" in shown and "all with model=lstm" in shown and "seed=1" in shown
    assert [job.number for job in table.bad(jobs)] == [1, 2]


# The queue, with real runs


def test_a_sweep_survives_its_jobs_and_goes_on(tmp_path):
    """kill -9, sys.exit and out of memory end their job alone; the same command skips, resumes, and halves if asked."""
    kinds = ("seqmix.mixers.lstm.LSTM", "faults.Killed", "faults.Full", "faults.Exits")
    line = [f"model._target_={','.join(kinds)}", "model=lstm", "logger=csv", *SELECTIVE_COPY, "trainer.max_steps=6"]
    line += ["callbacks.last.every_n_steps=1", "hydra.launcher.n_jobs=2"]
    env = {"PYTHONPATH": str(ROOT / "tests")}
    first = command(tmp_path, *line, env=env, multirun=True)
    assert first.returncode == 1, first.stderr
    jobs = jobs_of(tmp_path)
    assert [job["status"] for job in jobs] == ["complete", "killed", "oom", "interrupted"], first.stderr
    folders = [tmp_path / job["folder"] for job in jobs]
    assert "4 rows" in jobs[2]["error"] and jobs[2]["error"] in first.stderr.replace("\n", " ")
    stamp = (folders[0] / "metrics.csv").stat().st_mtime_ns

    again = command(tmp_path, *line, "hydra.launcher.on_oom=halve", env=env | {"FAULTS": "off"}, multirun=True)
    assert again.returncode == 0, again.stderr
    assert [job["status"] for job in jobs_of(tmp_path)] == ["skipped", *["complete"] * 3]
    assert (folders[0] / "metrics.csv").stat().st_mtime_ns == stamp, "what is complete is not touched"
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [bool(s["resumed_from"]) for s in summaries] == [False, True, False, True]
    assert summaries[1]["val/loss"] == summaries[0]["val/loss"], "the resumed run is the uninterrupted one, bit by bit"
    assert summaries[2]["micro_batch"] == {"halvings": 1, "micro_batch_size": "2", "task.eval_batch_size": "4"}
    assert summaries[2]["steps"] == 6
    assert summaries[2]["val/loss"] == pytest.approx(summaries[0]["val/loss"], abs=1e-5), "the same rows a step"


def test_a_job_of_a_sweep_is_the_run_of_its_own_bit_by_bit(tmp_path):
    """With workers that load its data, too: a forked job may have children."""
    line = ["logger=csv", *SELECTIVE_COPY, "dropout=0.1", "task.num_workers=1", "task.make_on=loader"]
    alone = command(tmp_path, *line, "model=mamba", "seed=1", "hydra.run.dir=alone")
    swept = command(tmp_path, *line, "model=lstm,mamba", "seed=1", "hydra.sweep.dir=swept", multirun=True)
    assert alone.returncode == swept.returncode == 0, alone.stderr + swept.stderr
    folders = tmp_path / "alone", tmp_path / jobs_of(tmp_path)[1]["folder"]
    one, other = [torch.load(folder / "checkpoints/last.ckpt", weights_only=True) for folder in folders]
    assert one["state_dict"].keys() == other["state_dict"].keys()
    assert all(torch.equal(one["state_dict"][name], other["state_dict"][name]) for name in one["state_dict"])
    assert [metrics(folder, "train/loss") for folder in folders] == 2 * [metrics(folders[0], "train/loss")]
    one, other = map(read_summary, folders)
    assert one["source"] == other["source"] and one["test/loss"] == other["test/loss"]


def test_a_sweep_that_is_killed_takes_its_jobs_along(tmp_path):
    """They save; and the sweep can be started again when the last of them has gone."""
    overrides = small(*SELECTIVE_COPY, "trainer.max_steps=100000", "logger=csv")
    line = [sys.executable, str(ROOT / "train.py"), "-m", *overrides]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(line, cwd=tmp_path, stdout=log, stderr=log)
        wait_for(lambda: any(path.stat().st_size > 200 for path in tmp_path.rglob("metrics.csv")), process)
        process.kill()
        process.wait()
        wait_for(lambda: list(tmp_path.rglob("summary.json")) and read_summary(next(tmp_path.rglob("summary.json")).parent))
    (path,) = tmp_path.rglob("summary.json")
    summary = read_summary(path.parent)
    assert summary["status"] == "interrupted"
    assert torch.load(path.parent / "checkpoints/last.ckpt", weights_only=True)["global_step"] == summary["steps"] > 0


def wait_for(done, process=None):
    deadline = time.monotonic() + 90
    while not done():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.1)


def test_halving_ends_at_one_row():
    cfg = compose_run(["task.batch_size=6", "trainer.limit_val_batches=3", "trainer.val_check_interval=0.5"], CONF, "x")
    assert halved(cfg, 0) == [] and halved(cfg, 3) == []
    assert halved(cfg, 2) == ["micro_batch_size=1", "task.eval_batch_size=64", "trainer.limit_val_batches=12"]
    cfg = compose_run(["task.batch_size=64", "micro_batch_size=16"], CONF, "x")
    assert halved(cfg, 1) == ["micro_batch_size=8", "task.eval_batch_size=128"]


# Presets and other launchers


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["length_sweep", "lr_sweep"])
def test_every_job_of_a_preset_can_be(preset):
    assert check_command_line(["logger=csv", f"experiment={preset}"], CONF) is None
    params = OmegaConf.load(CONF / f"experiment/{preset}.yaml").hydra.sweeper.params
    values = [[f"{key}={value}" for value in str(listed).split(",")] for key, listed in params.items()]
    jobs = list(itertools.product(*values))
    assert len(jobs) == {"length_sweep": 180, "lr_sweep": 60}[preset]
    for job in jobs[:: len(jobs) // 10]:
        check(compose_run([f"experiment={preset}", *job], CONF, "x"))


def test_a_preset_sweeps_by_itself(queue):
    """`experiment=length_sweep` is a multirun without -m, and its jobs are single runs all the same."""
    assert composed("experiment=length_sweep").hydra.mode.name == "MULTIRUN"
    queue([1])
    assert all("hydra.mode=RUN" in event[4] for event in events(queue.folder))


@pytest.mark.parametrize("choice", ["launcher=submitit_slurm", "launcher=submitit_local", "launcher=basic", "sweeper=tpe"])
def test_other_launchers_and_sweepers_compose(choice):
    cfg = composed(f"hydra/{choice}")
    group = cfg.hydra.launcher if "launcher" in choice else cfg.hydra.sweeper
    assert group._target_ and OmegaConf.to_container(group, resolve=False)
    resolved(cfg, "x")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="needs hydra-submitit-launcher: pip install '.[cluster]'"
)
def test_submitit_runs_and_skips(tmp_path):
    line = ["logger=csv", *SELECTIVE_COPY, "seed=0,1", "hydra/launcher=submitit_local"]
    before = None
    for _ in range(2):
        done = command(tmp_path, *line, multirun=True)
        assert done.returncode == 0, done.stderr
        stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.csv")}
        assert len(stamps) == 2 and done.stderr.count("complete") >= 2
        assert before in (None, stamps), "complete jobs are not run again"
        before = stamps


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra `sweep`")
def test_optuna_goes_on_where_it_stopped(tmp_path):
    line = ["logger=csv", "model=lstm", *SELECTIVE_COPY, "hydra/sweeper=tpe", "optimizer.lr=tag(log,interval(1e-4,1e-2))"]
    for trials in (1, 2):
        done = command(tmp_path, *line, f"hydra.sweeper.n_trials={trials}", multirun=True)
        assert done.returncode == 0, done.stderr
        assert len(list(tmp_path.rglob("summary.json"))) == trials
    best = OmegaConf.load(next(tmp_path.rglob("optimization_results.yaml")))
    assert best.best_value == min(objective(read_summary(path.parent)) for path in tmp_path.rglob("summary.json"))


def test_halved_rows_are_those_of_the_whole_batch(tmp_path):
    """Against Lightning itself: two halves accumulated are the step of the whole."""
    base = ("model=lstm", *SELECTIVE_COPY, "trainer.max_steps=3")
    whole = start(tmp_path / "whole", *base)
    halves = start(tmp_path / "halves", *base, *halved(compose_run([*SMALL, *base], CONF, "x"), 1))
    assert halves["val/loss"] == pytest.approx(whole["val/loss"], abs=1e-6) and halves["steps"] == whole["steps"]

"""What a run leaves behind when it goes wrong, and what the commands do (cases E, F, G01, H01)."""

import gzip
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from runs import ROOT, SELECTIVE_COPY, command, metrics, small, start

from seqmix.step import NonFiniteError

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install wandb")


def summaries(folder):
    return {path.parent: json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))}


def only(folder):
    (found,) = summaries(folder).items()
    return found


def no_gcc(tmp_path):
    """A PATH with Python and git on it, and no compiler."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for tool in ("git", "uname", "sh"):
        if found := shutil.which(tool):
            (bin_ / tool).symlink_to(found)
    return str(bin_)


# One run


@needs_wandb
def test_a_run_from_elsewhere_without_key_terminal_compiler_or_triton(tmp_path):
    """Cases F07, G01, H01: relative paths are the caller's; wandb goes offline by itself; nothing but torch is needed."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "triton.py").write_text("raise ImportError('no Triton here')")
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    env |= {"PATH": no_gcc(tmp_path), "PYTHONPATH": str(tmp_path / "site")}
    done = command(tmp_path, "task=lm", "task.source=./text.txt", "task.seq_len=16", env=env)
    assert done.returncode == 0, done.stderr
    folder, summary = only(tmp_path / "outputs")
    assert summary["status"] == "complete" and summary["test/bits_per_byte"] > 0
    assert (folder / "metrics.csv").is_file() and (folder / ".hydra" / "overrides.yaml").is_file()
    assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert str(folder.relative_to(tmp_path)) in done.stdout, "the run's folder is printed"
    assert "bits_per_byte" in done.stdout and "no C compiler" in done.stdout + done.stderr


def test_show_batch_prints_and_makes_nothing(tmp_path):
    done = command(tmp_path, *SELECTIVE_COPY, "show=batch")
    assert done.returncode == 0, done.stderr
    assert "^^^" in done.stdout and list(tmp_path.iterdir()) == []


def test_data_that_cannot_be_read_are_one_line_before_there_is_a_folder(tmp_path):
    """A stand-in for every kind, which tests/test_sources.py has; also without the extra, and where a batch is only shown."""
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(5000))[:-100])
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    (tmp_path / "tokenizers.py").write_text("raise ImportError('no tokenizers here')")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}
    for overrides, words in {
        ("task.source=cut.txt.gz",): "cut.txt.gz is damaged gzip data",
        ("task.source=cut.txt.gz", "show=batch"): "cut.txt.gz is damaged gzip data",
        ("task.source=none.txt",): "none.txt",
        ("task.source=text.txt", "task.seq_len=10000"): "8400 tokens < 10001",
        ("task.source=text.txt", "task.tokenizer=bpe", "task.vocab_size=300"): "pip install 'seqmix[data]'",
    }.items():
        done = command(tmp_path, "task=lm", *overrides, env=env)
        assert done.returncode == 2 and done.stdout == "", overrides
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
        assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_data_that_cannot_be_read_are_one_line_in_the_log_of_a_job(tmp_path):
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(5000))[:-100])
    done = command(tmp_path, "task=lm", "task.source=cut.txt.gz", "logger=csv", "seed=0,1", multirun=True, env=WIDE)
    assert done.returncode == 1 and "2 failed" in done.stderr and "cut.txt.gz is damaged" in done.stderr
    for folder, summary in summaries(tmp_path / "outputs").items():
        assert summary["status"] == "failed" and "cut.txt.gz is damaged" in summary["error"]
        (line,) = (folder / "train.log").read_text().splitlines()
        assert summary["error"] in line
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.rglob("output.log"))


def test_a_printed_checkpoint_can_be_pasted_into_ckpt(tmp_path):
    """Cases E02, E08; and `last`, which finds the run of the same config alone."""
    base = ("logger=csv", *SELECTIVE_COPY)
    assert command(tmp_path, *base, "model=lstm").returncode == 0
    checkpoint = next((tmp_path / "outputs").rglob("last.ckpt")).relative_to(tmp_path)
    assert "=" not in str(checkpoint)
    torch.load(tmp_path / checkpoint, weights_only=True)
    for ckpt, steps in ((checkpoint, 6), ("last", 8), ("last", 8)):
        done = command(tmp_path, *base, "model=lstm", f"ckpt={ckpt}", f"trainer.max_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert [(s["steps"], bool(s["resumed_from"])) for s in summaries(tmp_path).values()] == [(4, 0), (6, 1), (8, 1), (8, 1)]
    assert len({s["val/loss"] for s in list(summaries(tmp_path).values())[2:]}) == 1, "also where no step was left"
    other = command(tmp_path, *base, "model=rnn", "ckpt=last")
    assert other.returncode == 2 and "none of the 3 checkpointed runs" in other.stderr
    assert len(summaries(tmp_path)) == 4


def test_no_validation_tests_the_last_weights_and_says_so(tmp_path, caplog):
    summary = start(tmp_path / "run", *SELECTIVE_COPY, "trainer.max_steps=1", "trainer.limit_val_batches=0")
    assert summary["status"] == "complete" and math.isfinite(summary["test/loss"])
    assert "last weights" in caplog.text


def test_the_last_weights_are_validated_whatever_the_interval(tmp_path):
    """Case E06: every 20 of 30 steps, and at the end; also an interval longer than the run."""
    for interval, steps in ((2, [1, 2]), (50, [2])):
        folder = tmp_path / str(interval)
        start(folder, *SELECTIVE_COPY, "trainer.max_steps=3", f"trainer.val_check_interval={interval}")
        assert sorted(metrics(folder, "val/loss")) == steps
        assert sorted(metrics(folder, "train/loss")) == [0, 1, 2]


def test_a_wrong_monitor_is_named_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="val/loss"):
        start(tmp_path / "run", *SELECTIVE_COPY, "callbacks.checkpoint.monitor=val/los")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 0


def test_divergence_is_recorded_and_no_best_checkpoint_is_nan(tmp_path):
    with pytest.raises(NonFiniteError, match="step"):
        start(tmp_path / "run", *SELECTIVE_COPY, "optimizer.lr=1e30", "trainer.max_steps=50", "gradient_clip_val=null")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["steps"] < 50
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    if best.exists():
        weights = torch.load(best, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in weights.values())


def test_out_of_memory_is_a_result(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        start(tmp_path / "run", *SELECTIVE_COPY, error_at=(2, torch.OutOfMemoryError("tried to allocate 80 GiB")))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "oom" and summary["steps"] == 2 and "80 GiB" in summary["error"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_and_stops_the_sweep(tmp_path, sent, code):
    """Case E18."""
    line = [sys.executable, str(ROOT / "train.py"), "-m", *small(*SELECTIVE_COPY, "seed=0,1", "trainer.max_steps=100000")]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*line, "logger=csv"], cwd=tmp_path, stdout=log, stderr=log, env=env)
        deadline = time.monotonic() + 90
        while not any(path.stat().st_size > 200 for path in tmp_path.rglob("metrics.csv")):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        process.send_signal(sent)
        returned = process.wait(timeout=60)
    assert returned in (code, -sent), (tmp_path / "log").read_text()[-2000:]
    folder, summary = only(tmp_path / "outputs")
    assert summary["status"] == "interrupted" and summary["job"]["sweep"] == folder.parent.name
    assert "1 jobs were not started" in (tmp_path / "log").read_text()
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == summary["steps"] > 0


# Several runs

WIDE = {"COLUMNS": "240"}  # tables do not wrap


@needs_wandb
def test_a_sweep_keeps_its_runs_apart_and_lists_its_failures(tmp_path):
    """Cases F01, F02: every job a wandb run of its own, closed with its own exit code; each failure told, in its own log."""
    done = command(tmp_path, "task.n_tokens=3", "task.seq_len=12,-1,16,2", "trainer.max_steps=2", multirun=True, env=WIDE)
    assert done.returncode == 1
    sweep = tmp_path / "outputs" / "sweeps"
    (record,) = sweep.rglob("sweep.json")
    folders = [tmp_path / job["folder"] for job in json.loads(record.read_text())["jobs"]]
    found = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert [summary["status"] for summary in found] == ["complete", "failed", "complete", "failed"]
    runs = [path.name for path in sweep.rglob("offline-run-*")]
    assert len(runs) == len({name.split("-", 3)[-1] for name in runs}) == 2
    assert all(any(summary["job"]["wandb_id"] in name for name in runs) for summary in found[::2])
    table = done.stderr[done.stderr.index("4 jobs in") :]
    assert table.count("2 complete") == table.count("2 failed") == 1
    assert table.count("│ complete │") == table.count("│ failed   │") == 2
    assert "seq_len=-1" in table and "n_tokens=3" in table
    for folder, summary in zip(folders[1::2], found[1::2], strict=True):
        assert "ValueError" in (folder / "train.log").read_text() and "ValueError" in summary["error"]
        assert summary["error"] in table


@pytest.mark.slow
@needs_wandb
def test_the_basic_launcher_keeps_its_runs_apart_too(tmp_path):
    """All in one process: failures are recorded, listed and left behind; the same command skips what is complete."""
    line = ("task.n_tokens=3", "task.seq_len=12,-1", "trainer.max_steps=2", "hydra/launcher=basic", "model=lstm")
    for skips in (0, 1):
        done = command(tmp_path, *line, multirun=True)
        assert done.returncode == 1 and "2 jobs in" in done.stderr
        found = summaries(tmp_path / "outputs" / "sweeps")
        assert sorted(summary["status"] for summary in found.values()) == ["complete", "failed"]
        assert len(list((tmp_path / "outputs").rglob("offline-run-*"))) == 1, f"after {skips} skips"


def test_a_comma_without_m_says_what_is_missing(tmp_path):
    done = command(tmp_path, "seed=0,1")
    assert done.returncode == 2 and "-m" in done.stderr and "Traceback" not in done.stderr


# Several processes


def test_two_ranks_give_the_run_of_one(tmp_path):
    """Case E14: gloo on the CPU; 9 validation rows, which two ranks cannot share evenly."""
    base = ("logger=csv", *SELECTIVE_COPY, "task.eval_samples=9", "task.eval_batch_size=2", "model=mamba")
    two = command(
        tmp_path, *base, "trainer=ddp_cpu", "trainer.max_steps=4", "task.batch_size=2",
        launcher=("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"), env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert two.returncode == 0, two.stderr[-3000:]
    folder, summary = only(tmp_path / "outputs")
    one = start(tmp_path / "one", *base, "task.batch_size=4")
    for name in ("val/loss", "val/token_accuracy", "test/loss"):
        assert summary[name] == pytest.approx(one[name], abs=1e-5), name
    assert len(metrics(folder, "train/loss")) == 4
    first, last = metrics(tmp_path / "one", "train/loss"), metrics(folder, "train/loss")
    assert float(first[0]) == pytest.approx(float(last[0]), abs=1e-5)

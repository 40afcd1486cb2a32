"""A run folder has one owner, and one process at a time writes to it."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose
from omegaconf import OmegaConf
from runs import CONF, ROOT, SELECTIVE_COPY, SMALL, command, metrics, small

from seqmix import claim as claiming
from seqmix import folders
from seqmix.claim import claim
from seqmix.config import compose_run, hydra_at, register_resolvers
from seqmix.folders import lock

register_resolvers()
RUN = ("logger=csv", *SELECTIVE_COPY, "hydra.run.dir=run")


def content(folder) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def refused(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and done.stdout == "", done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def config_of(folder, *overrides: str):
    return compose_run([*SMALL, "logger=csv", *SELECTIVE_COPY, *overrides], CONF, folder)


@pytest.fixture
def held():
    """Give back what a test has locked: the locks are the process's."""
    yield
    folders._drop_locks()


@pytest.fixture
def folder(tmp_path, held):
    """A folder with the config of an LSTM, and a checkpoint."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/last.ckpt").touch()
    OmegaConf.save(config_of(folder, "model=lstm"), folder / "config.yaml")
    return folder


def test_a_folder_with_another_runs_config_is_refused_untouched(tmp_path):
    assert command(tmp_path, *RUN, "model=lstm").returncode == 0
    before = content(tmp_path)
    refused(command(tmp_path, *RUN, "model=rnn"), "run holds another run", "lstm", "rnn")
    assert content(tmp_path) == before
    again = command(tmp_path, *RUN, "model=lstm", "trainer.max_steps=6", "ckpt=run/checkpoints/last.ckpt")
    assert again.returncode == 0, again.stderr
    assert sorted(metrics(tmp_path / "run", "train/loss")) == [0, 1, 2, 3, 4, 5], "a resume of the same run goes on in it"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("logger=wandb",),  # where the numbers go is not the run
        ("ckpt={}/checkpoints/last.ckpt",),
        ("ckpt={}/checkpoints/last.ckpt", "trainer.max_steps=8", "callbacks.last.every_n_steps=2"),
    ],
)
def test_the_same_run_may_take_its_folder_again(folder, overrides):
    claim(folder, config_of(folder, "model=lstm", *(o.format(folder) for o in overrides)))
    assert folder.resolve() in folders._locks


def test_the_same_run_may_take_its_folder_again_where_the_folder_has_moved(folder):
    moved = folder.rename(folder.with_name("moved"))
    claim(moved, config_of(moved, "model=lstm"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("seed=1",), ("seed is 0 there and 1 here",)),
        (("optimizer.lr=0.5",), ("optimizer.lr", "0.5")),
        (("trainer.max_steps=8",), ("trainer.max_steps is 4 there and 8 here", "resume that run with ckpt=")),
        (("task.seq_len=14", "ckpt={}/checkpoints/last.ckpt"), ("task.seq_len is 12 there and 14 here",)),
        (("trainer.max_steps=8", "ckpt={}/../other.ckpt"), ("max_steps",)),  # resumed, but not from this folder
    ],
)
def test_what_another_run_is(folder, capsys, overrides, words):
    (folder.parent / "other.ckpt").touch()
    with pytest.raises(SystemExit) as stop:
        claim(folder, config_of(folder, "model=lstm", *(o.format(folder) for o in overrides)))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.count("\n") == 1 and all(word in message for word in words), message
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("text", ["- a list\n", "a: [b\n", "", "\x00\x01"])
def test_a_folder_whose_config_cannot_be_read_is_refused_by_the_files_name(folder, capsys, text):
    (folder / "config.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        claim(folder, config_of(folder, "model=lstm"))
    message = capsys.readouterr().err
    assert stop.value.code == 2 and str(folder / "config.yaml") in message and message.count("\n") == 1


def test_two_processes_do_not_write_to_one_folder_and_a_killed_one_leaves_it_free(tmp_path):
    """kill -9 too, and though its workers, which load data, outlive it by seconds."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA"))}
    long = (*RUN, "model=lstm", "task.num_workers=1", "task.make_on=loader")
    line = [sys.executable, str(ROOT / "train.py"), *small(*long, "trainer.max_steps=100000")]
    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(line, cwd=tmp_path, stdout=log, stderr=log, env=clean, start_new_session=True)
        try:
            deadline = time.monotonic() + 90
            while not any(path.stat().st_size > 200 for path in tmp_path.rglob("metrics.csv")):
                assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
            assert Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text(), "there is a worker"
            refused(command(tmp_path, *long, "trainer.max_steps=100000"), f"process {first.pid}", "is writing to run")
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            with (tmp_path / "run/.lock").open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12
def test_a_forked_child_does_not_keep_the_lock(tmp_path, held):
    lock(tmp_path / "run")
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(started, b".")
        time.sleep(30)
        os._exit(0)
    try:
        os.read(ready, 1)
        os.close(folders._locks.pop((tmp_path / "run").resolve()))  # as the end of this process would
        with (tmp_path / "run/.lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_of_several_ranks_the_first_holds_the_lock_and_writes_hydras_files(tmp_path, monkeypatch, held):
    for rank in (1, 0):
        with hydra_at(CONF):
            config = compose("train", overrides=[f"hydra.run.dir={tmp_path}/run"], return_hydra_config=True)
        monkeypatch.setattr(claiming, "rank_zero_only", SimpleNamespace(rank=rank))
        claiming.ClaimFolder().on_run_start(config)
        assert (tmp_path / "run/.lock").exists() == (rank == 0)
        assert config.hydra.output_subdir == (".hydra" if rank == 0 else None)


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, caplog, held):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", without)
    lock(tmp_path / "a")
    monkeypatch.setattr(folders, "fcntl", None)
    lock(tmp_path / "b")
    assert caplog.text.count("nothing keeps a second process") == 2
    assert "No locks available" in caplog.text and "no flock" in caplog.text


@pytest.mark.parametrize("multirun", [False, True])
def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path, multirun):
    (tmp_path / "outputs").write_text("a file in the way")
    refused(command(tmp_path, "logger=csv", *SELECTIVE_COPY, multirun=multirun), "cannot write to outputs/", "outputs")
    if os.getuid() != 0:  # who may write everywhere
        (tmp_path / "outputs").unlink()
        (tmp_path / "outputs").mkdir(mode=0o555)
        refused(command(tmp_path, "logger=csv", *SELECTIVE_COPY, multirun=multirun), "Permission denied")


@pytest.mark.slow
def test_jobs_of_a_sweep_do_not_share_a_folder(tmp_path):
    line = ("logger=csv", *SELECTIVE_COPY, "model=lstm,rnn", "hydra.sweep.dir=s", "hydra.sweep.subdir=same")
    done = command(tmp_path, *line, multirun=True)
    assert done.returncode == 2 and "s/same would hold two runs" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "s/same").exists()
    one_process = command(tmp_path, *line, "hydra/launcher=basic", multirun=True)
    assert one_process.returncode == 2 and "holds another run" in one_process.stderr
    assert json.loads((tmp_path / "s/same/summary.json").read_text())["status"] == "complete", "the first one's"

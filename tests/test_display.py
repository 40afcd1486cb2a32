"""What is shown can fail (a closed pipe, a full disk, a character that the encoding lacks); no run fails with it."""

import io
import json
import os
import subprocess
import sys

import pytest
from runs import ROOT, SELECTIVE_COPY, SMALL, metrics

from seqmix import callbacks, display
from seqmix.callbacks.predictions import Predictions

RUN = ("model=lstm", "logger=csv", *SELECTIVE_COPY)
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA", "PYTHONIOENCODING"))}


def shell(cwd, redirect: str, *overrides: str, env: dict | None = None) -> subprocess.CompletedProcess:
    """`python train.py ...` in bash, with `redirect` behind it; the return code is that of train.py."""
    line = f'"{sys.executable}" "{ROOT / "train.py"}" "$@" {redirect}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        ["bash", "-c", line, "bash", *overrides, *SMALL],
        cwd=cwd, capture_output=True, text=True, env=CLEAN | (env or {}), timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def assert_complete(folder) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete" and "test/loss" in summary and "error" not in summary
    assert sorted(metrics(folder, "train/loss")) == [0, 1, 2, 3]
    assert (folder / "predictions.txt").is_file()


@pytest.mark.parametrize("redirect", ["| head -1", "> /dev/full", "> /dev/full 2>&1", ">&- 2>&-"])
def test_a_run_whose_output_goes_nowhere_is_complete_and_its_exit_code_is_0(tmp_path, redirect):
    done = shell(tmp_path, redirect, *RUN, "hydra.run.dir=run")
    assert_complete(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if redirect == "> /dev/full":
        assert done.stderr.count("No space left on device") == 1, "it is said once"


def test_a_refusal_has_its_exit_code_where_it_cannot_be_shown(tmp_path):
    assert shell(tmp_path, "2> /dev/full", *RUN, "sed=1").returncode == 2


def test_a_text_is_shown_whatever_it_is(tmp_path):
    """A character that the encoding lacks, control codes of the terminal, markup in a path."""
    (tmp_path / "text.txt").write_text("Привет, мир!\x1b[2J\x1b]0;owned\x07\n" * 300, encoding="utf-8")
    lm = ("model=lstm", "logger=csv", "task=lm", "task.source=text.txt", "task.tokenizer=byte", "task.seq_len=64")
    done = shell(tmp_path, "", *lm, "hydra.run.dir='r[/x] [red]:100:'", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert_complete(tmp_path / "r[/x] [red]:100:")
    assert "/r[/x] [red]:100:\n" in done.stdout
    written = (tmp_path / "r[/x] [red]:100:/predictions.txt").read_text(encoding="utf-8")
    assert "Привет" in written and "\\u041f\\u0440" in done.stdout
    for text in (done.stdout, written):
        assert "\x1b" not in text and "\x07" not in text


def test_a_full_log_file_costs_the_log_alone_and_is_said_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.log").symlink_to("/dev/full")
    # no validation: a warning is logged; `auto` kernels are named: more lines
    done = shell(tmp_path, "", "model=mamba", "logger=csv", *SELECTIVE_COPY, "hydra.run.dir=run", "trainer.limit_val_batches=0")
    assert done.returncode == 0, done.stderr
    assert_complete(tmp_path / "run")
    assert "last weights" in done.stdout, "the terminal has the lines"
    assert "Traceback" not in done.stderr and done.stderr.count("train.log") == 1 and "No space left" in done.stderr


def test_the_log_file_takes_any_character(tmp_path):
    handler = display.LogFile(tmp_path / "x.log")
    handler.emit(display.logging.makeLogRecord({"msg": "Привет \udc80"}))
    handler.close()
    assert (tmp_path / "x.log").read_text(encoding="utf-8") == "Привет \\udc80\n"


def test_what_cannot_be_drawn_ends_the_display_and_not_the_training(caplog):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("the terminal is gone")

    bar = callbacks.Progress(stream=Broken())
    bar.print("a")
    bar.print("b")
    assert caplog.text.count("the terminal is gone") == 1, "a display that has failed is left alone"


def test_control_codes_of_a_text_are_made_visible(tmp_path):
    assert display.visible("a\x1b[2J\x07\x9b\u202eb c\udc80\u3000é") == "a\\x1b[2J\\x07\\x9b\\u202eb c\\udc80\u3000é"
    shown = Predictions(tmp_path)._text([[0, "\x1b]0;title\x07a\r\nb", "\x1b[31m", "\t", 0, 1]], [[0, "\x1b", "\x1bc"]], None)
    assert shown.replace("\n", "").isprintable()
    assert "\\x1b]0;title\\x07a\\r⏎b" in shown and "\\t" in shown


def test_in_a_terminal_the_bar_is_drawn_and_the_guarded_stream_is_a_terminal(tmp_path):
    import pty

    ours, theirs = pty.openpty()
    line = [sys.executable, str(ROOT / "train.py"), *SMALL, *RUN, "hydra.run.dir=run"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=theirs, stderr=theirs, env=CLEAN | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(timeout=60) == 0
    assert b"training" in shown and b"4/4" in shown and b"\x1b[" in shown
    os.close(ours)


@pytest.mark.slow
def test_sweep_and_report_survive_what_a_terminal_cannot_show(tmp_path):
    where = "hydra.sweep.dir='s[/x]'"
    done = shell(tmp_path, "2> /dev/full", "-m", *RUN, "seed=0,1", where)
    jobs = json.loads((tmp_path / "s[/x]/sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["complete"] * 2, jobs
    assert done.returncode == 0
    again = shell(tmp_path, "", "-m", *RUN, "seed=0,1", where)
    assert again.returncode == 0 and "s[/x]" in again.stderr and "2 skipped" in again.stderr, again.stderr
    line = f'"{sys.executable}" -m seqmix.report "s[/x]" > /dev/full'
    report = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=CLEAN, timeout=120)
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "s[/x]/report/index.html").is_file()


def test_an_error_with_control_codes_or_markup_does_not_break_the_table_of_a_sweep(tmp_path, capsys):
    from seqmix.sweep import table
    from seqmix.sweep.jobs import Job

    typed, error = "task.source=[/x]\x1b[2J", "\x1b[31mno [/y]"
    jobs = [Job(n, str(n), str(tmp_path / str(n)), [f"{typed}{n}"], "failed", error) for n in (0, 1)]
    with table.Live(tmp_path / "[/z]", jobs, 1, {"0": -1, "1": -1}) as live:
        live.ended(Job(0, "0", jobs[0].folder, jobs[0].overrides, "failed", jobs[0].error, seconds=1.0))
    table.show(tmp_path / "[/z]", jobs)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "[/x]\\x1b[2J1" in shown and "no [/y]" in shown and "[/z]" in shown


def test_predictions_do_not_end_a_run_whose_terminal_is_gone(tmp_path, monkeypatch, caplog):
    """Also in a program of the user's own, which has not guarded its streams."""
    from test_callbacks import TinyModule, TinyTask, make_trainer

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("gone")

    monkeypatch.setattr(sys, "stdout", Gone())
    trainer = make_trainer(tmp_path, callbacks.Predictions(tmp_path / "run", rows=1), max_steps=1)
    trainer.fit(TinyModule(), datamodule=TinyTask())
    monkeypatch.undo()
    assert trainer.state.finished and (tmp_path / "run/predictions.txt").is_file() and "gone" in caplog.text

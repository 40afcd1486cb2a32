"""What a run leaves in wandb, beside metrics.csv, read back from the files."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from offline import Read
from test_metrics_csv import column, read_csv
from torch.utils.data import DataLoader

from seqmix import tracking

wandb = pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
ROOT = Path(__file__).parents[1]
# Lightning 2.6 asks torch 2.13 for a class that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture(autouse=True)
def no_wandb_settings(monkeypatch, tmp_path):
    """No key, no netrc, no mode: what a stranger's machine has."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    yield home
    if wandb.run is not None:  # of a test that failed; the next would find it open
        wandb.finish()


class Line(L.LightningModule):
    """One weight; logs what it is told to."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = ((self.w - batch) ** 2).mean()
        self.log_dict({"train/loss": loss, "speed/step_ms": float(batch_idx)})
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 10.0 - self.trainer.global_step if self.trainer.global_step < 5 else 20.0)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", 0.25)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path: Path, loggers: list, num_workers: int = 0, **settings) -> L.Trainer:
    rows = DataLoader(torch.ones(64), batch_size=4, num_workers=num_workers)
    defaults = dict(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=2,
        val_check_interval=2,
        default_root_dir=tmp_path,
    )
    trainer = L.Trainer(**(defaults | settings))
    module = Line()
    trainer.fit(module, rows, DataLoader(torch.ones(2), batch_size=2))
    trainer.test(module, DataLoader(torch.ones(2), batch_size=2), verbose=False)
    return trainer


few_workers = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@few_workers
def test_what_was_logged_comes_back_from_both_files_and_the_run_ends_as_said(tmp_path):
    local, run = tracking.CSVLogger(tmp_path), tracking.WandbLogger(tmp_path, group="g", name="n", tags=["a", "b"])
    config = {"model": {"d_model": 64, "mixer": {"d_state": 16}}, "seed": 3, "lr": 1e-3, "ckpt": None, "tags": ["x"]}
    with tracking.closing([local, run]):
        run.log_hyperparams(config)
        local.log_hyperparams(config)
        fit(tmp_path, [local, run])
        run.log_table("predictions", columns=["target", "prediction"], data=[["ab", "ac"]])
        run.log_summary({"speed/step_ms": 2.5, "memory/peak_allocated_mib": None, "status": "ok", "bad": math.nan})

    rows = read_csv(tmp_path / "metrics.csv")
    losses = column(rows, "train/loss")
    assert list(losses) == [1, 3, 5] and losses[1] == pytest.approx((1 - 0.2) ** 2)
    assert column(rows, "val/loss") == {1: 8.0, 3: 6.0, 5: 20.0} and column(rows, "test/loss") == {6: 0.25}
    assert {p.name for p in tmp_path.iterdir()} == {"home", "metrics.csv", "wandb"}, "no hparams.yaml, no version_0"

    back = Read(tmp_path)
    history = {name: {} for name in ("train/loss", "val/loss", "test/loss", "speed/step_ms")}
    for row in back.history:
        for name in history.keys() & row.keys():
            history[name][row[tracking.STEP]] = row[name]
    assert history == {name: column(rows, name) for name in history}, "the two files tell the same"
    source = back.config.pop("source")
    assert back.config == config, "nested, plain"
    assert sorted(back.config_keys) == sorted([*config, "source"]), "once, no dotted twin"
    assert source == tracking.source_facts(tracking.source_state()) and len(source["commit"]) == 40
    assert back.exit_code == 0
    assert (back.run.project, back.run.run_group, back.run.display_name) == ("seqmix", "g", "n")
    assert sorted(back.run.tags) == ["a", "b"]
    assert back.summary["speed/step_ms"] == 2.5 and back.summary["status"] == "ok"
    assert back.summary["memory/peak_allocated_mib"] is None and back.summary["bad"] is None
    assert back.summary["val/loss"] == {"min": 6.0}, "the best, not the last"
    assert back.metrics["val/token_accuracy"].summary.max and not back.metrics["val/token_accuracy"].summary.min
    assert not any(name.startswith("*") and name != "*" for name in back.metrics)
    (table,) = back.folder.rglob("*.table.json")
    assert json.loads(table.read_text()) == {"columns": ["target", "prediction"], "data": [["ab", "ac"]]}


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("x"), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit("text"), 1)],
)
def test_a_crash_shows_as_one_and_the_next_job_has_its_own_run(tmp_path, error, code):
    ids = []
    for name, ends in (("crash", error), ("next", None)):
        run = tracking.WandbLogger(tmp_path / name)
        try:
            with tracking.closing([run]):
                run.log_metrics({"train/loss": 1.0}, 0)
                ids.append(run.version)
                if ends is not None:
                    raise ends
        except type(error):
            pass
    assert [Read(tmp_path / name).exit_code for name in ("crash", "next")] == [code, 0]
    assert ids[0] != ids[1]
    assert [Read(tmp_path / name).run.run_id for name in ("crash", "next")] == ids


def test_a_run_left_open_is_not_merged_into(tmp_path):
    first, second = tracking.WandbLogger(tmp_path / "a"), tracking.WandbLogger(tmp_path / "b")
    first.log_metrics({"x": 1.0}, 0)
    with pytest.raises(AssertionError, match="still open"):
        _ = second.experiment
    first.finish(1)
    second.log_metrics({"x": 2.0}, 0)
    second.finish()
    assert Read(tmp_path / "a").exit_code == 1 and Read(tmp_path / "b").history[0]["x"] == 2.0


def test_nothing_is_logged_after_the_end_and_a_run_never_used_is_never_opened(tmp_path):
    run = tracking.WandbLogger(tmp_path / "a")
    run.log_metrics({"x": 1.0}, 0)
    run.finish()
    with pytest.raises(RuntimeError, match="finished"):
        run.log_metrics({"x": 1.0}, 1)
    with tracking.closing([unused := tracking.WandbLogger(tmp_path / "b")]):
        pass
    assert unused._experiment is None and not (tmp_path / "b").exists()


def test_a_given_run_id_is_the_runs(tmp_path):
    run = tracking.WandbLogger(tmp_path, run_id="my-run-7")
    run.log_metrics({"x": 1.0}, 0)
    run.finish()
    assert Read(tmp_path).run.run_id == "my-run-7"


def test_no_secret_no_environment_and_no_home_path_leaves_the_machine(tmp_path, monkeypatch, no_wandb_settings):
    home = no_wandb_settings
    monkeypatch.setattr(tracking, "source_state", lambda: None)  # a diff holds what it holds
    monkeypatch.setenv("USER", "a-user-by-name")
    monkeypatch.setenv("LOGNAME", "a-user-by-name")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-in-the-environment")
    monkeypatch.setenv("SOME_SETTING", "a-value-of-no-concern")
    save_dir = home / "runs"
    run = tracking.WandbLogger(save_dir)
    config = {
        "task": {"source": f"{home}/corpus.txt", "n_tokens": 8, "pad_token": "<pad>", "tokenizer": "byte"},
        "service": {"api_key": "abc-def-key", "url": "http://x/?t=s3cr3t-in-the-environment"},
        "path": home / "data",
        "odd": math.inf,
    }
    run.log_hyperparams(config)
    run.log_metrics({"x": 1.0}, 0)
    run.finish()
    back = Read(save_dir)
    assert back.config["task"] == {"source": "~/corpus.txt", "n_tokens": 8, "pad_token": "<pad>", "tokenizer": "byte"}
    assert back.config["service"] == {"api_key": "<hidden>", "url": "<hidden>"}
    assert back.config["path"] == "~/data" and back.config["odd"] == "inf"
    assert config["service"]["api_key"] == "abc-def-key", "the caller's config is left alone"
    for leak in ("s3cr3t", "abc-def-key", "a-value-of-no-concern", "a-user-by-name", str(home), str(Path.cwd())):
        assert leak.encode() not in back.bytes, leak
    assert back.run.host == ""
    assert list((back.folder / "files").rglob("*")) == [], "no requirements, no metadata, no console"


def test_a_dotted_key_is_refused():
    with pytest.raises(ValueError, match=r"'model\.lr'"):
        tracking.plain_config({"model": {"lr": 1}, "model.lr": 1})


def make_repository(folder: Path) -> Path:
    folder.mkdir()
    file = folder / "tracked.py"
    file.write_text("x = 1\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for arguments in (["init", "-q"], ["add", "tracked.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)
    return file


def test_the_diff_is_of_tracked_files_and_a_key_turns_it_off(tmp_path, monkeypatch):
    file = make_repository(tmp_path / "repository")
    clean = tracking.source_state(file)
    assert len(clean.commit) == 40 and clean.diff == ""
    file.write_text("x = 2\n")
    (file.parent / "untracked.txt").write_text("private notes")
    state = tracking.source_state(file)
    assert "+x = 2" in state.diff and "private" not in state.diff and state.commit == clean.commit
    assert tracking.source_state(file.parent / "untracked.txt") is None, "installed inside somebody's repository"
    assert tracking.source_state(tmp_path / "no_repository.py") is None

    monkeypatch.setattr(tracking, "source_state", lambda: state)
    for log_diff in (True, False):
        run = tracking.WandbLogger(tmp_path / str(log_diff), log_diff=log_diff)
        run.log_hyperparams({"seed": 1})
        run.finish()
        back = Read(tmp_path / str(log_diff))
        assert back.config["source"] == tracking.source_facts(state) and back.config["source"]["diff_sha256"]
        assert (b"+x = 2" in back.bytes) == log_diff
    assert (Read(tmp_path / "True").folder / "files" / "source.diff").read_text() == state.diff


def test_a_very_long_diff_is_cut_and_says_so(tmp_path):
    file = make_repository(tmp_path / "repository")
    file.write_text("y = 3\n" * 400_000)
    diff = tracking.source_state(file).diff
    assert len(diff) < tracking.MAX_DIFF_BYTES + 100 and "[cut: " in diff[-60:]


# Modes


def test_auto_is_offline_without_a_key_and_online_with_one(monkeypatch, no_wandb_settings):
    assert tracking.resolve_mode("auto") == ("offline", "there is no key")
    with monkeypatch.context() as m:
        m.setenv("WANDB_API_KEY", "k" * 40)
        assert tracking.resolve_mode("auto")[0] == "online"
        m.setenv("WANDB_MODE", "offline")
        assert tracking.resolve_mode("auto") == ("offline", "set by WANDB_MODE")
        assert tracking.resolve_mode("online")[0] == "online", "what is typed wins over the environment"
    netrc = no_wandb_settings / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {'k' * 40}\n")
    netrc.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert tracking.resolve_mode("auto")[0] == "online"
    netrc.write_text("machine example.org login user password p\n")
    assert tracking.resolve_mode("auto")[0] == "offline", "a key of another host is none"


def test_online_without_a_key_is_refused_if_typed_and_softened_if_from_the_environment(monkeypatch):
    with pytest.raises(ValueError, match="needs a key"):
        tracking.resolve_mode("online")
    with pytest.raises(ValueError, match="got 'onlin'"):
        tracking.resolve_mode("onlin")
    monkeypatch.setenv("WANDB_MODE", "online")
    assert tracking.resolve_mode("auto")[0] == "offline"
    monkeypatch.setenv("WANDB_MODE", "on")
    with pytest.raises(ValueError, match="WANDB_MODE='on'"):
        tracking.resolve_mode("auto")


def test_a_server_out_of_reach_costs_a_warning_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()  # it reads the environment once a process
    run = tracking.WandbLogger(tmp_path, init_timeout=1.0)
    assert run.mode == "online"
    run.log_metrics({"x": 1.0}, 0)
    run.finish()
    assert run.mode == "offline" and "continuing offline" in caplog.text
    assert Read(tmp_path).history[0]["x"] == 1.0 and Read(tmp_path).exit_code == 0


def test_the_mode_and_its_reason_are_said_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="seqmix.tracking")
    run = tracking.WandbLogger(tmp_path)
    for step in range(3):
        run.log_metrics({"x": 1.0}, step)
    run.finish()
    (line,) = [r.message for r in caplog.records if r.name == "seqmix.tracking"]
    assert line.startswith("wandb: offline, there is no key; upload later with: wandb sync ")


@few_workers
def test_a_wandb_that_breaks_in_mid_run_is_left_behind(tmp_path, caplog):
    local, run = tracking.CSVLogger(tmp_path), tracking.WandbLogger(tmp_path)
    calls = []

    def full(*_, **__):
        calls.append(1)
        raise OSError(28, "No space left on device")

    run.experiment.log = full
    fit(tmp_path, [local, run])
    run.finish()
    assert list(column(read_csv(tmp_path / "metrics.csv"), "train/loss")) == [1, 3, 5]
    assert len(calls) == 1 and caplog.text.count("No space left") == 1, "said once, not tried again"


def test_a_folder_that_cannot_be_made_costs_the_copy_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    run = tracking.WandbLogger(tmp_path / "file" / "run")
    run.log_hyperparams({"seed": 1})
    run.log_metrics({"x": 1.0}, 0)
    run.finish()
    assert run.mode == "disabled" and "continuing disabled" in caplog.text


@pytest.mark.slow
def test_forked_workers_do_not_hang(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; import test_tracking as t;"
        f"p = Path({str(tmp_path)!r}); run = t.tracking.WandbLogger(p);"
        "t.fit(p, [run], num_workers=2, max_steps=6); run.finish(); print(t.Read(p).exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.strip().endswith("0"), done.stderr


# conf


@pytest.mark.parametrize(("choice", "names"), [("wandb", ["csv", "wandb"]), ("csv", ["csv"]), ("none", ["csv"])])
def test_every_logger_choice_keeps_the_local_file(tmp_path, choice, names):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(
            "train", [f"logger={choice}", f"hydra.runtime.output_dir={tmp_path}"], return_hydra_config=True
        )
    HydraConfig.instance().set_config(config)
    assert sorted(config.logger) == names
    loggers = {name: instantiate(part) for name, part in config.logger.items()}
    assert loggers["csv"].save_dir == str(tmp_path)
    if "wandb" in loggers:
        assert loggers["wandb"]._name == "mamba-selective_copy-L" + str(config.task.seq_len) + "-s0"

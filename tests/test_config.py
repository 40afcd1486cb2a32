"""The command line: what is refused, and how (cases F04, F05, F08, H01, I08)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from runs import SELECTIVE_COPY, command

from seqmix.config import check_command_line, compose_run, find_checkpoint, register_resolvers

CONF = Path(__file__).parent.parent / "conf"
register_resolvers()


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        check_command_line(list(arguments), CONF)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    return message


def test_the_default_run_is_mamba_on_selective_copy():
    cfg = check_command_line(["logger=csv"], CONF)
    same = check_command_line(["logger=csv", "model=mamba", "task=selective_copy"], CONF)
    assert cfg == same and "mamba" in cfg.model._target_ and "selective_copy" in cfg.task._target_


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("sed=3", "'seed'"),
        ("+sed=3", "'seed'"),
        ("++trainer.max_step=5", "'trainer.max_steps'"),
        ("trainer.max_step=5", "'trainer.max_steps'"),
        ("model.d_stat=8", "'model.d_state'"),
        ("+model.d_stat=8", "'model.d_state'"),
        ("task.seqlen=8", "'task.seq_len'"),
        ("seq_len=8", "seq_len'"),
        ("lr=1e-3", "'optimizer.lr'"),
        ("hydra.job.chdirr=true", "'hydra.job.chdir'"),
        ("~optimizer.lrr", "'optimizer.lr'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(capsys, override, nearest):
    assert nearest in refused(capsys, override)


def test_an_unknown_choice_lists_what_there_is(capsys):
    message = refused(capsys, "model=mambo")
    assert "'mamba'" in message and "transformer" in message
    assert "'mamba'" in refused(capsys, "-m", "model=lstm,mambo")


def test_show_is_for_one_run(capsys):
    assert "-m" in refused(capsys, "-m", "show=batch", "seed=0,1")


def test_unknown_keys_are_refused_in_a_multirun_too(capsys):
    assert "'seed'" in refused(capsys, "-m", "sed=1,2")


def test_a_key_of_one_choice_is_known_in_a_sweep_over_choices():
    assert check_command_line(["-m", "logger=csv", "model=lstm,mamba", "model.d_state=8,16"], CONF) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=abc", ("seed", "'abc'")),
        ("task.seq_len=1e3", ("task.seq_len", "write 1000")),
        ("task.seq_len=-4", ("seq_len", "-4")),
        ("task.n_tokens=65", ("n_tokens=65", "seq_len=64")),
        ("task.n_tokens=0", ("n_tokens=0",)),
        ("task.n_symbols=0", ("n_symbols=0",)),
        ("size.d_model=0", ("d_model", "0")),
        ("size.n_layer=two", ("size.n_layer", "'two'")),
        ("optimizer.lr=fast", ("optimizer.lr", "'fast'")),
        ("test=1", ("test", "1")),
        ("trainer.precision=bf16-true", ("bf16-true", "bf16-mixed")),
        ("model.scan=triton", ("scan", "'triton'", "fused")),
        ("dropout=1.5", ("dropout", "1.5")),
        ("show=everything", ("show", "everything")),
        ("size.d_model=${size.d_modl}", ("size.d_modl",)),
        ("seed=0,1", ("seed=0,1", "-m")),
        ("seed=5000000000", ("seed", "5000000000")),
        ("optimizer.lr=0", ("optimizer.lr", "0")),
        ("optimizer.weight_decay=-1", ("weight_decay", "-1")),
        ("optimizer.betas=[2,0.9]", ("beta", "2")),
        ("scheduler.final=3", ("scheduler.final", "3")),
        ("scheduler.warmup_steps=-5", ("warmup_steps", "-5")),
        ("trainer.val_check_interval=0", ("val_check_interval", "0")),
        ("trainer.log_every_n_steps=0", ("log_every_n_steps", "0")),
        ("trainer.gradient_clip_val=-1", ("gradient_clip_val", "-1")),
        ("trainer.precision=foo", ("foo",)),
        ("callbacks.checkpoint.mode=foo", ("mode", "'foo'")),
        ("hydra.job.chdir=true", ("chdir",)),
    ],
)
def test_impossible_values_are_refused_with_their_numbers(capsys, override, words):
    message = refused(capsys, override)
    assert all(word in message for word in words), message


def test_heads_must_divide_the_width(capsys):
    message = refused(capsys, "model=transformer", "size.d_model=100", "model.n_heads=3")
    assert "100" in message and "3" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.scan=fused"], ("scan='fused'", "needs a CUDA device")),
        (["model.decode=fused"], ("fused", "on cpu")),
        (["model=transformer", "model.attn_impl=fa4"], ("impl='fa4'", "needs an NVIDIA GPU")),
        (["model=s4", "model.impl=fused"], ("fused", "CUDA")),
        (["model=s4d", "model.impl=fused", "trainer.precision=bf16-mixed"], ("fused", "CUDA")),
    ],
)
def test_an_implementation_that_cannot_run_on_this_cpu_is_refused_before_the_run(capsys, overrides, words):
    pytest.importorskip("triton")  # else its absence is the reason
    message = refused(capsys, "trainer.accelerator=cpu", *overrides)
    assert all(word in message for word in words) and message.count("\n") == 1, message


@pytest.mark.parametrize(
    "overrides",
    [["model.scan=chunked"], ["model=transformer", "model.attn_impl=math", "size.n_layer=3"], ["model=s4", "model.impl=torch"]],
)
def test_an_implementation_that_runs_on_the_cpu_is_taken_by_name(overrides):
    assert check_command_line(["logger=csv", "trainer.accelerator=cpu", *overrides], CONF).size.n_layer in (2, 3)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TORCHRUN |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "x", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM |= {"SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("environment", "overrides", "words"),
    [
        (SLURM, ["trainer=ddp_cpu"], ("processes: 2, started: 1",)),  # without srun, or with too few tasks
        (SLURM, ["trainer=fsdp", "trainer.accelerator=cpu"], ("processes: 2, started: 1",)),
        (TORCHRUN, ["trainer=ddp_cpu"], ("processes: 2, started: 1",)),
        (
            TORCHRUN | {"WORLD_SIZE": "2"},
            ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=1"],
            ("processes: 1, started: 2",),
        ),
        (TORCHRUN | {"WORLD_SIZE": "2"}, ["trainer.accelerator=cpu"], ("processes: 1, started: 2",)),  # not spread at all
    ],
)
def test_other_processes_than_the_devices_ask_for_are_refused(capsys, monkeypatch, environment, overrides, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, *overrides)
    assert all(word in message for word in (*words, "torchrun --nproc-per-node", "srun")) and message.count("\n") == 1


def test_one_process_is_enough_where_one_device_is_asked_for(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for trainer in ("default", "ddp_cpu", "fsdp"):
        check_command_line(["logger=csv", f"trainer={trainer}", "trainer.devices=1", "trainer.accelerator=cpu"], CONF)


def test_asking_for_an_implementation_leaves_its_word_to_the_log_of_the_run(tmp_path):
    overrides = ("model.scan=sequential", "model.decode=reference", "logger=csv", *SELECTIVE_COPY)
    done = command(tmp_path, *overrides)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    assert "causal_conv1d on cpu takes" in (folder / "train.log").read_text()


def test_nothing_is_made_by_a_refusal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, "task.n_tokens=65")
    refused(capsys, "model=mambo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [(), ("-m", "seed=0,1")])
def test_a_logger_that_cannot_be_is_refused_before_a_folder_is_made(capsys, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if importlib.util.find_spec("wandb") is not None:
        assert "mode=online needs a key" in refused(capsys, *flags, "logger.wandb.mode=online")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    message = refused(capsys, *flags)
    assert "pip install wandb" in message and "logger=csv" in message and message.count("\n") == 1
    assert (check_command_line([*flags, "logger=csv"], CONF) is None) == bool(flags)
    assert list(tmp_path.iterdir()) == []


# ckpt=last


def with_checkpoint(folder, config):
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/last.ckpt").touch()
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder / "checkpoints/last.ckpt"


def test_ckpt_last_skips_by_name_what_it_cannot_read_and_finds_the_others(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    mine = compose_run([], CONF, "x")
    good = with_checkpoint(tmp_path / "outputs/runs/a", OmegaConf.to_yaml(mine)).relative_to(tmp_path)
    broken = {"b": None, "c": "- a list", "d": "a: [b", "e": "", "f": "seed: 7"}
    for name, text in broken.items():
        with_checkpoint(tmp_path / f"outputs/runs/{name}", text)
    for _ in range(2):
        assert find_checkpoint(compose_run(["ckpt=last"], CONF, "x")) == good
    for name in "bcde":
        assert caplog.text.count(f"outputs/runs/{name}/config.yaml") == 1, "each in one line, once"
    assert len(caplog.records) == 4
    with pytest.raises(ValueError, match="none of the 6"):
        find_checkpoint(compose_run(["ckpt=last", "seed=3"], CONF, "x"))


def test_ckpt_last_finds_runs_through_a_link_and_in_folders_of_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/runs").symlink_to(tmp_path / "disk")
    for seed, name in enumerate(("disk/report/a", "disk/wandb/b", "disk/checkpoints/c", "outputs/d")):
        with_checkpoint(tmp_path / name, OmegaConf.to_yaml(compose_run([f"seed={seed}"], CONF, "x")))
        assert find_checkpoint(compose_run(["ckpt=last", f"seed={seed}"], CONF, "x")).parts[-3] == name[-1]


def test_no_noise_is_allowed():
    assert check_command_line(["logger=csv", "task.seq_len=16", "task.n_tokens=16"], CONF).task.n_tokens == 16


def test_every_top_level_key_is_read():
    """Groups are read by what they instantiate, whose constructors refuse what they do not know; scalars by name."""
    keys = [key for key, value in OmegaConf.load(CONF / "train.yaml").items() if key not in ("defaults", "hydra")]
    source = (CONF.parent / "train.py").read_text() + (CONF.parent / "src/seqmix/config.py").read_text()
    assert keys and all(f"cfg.{key}" in source for key in keys)

"""The command line: what is refused, and how (cases F04, F05, F08, H01, I08)."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import SELECTIVE_COPY, command

from seqmix import signatures
from seqmix.build import build
from seqmix.command_line import check_command_line
from seqmix.config import compose_run, find_checkpoint, register_resolvers

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


def test_a_key_is_read_by_every_choice_of_a_sweep(capsys):
    assert check_command_line(["-m", "model=s4,mamba", "model.d_state=8,16"], CONF) is None
    assert "LSTM takes no d_state" in refused(capsys, "-m", "model=mamba,lstm", "model.d_state=8,16")


SGD = ("optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.eps")
SWIGLU = "channel_mixer={_target_:seqmix.channel_mixers.SwiGLU,_partial_:true}"


@pytest.mark.parametrize(
    "overrides",
    [
        ("+optimizer.amsgrad=true",),
        ("gradient_clip_val=null",),
        ("micro_batch_size=8",),
        ("+optimizer.momentum=0.9", *SGD),
        ("+model.bias=true",),
        ("+model.dt_min=0.01",),
        ("model=lstm", "+model.forget_bias=0.5"),
        ("+trainer.min_steps=3",),
        ("+callbacks.mine._target_=seqmix.callbacks.Memory", "+callbacks.mine.warmup_steps=3"),
        ("+callbacks.mine={_target_:seqmix.callbacks.Memory,warmup_steps:3}",),
        (SWIGLU, "+channel_mixer.expand=3.0"),
        ("+hydra.job.env_set.OMP_NUM_THREADS=1",),
        ("trainer.max_time={minutes:5}",),
        ("trainer.deterministic=warn",),
        ("callbacks.memory=null",),
        ("~callbacks.memory",),
    ],
)
def test_a_key_that_a_target_takes_is_read(overrides):
    """Also where no file names it: keys are known from the signatures of what `_target_` names."""
    assert check_command_line(list(overrides), CONF) is not None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+optimizer.momentum=0.9",), ("optimizer.momentum", "AdamW takes no momentum")),
        (("optimizer._target_=torch.optim.SGD",), ("optimizer.betas", "SGD takes no betas")),
        (("optimizer._target_=torch.optim.Adamm",), ("torch.optim has no Adamm", "'Adam'")),
        (("model._target_=nowhere.LSTM",), ("nowhere.LSTM", "No module named")),
        (("+callbacks.mine.warmup_steps=3",), ("callbacks.mine",)),
        (("+callbacks.mine={_target_:seqmix.callbacks.Memory,warm_up:3}",), ("callbacks.mine.warm_up", "warmup_steps'")),
        ((SWIGLU.replace("_partial_:true", "_partial_:true,exand:3"),), ("channel_mixer.exand", "'channel_mixer.expand'")),
        (("+mine._target_=seqmix.callbacks.Memory",), ("'mine'",)),
        (("+size.width=3",), ("size.width",)),
    ],
)
def test_a_key_that_no_target_takes_is_refused(capsys, overrides, words):
    message = refused(capsys, *overrides)
    assert all(word in message for word in words) and message.count("\n") == 1, message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("+trainer.fast_dev_run=true", "debug=smoke"),
        ("+trainer.accumulate_grad_batches=2", "micro_batch_size"),
        ("+trainer.gradient_clip_val=2.0", "gradient_clip_val, without trainer"),
        ("+trainer.limit_train_batches=5", "task.train_samples"),
        ("+trainer.overfit_batches=5", "task.train_samples"),
        ("trainer.max_epochs=3", "trainer.max_steps"),
        ("trainer.check_val_every_n_epoch=2", "trainer.val_check_interval"),
        ("+trainer.logger=false", "logger=none"),
        ("+model.d_model=32", "size.d_model"),
        ("+scheduler.total_steps=32", "trainer.max_steps"),
    ],
)
def test_a_key_that_would_break_a_promise_is_refused_with_the_reason(capsys, override, reason):
    message = refused(capsys, override)
    assert reason in message and "nothing reads" not in message and override.lstrip("+").split("=")[0] in message, message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("seed=1", "seed=2"), "seed"),
        (("-m", "seed=0,1", "seed=2,3"), "seed"),
        (("model=lstm", "model=mamba"), "model"),
        (("model.d_state=8", "++model.d_state=16"), "model.d_state"),
        ((SWIGLU.replace("true", "true,expand:2"), "channel_mixer.expand=3"), "channel_mixer.expand"),
    ],
)
def test_a_key_that_is_set_twice_is_refused(capsys, overrides, key):
    message = refused(capsys, *overrides)
    assert f"both set {key}:" in message and all(o in message for o in overrides if o != "-m"), message
    replaced = check_command_line(["~optimizer.betas", "+optimizer.betas=[0.8,0.9]"], CONF)
    assert replaced.optimizer.betas == [0.8, 0.9]


@pytest.mark.parametrize("flag", ["--config-dir {}", "-cd {}", "--config-name train", "-cn train", "--run"])
def test_a_flag_of_hydras_does_not_turn_the_checks_off(capsys, tmp_path, flag):
    flags = flag.format(tmp_path).split()
    assert "'seed'" in refused(capsys, *flags, "+sed=3")
    assert "n_tokens=65" in refused(capsys, *flags, "task.n_tokens=65")
    assert check_command_line([*flags, "show=batch"], CONF).show == "batch", "and shows it rather than trains"


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"], ["--info"], ["-c", "all", "sed=3"], ["--hydra-help"]])
def test_flags_with_which_nothing_runs_are_hydras_own(flags):
    assert check_command_line(flags, CONF) is None


def test_a_pickled_config_does_not_run_unchecked(capsys):
    assert "--experimental-rerun" in refused(capsys, "--experimental-rerun", "x.pickle")


def test_files_of_ones_own_are_checked_like_what_is_typed(capsys, tmp_path):
    """--config-dir adds choices; a key that nothing reads is refused in them too."""
    for name, text in {
        "size/big": "{d_model: 32, n_layer: 3}",
        "size/wide": "{d_model: 32, n_layers: 3}",
        "experiment/typo": "# @package _global_\ndroput: 0.1",
        "experiment/type": "# @package _global_\ndropout: much",
        "experiment/key": "# @package _global_\ntask: {seqlen: 32}",
        "experiment/swept": "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {sede: '1,2'}}}",
        "experiment/choice": "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {model: 'lstm,mambo'}}}",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    flags = ("--config-dir", str(tmp_path))
    assert check_command_line([*flags, "size=big"], CONF).size.n_layer == 3
    assert check_command_line(["-m", *flags, "size=big,tiny"], CONF) is None
    assert check_command_line(["-m", *flags, "size=glob(b*)"], CONF) is None
    assert "there are 130m, big" in refused(capsys, *flags, "size=huge")
    for overrides, words in {
        ("size=wide",): "'size.n_layers'; the nearest is 'size.n_layer'",
        ("-m", "size=tiny,wide"): "'size.n_layers'",
        ("experiment=typo",): "'droput'; the nearest is 'dropout'",
        ("experiment=type",): "dropout takes float, got 'much'",
        ("experiment=key",): "'task.seqlen'",
        ("-m", "experiment=key", "seed=0,1"): "'task.seqlen'",
        ("experiment=swept",): "'sede'; the nearest is 'seed'",
        ("experiment=choice",): "no model=mambo; the nearest is 'mamba'",
    }.items():
        assert words in refused(capsys, *flags, *overrides)
    assert "no such folder" in refused(capsys, "--config-dir", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("override", "count"), [("model=glob(s4*)", 2), ("model=choice(lstm,rnn)", 2), ("seed=range(0,3)", 3), ("model=glob(*)", 6)]
)
def test_a_sweep_may_be_written_in_any_way_of_hydras(monkeypatch, override, count):
    values = []
    monkeypatch.setattr("seqmix.command_line._Keys.check", lambda self, key, value: key in override and values.append(value))
    assert check_command_line(["-m", override], CONF) is None
    assert len(set(map(str, values))) >= count or override.startswith("model")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=glob(x*)",), ("names no value",)),
        (("seed=range(5,5)",), ("names no value",)),
        (("seed=0,a",), ("seed", "'a'")),
        (("model.d_state=8,1.5",), ("model.d_state=1.5", "int")),
        (("optimizer.lr=interval(0,1)",), ("hydra/sweeper=tpe",)),
        (("hydra/launcher=quee",), ("'queue'", "submitit_slurm")),
        (("hydra.launcher.skip=complete",), ("hydra.launcher.skip", "Sequence[str]")),
        (("hydra.launcher.skip=[complet]",), ("hydra.launcher.skip", "complet", "diverged")),
        (("hydra.launcher.runner=-m",), ("hydra.launcher.runner", "Sequence[str | int]")),
        (("hydra.launcher.n_jobs=true",), ("hydra.launcher.n_jobs", "int")),
        (("+hydra.launcher.njobs=3",), ("hydra.launcher.njobs", "n_jobs'")),
        (("hydra.launcher.njobs=3",), ("hydra.launcher.njobs", "n_jobs'")),
        (("+hydra.sweeper.params.seed='1,2'",), ("Hydra cannot compose this",)),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_refused_before_its_folder_is_made(capsys, overrides, words):
    message = refused(capsys, "-m", "task.seq_len=16,32", *overrides)
    assert all(word in message for word in words) and message.count("\n") == 1, message


@pytest.mark.parametrize(
    ("override", "module", "extra"),
    [
        ("hydra/sweeper=tpe", "hydra_plugins.hydra_optuna_sweeper", "sweep"),
        ("hydra/launcher=submitit_local", "hydra_plugins.hydra_submitit_launcher", "cluster"),
    ],
)
def test_a_plugin_that_is_missing_names_the_extra_to_install(capsys, monkeypatch, override, module, extra):
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    signatures.parameters.cache_clear()
    assert f"pip install -e '.[{extra}]'" in refused(capsys, "-m", override, "seed=0,1")


def test_a_run_has_an_end(capsys):
    """The budget is steps or time, whichever comes first; a schedule that ends, ends with the steps."""
    assert "trainer.max_time" in refused(capsys, "trainer.max_steps=-1", "scheduler=constant")
    assert "scheduler=constant" in refused(capsys, "trainer.max_steps=-1", "trainer.max_time=00:00:05:00")
    assert check_command_line(["trainer.max_steps=-1", "trainer.max_time=00:00:05:00", "scheduler=constant"], CONF) is not None
    assert check_command_line(["trainer.max_steps=0"], CONF) is not None


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
        ("gradient_clip_val=-1", ("gradient_clip_val", "-1")),
        ("micro_batch_size=0", ("micro_batch_size", "0")),
        ("cuda_graph=on", ("cuda_graph", "auto", "off", "on")),
        ("trainer.precision=foo", ("foo",)),
        ("callbacks.checkpoint.mode=foo", ("mode", "'foo'")),
        ("hydra.job.chdir=true", ("chdir",)),
        ("micro_batch_size=all", ("micro_batch_size", "'all'", "int | null")),
        ("gradient_clip_val=much", ("gradient_clip_val", "'much'", "float | null")),
        ("cuda_graph=null", ("cuda_graph", "null", "str")),
        ("seed=null", ("seed", "null")),
        ("dropout=null", ("dropout", "null")),
        ("test=null", ("test", "null")),
        ("size.n_layer=null", ("size.n_layer", "null")),
        ("model=null", ("model=null", "lstm")),
        ("model.d_state=null", ("model.d_state=null", "int")),
        ("optimizer.betas=[0.9]", ("optimizer.betas=[0.9]", "tuple[float | Tensor, float | Tensor]")),
        ("optimizer.betas=0.9", ("optimizer.betas=0.9", "tuple")),
        ("optimizer.betas=[0.9,x]", ("optimizer.betas", "'x'")),
        ("optimizer.lr=null", ("optimizer.lr=null", "float")),
        ("trainer.max_time=5", ("trainer.max_time=5", "str | timedelta | dict[str, int] | null")),
        ("trainer.max_time=soon", ("trainer", "'soon'", "DD:HH:MM:SS")),
        ("trainer.max_steps=null", ("trainer.max_steps=null", "int")),
        ("trainer.max_steps=-2", ("trainer.max_steps", "-2")),
        ("trainer.log_every_n_steps=null", ("trainer.log_every_n_steps", "null")),
        ("trainer.val_check_interval=0.5", ("trainer.val_check_interval", "0.5")),
        ("trainer.devices=x", ("trainer", "devices")),
        ("trainer.deterministic=maybe", ("trainer.deterministic='maybe'", "bool | 'warn'")),
        ("callbacks.last.every_n_steps=x", ("callbacks.last.every_n_steps='x'", "int | null")),
        ("callbacks.last.every_n_steps=0", ("callbacks.last", "every_n_steps", "0")),
        ("callbacks.progress.metrics=train/loss", ("callbacks.progress.metrics", "Sequence[str]")),
        ("logger.wandb.tags=mine", ("logger.wandb.tags", "Iterable[str]")),
        ("logger.wandb.mode=on", ("logger.wandb", "'on'", "offline")),
        ("ckpt=5", ("ckpt=5", "no such file")),
        ("seed=${nowhere}", ("nowhere",)),
    ],
)
def test_impossible_values_are_refused_with_their_numbers(capsys, override, words):
    message = refused(capsys, override)
    assert all(word in message for word in words) and message.count("\n") == 1, message


def test_float16_on_a_cpu_is_not_taken_for_bfloat16(capsys):
    message = refused(capsys, "trainer.precision=16-mixed", "trainer.accelerator=cpu")
    assert "16-mixed needs a GPU" in message and "bf16-mixed" in message


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
        (SLURM, ["trainer=ddp_cpu"], ("= 2, but the number of processes started is 1",)),  # without srun, or with too few tasks
        (SLURM, ["trainer=fsdp", "trainer.accelerator=cpu"], ("= 2, but the number of processes started is 1",)),
        (TORCHRUN, ["trainer=ddp_cpu"], ("= 2, but the number of processes started is 1",)),
        (
            TORCHRUN | {"WORLD_SIZE": "2"},
            ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=1"],
            ("= 1, but the number of processes started is 2",),
        ),
        # one device is asked for: each process would train alone
        (TORCHRUN | {"WORLD_SIZE": "2"}, ["trainer.accelerator=cpu"], ("= 1, but the number of processes started is 2",)),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "2"},
            ["trainer.accelerator=cpu"],
            ("= 1, but the number of processes started is 2",),
        ),
    ],
)
def test_other_processes_than_the_devices_ask_for_are_refused(capsys, monkeypatch, environment, overrides, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, *overrides)
    assert all(word in message for word in (*words, "torchrun --nproc-per-node", "srun")) and message.count("\n") == 1


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_is_enough_where_one_device_is_asked_for(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for trainer in ("default", "ddp_cpu", "fsdp"):
        check_command_line(["logger=csv", f"trainer={trainer}", "trainer.devices=1", "trainer.accelerator=cpu"], CONF)


def test_a_run_takes_one_card_however_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    cfg = compose_run([], CONF, folder="x")
    assert cfg.trainer.accelerator == "cuda"
    trainer = build(cfg.trainer)(logger=False)
    assert (trainer.num_devices, trainer.world_size) == (1, 1)
    assert trainer.strategy.root_device == torch.device("cuda", 0)


def test_asking_for_an_implementation_leaves_its_word_to_the_log_of_the_run(tmp_path):
    overrides = ("model.scan=sequential", "model.decode=reference", "logger=csv", *SELECTIVE_COPY)
    done = command(tmp_path, *overrides)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    assert "causal_conv1d on cpu uses" in (folder / "train.log").read_text()


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
    files = ("train.py", *(f"src/seqmix/{name}.py" for name in ("build", "config", "command_line")))
    source = "".join((CONF.parent / file).read_text() for file in files)
    assert keys and all(f"cfg.{key}" in source for key in keys)

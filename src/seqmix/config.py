"""Composing a config, and checking it: what it describes is built in build.py.

Refused with the numbers: a value that a target does not take, sizes that cannot be (the task is built, and the model on the
meta device, which costs no memory), a run that would not end, another number of processes than of devices, and an
implementation that cannot run there. What is typed is checked in command_line.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from omegaconf import DictConfig, OmegaConf, open_dict

from seqmix import lengths, signatures
from seqmix.build import build, build_module, said_of
from seqmix.folders import read_file, walk
from seqmix.identity import changed, flat
from seqmix.model import SequenceModel
from seqmix.module import SequenceModule
from seqmix.optim import make_optimizer
from seqmix.signatures import show
from seqmix.sweep.names import resolved, run_folder, sweep_name

log = logging.getLogger(__name__)
RUNS = Path("outputs")
NO_EPOCHS = "the stream of training rows has no end, so there are no epochs"
# arguments that a target takes and a run does not: the values at which they change nothing, and why they may have no other
REFUSED = {
    "model.d_model": ((), "size.d_model sets it, for every model"),
    "channel_mixer.d_model": ((), "size.d_model sets it, for every model"),
    "optimizer.params": ((), "the optimizer is given the model's parameters"),
    "scheduler.optimizer": ((), "the scheduler is given the optimizer"),
    "scheduler.total_steps": ((), "trainer.max_steps sets it"),
    "trainer.callbacks": ((), "callbacks.NAME adds one"),
    "trainer.logger": ((), "logger.NAME adds one; logger=none keeps the local files alone"),
    "trainer.default_root_dir": ((), "hydra.run.dir sets it"),
    "trainer.fast_dev_run": ((False, 0), "one step would be recorded as a complete run; debug=smoke trains for twenty steps"),
    "trainer.accumulate_grad_batches": ((1,), "micro_batch_size computes a step's rows in parts, task.batch_size are its rows"),
    "trainer.gradient_clip_val": ((None,), "gradient_clip_val, without trainer, is the largest norm"),
    "trainer.gradient_clip_algorithm": ((None,), "gradients are clipped by their 2-norm"),
    "trainer.max_epochs": ((None, -1), f"{NO_EPOCHS}; trainer.max_steps and trainer.max_time end a run"),
    "trainer.min_epochs": ((None,), f"{NO_EPOCHS}; trainer.min_steps counts steps"),
    "trainer.check_val_every_n_epoch": ((None, 1), f"{NO_EPOCHS}; trainer.val_check_interval counts steps"),
    "trainer.reload_dataloaders_every_n_epochs": ((0,), NO_EPOCHS),
    "trainer.limit_train_batches": ((None, 1.0), f"{NO_EPOCHS}; task.train_samples=N trains on the same N rows"),
    "trainer.overfit_batches": ((0, 0.0), f"{NO_EPOCHS}; task.train_samples=N trains on the same N rows"),
}


def register_resolvers() -> None:
    """`${accelerator:}`, `${run_stamp:}`, `${sweep_name:}` and `${run_folder:}`, which conf/train.yaml uses."""
    accelerator = lambda: "cuda" if torch.cuda.is_available() else "cpu"  # noqa: E731
    OmegaConf.register_new_resolver("accelerator", accelerator, replace=True)
    OmegaConf.register_new_resolver("run_stamp", _run_stamp, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)


@contextlib.contextmanager
def hydra_at(conf: Path, beside: Path | None = None) -> Iterator[None]:
    """A context in which Hydra composes from `conf`. beside: a further folder of configs, as Hydra's --config-dir adds it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf.absolute()), version_base="1.3", job_name="train"):
        if beside is not None:
            search_path = GlobalHydra.instance().config_loader().get_search_path()
            search_path.prepend("command-line", f"file://{beside}", SearchPathQuery(provider="schema"))
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("train", search_path)
        yield


def compose_run(overrides: list[str], conf: Path, folder: Path | str) -> DictConfig:
    """The config of one run in `folder`, every interpolation resolved, without Hydra's own part."""
    with hydra_at(conf):
        return resolved(compose("train", overrides=overrides, return_hydra_config=True), folder)


def check(cfg: DictConfig, own: Path | None = None) -> SequenceModel:
    """ValueError where a resolved config names something that cannot be; builds the task and, on no device, the model.

    own: a checkpoint of the run itself, from which it resumes whatever `ckpt` names.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ValueError(f"no value for {', '.join(missing)}")
    check_arguments(cfg)
    if str(cfg.trainer.precision) in ("16-true", "bf16-true", "16", "bf16"):
        raise ValueError(
            f"trainer.precision={cfg.trainer.precision} would keep the weights in 16 bit, which loses an update below 1/512 of "
            "a weight (in float16 1/4096); write bf16-mixed or 16-mixed"
        )
    if str(cfg.trainer.precision) == "16-mixed" and cfg.trainer.accelerator == "cpu":
        raise ValueError("trainer.precision=16-mixed needs a GPU: on a CPU Lightning computes in bfloat16; write bf16-mixed")
    if cfg.show not in (None, "batch"):
        raise ValueError(f"show must be null or batch, got {cfg.show!r}")
    if cfg.matmul_precision not in ("highest", "high", "medium"):
        raise ValueError(f"matmul_precision must be highest, high or medium, got {cfg.matmul_precision!r}")
    if not signatures.fits(cfg.seed, int) or not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed must be an integer in 0..2^32 - 1, got {show(cfg.seed)}")
    for key in ("val_check_interval", "log_every_n_steps"):
        if not signatures.fits(cfg.trainer[key], int) or cfg.trainer[key] < 1:
            raise ValueError(f"trainer.{key} must be an integer of at least 1, got {show(cfg.trainer[key])}")
    if cfg.trainer.max_steps < -1:
        raise ValueError(f"trainer.max_steps must be at least 0, or -1 for no limit, got {cfg.trainer.max_steps}")
    if cfg.trainer.max_steps == -1 and cfg.trainer.max_time is None:
        raise ValueError(
            f"trainer.max_steps=-1 without trainer.max_time: {NO_EPOCHS}, and the run would not end; it ends at max_steps or "
            "max_time, whichever comes first"
        )
    if cfg.eval.lengths and not cfg.test:
        raise ValueError(f"eval.lengths={cfg.eval.lengths} with test=false: nothing is tested")
    lengths.tasks_at(cfg)
    task = build(cfg.task)
    with torch.device("meta"):
        with said_of("model"):
            module = build_module(cfg, task)
        with said_of("optimizer"):
            optimizer = make_optimizer(module.model, module.make_optimizer)
        with said_of("scheduler"):
            module.make_scheduler(optimizer, total_steps=cfg.trainer.max_steps)
    if path := own or find_checkpoint(cfg):
        check_checkpoint(path, module, cfg.trainer.max_steps)
    return module.model


def check_arguments(cfg: DictConfig) -> None:
    """ValueError where a resolved config has an argument that its target does not take, or one of REFUSED."""
    plain = OmegaConf.to_container(cfg)
    for key, value in flat(plain).items():
        check_promises(key, value)
    for key, node in plain.items():
        if isinstance(node, dict):
            signatures.check(node, key)


def check_promises(key: str, value: Any) -> None:
    """ValueError for a key of REFUSED that would change something."""
    harmless, reason = REFUSED.get(key, ((value,), ""))
    if value not in harmless:
        raise ValueError(f"{key}={show(value)} is refused: {reason}")


def check_checkpoint(path: Path, module: SequenceModule, max_steps: int) -> None:
    """ValueError where a checkpoint is damaged, of another model, or of more steps than are asked for. Reads no weights."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        weights, steps = saved["state_dict"], saved["global_step"]
    except (EOFError, KeyError, OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"ckpt={path} is damaged, or no checkpoint of a run: {str(error).splitlines()[:1]}") from error
    here = {name: tuple(t.shape) for name, t in module.state_dict().items() if name.startswith("model.")}
    there = {name: tuple(t.shape) for name, t in weights.items() if name.startswith("model.")}
    unlike = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"ckpt={path} is of another model: {name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
            f" ({len(unlike)} of {len(here)} parameters differ)"
        )
    if 0 <= max_steps < steps:
        raise ValueError(f"trainer.max_steps={max_steps}, but ckpt={path} has {steps} steps behind it: ask for more")


def check_processes(trainer: L.Trainer) -> None:
    """ValueError where another number of processes has been started than trainer.devices x trainer.num_nodes.

    Without torchrun or Slurm, Lightning starts the other processes itself; with them it trusts that they are there.
    """
    asked = trainer.num_devices * trainer.num_nodes
    if isinstance(trainer.strategy, ParallelStrategy):
        started = trainer.world_size
    else:  # one device: Lightning does not look at what torchrun or srun has started, and each process would train alone
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        started = int(os.environ["WORLD_SIZE"] if torchrun else os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if started != asked:
        raise ValueError(
            f"trainer.devices x trainer.num_nodes = {asked}, but the number of processes started is {started}; "
            "`torchrun --nproc-per-node N train.py trainer=ddp trainer.devices=N` (or trainer=fsdp) starts N, "
            "and so does `srun --ntasks-per-node N python train.py trainer=ddp trainer.devices=N`"
        )


def check_lengths(cfg: DictConfig, trainer: L.Trainer) -> None:
    """ValueError where eval.lengths is asked for and the parameters are sharded: they are gathered for whole rows only."""
    if cfg.eval.lengths and isinstance(trainer.strategy, ModelParallelStrategy):
        raise ValueError(f"eval.lengths={cfg.eval.lengths} needs a whole model on each device; use trainer=ddp or one device")


def check_kernels(cfg: DictConfig, model: SequenceModel, trainer: L.Trainer) -> None:
    """ValueError where an implementation that the config names cannot run on the trainer's device: it is asked, not run.

    Only for what is named: `auto` takes what runs, and says what in the log of the run. model: on any device.
    """
    keys = {key for block in model.blocks for key in block.mixer.kernel_arguments}
    if all(cfg.model.get(key, "auto") == "auto" for key in keys):
        return
    with trainer.precision_plugin.forward_context():
        model.kernels_used(cfg.task.batch_size, cfg.task.seq_len, trainer.strategy.root_device)


def find_checkpoint(cfg: DictConfig) -> Path | None:
    """The file that `ckpt` names; for `last` the newest last.ckpt of a run with the same settings, see seqmix.identity."""
    if cfg.ckpt is None:
        return None
    if cfg.ckpt != "last":
        path = Path(str(cfg.ckpt))
        if not path.is_file():
            raise ValueError(f"ckpt={cfg.ckpt}: there is no such file (looked for {path.absolute()})")
        return path
    checkpoints = [folder / "checkpoints" / "last.ckpt" for folder, children, _ in walk(RUNS) if "checkpoints" in children]
    newest_first = sorted(filter(Path.is_file, checkpoints), key=lambda path: path.stat().st_mtime, reverse=True)
    mine, differ = flat(OmegaConf.to_container(cfg, resolve=True)), []
    for path in newest_first:
        try:
            other = changed(flat(read_file(path.parent.parent / "config.yaml")), mine, "resume")
        except ValueError as error:
            _say_skipped(path, str(error))
            continue
        if not other:
            return path
        differ.append(f"{path.parent.parent}, differs in {', '.join(other)}")
    newest = f"; the newest, {differ[0]}" if differ else ""
    raise ValueError(
        f"ckpt=last: none of the {len(newest_first)} checkpointed runs under {RUNS} has the same settings{newest}; name a file"
    )


@functools.cache  # once, however often the run asks
def _say_skipped(path: Path, reason: str) -> None:
    log.warning("ckpt=last: %s is skipped: %s", path, reason)


def record_resume(checkpoint: Path, cfg: DictConfig) -> None:
    """Adds to cfg, as `resumed_over`, the settings that were others before, where they change a result: it is another run then.

    Those of earlier resumes are kept. A checkpoint without a config of its run that can be read is named instead.
    """
    over = {"ckpt": str(checkpoint)}
    with contextlib.suppress(ValueError):
        before = read_file(checkpoint.parent.parent / "config.yaml")
        over = before.pop("resumed_over", {}) | changed(flat(before), flat(OmegaConf.to_container(cfg)), "resume", "cell")
    if over:
        with open_dict(cfg):
            cfg.resumed_over = over


def _run_stamp() -> str:
    """Now, to the microsecond; under torchrun when its launcher was started, so that all ranks share one folder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    launcher = os.getppid()
    fields = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()
    booted = next(int(row.split()[1]) for row in Path("/proc/stat").read_text().splitlines() if row.startswith("btime"))
    started = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(started).strftime("%Y-%m-%d_%H-%M-%S") + f"-{launcher}"

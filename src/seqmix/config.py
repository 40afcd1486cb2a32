"""The command line is checked before anything is made: no run folder, no wandb run, no data.

Refused, with the nearest name that exists: a key nothing reads (also behind `+`), a choice that is not there, a value
of another type than its default. Refused with the numbers: sizes that cannot be (the task is built, and the model on
the meta device, which costs no memory), other processes than the devices ask for, and an implementation that cannot run
there.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from seqmix.display import refuse
from seqmix.folders import read_file, walk
from seqmix.model import SequenceModel
from seqmix.optim import make_optimizer
from seqmix.sweep.names import run_folder, sweep_name

log = logging.getLogger(__name__)
RUNS = Path("outputs")
# what a resumed run must share
SAME_RUN = ("model", "channel_mixer", "task", "size", "seed", "dropout", "optimizer", "scheduler")
FREE_FORM = ("hydra.job.env_set", "hydra.job_logging", "hydra.hydra_logging", "hydra.launcher", "hydra.sweeper")


def register_resolvers() -> None:
    """`${accelerator:}`, `${run_stamp:}`, `${sweep_name:}` and `${run_folder:}`, which conf/train.yaml uses."""
    accelerator = lambda: "cuda" if torch.cuda.is_available() else "cpu"  # noqa: E731
    OmegaConf.register_new_resolver("accelerator", accelerator, replace=True)
    OmegaConf.register_new_resolver("run_stamp", _run_stamp, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("sweep_name", sweep_name, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)


def check_command_line(arguments: list[str], conf: Path) -> DictConfig | None:
    """The composed config of a single run whose overrides make sense; exits with code 2 and one line where they do not.

    None for a multirun, whose jobs check their own values, and for Hydra's own flags (--help, --cfg, ...).
    """
    overrides = [a for a in arguments if not a.startswith("-")]
    flags = [a for a in arguments if a.startswith("-")]
    multirun = "-m" in flags or "--multirun" in flags
    if any(flag not in ("-m", "--multirun") for flag in flags):
        return None
    try:
        with _hydra_at(conf):
            _check_overrides(OverridesParser.create().parse_overrides(overrides), conf, multirun)
        if multirun:
            fixed = [o for o in overrides if o.startswith("logger") and "," not in o]
            build_loggers(compose_run(fixed, conf, folder="(made when a job starts)"))
            return None
        cfg = compose_run(overrides, conf, folder="(made when the run starts)")
        model = check(cfg)
        callbacks = [build(node) for node in (cfg.get("callbacks") or {}).values() if node]
        trainer = build(cfg.trainer)(callbacks=callbacks, logger=False)
        check_processes(trainer)
        check_kernels(cfg, model, trainer)
        if cfg.show is None:
            build_loggers(cfg)
    except (ValueError, TypeError, MisconfigurationException, HydraException, OmegaConfBaseException) as error:
        refuse(str(error))
    return cfg


def compose_run(overrides: list[str], conf: Path, folder: Path | str) -> DictConfig:
    """The config of one run in `folder`, every interpolation resolved, without Hydra's own part."""
    with _hydra_at(conf):
        cfg = compose("train", overrides=overrides, return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(cfg)
    cfg = cfg.copy()
    with open_dict(cfg):
        del cfg["hydra"]
    OmegaConf.resolve(cfg)
    return cfg


def check(cfg: DictConfig) -> SequenceModel:
    """ValueError where a resolved config names something that cannot be; builds the task and, on no device, the model."""
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise ValueError(f"no value for {', '.join(missing)}")
    if str(cfg.trainer.precision) in ("16-true", "bf16-true", "16", "bf16"):
        raise ValueError(
            f"trainer.precision={cfg.trainer.precision} would keep the weights in 16 bit, which loses an update below 1/512 of "
            "a weight (in float16 1/4096); write bf16-mixed or 16-mixed"
        )
    if cfg.show not in (None, "batch"):
        raise ValueError(f"show must be null or batch, got {cfg.show!r}")
    if cfg.matmul_precision not in ("highest", "high", "medium"):
        raise ValueError(f"matmul_precision must be highest, high or medium, got {cfg.matmul_precision!r}")
    if not 0 <= cfg.seed < 2**32:
        raise ValueError(f"seed must lie in 0..2^32 - 1, got {cfg.seed}")
    for key in ("val_check_interval", "log_every_n_steps", "accumulate_grad_batches"):
        if cfg.trainer[key] < 1:
            raise ValueError(f"trainer.{key} must be at least 1, got {cfg.trainer[key]}")
    if (cfg.trainer.gradient_clip_val or 0) < 0:
        raise ValueError(f"trainer.gradient_clip_val must be at least 0, or null, got {cfg.trainer.gradient_clip_val}")
    find_checkpoint(cfg)
    task = build(cfg.task)
    with torch.device("meta"):
        model = build_model(cfg, task.vocab_size)
        optimizer = make_optimizer(model, build(cfg.optimizer))
        build(cfg.scheduler)(optimizer, total_steps=max(1, cfg.trainer.max_steps))
    return model


def check_processes(trainer: L.Trainer) -> None:
    """ValueError where other processes have been started than the trainer's devices ask for.

    Started by hand, Lightning starts the others itself; where torchrun or Slurm are there to do it, it trusts them.
    """
    asked = trainer.num_devices * trainer.num_nodes
    if isinstance(trainer.strategy, ParallelStrategy):
        started = trainer.world_size
    else:  # it asks nobody
        started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if started != asked:
        raise ValueError(
            f"trainer.devices={trainer.num_devices} and trainer.num_nodes={trainer.num_nodes} ask for processes: {asked}, "
            f"started: {started}; `torchrun --nproc-per-node N train.py trainer=ddp trainer.devices=N` (or trainer=fsdp) "
            "starts N, and so does `srun --ntasks-per-node N python train.py ...`"
        )


def check_kernels(cfg: DictConfig, model: SequenceModel, trainer: L.Trainer) -> None:
    """ValueError where an implementation that the config names cannot run on the trainer's device: it is asked, not run.

    Only for what is named: `auto` takes what runs, and says what in the log of the run. model: on any device.
    """
    if all(cfg.model.get(key, "auto") == "auto" for key in ("scan", "decode", "attn_impl", "impl")):
        return
    with trainer.precision_plugin.forward_context():
        model.kernels_used(cfg.task.batch_size, cfg.task.seq_len, trainer.strategy.root_device)


def find_checkpoint(cfg: DictConfig) -> Path | None:
    """The file that `ckpt` names; for `last` the newest last.ckpt of a run with the same model, task, size and seed."""
    if cfg.ckpt is None:
        return None
    if cfg.ckpt != "last":
        path = Path(cfg.ckpt)
        if not path.is_file():
            raise ValueError(f"ckpt={cfg.ckpt}: there is no such file (looked for {path.absolute()})")
        return path
    checkpoints = [folder / "checkpoints" / "last.ckpt" for folder, children, _ in walk(RUNS) if "checkpoints" in children]
    newest_first = sorted(filter(Path.is_file, checkpoints), key=lambda path: path.stat().st_mtime, reverse=True)
    mine = OmegaConf.to_container(cfg, resolve=True)
    for path in newest_first:
        try:
            other = read_file(path.parent.parent / "config.yaml")
        except ValueError as error:
            _say_skipped(path, str(error))
            continue
        if all(other.get(key) == mine[key] for key in SAME_RUN):
            return path
    raise ValueError(
        f"ckpt=last: none of the {len(newest_first)} checkpointed runs under {RUNS} has the same "
        f"{', '.join(SAME_RUN)}; name a file instead"
    )


@functools.cache  # once, however often the run asks
def _say_skipped(path: Path, reason: str) -> None:
    log.warning("ckpt=last: %s is skipped: %s", path, reason)


def build(node: DictConfig | None) -> Any:
    """hydra's instantiate, with the error of the thing itself rather than hydra's wrapping of it."""
    try:
        return instantiate(node, _convert_="all")  # plain lists: an OmegaConf object in a checkpoint cannot be loaded
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, (ValueError, FileNotFoundError)):
            raise ValueError(str(cause)) from cause
        if isinstance(cause, TypeError):
            raise ValueError(f"{node.get('_target_')}: {cause}") from cause
        raise


def build_loggers(cfg: DictConfig) -> list[L.pytorch.loggers.Logger]:
    """The loggers of a config, which open nothing yet. ValueError where wandb is not installed, or lacks its key."""
    return [build(node) for node in (cfg.get("logger") or {}).values() if node]


def build_model(cfg: DictConfig, vocab_size: int) -> SequenceModel:
    """The model of a config: conf/model names its parts, conf/size its width and depth."""
    return SequenceModel(
        vocab_size=vocab_size,
        d_model=cfg.size.d_model,
        n_layer=cfg.size.n_layer,
        mixer=build(cfg.model),
        channel_mixer=build(cfg.channel_mixer),
        dropout=cfg.dropout,
    )


def _check_overrides(overrides: list[Override], conf: Path, multirun: bool) -> None:
    groups = {
        str(folder.relative_to(conf)): sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in conf.rglob("*")
        if folder.is_dir()
    }
    choices: dict[str, list[str]] = {}
    values = []
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if override.is_sweep_override() and not multirun:
            raise ValueError(
                f"{override.input_line} names several values: add -m to run one job a value, or write a list as '{key}=[...]'"
            )
        if key == "hydra.job.chdir" and override.value():
            raise ValueError(f"{override.input_line}: paths are the caller's; a run does not change the folder it stands in")
        if key == "show" and multirun:
            raise ValueError(f"{override.input_line} shows one run's batch: leave out -m")
        if "/" in key or "@" in key:  # a group of Hydra's own (hydra/launcher): Hydra answers for it
            continue
        if key in groups:
            picked = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
            for choice in picked:
                if choice is not None and str(choice) not in groups[key] and not isinstance(choice, list):
                    raise ValueError(
                        f"no {key}={choice}{_nearest(str(choice), groups[key])}; there are {', '.join(groups[key])}"
                    )
            choices[key] = [str(choice) for choice in picked if choice is not None]
        else:
            values.append((key, override))
    known = _known_keys(choices)
    for key, override in values:
        if key not in known and not key.startswith(FREE_FORM):
            raise ValueError(f"nothing reads the key {key!r}{_nearest(key, known)}")
        if not override.is_sweep_override() and not override.is_delete():
            _check_type(key, known.get(key), override.value())


def _known_keys(choices: dict[str, list[str]]) -> dict[str, Any]:
    """Every key of the config, dotted, with its default: over all the choices that a sweep names."""
    compositions = [[f"{group}={names[0]}" for group, names in choices.items() if names]]
    compositions += [[f"{group}={name}"] for group, names in choices.items() for name in names[1:]]
    known: dict[str, Any] = {}
    for overrides in compositions:
        _flatten(compose("train", overrides=overrides, return_hydra_config=True), "", known)
    return known


def _flatten(node: DictConfig, prefix: str, into: dict[str, Any]) -> None:
    for key in node:
        name = f"{prefix}{key}"
        try:
            value = node._get_node(key)._value() if node._get_node(key)._is_interpolation() else node[key]
        except OmegaConfBaseException:  # a `???` of Hydra's own
            value = None
        into.setdefault(name, value)
        if isinstance(value, DictConfig):
            _flatten(value, f"{name}.", into)


def _check_type(key: str, default: Any, value: Any) -> None:
    if default is None or value is None or isinstance(default, (str, DictConfig, ListConfig)):
        return
    hint = ""
    if isinstance(default, bool):
        right = isinstance(value, bool)
    elif isinstance(default, int):
        right = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, float) and value.is_integer():
            hint = f"; write {int(value)}"
    else:
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right and not str(value).startswith("${"):
        raise ValueError(f"{key} takes a value like {default!r}, got {value!r}{hint}")


def _nearest(name: str, names: Iterable[str]) -> str:
    """The name most like it; where none is, one whose last part is."""
    whole = {n: n for n in names}
    last = {n.rsplit(".", 1)[-1]: n for n in reversed(whole)}
    for candidates, word, cutoff in ((whole, name, 0.75), (last, name.rsplit(".", 1)[-1], 0.7), (whole, name, 0.5)):
        if close := difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff):
            return f"; the nearest is {candidates[close[0]]!r}"
    return ""


def _hydra_at(conf: Path) -> initialize_config_dir:
    GlobalHydra.instance().clear()
    return initialize_config_dir(str(conf), version_base="1.3", job_name="train")


def _run_stamp() -> str:
    """Now, to the microsecond; under torchrun when its launcher was started, so that all ranks share one folder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    launcher = os.getppid()
    fields = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()
    booted = next(int(row.split()[1]) for row in Path("/proc/stat").read_text().splitlines() if row.startswith("btime"))
    started = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return datetime.fromtimestamp(started).strftime("%Y-%m-%d_%H-%M-%S") + f"-{launcher}"

"""Train one model on one task and leave its numbers behind.

    python train.py model=mamba task=selective_copy
    python train.py -m model=transformer,s4,mamba,lstm,rnn seed=0,1,2
    python train.py task=selective_copy show=batch
    python train.py ckpt=last

A run folder (outputs/runs/...) holds config.yaml (resolved), .hydra/ (as composed, with the overrides), metrics.csv,
summary.json, train.log and checkpoints/.
"""

from __future__ import annotations

import seqmix.quick_lightning  # noqa: F401  before torch and Lightning

# isort: split
import atexit
import gc
import json
import logging
import math
import signal
import sys
import time
import warnings
from pathlib import Path

import hydra
import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from seqmix import display, measure
from seqmix.build import build, build_callbacks, build_loggers, build_module
from seqmix.callbacks import best_checkpoint
from seqmix.claim import claim
from seqmix.command_line import check_command_line
from seqmix.config import check, check_kernels, check_processes, find_checkpoint, record_resume, register_resolvers
from seqmix.memory import out_of_memory
from seqmix.step import NonFiniteError
from seqmix.sweep.jobs import in_a_sweep, objective, read_summary, take_up
from seqmix.tasks.base import Task
from seqmix.tracking import closing, source_facts, source_state

CONF = Path(__file__).parent / "conf"
REFUSED = (ValueError, OSError, ImportError)  # before training: wrong settings, data, disk or network, said in one line
data: Task | None = None  # of a single run, which is read before there is a folder for it
log = logging.getLogger("seqmix")
for package in ("lightning.pytorch", "lightning.fabric"):  # their remarks on what the config says anyway
    logging.getLogger(package).setLevel(logging.WARNING)
# Lightning 2.6.6 under torch 2.13: a name of torch's that is going away
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)
# what is logged has been summed over the ranks already (metrics.py)
warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
# torch 2.13's FSDP says so of any view that a module hands out; nothing here changes one in place
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
# our settings for submitit keep its own names, so that Hydra checks them against its schema and says so
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/submitit_", category=UserWarning)
register_resolvers()
gc.freeze()  # what is imported stays: no collection looks at it again, and the last one, at exit, takes no second


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """One job; returns what a search minimises. An error goes to its own train.log and summary.json."""
    display.guard_standard_streams()  # submitit begins here
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    folder = Path(HydraConfig.get().runtime.output_dir)
    if multirun:  # in one process, or in submitit's
        claim(folder, cfg)
    try:
        done, own = take_up(folder) if multirun or in_a_sweep() else (None, None)
        return objective(done or train(cfg, folder, own))
    except Exception as error:
        refused = not read_summary(folder)  # or its data was not there
        if refused and isinstance(error, REFUSED):
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.exception("the run has failed")
        if refused:
            write({"status": status_of(error), "error": f"{type(error).__name__}: {error}", "folder": str(folder)}, folder, [])
        if not multirun:
            raise SystemExit(1) from None
        return math.inf


def train(cfg: DictConfig, folder: Path, own: Path | None = None) -> dict:
    """One run in `folder`; returns what it wrote to summary.json. Errors are recorded there too, then raised.

    own: its last checkpoint from an earlier time. It resumes from there, wherever it began.
    """
    OmegaConf.resolve(cfg)
    check(cfg, own)
    checkpoint = own or find_checkpoint(cfg)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    task = read(cfg) if data is None else data  # now, while errors in the data itself (too short, no network) cost nothing
    started = time.monotonic()
    module = build_module(cfg, task)
    if cfg.compile:
        for block in module.model.blocks:  # blocks that are alike are compiled once
            block.compile()
    callbacks = build_callbacks(cfg)
    loggers = build_loggers(cfg)
    trainer = build(cfg.trainer)(callbacks=callbacks, logger=loggers, default_root_dir=str(folder))
    check_processes(trainer)
    if trainer.world_size > 1:
        atexit.register(leave_group)
    check_kernels(cfg, module.model, trainer)

    if trainer.is_global_zero:
        if checkpoint:
            record_resume(checkpoint, cfg)
        OmegaConf.save(cfg, folder / "config.yaml")
    summary = {"status": "failed", "folder": str(folder), "resumed_from": checkpoint and str(checkpoint)}
    facts = {
        "data": task.facts(),
        "environment": measure.environment(trainer.strategy.root_device),
        "source": source_facts(source_state()),
    }
    with closing(loggers):
        try:
            for logger in loggers:
                logger.log_hyperparams(OmegaConf.to_container(cfg) | facts)
            trainer.fit(module, datamodule=task, ckpt_path=checkpoint, weights_only=True)
            if checkpoint and (module.step is None or module.step.taken == module.step.first):
                log.warning("no step was left to take: ckpt=%s has used up trainer.max_steps or trainer.max_time", checkpoint)
            if trainer.num_val_batches == [] and trainer.limit_val_batches != 0:  # it went on from its very end
                trainer.validate(module, datamodule=task, verbose=False)
            summary |= numbers(trainer, "train/", "val/")
            if cfg.test:
                trainer.test(module, datamodule=task, ckpt_path=chosen(trainer), weights_only=True, verbose=False)
                summary |= numbers(trainer, "test/")
            summary["status"] = "complete"
        except BaseException as error:
            error = unmasked(error, trainer)
            summary |= {"status": status_of(error), "error": f"{type(error).__name__}: {error}"}
            raise error
        finally:
            if module.step is not None:
                module.step.graphs.clear()
            summary |= {
                "steps": trainer.global_step,
                "steps_run_as": module.step and module.step.runs_as,
                "seconds": round(time.monotonic() - started, 1),
                "chance/token_accuracy": task.chance_token_accuracy,
                "chance/sequence_accuracy": task.chance_sequence_accuracy,
                **facts,
            }
            for callback in callbacks:
                summary |= callback.summary() if hasattr(callback, "summary") else {}
            if trainer.is_global_zero:
                write(summary, folder, loggers)
    if trainer.is_global_zero:
        display.attempt("the table", lambda: print_table(summary, cfg))
    return summary


def read(cfg: DictConfig) -> Task:
    """The task of a config, with its data."""
    task = build(cfg.task)
    task.prepare_data()
    task.setup("fit")
    return task


def leave_group() -> None:
    """Ends what ranks speak through while there is an interpreter: gloo's threads, ended later, abort one run in ten at its
    very end. Lightning does so for NCCL alone."""
    gc.collect()  # DDP's wrapper holds the group, too
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def chosen(trainer: L.Trainer) -> str | None:
    """The checkpoint with the best validation loss; None, and a word about it, where no validation has picked one."""
    best = best_checkpoint(trainer)
    if best is None:
        log.warning("no validation has picked a best checkpoint: the test runs on the last weights")
    return best


def status_of(error: BaseException) -> str:
    if isinstance(error, NonFiniteError):
        return "diverged"
    if out_of_memory(error):
        return "oom"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def unmasked(error: BaseException, trainer: L.Trainer) -> BaseException:
    """The error itself; Lightning makes Ctrl-C an exit code 1 and ignores the next one, and SIGTERM no code at all."""
    if isinstance(error, SIGTERMException):
        return SystemExit(128 + signal.SIGTERM)
    if isinstance(error, SystemExit) and trainer.state.status == TrainerStatus.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return KeyboardInterrupt()
    return error


def numbers(trainer: L.Trainer, *prefixes: str) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith(prefixes)}


def write(summary: dict, folder: Path, loggers: list) -> None:
    """summary.json, and the same numbers to the loggers that keep a summary."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}  # JSON's null
    (folder / "summary.json").write_text(json.dumps(plain, indent=2, allow_nan=False) + "\n")
    for logger in loggers:
        if hasattr(logger, "log_summary"):
            logger.log_summary({k: v for k, v in plain.items() if k != "folder"})


def print_table(summary: dict, cfg: DictConfig) -> None:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    title = " ".join(f"{group}={choices[group]}" for group in ("model", "task") if group in choices)
    size = f"d_model={cfg.size.d_model} n_layer={cfg.size.n_layer} seed={cfg.seed}"
    table = Table(title=f"{title} {size}:\n{summary['steps']} steps in {summary['seconds']:.0f} s")
    for column in ("", "train", "val", "test", "chance"):
        table.add_column(column, justify="left" if not column else "right")
    for metric in ("loss", "token_accuracy", "sequence_accuracy", "perplexity", "bits_per_byte"):
        row = [summary.get(f"{split}/{metric}") for split in ("train", "val", "test", "chance")]
        if any(value is not None for value in row):
            table.add_row(metric, *("" if value is None else f"{value:.4g}" for value in row))
    costs = Table(box=None, show_header=False)
    costs.add_column()
    costs.add_column(justify="right")
    for name, value in summary.items():
        if name.startswith(("speed/", "memory/")) and value is not None:
            costs.add_row(name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    console = display.console()
    console.print(table, costs)
    console.print(display.visible(summary["folder"]), soft_wrap=True)


if __name__ == "__main__":
    display.guard_standard_streams()
    composed = None if in_a_sweep() else check_command_line(sys.argv[1:], CONF)  # the sweep's own has been checked
    if composed is not None:
        try:
            data = read(composed)
        except REFUSED as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    if composed is not None and composed.show == "batch":
        print(data.render(data.sample("train", torch.arange(data.batch_size))))  # as the model will see it
    else:
        main()

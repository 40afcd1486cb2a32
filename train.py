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
from seqmix.config import (
    check,
    check_kernels,
    check_lengths,
    check_processes,
    find_checkpoint,
    record_resume,
    register_resolvers,
)
from seqmix.lengths import test_at_lengths
from seqmix.memory import gpu_fault, out_of_memory
from seqmix.step import NonFiniteError
from seqmix.sweep.jobs import in_a_sweep, objective, read_summary, take_up
from seqmix.tasks.base import Task
from seqmix.tracking import closing, source_facts, source_state

CONF = Path(__file__).parent / "conf"
REFUSED = (ValueError, OSError, ImportError)  # before training: settings, data, disk or network; reported in one line
data: Task | None = None  # the task of a single run, whose data are read before its folder is made
log = logging.getLogger("seqmix")
for package in ("lightning.pytorch", "lightning.fabric"):  # they repeat what the config says
    logging.getLogger(package).setLevel(logging.WARNING)
# Lightning 2.6.6 uses a name that torch 2.13 deprecates
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning)
# metrics.py has already summed over the ranks what is logged
warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")
# FSDP of torch 2.13 warns about every view that a module returns; no such view is changed in place here
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
# our submitit configs have the names of submitit's schemas, so that Hydra checks them against these; it warns that it does
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/submitit_", category=UserWarning)
register_resolvers()
gc.freeze()  # excludes imported modules from garbage collection, which saves a second at exit


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Run one job; returns what a search minimises. An error is recorded in the job's train.log and summary.json."""
    display.guard_standard_streams()  # also here, because submitit's jobs enter here
    multirun = HydraConfig.get().mode == RunMode.MULTIRUN
    folder = Path(HydraConfig.get().runtime.output_dir)
    if multirun:  # the jobs run in this process, or in submitit's processes
        claim(folder, cfg)
    try:
        done, own = take_up(folder) if multirun or in_a_sweep() else (None, None)
        return objective(done or train(cfg, folder, own))
    except Exception as error:
        refused = not read_summary(folder)  # train() ended before training: a wrong config, or data that cannot be read
        if refused and isinstance(error, REFUSED):
            log.error("%s: %s", type(error).__name__, error)
        else:
            log.exception("the run failed")
        if refused:
            write({"status": status_of(error), "error": f"{type(error).__name__}: {error}", "folder": str(folder)}, folder, [])
        if not multirun:
            raise SystemExit(1) from None
        return math.inf


def train(cfg: DictConfig, folder: Path, own: Path | None = None) -> dict:
    """Train and test in `folder`; returns what it wrote to summary.json. An error is recorded there, too, and raised.

    own: the last checkpoint that an earlier process of this run saved. The run resumes from it, whatever `ckpt` names.
    """
    OmegaConf.resolve(cfg)
    check(cfg, own)
    checkpoint = own or find_checkpoint(cfg)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    task = read(cfg) if data is None else data  # before all else: the data may be bad (too short, no network)
    started = time.monotonic()
    module = build_module(cfg, task)
    if cfg.compile:
        for block in module.model.blocks:  # identical blocks are compiled once
            block.compile()
    callbacks = build_callbacks(cfg)
    loggers = build_loggers(cfg)
    trainer = build(cfg.trainer)(callbacks=callbacks, logger=loggers, default_root_dir=str(folder))
    check_processes(trainer)
    check_lengths(cfg, trainer)
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
                log.warning("no training step was run: ckpt=%s already is at trainer.max_steps or trainer.max_time", checkpoint)
            if trainer.num_val_batches == [] and trainer.limit_val_batches != 0:  # resumed after its last step
                trainer.validate(module, datamodule=task, verbose=False)
            summary |= numbers(trainer, "train/", "val/")
            if cfg.test:
                trainer.test(module, datamodule=task, ckpt_path=chosen(trainer), weights_only=True, verbose=False)
                summary |= numbers(trainer, "test/")
                with trainer.precision_plugin.forward_context():
                    summary |= test_at_lengths(module.model, cfg)
            summary["status"] = "complete"
        except BaseException as error:
            error = unmasked(error, trainer)
            summary |= {"status": status_of(error), "error": f"{type(error).__name__}: {error}", "gpu_fault": gpu_fault(error)}
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
            for callback in () if summary.get("gpu_fault") else callbacks:  # they may read tensors on the GPU
                summary |= callback.summary() if hasattr(callback, "summary") else {}
            if trainer.is_global_zero:
                write(summary, folder, loggers)
    if trainer.is_global_zero:
        display.attempt("the table", lambda: print_table(summary, cfg))
    return summary


def read(cfg: DictConfig) -> Task:
    """Build the task of a config and read its data."""
    task = build(cfg.task)
    task.prepare_data()
    task.setup("fit")
    return task


def leave_group() -> None:
    """Destroy the process group before the interpreter shuts down: otherwise gloo's threads abort one run in ten at exit.
    Lightning does this for NCCL only."""
    gc.collect()  # what still refers to the group must go first
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def chosen(trainer: L.Trainer) -> str | None:
    """The checkpoint with the best validation score; None, with a warning, if no validation has picked one."""
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
    """The error before Lightning changed it: it turns Ctrl-C into exit code 1 and ignores the next Ctrl-C, and it gives
    SIGTERM no exit code."""
    if isinstance(error, SIGTERMException):
        return SystemExit(128 + signal.SIGTERM)
    if isinstance(error, SystemExit) and trainer.state.status == TrainerStatus.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return KeyboardInterrupt()
    return error


def numbers(trainer: L.Trainer, *prefixes: str) -> dict[str, float]:
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith(prefixes)}


def write(summary: dict, folder: Path, loggers: list) -> None:
    """Write summary.json, and send the same numbers to the loggers that keep a summary."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}  # JSON has no NaN
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
    composed = None if in_a_sweep() else check_command_line(sys.argv[1:], CONF)  # the sweep has checked it
    if composed is not None:
        try:
            data = read(composed)
        except REFUSED as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    if composed is not None and composed.show == "batch":
        print(data.render(data.sample("train", torch.arange(data.batch_size))))  # as the model sees it
    else:
        main()

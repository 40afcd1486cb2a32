"""Building what a config describes: the model, what trains it, and what watches over that."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from seqmix.model import SequenceModel
from seqmix.module import SequenceModule
from seqmix.tasks.base import Task

# what a thing raises when it cannot be built as it is asked to be
WRONG = (
    ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, FileNotFoundError, ImportError,
    MisconfigurationException,
)  # fmt: skip


def build(node: DictConfig | None) -> Any:
    """hydra's instantiate, with the error of the thing itself rather than hydra's wrapping of it."""
    try:
        return instantiate(node, _convert_="all")  # plain lists: an OmegaConf object in a checkpoint cannot be loaded
    except InstantiationException as error:
        if not isinstance(error.__cause__, WRONG):
            raise
        raise _named(node._get_full_key(None), error.__cause__) from error.__cause__


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """The trainer of a config with its callbacks, and without loggers."""
    callbacks = build_callbacks(cfg)
    with said_of("trainer"):
        return build(cfg.trainer)(callbacks=callbacks, logger=False)


def build_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """The callbacks of a config."""
    return [build(node) for node in (cfg.get("callbacks") or {}).values() if node]


def build_module(cfg: DictConfig, task: Task) -> SequenceModule:
    """What a trainer trains: the model of a config with its optimizer, schedule and step. task: set up, for its token_bytes."""
    return SequenceModule(
        build_model(cfg, task.vocab_size),
        build(cfg.optimizer),
        build(cfg.scheduler),
        task.token_bytes,
        micro_batch_size=cfg.micro_batch_size,
        gradient_clip_val=cfg.gradient_clip_val,
        cuda_graph=cfg.cuda_graph,
    )


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


@contextlib.contextmanager
def said_of(key: str) -> Iterator[None]:
    """An error within becomes a ValueError that names the key."""
    try:
        yield
    except WRONG as error:
        raise _named(key, error) from error


def _named(key: str, error: BaseException) -> ValueError:
    """The error in one line with the key; where it is no error of a value, with its kind and the line as well."""
    text = str(error)
    if not isinstance(error, ValueError | FileNotFoundError | ImportError | MisconfigurationException):
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {text} ({Path(at.filename).name}, line {at.lineno})"
    return ValueError(text if f"{key}." in text else f"{key}: {text}")

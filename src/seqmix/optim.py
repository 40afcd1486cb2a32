"""Parameter groups and learning-rate schedules: the same for every model.

A parameter that needs its own treatment is marked where it is made, by `seqmix.mixers.base.no_weight_decay`, which sets one
attribute; only this file acts on it. Of the other parameters, matrices are decayed, vectors and scalars (norms, biases) are
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Marks = dict[str, dict]  # name of a parameter -> its mark


def marks_of(model: nn.Module) -> Marks:
    """The marks on the parameters of `model`. Read them before sharding, which replaces parameters by new, unmarked ones."""
    return {name: p._optim for name, p in model.named_parameters() if hasattr(p, "_optim")}


def param_groups(model: nn.Module, lr: float, weight_decay: float, marks: Marks | None = None) -> list[dict]:
    """Groups for a torch optimizer; every trained parameter is in exactly one.

    A parameter marked with `max_lr` gets min(lr · lr_scale, max_lr) (experiments: S4's A and Δ at 1e-3 at most).
    marks: None reads them from the parameters.
    """
    if not lr > 0:
        raise ValueError(f"optimizer.lr must be positive, got {lr!r}")
    if not weight_decay >= 0:
        raise ValueError(f"optimizer.weight_decay must be at least 0, got {weight_decay!r}")
    marks = marks_of(model) if marks is None else marks
    plain = {"lr_scale": 1.0, "max_lr": None}
    # grouped by mark, not by the resulting rate: a run resumed with other rates must have the same groups
    groups: dict[tuple[bool, float, float | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():  # which yields a tied parameter once
        if not parameter.requires_grad:
            continue
        mark = marks.get(name, plain)
        decayed = name not in marks and parameter.ndim >= 2
        groups.setdefault((decayed, mark["lr_scale"], mark["max_lr"]), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": lr * scale if max_lr is None else min(lr * scale, max_lr),
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for (decayed, scale, max_lr), parameters in groups.items()
    ]


def make_optimizer(model: nn.Module, optimizer: Callable[..., Optimizer], marks: Marks | None = None) -> Optimizer:
    """optimizer: a partial of a torch optimizer with the keyword `lr`, and `weight_decay` if it decays."""
    settings = optimizer.keywords
    return optimizer(param_groups(model, settings["lr"], settings.get("weight_decay", 0.0), marks))


def constant(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """Linear warm-up over `warmup_steps`, then lr."""
    return LambdaLR(optimizer, partial(_factor, warmup_steps=_checked(warmup_steps), total_steps=total_steps, final=1.0))


def cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.1) -> LambdaLR:
    """Linear warm-up over `warmup_steps`, then half a cosine from lr to `final · lr` at `total_steps`."""
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"scheduler.final must lie in [0, 1], got {final!r}")
    if total_steps < 0:
        raise ValueError(
            f"scheduler=cosine ends at trainer.max_steps, which is {total_steps}: set it, or use scheduler=constant, "
            "which does not depend on it"
        )
    factor = partial(_factor, warmup_steps=_checked(warmup_steps), total_steps=total_steps, final=final)
    return LambdaLR(optimizer, factor)


def _checked(warmup_steps: int) -> int:
    if warmup_steps < 0:
        raise ValueError(f"scheduler.warmup_steps must be at least 0, got {warmup_steps!r}")
    return warmup_steps


def _factor(step: int, warmup_steps: int, total_steps: int, final: float) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

"""One Point, measured: what runs in the process that is started for it."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch
from omegaconf import OmegaConf
from torch import nn

from seqmix import costs, measure
from seqmix.bench.grid import Point
from seqmix.build import build, build_model
from seqmix.decode import in_precision
from seqmix.memory import out_of_memory
from seqmix.optim import make_optimizer
from seqmix_kernels.frame import CannotRun
from seqmix_kernels.ops.attention import take_choices, tried_choices


def serve(point: Point, known: Mapping, answer: Connection) -> None:
    """The process: measures, answers with what `attempt` gives and what it has found out of use to later ones, and is gone.

    known: of earlier processes of the same run, so on the same card with the same versions (attention's choices)."""
    gc.freeze()  # what was imported before: no collection looks at it again
    started = time.perf_counter()
    take_choices(known)
    row = attempt(point)
    answer.send((row | {"seconds": round(time.perf_counter() - started, 2)}, tried_choices()))
    answer.close()
    os._exit(0)  # nothing is left to be put in order, and that would take a second


def attempt(point: Point) -> dict:
    """{"status": "ok", numbers ...}, or why there are none: {"status": oom | wrong | not here | failed, "error": one line}."""
    try:
        return {"status": "ok", **numbers(point), "environment": measure.environment(torch.device(point.config["device"]))}
    except costs.WrongError as error:
        return {"status": "wrong", "error": _one_line(error)}
    except CannotRun as error:
        return {"status": "not here", "error": " ".join(str(error).split())[:300]}
    except Exception as error:
        if out_of_memory(error):
            return {"status": "oom", "error": _one_line(error)}
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{_one_line(error)} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return {"status": "failed", "error": said}


def numbers(point: Point) -> dict:
    """What the point measures. Raises what measuring it raises."""
    config = point.config
    device = torch.device(config["device"])
    torch.set_num_threads(config["threads"])
    torch.set_float32_matmul_precision(config["matmul_precision"])
    torch.manual_seed(config["seed"])
    if point.part == "kernels":
        from seqmix.bench.kernels import kernel_cost

        return kernel_cost(tuple(config["case"]), device, config["seconds"])
    autocast = config["autocast"] and getattr(torch, config["autocast"])
    started = time.perf_counter()
    with device:  # weights are drawn where they are used
        model = build_model(OmegaConf.create(config["model"]), config["vocab_size"])
    training = point.part == "training"
    batch, length = (point.batch, point.length + 1) if training else (max(1, min(point.batch, 8)), point.length)
    tokens = costs.random_tokens(config["vocab_size"], batch, length, device, config["seed"])
    if training:
        optimizer = make_optimizer(model, build(OmegaConf.create(config["optimizer"])))
    elif autocast is not None:
        in_precision(model, autocast)
    measure.synchronizer(device)()
    facts = _sizes(model) | {"setup_seconds": round(time.perf_counter() - started, 2)}
    settings = {"autocast": autocast, "seconds": config["seconds"]}
    if training:
        facts |= costs.training_cost(model, optimizer, tokens, **settings)
    elif point.part == "context":
        facts |= costs.context_cost(model, tokens, **settings)
    elif point.part == "decode":
        facts |= costs.decoding_cost(model, tokens, point.batch, **settings)
    else:
        facts |= costs.largest_batch(model, tokens, int(config["limit_gib"] * 2**30), autocast=autocast)
    return facts | {"kernels": _kernels_used(model, batch, point.length, autocast, training)}


def _kernels_used(model: nn.Module, batch: int, length: int, autocast: torch.dtype | None, training: bool) -> dict[str, str]:
    """What computed each operator, and why. Whatever goes wrong with that is told, and costs no number."""
    kind, enabled = next(model.parameters()).device.type, autocast is not None
    try:
        with torch.autocast(kind, autocast or torch.bfloat16, enabled), torch.set_grad_enabled(training):
            return model.kernels_used(batch, length)
    except Exception as error:
        return {"unknown": _one_line(error)}


def _sizes(model: nn.Module) -> dict[str, int]:
    return {f"params{'' if i == 0 else '_non_embedding'}": n for i, n in enumerate(measure.parameter_count(model))}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]

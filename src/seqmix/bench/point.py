"""One Point, measured: what runs in the process that is started for it."""

from __future__ import annotations

import gc
import os
import time
import traceback
from multiprocessing.connection import Connection

import torch
from omegaconf import OmegaConf
from torch import nn

from seqmix import costs, measure
from seqmix.bench.grid import Point
from seqmix.config import build, build_model
from seqmix.decode import in_precision
from seqmix.optim import make_optimizer


def serve(point: Point, answer: Connection) -> None:
    """The process: measures, answers with what `attempt` gives, and is gone."""
    gc.freeze()  # what was imported before: no collection looks at it again
    started = time.perf_counter()
    answer.send(attempt(point) | {"seconds": round(time.perf_counter() - started, 2)})
    answer.close()
    os._exit(0)  # nothing is left to be put in order, and that would take a second


def attempt(point: Point) -> dict:
    """{"status": "ok", numbers ...}, or why there are none: {"status": oom | wrong | not here | failed, "error": one line}."""
    try:
        return {"status": "ok", **numbers(point), "environment": measure.environment(torch.device(point.config["device"]))}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"status": "oom", "error": _one_line(error)}
    except costs.WrongError as error:
        return {"status": "wrong", "error": _one_line(error)}
    except Exception as error:
        if "cannot run here" in str(error):  # what an op says of an implementation
            return {"status": "not here", "error": " ".join(str(error).split())[:300]}
        oom = "DefaultCPUAllocator: can't allocate memory" in str(error) or "CUDA out of memory" in str(error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{_one_line(error)} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return {"status": "oom" if oom else "failed", "error": said}


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
    with device:  # weights are drawn where they are used
        model = build_model(OmegaConf.create(config["model"]), config["vocab_size"])
    settings = {"autocast": autocast, "seconds": config["seconds"]}
    tokens = costs.random_tokens(config["vocab_size"], max(1, min(point.batch, 8)), point.length, device, config["seed"])
    if point.part == "training":
        optimizer = make_optimizer(model, build(OmegaConf.create(config["optimizer"])))
        tokens = costs.random_tokens(config["vocab_size"], point.batch, point.length + 1, device, config["seed"])
        return costs.training_cost(model, optimizer, tokens, **settings)
    if autocast is not None:
        in_precision(model, autocast)
    if point.part == "context":
        prompt = costs.prompt_cost(model, tokens, **settings)
        decoding = costs.decoding_cost(model, tokens, 1, **settings)
        error = max(prompt["check_error"], decoding["check_error"])
        return _sizes(model) | prompt | decoding | {"check_error": error}
    if point.part == "decode":
        return _sizes(model) | costs.decoding_cost(model, tokens, point.batch, **settings)
    limit = int(config["limit_gib"] * 2**30)
    return _sizes(model) | costs.largest_batch(model, tokens, limit, autocast=autocast)


def _sizes(model: nn.Module) -> dict[str, int]:
    return {f"params{'' if i == 0 else '_non_embedding'}": n for i, n in enumerate(measure.parameter_count(model))}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]

"""What is to be measured: a list of Points, from the config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from omegaconf import DictConfig, ListConfig, OmegaConf

from seqmix.config import compose_run

# of keys whose default does not say what they take
TYPES = {
    "device": Literal["cpu", "cuda"],
    "autocast": Literal["bfloat16", "float16"] | None,
    "matmul_precision": Literal["highest", "high", "medium"],
    "wandb": Literal["auto", "offline", "online", "disabled"],
    "time_limit": float | None,
    "seconds": float,
    "capacity.limit_gib": float,
    "kernels.ops": list[str] | None,
    "kernels.impls": list[str] | None,
    "kernels.shapes": list[str] | None,
    "out": str | None,
    "redraw": str | None,
}
PARTS = ("training", "context", "decode", "capacity", "kernels")
MODEL_KEYS = ("model", "channel_mixer", "size", "dropout")


class Point(NamedTuple):
    """One cell of the table, and all that its process has to know.

    part: training (a step), context (a prompt of `length` and a token after it), decode (a token after a prompt, for `batch`
    rows), capacity (the largest batch) or kernels. model: for kernels the op. config: plain, for the process.
    """

    part: str
    model: str
    size: str
    length: int
    batch: int
    config: dict

    @property
    def curve(self) -> tuple[str, str, str, int]:
        """What it has in common with the points at other lengths: one slow at a length is slow at longer ones."""
        return self.part, self.model, self.size, 0 if self.part == "training" else self.batch

    def __str__(self) -> str:
        return f"{self.part} {self.model} {self.size} L{self.length} B{self.batch}"


def grid(cfg: DictConfig, conf: Path) -> list[Point]:
    """The points of a config, in the order in which they are measured. ValueError for a setting that cannot be."""
    for part in cfg.parts:
        if part not in PARTS:
            raise ValueError(f"parts must be of {', '.join(PARTS)}, got {part!r}")
    for key in ("threads", "seconds", "patience", "lengths", "decode.batches", "decode.length", "capacity.length"):
        value = OmegaConf.select(cfg, key)
        if min(value if isinstance(value, ListConfig) else [value]) <= 0:
            raise ValueError(f"{key} must be positive, got {value}")
    for size, models in cfg.overrides.items():
        for model in models or ():
            if not ((conf / "size" / f"{size}.yaml").is_file() and (conf / "model" / f"{model}.yaml").is_file()):
                raise ValueError(f"overrides.{size}.{model} is of no size and model of {conf}")
    shared = {
        **{key: cfg[key] for key in ("device", "autocast", "threads", "seed", "seconds", "matmul_precision")},
        "optimizer": OmegaConf.to_container(cfg.optimizer, resolve=True),
    }
    models = {(model, size): _model(cfg, model, size, conf) for size in cfg.sizes for model in cfg.models}
    points = []
    for part in cfg.parts:
        if part == "kernels":
            from seqmix.bench.kernels import cases

            for case in cases(cfg.device, **cfg.kernels):
                length, batch = (case.sizes.get(letter, 1) for letter in "LB")
                points.append(Point(part, case.op, case.impl, length, batch, shared | {"case": list(case)}))
            continue
        for (model, size), built in models.items():
            config = shared | {"model": built} | OmegaConf.to_container(cfg[part])
            points += [Point(part, model, size, length, batch, config) for length, batch in _shapes(cfg, part)]
    return points


def _shapes(cfg: DictConfig, part: str) -> list[tuple[int, int]]:
    """(length, batch) of a part's points."""
    if part == "training":
        return [(length, max(1, cfg.training.tokens // length)) for length in cfg.lengths]
    if part == "context":
        return [(length, 1) for length in cfg.lengths]
    if part == "decode":
        return [(cfg.decode.length, batch) for batch in cfg.decode.batches]
    return [(cfg.capacity.length, 1)]


def _model(cfg: DictConfig, model: str, size: str, conf: Path) -> dict:
    overrides = (cfg.overrides.get(size) or {}).get(model) or []
    run = compose_run([f"model={model}", f"size={size}", *overrides], conf, "(none)")
    return OmegaConf.to_container(OmegaConf.masked_copy(run, list(MODEL_KEYS)))

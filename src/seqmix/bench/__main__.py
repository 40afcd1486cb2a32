"""python -m seqmix.bench: what each model costs in training and inference, and each kernel, on the device at hand.

python -m seqmix.bench                                          the grid of conf/bench/{gpu,cpu}.yaml
python -m seqmix.bench parts=[training] models=[mamba,transformer] lengths=[512,2048]
python -m seqmix.bench --cfg                                    print every key
python -m seqmix.bench redraw=outputs/report/bench_cpu          its report again, from points.jsonl
"""

from __future__ import annotations

import seqmix.quick_lightning  # noqa: F401  before torch and Lightning

# isort: split
import itertools
import json
import re
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seqmix import display, figures
from seqmix.bench import pool, results
from seqmix.bench.grid import TYPES, Point, grid
from seqmix.command_line import check_keys, check_set_once
from seqmix.config import hydra_at, register_resolvers
from seqmix.folders import lock
from seqmix.tracking import WandbLogger, closing, source_facts, source_state

PLACES = (Path("conf"), Path(__file__).parents[3] / "conf")  # of the caller; beside the sources


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 0 if every point has a number or a result that stands for one (out of memory, slow)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*arguments}:
        print(__doc__.strip())
        return 0
    register_resolvers()
    pool.start()
    try:
        conf = next((at.resolve() for at in PLACES if (at / "bench.yaml").is_file()), None)
        if conf is None:
            raise ValueError("there is no conf/bench.yaml here: run it in the root of the repository")
        cfg = compose_bench([a for a in arguments if a != "--cfg"], conf)
        if "--cfg" in arguments:
            print(OmegaConf.to_yaml(cfg), end="")
            return 0
        if cfg.redraw and not (Path(cfg.redraw) / "points.jsonl").is_file():
            raise ValueError(f"redraw={cfg.redraw}: there is no points.jsonl in it")
        rows = results.read(Path(cfg.redraw) / "points.jsonl") if cfg.redraw else []
        points = [] if cfg.redraw else grid(cfg, conf)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if cfg.redraw:
        out = Path(cfg.redraw)
    else:
        out = Path(cfg.out) if cfg.out else _unused(Path(f"outputs/report/bench_{_card(cfg.device)}"))
        typed = [a for a in arguments if not a.startswith("out=")]  # where it is written to is of no number
        rows = measure_all(points, cfg, out, shlex.join(["python", "-m", "seqmix.bench", *typed]))
    paths = write(rows, out)
    print("\n".join(results.crossing_lines(rows)))
    print(*paths, sep="\n")
    if cfg.wandb != "disabled":
        to_wandb(rows, out, cfg)
    return int(any(row["status"] in ("wrong", "failed") for row in rows))


def compose_bench(overrides: list[str], conf: Path) -> DictConfig:
    """conf/bench.yaml with the grid of the device that is there, unless one is named. ValueError for what nothing reads."""
    typed = [o for o in overrides if not o.startswith("bench=")]
    chosen = [o for o in overrides if o.startswith("bench=")] or [f"bench={'gpu' if torch.cuda.is_available() else 'cpu'}"]
    with hydra_at(conf):
        check_set_once(overrides)
        cfg, defaults = compose("bench", overrides=[*chosen, *typed]), compose("bench", overrides=chosen)
    check_keys(cfg, defaults, TYPES, free_form=("overrides.",))
    return cfg


def _unused(folder: Path) -> Path:
    """The folder, or with _2, _3, ... behind it: numbers that are there stay, unless `out` names them."""
    names = (folder if n == 1 else folder.with_name(f"{folder.name}_{n}") for n in itertools.count(1))
    return next(name for name in names if not (name / "points.jsonl").exists())


def measure_all(points: list[Point], cfg: DictConfig, out: Path, command: str) -> list[dict]:
    """The rows, each a line of out/points.jsonl as soon as it is there."""
    lock(out)
    source = source_facts(source_state()) or {"commit": None}
    began, rows = time.perf_counter(), []
    with (out / "points.jsonl").open("w", encoding="utf-8") as file:
        for i, (point, numbers) in enumerate(pool.run(points, cfg.patience, cfg.time_limit), 1):
            row = {
                **{key: getattr(point, key) for key in ("part", "model", "size", "length", "batch")},
                **numbers,
                "autocast": cfg.autocast,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": source["commit"] and source["commit"][:12] + ("+" if source["diff_sha256"] else ""),
                "command": command,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            line = f"{i:3}/{len(points)} {time.perf_counter() - began:6.1f} s  {point}  {told(row)}"
            print(display.visible(line), flush=True)
    return rows


def told(row: dict) -> str:
    """A row in a few words."""
    if row["status"] != "ok":
        return f"{row['status']}: {row.get('error', '')}"
    keys = {
        "training": ("step_ms", "tokens_per_second", "mfu", "peak_allocated_mib"),
        "context": ("prefill_ms", "eager_ms", "graph_ms", "state_bytes"),
        "decode": ("eager_tokens_per_second", "graph_tokens_per_second"),
        "capacity": ("rows_counted", "rows_tried"),
        "kernels": ("forward_ms", "both_ms", "percent_of_floor"),
    }[row["part"]]
    return ", ".join(f"{key} {results.show(row[key])}" for key in keys if row.get(key) is not None)


def write(rows: list[dict], out: Path) -> list[Path]:
    """report.md and the figures that have curves; their paths."""
    drawn = []
    for measure in results.MEASURES:
        curves = results.curves(rows, measure)
        if any(curves.values()):
            axis = {"context": "context, tokens", "training": "length, tokens", "decode": "batch"}[measure.part]
            under = results.caption(rows, measure.part)
            drawing = figures.figure(measure.title, axis, measure.unit, curves, results.missing(rows, measure), under)
            drawn.append(f"{measure.name}.svg")
            (out / drawn[-1]).write_text(drawing, encoding="utf-8")
    (out / "report.md").write_text(results.markdown(rows, drawn), encoding="utf-8")
    return [out / "report.md", out / "points.jsonl", *(out / name for name in drawn)]


def to_wandb(rows: list[dict], out: Path, cfg: DictConfig) -> None:
    """A run with every row in a table, a line chart a measure, the figures, and the crossings."""
    try:
        import wandb
    except ImportError:
        print("wandb is not installed; wandb=disabled says that it need not be", file=sys.stderr)
        return
    logger = WandbLogger(save_dir=Path("outputs").absolute(), project=cfg.project, group="bench", name=out.name, mode=cfg.wandb)
    with closing([logger]):
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True) | {"commands": results.commands(rows)})
        columns = sorted({key for row in rows for key, v in row.items() if not isinstance(v, dict)})
        logger.log_table("points", columns=columns, data=[[row.get(key) for key in columns] for row in rows])
        for measure in results.MEASURES:
            curves = {name: curve for name, curve in results.curves(rows, measure).items() if curve}
            if curves:
                lines = wandb.plot.line_series(
                    xs=[sorted(curve) for curve in curves.values()],
                    ys=[[curve[x] for x in sorted(curve)] for curve in curves.values()],
                    keys=list(curves), title=measure.title, xname=measure.axis,
                )  # fmt: skip
                drawing = wandb.Html((out / f"{measure.name}.svg").read_text(encoding="utf-8"), inject=False)
                logger.experiment.log({measure.name: lines, f"figures/{measure.name}": drawing})
        logger.log_summary({"crossings": "\n".join(results.crossing_lines(rows))})


def _card(device: str) -> str:
    """cpu, or the card's name as a file's: h200."""
    if device != "cuda":
        return device
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name().lower())
    return "_".join(word for word in words if word not in ("nvidia", "geforce")) or device


if __name__ == "__main__":
    display.guard_standard_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the process of the point ends, too
    raise SystemExit(main())

"""Names that follow from the config: the same job gets the same folder, and the same command the same sweep folder.

outputs/sweeps/<swept keys>-<hash>/<model>-<task>-L<length>-s<seed>-<hash>/
outputs/sweeps/model-seed-seq_len-3fa9c1d27b/mamba-selective_copy-L64-s0-8d2f6b01ce/

seqmix.identity defines (question `job`) which settings make two jobs the same.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from seqmix.identity import checkpoint_mark, flat, matters, settings

NOT_THE_SWEEP = ("n_trials", "n_jobs")  # a search with more trials continues in its folder


def resolved(cfg: DictConfig, folder: Path | str) -> DictConfig:
    """A composed config without its `hydra` node, with every interpolation resolved as for a run in `folder`."""
    cfg = copy.deepcopy(cfg)
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(folder)
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(cfg)
    try:
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        OmegaConf.resolve(cfg)
    finally:
        instance.cfg = before
    return cfg


def run_id(cfg: DictConfig) -> str:
    """Ten hex digits that identify a job: a hash of its resolved config, without the paths of its folder, and of the files
    that the config names: its checkpoint (by content) and the files of its task (`Task.file_facts`)."""
    own = resolved(cfg, "")
    job = settings(flat(OmegaConf.to_container(own)), "job")
    if job.get("ckpt") not in (None, "last"):
        job["ckpt"] = checkpoint_mark(Path(str(job["ckpt"])))
    with contextlib.suppress(InstantiationException):  # an invalid task: its job reports why
        if files := instantiate(own.task, _convert_="all").file_facts():
            job["files"] = files
    return _digest(job)


def run_folder(*, _root_: DictConfig) -> str:
    """`${run_folder:}`: the name of a job's folder inside its sweep."""
    choices = _root_.hydra.runtime.choices
    parts = [choices.get("model"), choices.get("task"), f"L{_root_.task.get('seq_len')}", f"s{_root_.seed}"]
    return f"{_tame('-'.join(map(str, parts)), 80)}-{run_id(_root_)}"


def sweep_name(*, _root_: DictConfig) -> str:
    """`${sweep_name:}`: depends on the typed overrides, in any order, and on the composed config that they change."""
    typed = OverridesParser.create().parse_overrides(list(_root_.hydra.overrides.task))
    typed = [o for o in typed if matters(o.key_or_group, "job")]
    sweeper = OmegaConf.to_container(_root_.hydra.sweeper, resolve=False)
    with_params = [*(sweeper.get("params") or {}), *(o.key_or_group for o in typed if o.is_sweep_override())]
    swept = sorted({key.rsplit(".", 1)[-1] for key in with_params})
    preset = [str(o.value()) for o in typed if o.key_or_group == "experiment" and not o.is_sweep_override()]
    base = copy.deepcopy(_root_)
    with read_write(base), open_dict(base):
        del base["hydra"]
    digest = _digest(
        {
            "typed": sorted(o.input_line for o in typed),
            "sweeper": {key: value for key, value in sweeper.items() if key not in NOT_THE_SWEEP},
            "base": settings(flat(OmegaConf.to_container(base, resolve=False)), "job"),
        }
    )
    return f"{_tame('-'.join(preset or swept or ['sweep']), 60)}-{digest}"


def _digest(plain: dict) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _tame(text: str, length: int) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[:length]

"""Names that follow from the config: the same run has the same folder, and the same command the same sweep.

outputs/sweeps/<swept keys>-<hash>/<model>-<task>-L<length>-s<seed>-<hash>/
outputs/sweeps/model-seq_len-seed-3fa9c1d27b/mamba-selective_copy-L64-s0-8d2f6b01ce/
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

NOT_THE_RUN = ("logger", "ckpt", "show")  # where numbers go and where a run goes on from: the run stays the same
NOT_THE_SWEEP = ("n_trials", "n_jobs")  # more trials of the same search go on in its folder


def resolved(cfg: DictConfig, folder: Path | str) -> DictConfig:
    """The job's own part of a composed config, every interpolation resolved as for a run in `folder`."""
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
    """Ten hex digits of the resolved config, without its loggers and the paths of its folder."""
    plain = OmegaConf.to_container(resolved(cfg, ""))
    return _digest({key: value for key, value in plain.items() if key not in NOT_THE_RUN})


def run_folder(*, _root_: DictConfig) -> str:
    """`${run_folder:}`: the folder of a job inside its sweep."""
    choices = _root_.hydra.runtime.choices
    parts = [choices.get("model"), choices.get("task"), f"L{_root_.task.get('seq_len')}", f"s{_root_.seed}"]
    return f"{_tame('-'.join(map(str, parts)), 80)}-{run_id(_root_)}"


def sweep_name(*, _root_: DictConfig) -> str:
    """`${sweep_name:}`: of what was typed and of the defaults it was typed over; the order does not count."""
    typed = OverridesParser.create().parse_overrides(list(_root_.hydra.overrides.task))
    typed = [o for o in typed if o.get_key_element().lstrip("+~").split(".")[0] not in NOT_THE_RUN]
    sweeper = OmegaConf.to_container(_root_.hydra.sweeper, resolve=False)
    with_params = [*(sweeper.get("params") or {}), *(o.get_key_element() for o in typed if o.is_sweep_override())]
    swept = dict.fromkeys(key.rsplit(".", 1)[-1] for key in with_params)  # in order, once
    preset = [str(o.value()) for o in typed if o.get_key_element() == "experiment" and not o.is_sweep_override()]
    base = copy.deepcopy(_root_)
    with read_write(base), open_dict(base):
        for key in ("hydra", *NOT_THE_RUN):
            base.pop(key, None)
    digest = _digest(
        {
            "typed": sorted(o.input_line for o in typed),
            "sweeper": {key: value for key, value in sweeper.items() if key not in NOT_THE_SWEEP},
            "base": OmegaConf.to_container(base, resolve=False),
        }
    )
    return f"{_tame('-'.join(preset or swept or ['sweep']), 60)}-{digest}"


def _digest(plain: dict) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _tame(text: str, length: int) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[:length]

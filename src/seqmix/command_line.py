"""The command line is checked before anything is made: no run folder, no sweep folder, no wandb run, no data.

These are refused in one line: a key that nothing reads, whether typed (also with `+`) or in a file, with the nearest key that
is read; a choice that does not exist; a key that is set twice; a value of a type that the key does not take. A single run is
then built without a device by seqmix.config.check. For a sweep one job per choice of a group is composed, and its keys and
types are checked; each job checks its own values when it starts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seqmix import signatures
from seqmix.build import build_loggers, build_trainer
from seqmix.config import REFUSED, check, check_kernels, check_processes, check_promises, hydra_at
from seqmix.display import refuse
from seqmix.signatures import nearest, show
from seqmix.sweep.names import resolved

OPEN = ("callbacks", "logger", "hydra.callbacks")  # each child is built, whatever its name
FREE_FORM = ("hydra.job.env_set", "hydra.job_logging", "hydra.hydra_logging")
PRINTS = ("help", "hydra_help", "cfg", "info", "shell_completion")  # flags with which Hydra prints and runs nothing


def check_command_line(arguments: list[str], conf: Path) -> DictConfig | None:
    """The resolved config of a single run. Exits with code 2 and a one-line error if the command line is wrong.

    None for a multirun, and for flags with which Hydra runs nothing (--help, --cfg, ...).
    """
    flags = get_args_parser().parse_args(arguments)
    if any(getattr(flags, name) for name in PRINTS):
        return None
    try:
        cfg = _composed(flags, conf)
        if cfg is not None:
            model = check(cfg)
            trainer = build_trainer(cfg)
            check_processes(trainer)
            check_kernels(cfg, model, trainer)
            if cfg.show is None:
                build_loggers(cfg)
        return cfg
    except (ValueError, TypeError, MisconfigurationException, HydraException, OmegaConfBaseException) as error:
        refuse(" ".join(str(error).split()))


def _composed(flags: Namespace, conf: Path) -> DictConfig | None:
    """The config of a single run, its keys and types checked; None for a multirun, whose jobs are checked the same way."""
    if flags.experimental_rerun is not None:
        raise ValueError("--experimental-rerun would run a pickled config unchecked: use the overrides of that run instead")
    beside = None if flags.config_dir is None else Path(flags.config_dir).absolute()
    if beside is not None and not beside.is_dir():
        raise ValueError(f"--config-dir {flags.config_dir}: there is no such folder")
    with hydra_at(conf):
        defaults = compose("train", return_hydra_config=True)
    with hydra_at(conf if flags.config_path is None else conf.parent / flags.config_path, beside):
        line = _Line(flags.config_name or "train", flags.overrides, flags.multirun, defaults)
        if not line.sweeps:
            return line.job(line.typed)[0]
        line.check_sweep()
    return None


def check_keys(cfg: DictConfig, defaults: DictConfig, types: Mapping[str, Any], free_form: tuple[str, ...]) -> None:
    """ValueError for a key of `cfg` that nothing reads, or a value of a type that it does not take.

    The keys of `defaults`, the arguments of targets, and keys that begin with one of `free_form` are read. types: key -> type,
    for keys that take another type than that of their default.
    """
    keys = _Keys(cfg, defaults, types, free_form)
    for key, value in keys.values.items():
        keys.check(key, value)


class _Keys:
    """The keys of a composed config, and which are read: by the program under their name, or by a target as an argument."""

    def __init__(self, cfg: DictConfig, defaults: DictConfig, types: Mapping[str, Any], free_form: tuple[str, ...]):
        own, self.values = dict(_flatten(defaults)), dict(_flatten(cfg))
        self.targets = _targets(self.values)
        inside = tuple(f"{key}." for key in _targets(own))
        self.by_name = {key: value for key, value in own.items() if not key.startswith(inside)}
        self.types, self.free_form = types, free_form

    def are_read(self, key: str) -> bool:
        parent, _, name = key.rpartition(".")
        if key in self.by_name or key.startswith(self.free_form):
            return True
        if parent in OPEN:
            return key in self.targets or (key in self.values and self.values[key] is None)
        if not parent or (parent in self.by_name and parent not in self.targets) or not self.are_read(parent):
            return False
        if parent in self.targets and name not in signatures.SPECIAL:
            return bool({name, signatures.ANY} & signatures.parameters(self.targets[parent]).keys())
        return True  # within an argument that is a mapping

    def check(self, key: str, value: Any) -> None:
        """ValueError if nothing reads the key, or if it does not take such a value."""
        parent, _, name = key.rpartition(".")
        if not self.are_read(key):
            taken = [f"{node}.{name}" for node, target in self.targets.items() for name in signatures.parameters(target)]
            near = nearest(key, [one for one in (*self.by_name, *taken) if one not in REFUSED])
            target = f" ({self.targets[parent]} takes no {name})" if parent in self.targets else ""
            raise ValueError(f"nothing reads the key {key!r}{target}{near}")
        check_promises(key, value)
        if key.startswith("hydra.") or "${" in str(value):
            return  # Hydra checks its own keys; an interpolation is checked when it is resolved
        if parent in self.targets and name not in signatures.SPECIAL:
            signatures.check_argument(self.targets[parent], key, value)
        elif key in self.by_name:
            self._check_type(key, value)

    def _check_type(self, key: str, value: Any) -> None:
        """The default gives the type unless `types` does: a list has elements of the default's type, null allows any type."""
        default = self.by_name[key]
        if key not in self.types and (default is None or isinstance(default, DictConfig)):
            return
        of_default = list[type(default[0])] if isinstance(default, list) and default else type(default)
        hint = self.types.get(key, of_default)
        if not signatures.fits(value, hint):
            whole = isinstance(value, float) and value.is_integer() and signatures.fits(int(value), hint)
            also = f"; write {int(value)}" if whole else ""
            raise ValueError(f"{key} takes {signatures.words(hint)}, got {show(value)}{also}")


def _flatten(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and its value, including mappings; an interpolation is not resolved."""
    for key in node:
        child = node._get_node(key)
        value = None if child._is_missing() else child._value() if child._is_interpolation() else node[key]
        yield f"{prefix}{key}", OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
        if isinstance(value, DictConfig):
            yield from _flatten(value, f"{prefix}{key}.")


def _targets(values: dict[str, Any]) -> dict[str, str]:
    named = ((key, value) for key, value in values.items() if key.endswith("._target_") and isinstance(value, str))
    return {key.removesuffix("._target_"): value for key, value in named if "${" not in value}


def _types() -> dict[str, Any]:
    """The types of the keys that are passed to SequenceModel and SequenceModule, from their signatures."""
    model, module = (signatures.parameters(f"seqmix.{name}") for name in ("model.SequenceModel", "module.SequenceModule"))
    types = {name: module[name].hint for name in ("micro_batch_size", "gradient_clip_val", "cuda_graph")}
    return types | {"dropout": model["dropout"].hint}


class _Line:
    """The overrides of a command line, in a context where Hydra can compose them. ValueError for overrides that are wrong."""

    def __init__(self, name: str, overrides: list[str], multirun: bool, defaults: DictConfig):
        self.name, self.defaults = name, defaults
        self.hydra = GlobalHydra.instance().hydra
        self.typed = self._parsed(overrides)
        self.sweeps = multirun or self._sweeps_by_itself()
        check_set_once(overrides)
        for override in self.typed:
            self._check_words(override)
            self._check_choices(override)

    def _parsed(self, lines: list[str]) -> list[Override]:
        return OverridesParser.create(config_loader=self.hydra.config_loader).parse_overrides(lines)

    def _keys(self, cfg: DictConfig) -> _Keys:
        return _Keys(cfg, self.defaults, _types(), FREE_FORM)

    def _sweeps_by_itself(self) -> bool:
        """Whether hydra.mode, typed or in a file, asks for a multirun without -m. show=batch then shows one run of it."""
        asked = {override.key_or_group for override in self.typed}
        if "show" in asked or not (asked & {"experiment", "hydra.mode"} or self.name != "train"):
            return False
        return self.hydra.get_mode(self.name, [override.input_line for override in self.typed]) == RunMode.MULTIRUN

    def _one_by_one(self, override: Override) -> list[Override]:
        """One override per value of a swept key; for an interval, one with its lower end."""
        key = override.get_key_element()
        if override.is_interval_sweep():
            return self._parsed([f"{key}={override.value().start}"])
        if override.is_sweep_override():
            return self._parsed([f"{key}={value}" for value in override.sweep_string_iterator()])
        return [override]

    def _options(self, override: Override) -> list[str]:
        """The available choices, if the override chooses from a config group; else []. A group in a group is GROUP/CHOICE."""
        key = override.key_or_group
        if not key or "." in key or override.is_delete():
            return []
        of, groups = self.hydra.config_loader.get_group_options, ObjectType.GROUP
        return [*of(key), *(f"{inner}/{choice}" for inner in of(key, groups) for choice in of(f"{key}/{inner}"))]

    def _check_words(self, override: Override) -> None:
        line, key = override.input_line, override.key_or_group
        if override.is_sweep_override() and not self.sweeps:
            raise ValueError(f"{line} names several values: add -m to run one job per value, or write a list as '{key}=[...]'")
        if key == "hydra.job.chdir" and override.value():
            raise ValueError(f"{line}: paths are relative to the caller's folder, so a run must not change its folder")
        if key == "show" and self.sweeps:
            raise ValueError(f"{line} shows the batch of a single run: leave out -m")

    def _check_choices(self, override: Override) -> None:
        key, values = override.key_or_group, [one.value() for one in self._one_by_one(override)]
        if not values:
            raise ValueError(f"{override.input_line} names no value")
        if options := self._options(override):
            for choice in (choice for value in values for choice in (value if isinstance(value, list) else [value])):
                if str(choice) not in options and "${" not in str(choice):
                    near, word = nearest(str(choice), options), "null" if choice is None else choice
                    raise ValueError(f"no {key}={word}{near}; there are {', '.join(options)}")

    def job(self, overrides: list[Override]) -> tuple[DictConfig, _Keys]:
        """One run of these overrides, composed and resolved. Checks every key and type, also those of config files."""
        cfg = self._composed(overrides, RunMode.RUN)
        keys = self._keys(cfg)
        typed = [override.key_or_group for override in overrides]
        for key, value in keys.values.items():
            if not key.startswith("hydra.") or key in typed:
                keys.check(key, value)
        return resolved(cfg, "(made when the run starts)"), keys

    def _composed(self, overrides: list[Override], mode: RunMode) -> DictConfig:
        """The config with the `hydra` node. ValueError if Hydra cannot compose it; if a key is the reason, it names the key."""
        try:
            return self.hydra.compose_config(self.name, [override.input_line for override in overrides], mode)
        except Exception as error:  # errors of Hydra and OmegaConf, and Python's where these two fail to catch one
            chosen = [override for override in overrides if self._brings_keys(override) and not override.is_sweep_override()]
            if len(chosen) < len(overrides):
                keys = self._keys(self._composed(chosen, RunMode.RUN))
                for override in overrides:
                    if override not in chosen and not self._brings_keys(override):
                        keys.check(override.key_or_group, self._one_by_one(override)[0].value())
            raise ValueError(f"Hydra cannot compose this: {error}") from error

    def _brings_keys(self, override: Override) -> bool:
        return not override.is_delete() and ("_target_" in override.input_line or bool(self._options(override)))

    def check_sweep(self) -> None:
        """Check the launcher and the sweeper, the first job, that job with each further choice of a group, and each further
        value."""
        whole = self._composed(self.typed, RunMode.MULTIRUN)
        _check_launcher(whole)
        swept = self._parsed([f"{key}={value}" for key, value in (whole.hydra.sweeper.get("params") or {}).items()])
        for override in swept:
            self._check_choices(override)
        # what is typed overrides a preset
        by_key = {override.get_key_element().lstrip("+"): override for override in [*swept, *self.typed]}
        for override in by_key.values():
            if override.is_interval_sweep() and "BasicSweeper" in str(whole.hydra.sweeper._target_):
                raise ValueError(f"{override.input_line}: only hydra/sweeper=tpe searches an interval; use it, or list values")
        ways = [self._one_by_one(override) for override in by_key.values()]
        first = [way[0] for way in ways]
        cfg, keys = self.job(first)
        build_loggers(cfg)
        for i, way in enumerate(ways):
            for override in way[1:]:
                if self._brings_keys(override):
                    self.job([*first[:i], override, *first[i + 1 :]])
                else:
                    keys.check(override.key_or_group, override.value())


def check_set_once(overrides: list[str]) -> None:
    """ValueError if a key is set twice: Hydra would silently use only the last value, or the last list of values."""
    before: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_delete():  # `~key +key=...` replaces a mapping
            continue
        for key in _keys_set(override.key_or_group, None if override.is_sweep_override() else override.value()):
            if key in before:
                raise ValueError(f"{before[key]} and {override.input_line} both set {key}: leave one of them out")
            before[key] = override.input_line


def _keys_set(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _keys_set(f"{key}.{name}", part)
    else:
        yield key


def _check_launcher(whole: DictConfig) -> None:
    """ValueError for invalid settings of the launcher or the sweeper."""
    for part in ("launcher", "sweeper"):
        node = OmegaConf.to_container(whole.hydra[part], resolve=True)
        signatures.check(node, f"hydra.{part}")
        if part == "launcher":  # its constructor checks the settings; Hydra builds it again
            signatures.locate(node.pop("_target_"))(**node)

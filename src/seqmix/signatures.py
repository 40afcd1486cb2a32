"""The arguments that a `_target_` takes, with their types, read from its signature.

A config is checked against them before anything is built, so that a key that nothing reads and a value of a wrong type are
refused in one line that names the key, instead of by an error of the target.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

SPECIAL = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")  # keys that Hydra's instantiate reads itself
# the extra that installs each of Hydra's optional plugins
EXTRAS = {"hydra_plugins.hydra_optuna_sweeper": "sweep", "hydra_plugins.hydra_submitit_launcher": "cluster"}


ANY = "**"


class Parameter(typing.NamedTuple):
    hint: Any
    default: Any


@functools.cache
def parameters(target: str) -> dict[str, Parameter]:
    """The keyword arguments of the class or function at a dotted path, with ANY among them if it takes any name.

    ValueError if nothing is there.
    """
    thing = locate(target)
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):  # written in C
        return {ANY: Parameter(Any, None)}
    try:
        hints = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    except (NameError, TypeError, AttributeError):  # a name that is only imported for type checkers
        hints = {}
    by_name = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    takes = {p.name: Parameter(hints.get(p.name, Any), p.default) for p in by_name}
    return takes | ({ANY: Parameter(Any, None)} if any(p.kind is p.VAR_KEYWORD for p in found) else {})


def locate(target: str) -> Callable:
    """The class or function at a dotted path. ValueError, with the nearest name or the extra to install, if there is none."""
    parts = target.split(".")
    for n in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:n])
        try:
            thing = import_module(module)
        except ImportError as error:
            if error.name and module.startswith(error.name) and n > 1:  # not a module: look one level up
                continue
            raise ValueError(f"_target_={target}: {error}{_install(target)}") from error
        for i, name in enumerate(parts[n:], n):
            if not hasattr(thing, name):
                near = _install(target) or nearest(name, [at for at in dir(thing) if not at.startswith("_")])
                raise ValueError(f"_target_={target}: {'.'.join(parts[:i])} has no {name}{near}")
            thing = getattr(thing, name)
        if not callable(thing):
            raise ValueError(f"_target_={target} is {thing!r}, which cannot be called")
        return thing
    raise ValueError(f"_target_={target} is not the dotted path of a class or function")


def _install(target: str) -> str:
    return next((f"; pip install -e '.[{extra}]'" for module, extra in EXTRAS.items() if target.startswith(f"{module}.")), "")


def check(config: Mapping, key: str) -> None:
    """ValueError, with the whole key, if a resolved config or a nested one gives its target an argument that it does not take.

    key: the dotted key of this config within the whole.
    """
    target = config.get("_target_")
    if isinstance(target, str):
        parameters(target)  # raises if the target does not exist
    for name, value in config.items():
        if isinstance(target, str) and not config.get("_args_") and name not in SPECIAL:
            check_argument(target, f"{key}.{name}", value)
        for place, child in _children(value, f"{key}.{name}"):
            check(child, place)


def check_argument(target: str, key: str, value: Any) -> None:
    """ValueError if a target does not take the last part of `key` as an argument, or does not take this value for it."""
    name, takes = key.rpartition(".")[2], parameters(target)
    if not {name, ANY} & takes.keys():
        raise ValueError(f"{key}: {target} takes no {name}{nearest(name, takes) or '; it takes ' + ', '.join(takes)}")
    hint, default = takes[name if name in takes else ANY]
    if not fits(value, hint) and not (value is None and default is None):
        whole = isinstance(value, float) and value.is_integer() and fits(int(value), hint)
        raise ValueError(f"{key}={show(value)}: {target} takes {words(hint)}" + (f"; write {int(value)}" if whole else ""))


def _children(value: Any, key: str) -> Iterable[tuple[str, Mapping]]:
    if isinstance(value, Mapping):
        yield key, value
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _children(part, f"{key}.{i}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML is of type `hint`. A nested target fits every type, and every value fits an unknown type."""
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    kind, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in of)
    if kind is typing.Literal:
        return any(value == part and type(value) is type(part) for part in of)
    if value is None or kind in (None, types.NoneType):
        return value is None and (kind in (None, types.NoneType, Any) or not isinstance(kind, type))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (bool, int, str):
        return type(value) is kind
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, str):  # a path or the name of a device, for example; but not a sequence of its characters
        return kind is not Callable and not issubclass(kind, Iterable)
    if isinstance(value, list):
        if kind is tuple and of and of[-1] is not Ellipsis:
            return len(value) == len(of) and all(map(fits, value, of))
        inner = of[0] if of else Any
        return issubclass(kind, Iterable) and not issubclass(kind, Mapping) and all(fits(part, inner) for part in value)
    return isinstance(value, kind) or (isinstance(value, Mapping) and issubclass(kind, Mapping))


def words(hint: Any) -> str:
    """A type as it is written in code, without module names."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(words(part) for part in typing.get_args(hint)))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(hint)))
    if hint in (None, types.NoneType):
        return "null"
    plain = isinstance(hint, type) and not typing.get_args(hint)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", hint.__name__ if plain else str(hint))


def show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def nearest(name: str, names: Iterable[str]) -> str:
    """`; the nearest is 'x'`, where x is the most similar name or has the most similar last part; "" if none is similar."""
    whole = {n: n for n in names}
    last = {n.rsplit(".", 1)[-1]: n for n in reversed(whole)}
    for candidates, word, cutoff in ((whole, name, 0.75), (last, name.rsplit(".", 1)[-1], 0.7), (whole, name, 0.5)):
        if close := difflib.get_close_matches(word, candidates, n=1, cutoff=cutoff):
            return f"; the nearest is {candidates[close[0]]!r}"
    return ""

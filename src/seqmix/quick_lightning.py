"""Imports Lightning without the modules that a run does not use. train.py, the benchmark and the tests import this first.

Lightning needs two classes of torchmetrics, whose __init__ imports all of its metrics, and with them scipy, torchvision and
transformers if these are installed. This takes seconds, so that __init__ is postponed until another name than these two is
used. Lightning also imports torch._dynamo (which takes a second), Triton and matplotlib for names that few runs use; such a
module is imported when one of its names is used.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType

import seqmix.startup  # noqa: F401  before torch

LIGHTNING_NEEDS = {"Metric": "torchmetrics.metric", "MetricCollection": "torchmetrics.collections"}
POSTPONED = ("torch._dynamo", "torch.utils.flop_counter", "torchmetrics.utilities.plot")  # the last imports matplotlib


class _Torchmetrics(ModuleType):
    """The package torchmetrics before its __init__ has run."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in LIGHTNING_NEEDS:
            importlib.import_module("torchmetrics.utilities")  # first: it and torchmetrics.metric import each other
            return getattr(importlib.import_module(LIGHTNING_NEEDS[name]), name)
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class _Postponed(ModuleType):
    """Replaces a module while Lightning is imported."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _PostponedName(name, (), {"__module__": self.__name__})


class _PostponedName(type):
    """A function or class of a postponed module. A call imports the module; until then nothing is an instance of it."""

    def __call__(cls, *args, **kwargs):
        return cls._real()(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__module__ in sys.modules and isinstance(instance, cls._real())

    def _real(cls) -> object:
        if isinstance(sys.modules.get(cls.__module__), _Postponed):
            del sys.modules[cls.__module__]
        return getattr(importlib.import_module(cls.__module__), cls.__name__)


def _as_it_is(function: Callable | None = None, **_: object) -> Callable:
    """Replaces torch.compiler.disable, which imports torch._dynamo. Lightning decorates one method with it, which no model
    here calls."""
    return _as_it_is if function is None else function


def _import_lightning() -> None:
    spec = importlib.util.find_spec("torchmetrics")
    torchmetrics = sys.modules["torchmetrics"] = importlib.util.module_from_spec(spec)
    torchmetrics.__class__ = _Torchmetrics
    torchmetrics.__version__ = version("torchmetrics")
    torchmetrics._logger = logging.getLogger("torchmetrics")
    import torch

    sys.modules |= {name: _Postponed(name) for name in POSTPONED if name not in sys.modules}
    disable, torch.compiler.disable = torch.compiler.disable, _as_it_is
    try:
        importlib.import_module("lightning.pytorch")
    finally:
        torch.compiler.disable = disable
        for name in POSTPONED:
            if isinstance(sys.modules.get(name), _Postponed):
                del sys.modules[name]


if "torchmetrics" not in sys.modules and "lightning" not in sys.modules:
    _import_lightning()

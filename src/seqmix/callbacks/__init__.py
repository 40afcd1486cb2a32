"""Thin Lightning hooks over measure.py, memory.py and costs.py. Those that measure have `summary()`, which returns values for
summary.json."""

from seqmix.callbacks.checkpoint import BestCheckpoint, LastCheckpoint, best_checkpoint
from seqmix.callbacks.costs import Costs
from seqmix.callbacks.kernels import Kernels
from seqmix.callbacks.memory import Memory
from seqmix.callbacks.nonfinite import NonFiniteGuard
from seqmix.callbacks.predictions import Predictions
from seqmix.callbacks.progress import Progress
from seqmix.callbacks.solved import Solved
from seqmix.callbacks.throughput import Throughput

__all__ = [
    "BestCheckpoint",
    "Costs",
    "Kernels",
    "LastCheckpoint",
    "Memory",
    "NonFiniteGuard",
    "Predictions",
    "Progress",
    "Solved",
    "Throughput",
    "best_checkpoint",
]

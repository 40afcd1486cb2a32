"""How an operator tells `python -m seqmix.bench` what to measure: OPS in the bench.py of its folder, by name.

A declaration imports torch and its operator, but neither Triton nor seqmix.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Work(NamedTuple):
    """What any implementation must do: move bytes, execute FLOPs (two per multiply-add), take exponentials."""

    bytes: float
    flops: float = 0.0
    specials: float = 0.0


class Peer(NamedTuple):
    """An implementation from elsewhere, or a plain one, to compare with.

    run: takes what `arrange` returns, and gives what the operator's run gives
    arrange: tensors -> the same in the peer's own layout and dtypes; called once, outside the measured time
    package: measured wherever this package is installed; None: measured where kernels.impls names it
    """

    run: Callable
    arrange: Callable = lambda *tensors: tensors
    package: str | None = None


class Op(NamedTuple):
    """One operator. A shape is written "B8 L2048 D3072 N16 bfloat16"; its letters are keyword arguments of inputs and work.

    impls: names of the operator's implementations; "auto" is measured where kernels.impls names it
    inputs: (normal, dtype, **sizes) -> the arguments of a call; normal(*shape) gives float32 numbers on the device
    run: (impl, *arguments) -> the output, one tensor
    check: (arguments, output) -> a piece of the output, and the same piece by the equation in float64
    work: (bytes per element, **sizes) -> Work of the forward, Work of forward and backward; None: it has no gradient
    shapes: per device ("cuda", "cpu") those that are measured by default; without any, the operator is measured where
        kernels.ops and kernels.shapes name it
    """

    impls: tuple[str, ...]
    inputs: Callable
    run: Callable
    check: Callable
    work: Callable
    shapes: Mapping[str, tuple[str, ...]] = {}
    peers: Mapping[str, Peer] = {}


# Steps, channels or rows of an output that are compared: by causality the first steps do not depend on later ones, and no
# channel, head or row depends on another.
PIECE = 64


def operators() -> dict[str, Op]:
    """The OPS of every operator that has a bench.py."""
    found = {}
    for folder in sorted((Path(__file__).parent / "ops").glob("*/bench.py")):
        found |= importlib.import_module(f".ops.{folder.parent.name}.bench", __package__).OPS
    return found

"""The state of a model as a tree of tensors: what it weighs, and copies of it with other rows or with more room.

A state is nested tuples of tensors with the batch in their first axis (mixers/base.py). A part of it that is a GrowingState has
its own ways to take rows and to make room; the other parts are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from seqmix.mixers.base import GrowingState


def tensors(tree: object) -> Iterable[Tensor]:
    """Every tensor in nested tuples, NamedTuples, lists and dicts, in order; other leaves are passed over."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)


def state_bytes(state: object) -> int:
    """Bytes of the elements of every tensor in `state`, whatever the nesting; a storage shared by two counts twice.

    A view counts its own elements, not what it was cut from: what a state is, not how the allocator holds it.
    """
    return sum(t.numel() * t.element_size() for t in tensors(state))


def held_bytes(state: object) -> int:
    """Bytes of the distinct storages behind the tensors in `state`: more than `state_bytes` where one is a view of a larger
    tensor, which it keeps alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(state)}
    return sum(storages.values())


def repeated(state: object, batch: int) -> object:
    """A state of `batch` rows in storage of its own: row i is row i mod b of `state`, which has b rows."""

    def repeat(part: Tensor | GrowingState) -> Tensor | GrowingState:
        first = next(iter(tensors(part)))
        index = torch.arange(batch, device=first.device) % len(first)
        return part[index] if isinstance(part, Tensor) else part.rows(index)

    return _mapped(state, repeat)


def reserved(state: object, tokens: int) -> object:
    """`state` with room for `tokens` more in those of its parts that grow; the other parts are handed back as they are."""
    return _mapped(state, lambda part: part if isinstance(part, Tensor) else part.reserve(tokens))


def owned(state: object, tokens: int) -> object:
    """`state` with room for `tokens` more, and dense storage of its own for each of its tensors."""

    def own(part: Tensor | GrowingState) -> Tensor | GrowingState:
        if isinstance(part, Tensor):
            return part.clone(memory_format=torch.contiguous_format)
        larger = part.reserve(tokens)
        return repeated(part, len(next(iter(tensors(part))))) if larger is part else larger

    return _mapped(state, own)


def _mapped(state: object, change: Callable[[Tensor | GrowingState], object]) -> object:
    """`state` with `change` applied to each tensor and to each part that grows."""
    if isinstance(state, Tensor | GrowingState):
        return change(state)
    parts = [_mapped(part, change) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)

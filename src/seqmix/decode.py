"""Decoding under a CUDA graph: one replay computes one token of every row through the whole model.

At batch 1 a step of a small model is some hundred kernels of a few microseconds each, and the host needs longer to launch
them than the GPU to run them. A CUDA graph launches all of them at once, at fixed addresses. So here, and only here, a state
is not handed back but advanced in place: what `model.step` returns is written over what it was given.

    state, tokens ──► model.step ──► logits ──► draw ──► tokens        one replay
      ▲                    │                               │
      └──── written over ──┘            written over ◄─────┘
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from seqmix.mixers.base import PRODUCTS
from seqmix.state import owned, tensors

WARMUP = 3  # eager steps before a capture: what is compiled, tuned or loaded must not be captured


def greedy(logits: Tensor) -> Tensor:
    """logits (B, V) -> the likeliest token of each row (B,)."""
    return logits.argmax(-1)


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model`, in place, with the weights of its products in `dtype` and all else (norms, spectra, step sizes) as it was:
    what autocast casts at every call, cast once. For inference alone."""
    for module in model.modules():
        if isinstance(module, PRODUCTS):
            module.to(dtype)
    return model


class Decoder:
    """Decodes from `state` on.

        decoder = Decoder(model, state, tokens)     state after the prompt; tokens (B,) int64, the first to take in
        decoder.capture(room=256)                   from here on a step is one replay; without it, the same eagerly
        decoder.advance()                           decoder.logits (B, V) of the tokens taken in, decoder.tokens (B,) drawn

    draw: logits (B, V) -> tokens (B,); under a graph without a wait for the device (torch.multinomial has none).
    autocast: dtype of the products, None for that of the weights. The model is put into eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        state: object,
        tokens: Tensor,
        *,
        draw: Callable[[Tensor], Tensor] = greedy,
        autocast: torch.dtype | None = None,
    ):
        self.model, self.draw, self.autocast = model.eval(), draw, autocast
        self.state, self.tokens = state, tokens.clone()
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def advance(self) -> None:
        """Take in `tokens`, draw the next ones."""
        if self.graph is not None:
            self.graph.replay()
            return
        with self._precision():
            self.logits, self.state = self.model.step(self.tokens, self.state)
            self.tokens.copy_(self.draw(self.logits))

    def generate(self, length: int) -> Tensor:
        """The next tokens (B, length), int64."""
        out = torch.empty(len(self.tokens), length, dtype=torch.long, device=self.tokens.device)
        for i in range(length):
            self.advance()
            out[:, i] = self.tokens
        return out

    @torch.no_grad()
    def capture(self, room: int) -> None:
        """Make a graph of one step, over a copy of the state with room for `room` more tokens: no more may be drawn from it.

        ValueError where there can be none: no CUDA device; a state whose size changes with the step and that reserves no
        room."""
        if self.tokens.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, the tokens are on {self.tokens.device}")
        self._own_state(room)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self._precision():
            self._warm_up()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self._precision():
            self._advance_in_place()
        self.graph = graph

    def _own_state(self, room: int) -> None:
        """Storage of its own for each tensor: two that share one, or a view of more, could not be written over apart."""
        self.state = owned(self.state, room + WARMUP)

    def _warm_up(self) -> None:
        """Steps whose results are dropped. Each goes on from the one before: a cache is then written behind its end, where it
        is spare, and copied nowhere."""
        after = self.state
        for _ in range(WARMUP):
            _, after = self.model.step(self.tokens, after)
            self._check_fits(after)

    def _advance_in_place(self) -> None:
        self.logits, after = self.model.step(self.tokens, self.state)
        self._check_fits(after)
        pairs = zip(tensors(self.state), tensors(after), strict=True)
        moved = [(old, new) for old, new in pairs if new.data_ptr() != old.data_ptr()]  # else written there already
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))  # a few launches for all of them
        self.tokens.copy_(self.draw(self.logits))

    def _check_fits(self, after: object) -> None:
        for old, new in zip(tensors(self.state), tensors(after), strict=True):
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"a step made {tuple(new.shape)} {new.dtype} of a state of {tuple(old.shape)} {old.dtype}: "
                    "it cannot be advanced in place"
                )

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        # without autocast's cache: a graph would keep reading the weights that were cast before it
        kind = self.tokens.device.type
        enabled = self.autocast is not None
        with torch.autocast(kind, dtype=self.autocast or torch.bfloat16, enabled=enabled, cache_enabled=False):
            yield

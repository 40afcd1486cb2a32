"""What a mixer is.

A mixer moves information along time: (B, L, D) in, (B, L, D) out, causal. It has two views of one function: `forward`
sees a whole sequence and is what training runs; `step` sees one token and a state and is what decoding runs.
`prefill` goes between them: a piece of a sequence, of any length, and a state. A state whose size depends on the length of the
sequence is a GrowingState.

The laws, each a test over every model in conf/model (tests/test_mixers.py):

1. causal              changing a token changes nothing before it
2. one function        stepping through a sequence equals forward (in float64, to rounding)
3. any pieces          prefill in any pieces equals one piece, also pieces shorter than a convolution
4. functional state    a state is handed in and handed back; the one handed in holds what it held; the module keeps none
5. counted bytes       the bytes of a state are summed over its tensors
6. padding             what follows a sequence, or sits beside it in the batch, changes nothing in it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = NamedTuple  # of tensors (or further such tuples), the batch in their first axis
# modules whose weights are multiplied as matrices: what counts FLOPs, and what casts a model for inference, looks for these
PRODUCTS = (nn.Linear, nn.Embedding, nn.RNNBase)
PIECE = 32_768  # steps of one call of a recurrent layer: cuDNN refused 131,072
EVERY_MODULE = (  # hooks of all modules at once: what counts FLOPs by module sets them
    nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks,
)  # fmt: skip


@runtime_checkable
class GrowingState(Protocol):
    """A state that grows with the sequence, as a cache does: a NamedTuple of tensors that has these two methods as well."""

    def reserve(self, tokens: int) -> Self:
        """The same state with room for `tokens` more in every row: that many steps change the shape of none of its tensors, as
        a CUDA graph needs. It is the state itself where the room is there already, else one with storage of its own."""

    def rows(self, index: Tensor) -> Self:
        """The rows of `index` (B',) int64, in this order and with storage of their own."""


class Mixer(nn.Module):
    """Base class of all mixers; a constructor names every parameter, `d_model` first, and takes no `**kwargs`.

    Beside the methods below, the backbone reads `out_proj` and the configuration reads `kernel_arguments`.
    """

    d_model: int
    out_proj: nn.Linear  # the last product, into the residual stream: the backbone scales its initial weight
    # arguments of the constructor that name an implementation; "auto" is the default of each, and takes one that can run
    kernel_arguments: tuple[str, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> y (B, L, D), from the empty state."""
        y, _ = self.prefill(x, self.init_state(len(x)))
        return y

    def init_state(self, batch: int) -> State:
        """The empty state, before any token: on the device of the parameters, the batch in the first axis."""
        raise NotImplementedError

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """x_t (B, D), state -> y_t (B, D), the state after it."""
        y, state = self.prefill(x_t.unsqueeze(1), state)
        return y.squeeze(1), state

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x (B, L, D) with L >= 0, the state before it -> y (B, L, D), the state after it."""
        raise NotImplementedError

    def kernels_used(self, x: Tensor) -> dict[str, str]:
        """What computes each operator over a sequence like x (B, L, D), and why; {} where torch's own modules do it all.

        Of x the shape, dtype, device and whether a gradient is wanted are read; the parameters may be on another device.
        Nothing is run. ValueError where what was asked for by name cannot run.
        """
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()`, `.half()` and their kin call. The parameters a mixer holds itself (spectra, step sizes, skips;
        not the weights of its Linears) stay in float32 where the rest goes to 16 bits, in which exp(-0.001) is 1."""
        if recurse:
            for child in self.children():
                child._apply(fn)

        def stop_at_float32(t: Tensor) -> Tensor:
            new = fn(t)
            return t.to(new.device) if new.dtype in (torch.bfloat16, torch.float16) else new

        return super()._apply(stop_at_float32, recurse=False)

    # A copied or pickled parameter loses its attributes, and with them the marks of `no_weight_decay`

    def __getstate__(self) -> dict:
        marks = {name: p._optim for name, p in self._parameters.items() if hasattr(p, "_optim")}
        return self.__dict__ | {"_marks": marks}

    def __setstate__(self, state: dict) -> None:
        marks = state.pop("_marks")
        super().__setstate__(state)
        for name, mark in marks.items():
            self._parameters[name]._optim = mark


def in_pieces(layer: nn.RNNBase, x: Tensor, state: Tensor | tuple) -> tuple[Tensor, Tensor | tuple]:
    """y, state = layer(x, state) of a recurrent layer of torch, for x (B, L, D) of any length."""
    if x.shape[1] == 0:  # torch refuses it; of one step none is used, so that every weight has a gradient, of zeros
        return layer(F.pad(x, (0, 0, 0, 1)), state)[0][:, :0], state
    if x.shape[1] <= PIECE:
        return layer(x, state)
    outputs = []
    for piece in x.split(PIECE, dim=1):
        y, state = layer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def is_plain(module: nn.Module) -> bool:
    """Whether reading its weight is all there is to calling it: an nn.Linear, not a subclass, that nothing watches."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and not any(own) and not any(EVERY_MODULE)


def no_weight_decay(parameter: nn.Parameter, lr_scale: float = 1.0, max_lr: float | None = None) -> nn.Parameter:
    """Declare, where a parameter is made, that it is not decayed and how its learning rate differs.

    The mark is the one attribute `optim.py` reads; names are not looked at anywhere.
    """
    parameter._optim = {"lr_scale": lr_scale, "max_lr": max_lr}
    return parameter

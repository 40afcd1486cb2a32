"""The C kernel (cpu.c) as `forward` and `backward` over torch tensors.

It computes in float32; 16-bit tensors are converted before and after. It saves only the inputs.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ...c_library import load

_SOURCE = Path(__file__).with_name("cpu.c")
_BLOCK = 8  # most vectors of channels per task
_TASKS = 16  # a block shrinks until there are this many tasks
_SMALL = 1 << 14  # up to this many elements one thread is faster than waking others


def why_not() -> str | None:
    """Why the C kernel cannot run on this machine; None if it can. It compiles the kernel if necessary."""
    found = load(_SOURCE)
    return found if isinstance(found, str) else None


def forward(x, weight, bias, initial_state, seq_idx, silu: bool) -> tuple[Tensor, Tensor]:
    """y (B, L, D) and the final state (B, W-1, D), both in x's dtype."""
    batch, length, width = x.shape
    back = weight.shape[1] - 1
    y, final = _new(batch, length, width), _new(batch, back, width)
    if x.numel():
        _call("seqmix_conv_forward", x, None, weight, bias, initial_state, None, seq_idx, silu, (y, final), (None,) * 6)
    elif initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    return y.to(x.dtype), final.to(x.dtype)


def backward(dy, dfinal, x, weight, bias, initial_state, seq_idx, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias, dinitial in the dtypes of their inputs; of shape (0,) where the input is absent."""
    batch, length, width = x.shape
    taps = weight.shape[1]
    dx, dw = _new(batch, length, width), _new(taps, width)
    dbias = _new(width if bias is not None else 0)
    dstate = _new(*initial_state.shape) if initial_state is not None else _new(0)
    if x.numel():
        made = (dx, dw, dbias, dstate, _new(batch, taps, width), _new(batch, width))
        _call("seqmix_conv_backward", x, dy, weight, bias, initial_state, dfinal, seq_idx, silu, (None, None), made)
    else:
        for grad in (dx, dw, dbias):
            grad.zero_()
        if initial_state is not None:
            dstate.zero_() if dfinal is None else dstate.copy_(dfinal)
    dbias = dbias if bias is None else dbias.to(bias.dtype)
    dstate = dstate if initial_state is None else dstate.to(initial_state.dtype)
    return dx.to(x.dtype), dw.t().contiguous().to(weight.dtype), dbias, dstate


def _new(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _call(function, x, dy, weight, bias, initial_state, dfinal, seq_idx, silu, forward, backward) -> None:
    """Fills `struct args` of cpu.c, whose fields all have eight bytes, and calls the function."""
    library = load(_SOURCE)
    if isinstance(library, str):
        raise RuntimeError(f"the CPU convolution cannot run here: {library}")
    batch, length, width = x.shape
    vectors = -(-width // library.seqmix_lanes())
    block = min(vectors, _BLOCK)
    while block > 1 and batch * -(-vectors // block) < _TASKS:
        block //= 2
    threads = torch.get_num_threads() if x.numel() > _SMALL else 1
    x, dy, weight = x.float(), None if dy is None else dy.float(), weight.float()
    plain = [None if t is None else t.float().contiguous() for t in (bias, initial_state, dfinal)]
    seq = None if seq_idx is None else seq_idx.long().contiguous()
    pointers = (x, dy, weight, *plain, seq)
    strides = (*x.stride(), *((0, 0, 0) if dy is None else dy.stride()), *weight.stride())
    sizes = (batch, length, width, weight.shape[1], silu, threads, block)
    address = [t.data_ptr() if t is not None and t.numel() else 0 for t in (*pointers, *forward, *backward)]
    fields = (*sizes, *address[: len(pointers)], *strides, *address[len(pointers) :])
    if getattr(library, function)((ctypes.c_int64 * len(fields))(*fields)):
        raise MemoryError("the CPU convolution could not allocate memory for its windows")

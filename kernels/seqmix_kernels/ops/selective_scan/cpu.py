"""The C kernel (cpu.c) as `forward` and `backward` over torch tensors, with the signature that op.py expects of a backend.

Depth L, work O(B L D N) spread over batch rows and channel blocks. It computes in float32; 16-bit tensors are converted
before and after. Besides the inputs it saves a state every CHUNK steps for the backward, 4 N / CHUNK bytes per (b, t, d).
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ...c_library import load

_SOURCE = Path(__file__).with_name("cpu.c")
CHUNK = 32  # steps between saved states: the backward's data of a chunk nearly fits into the L1 cache
_BLOCK = 8  # most vectors of channels per task: their dB and dC are summed within the task
_SMALL = 1 << 17  # up to this many states times steps one thread is faster than waking others
_TASKS = 16  # a block shrinks until there are this many tasks; only the shape decides, so the order of sums is fixed


def why_not() -> str | None:
    """Why the C kernel cannot run on this machine; None if it can. It compiles the kernel if necessary."""
    found = load(_SOURCE)
    return found if isinstance(found, str) else None


def _library():
    library = load(_SOURCE)
    if isinstance(library, str):
        raise RuntimeError(f"the CPU selective scan cannot run here: {library}")
    return library


def saved_specs(x: Tensor, A: Tensor, B: Tensor, z: Tensor | None, discretization: str, chunk: int | None, save: bool):
    """Shapes and dtypes of what the forward saves: only the states before each chunk, (B, chunks, N, D)."""
    batch, length, width = x.shape
    chunk = chunk or CHUNK
    states = (batch, (length + chunk - 1) // chunk, A.shape[1], width) if save else (0,)
    return (states, torch.float32), ((0,), x.dtype)


def forward(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, discretization, chunk, save=True):
    """y, the final state, the boundary states (`saved_specs`), and an empty tensor, because the backward recomputes y before
    the gate."""
    batch, length, width = x.shape
    n = A.shape[1]
    chunk = chunk or CHUNK
    final = _new(batch, width, n)
    bound = _new(*saved_specs(x, A, B, z, discretization, chunk, save)[0][0])
    y = _new(batch, length, width)
    if x.numel():
        call = _Call(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, discretization, chunk)
        call("seqmix_scan_forward", None, None, (y, final, bound), (None,) * 14)
    elif initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    return y.to(x.dtype), final, bound, x.new_empty(0)


def backward(
    dy, dfinal, x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, y, bound, gate, dt_softplus, discretization,
    chunk,
):  # fmt: skip
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial); of shape (0,) where the input is absent."""
    batch, length, width = x.shape
    n, groups = A.shape[1], B.shape[2]
    chunk = chunk or CHUNK
    dx, ddt = _new(batch, length, width), _new(batch, length, width)
    dz = _new(batch, length, width) if z is not None else _new(0)
    dB, dC = _new(batch, length, groups, n), _new(batch, length, groups, n)
    dA = _new(width, n)
    dD, dbias = (_new(width if given is not None else 0) for given in (D, dt_bias))
    dh0 = _new(batch, width, n) if initial_state is not None else _new(0)
    if x.numel():
        call = _Call(x, dt, A, B, C, D, z, dt_bias, initial_state, seq_idx, dt_softplus, discretization, chunk)
        partial = _new(2, batch, groups, call.blocks, length, n)
        rows = _new(batch, width, n), _new(batch, width), _new(batch, width)
        made = (dx, ddt, dz, dB, dC, dA, dD, dbias, dh0, partial[0], partial[1], *rows)
        call("seqmix_scan_backward", dy, dfinal, (None, None, bound), made)
    else:
        for grad in (dx, ddt, dz, dB, dC, dA, dD, dbias):
            grad.zero_()
        if initial_state is not None:
            dh0.zero_() if dfinal is None else dh0.copy_(dfinal)
    return (*(t.to(x.dtype) for t in (dx, ddt)), dA, dB.to(x.dtype), dC.to(x.dtype), dD, dz.to(x.dtype), dbias, dh0)


def _new(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class _Call:
    """The fields of `struct args` in cpu.c, all of eight bytes, for one shape; it holds references to the tensors behind the
    pointers."""

    def __init__(self, x, dt, A, B, C, D, z, dt_bias, h0, seq_idx, softplus, discretization, chunk):
        self.library = _library()
        batch, length, width = x.shape
        groups, n = B.shape[2:]
        lanes = self.library.seqmix_lanes()
        vectors = -(-(width // groups) // lanes)
        block = min(vectors, _BLOCK)
        while block > 1 and batch * groups * -(-vectors // block) < _TASKS:
            block //= 2
        self.blocks = -(-vectors // block)
        zoh = discretization == "zoh"
        threads = torch.get_num_threads() if x.numel() * n > _SMALL else 1
        self.sizes = (batch, length, width, groups, n, chunk, softplus, zoh, threads, block)
        self.strided = [t if t is None else t.float() for t in (x, dt, z)]
        self.states = [B.float(), C.float()]
        self.plain = [t if t is None else t.contiguous() for t in (A, D, dt_bias, h0)]
        self.seq = None if seq_idx is None else seq_idx.long().contiguous()

    def __call__(self, function: str, dy: Tensor | None, dfinal: Tensor | None, forward: tuple, backward: tuple):
        dy = None if dy is None else dy.float()
        dfinal = None if dfinal is None else dfinal.contiguous()
        strided = [*self.strided, dy]
        strides = [s for t in strided for s in ((0, 0, 0) if t is None else t.stride())]
        pointers = [0 if t is None or not t.numel() else t.data_ptr()
                    for t in (*strided, *self.states, *self.plain, dfinal, self.seq)]  # fmt: skip
        results = [0 if t is None or not t.numel() else t.data_ptr() for t in (*forward, *backward)]
        state_strides = [s for t in self.states for s in t.stride()]
        fields = (*self.sizes, *pointers, *strides, *state_strides, *results)
        if getattr(self.library, function)((ctypes.c_int64 * len(fields))(*fields)):
            raise MemoryError("the CPU selective scan could not allocate memory for its tiles")

"""flash-attn-4 (FlashAttention in CuTe's Python, compiled at its first call) as a registered operator.

Its own autograd.Function breaks the graph of torch.compile; the forward and backward functions that it calls do not,
once each is registered as an operator. Both take (B, L, H, P) with any outer strides: nothing is transposed or copied.
"""

import functools
import importlib
import warnings

import torch
from torch import Tensor

from ... import frame

# Its backward (4.0.0b36, Hopper) stores dq in widths of 16 and reads it back in widths of 32: for heads of 8, 48 or 72 dq is
# wrong, while the forward and the other gradients are correct
WIDTH = 32
NAME = "flash-attn-4 (the extra `gpu`: pip install -e '.[gpu]')"


def why_not(case) -> str | None:
    if case.device.type != "cuda":
        return f"{NAME} needs an NVIDIA GPU, q is on the {case.device.type.upper()}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"{NAME} computes in bfloat16 and float16, q is {str(case.dtype)[6:]}"
    major, minor = torch.cuda.get_device_capability(case.device)
    if (major, minor) < ((9, 0) if case.train else (8, 0)):
        needs = "9.0 for gradients" if case.train else "8.0"
        return f"{NAME} needs compute capability {needs}, this GPU has {major}.{minor}"
    most = 256 if major == 9 else 128
    if case.head_dim > most:
        return f"{NAME} takes heads of at most {most} on this GPU, these are {case.head_dim} wide with padding and positions"
    if case.dropout:
        return f"{NAME} has no dropout"
    if case.cached and case.train:
        return f"{NAME} has no gradients through lengths here"
    return missing()


@frame.constant
def missing() -> str | None:
    """Why the package cannot be used; None if it can."""
    return _missing()


@functools.cache
def _missing() -> str | None:
    try:
        _interface()
    except ImportError as error:
        return f"{NAME} cannot be imported ({error})"
    return None


@functools.cache
def _interface():
    # CUTLASS warns at each compilation that one of its own arguments is a constant
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    return importlib.import_module("flash_attn.cute.interface")  # takes seconds, so only where it will run


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    offsets: Tensor | None,
    lengths: Tensor | None,
    dropout: float,
    longest: int | None = None,
) -> Tensor:
    """On (B, L, H, P); with offsets on (B L, H, P)."""
    return torch.ops.seqmix.fa4_fwd(q, k, v, offsets, lengths, scale, window, longest)[0]


def _span(window, offsets, longest):
    span = {"causal": True, "window_size_left": None if window is None else window - 1}
    if offsets is not None:
        span |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return span


def forward(q, k, v, offsets, lengths, scale, window, longest):
    # always request the log-sum-exp: training and evaluation then share one compiled kernel
    span = _span(window, offsets, longest)
    y, lse, *_ = _interface()._flash_attn_fwd(q, k, v, seqused_k=lengths, softmax_scale=scale, return_lse=True, **span)
    return y, lse


def backward(dy, q, k, v, offsets, lengths, y, lse, scale, window, longest):
    span = _span(window, offsets, longest)
    repeatable = torch.are_deterministic_algorithms_enabled()
    return _interface()._flash_attn_bwd(
        q, k, v, y, dy.contiguous(), lse, softmax_scale=scale, deterministic=repeatable, **span
    )


def _fake_forward(q, k, v, offsets, lengths, scale, window, longest):
    rows = (q.shape[0], q.shape[2], q.shape[1]) if offsets is None else (q.shape[1], q.shape[0])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


def _fake_backward(dy, q, k, v, offsets, lengths, y, lse, scale, window, longest):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? offsets, Tensor? lengths"
_SETTINGS = "float scale, SymInt? window, SymInt? longest"
frame.register("fa4_fwd", f"({_INPUTS}, {_SETTINGS}) -> (Tensor y, Tensor lse)", forward, _fake_forward)
frame.register(
    "fa4_bwd",
    f"(Tensor dy, {_INPUTS}, Tensor y, Tensor lse, {_SETTINGS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    backward,
    _fake_backward,
)
frame.register_gradient(
    "fa4", 5, 1, 'flash-attn-4 has no second derivative; impl="math" has one', saved=lambda y, lse: (y, lse)
)

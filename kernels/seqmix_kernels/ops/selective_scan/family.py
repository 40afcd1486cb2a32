"""Parallel forms of the recurrence h_t = ā_t h_{t-1} + b̄_t in plain torch, for any device and dtype.

A step is the affine map (ā, b̄): h -> ā h + b̄. Two steps compose to one, (a₁, b₁) then (a₂, b₂) = (a₂ a₁, a₂ b₁ + b₂),
and composition is associative, so the states are a prefix "sum" that any scan algorithm can compute (Blelloch, "Prefix
sums and their applications", 1990). With T steps of (B, D, N) elements each:

    form          depth          compositions   extra memory
    kogge_stone   log2 T         T log2 T       2 (B, T, D, N)     Hillis and Steele 1986; Kogge and Stone 1973
    blelloch      2 log2 T       2 T            2 (B, T, D, N)     up-sweep, down-sweep
    chunked       (T/K) log2 K   T log2 K       2 (B, K, D, N)     kogge_stone inside a chunk of K, serial across

The adjoint of the recurrence is the same recurrence run backwards, g_t = ∂h_t + ā_{t+1} g_{t+1}, so the gradient of
each form is that form again on flipped tensors: only ā and h are saved.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import discretise, initial, read_out


def kogge_stone(a: Tensor, b: Tensor) -> Tensor:
    """States h_t = a_t h_{t-1} + b_t, h_{-1} = 0, over dimension 1: after k levels (a, b) spans the last 2^k steps."""
    span = 1
    while span < a.shape[1]:
        b = torch.cat([b[:, :span], torch.addcmul(b[:, span:], a[:, span:], b[:, :-span])], 1)
        if 2 * span < a.shape[1]:
            a = torch.cat([a[:, :span], a[:, span:] * a[:, :-span]], 1)
        span *= 2
    return b


def blelloch(a: Tensor, b: Tensor) -> Tensor:
    """The same states by halving: compose neighbours (up-sweep), scan the half as long sequence, expand it (down-sweep)."""
    length = a.shape[1]
    if length < 2:
        return b
    even, odd = slice(0, length - length % 2, 2), slice(1, None, 2)
    half = blelloch(a[:, odd] * a[:, even], torch.addcmul(b[:, odd], a[:, odd], b[:, even]))  # states at 1, 3, 5, ...
    h = torch.empty_like(b)
    h[:, odd] = half
    h[:, :1] = b[:, :1]
    later = slice(2, None, 2)
    h[:, later] = torch.addcmul(b[:, later], a[:, later], half[:, : (length - 1) // 2])
    return h


class _Scan(torch.autograd.Function):
    """All states of h_t = a_t h_{t-1} + b_t, h_{-1} = h0, by `scan`; a, b (B, L, ...), h0 (B, ...), L >= 1."""

    @staticmethod
    def forward(ctx, a, b, h0, scan):
        first = torch.addcmul(b[:, :1], a[:, :1], h0.unsqueeze(1))
        h = scan(a, torch.cat([first, b[:, 1:]], 1))
        ctx.save_for_backward(a, h, h0)
        ctx.scan = scan
        return h

    @staticmethod
    def backward(ctx, dh):
        a, h, h0 = ctx.saved_tensors
        # g_t = dh_t + a_{t+1} g_{t+1}: the same recurrence on reversed time, whose first step has no decay
        reversed_a = torch.cat([torch.zeros_like(a[:, :1]), a[:, 1:].flip(1)], 1)
        g = _Scan.apply(reversed_a, dh.flip(1), torch.zeros_like(h0), ctx.scan).flip(1)
        da = g * torch.cat([h0.unsqueeze(1), h[:, :-1]], 1)
        return da, g, g[:, 0] * a[:, 0], None


def parallel(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=True, discretization="euler", initial_state=None,
    seq_idx=None, *, scan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The selective scan over the whole length by `scan` (kogge_stone or blelloch); see `selective_scan`."""
    decay, b = discretise(x, dt, A, B, dt_bias, dt_softplus, discretization, seq_idx)
    h0 = initial(initial_state, b)
    h = _Scan.apply(decay, b, h0, scan) if x.shape[1] else b
    final = h[:, -1].clone() if x.shape[1] else h0  # a copy, because a view would keep all states alive
    return read_out(h, x, C, D, z), final.flatten(1, 2)


def chunked(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=True, discretization="euler", initial_state=None,
    seq_idx=None, *, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """kogge_stone within chunks of `chunk` steps, the state carried between chunks. The backward recomputes each chunk, so
    the (B, L, D, N) tensors never exist as a whole."""
    batch, length, width = x.shape
    state = A.new_zeros(batch, width, A.shape[1]) if initial_state is None else initial_state
    if not length:
        return torch.empty_like(x), state.clone()
    # split instead of slices, because each slice's backward would fill a tensor of the whole length with zeros
    parts = [[None] * -(-length // chunk) if t is None else t.split(chunk, 1) for t in (x, dt, B, C, z)]
    ys = []
    for i, (x_i, dt_i, B_i, C_i, z_i) in enumerate(zip(*parts, strict=True)):
        # one earlier index shows whether this chunk begins a document; `_one_chunk` drops it
        seq_i = None if seq_idx is None else seq_idx[:, max(i * chunk - 1, 0) : (i + 1) * chunk]
        args = (x_i, dt_i, A, B_i, C_i, D, z_i, dt_bias, state, seq_i)
        y, state = _Recomputed.apply(dt_softplus, discretization, *args)
        ys.append(y)
    return torch.cat(ys, 1), state


class _Recomputed(torch.autograd.Function):
    """One chunk that saves only its inputs. (torch's checkpoint leaves each chunk's tensors to the garbage collector.)"""

    @staticmethod
    def forward(ctx, dt_softplus, discretization, *tensors):
        ctx.settings = dt_softplus, discretization
        ctx.save_for_backward(*tensors)
        return _one_chunk(*ctx.settings, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dstate):
        wanted = ctx.needs_input_grad[2:]
        given = zip(ctx.saved_tensors, wanted, strict=True)
        leaves = [t.detach().requires_grad_() if need else t for t, need in given]
        with torch.enable_grad():
            made = _one_chunk(*ctx.settings, *leaves)
        asked = [t for t, need in zip(leaves, wanted, strict=True) if need]
        grads = iter(torch.autograd.grad(made, asked, (dy, dstate), allow_unused=True))
        return None, None, *(next(grads) if need else None for need in wanted)


def _one_chunk(dt_softplus, discretization, x, dt, A, B, C, D, z, dt_bias, state, seq_idx):
    if seq_idx is not None and seq_idx.shape[1] > x.shape[1]:
        opens = (seq_idx[:, 1] != seq_idx[:, 0]).view(-1, 1, 1)
        state, seq_idx = state.masked_fill(opens, 0.0), seq_idx[:, 1:]
    return parallel(x, dt, A, B, C, D, z, dt_bias, dt_softplus, discretization, state, seq_idx, scan=kogge_stone)

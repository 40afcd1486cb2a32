"""Long short-term memory (Hochreiter & Schmidhuber 1997; with the forget gate of Gers, Schmidhuber & Cummins 2000).

    i, f, o = σ(W x_t + U h_{t-1} + b)      g = tanh(W_g x_t + U_g h_{t-1} + b_g)
    c_t = f ∘ c_{t-1} + i ∘ g               h_t = o ∘ tanh(c_t)               y_t = W_o h_t

nn.LSTM computes the recurrence. This file adds the initialisation, a state with the batch first, and the projection W_o.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqmix.mixers.base import Mixer, in_pieces


class LSTMState(NamedTuple):
    h: Tensor  # (B, H)
    c: Tensor  # (B, H)


class LSTM(Mixer):
    """One LSTM layer of hidden width expand · d_model, and a projection to d_model.

    Weights start at U(±1/√hidden). The forget gate's bias starts at `forget_bias`: at 1 the cell remembers until it has
    learned to forget (Jozefowicz, Zaremba & Sutskever 2015, §2.2).
    """

    def __init__(self, d_model: int, expand: float = 1.0, *, forget_bias: float = 1.0):
        super().__init__()
        hidden = int(expand * d_model)
        if hidden < 1:
            raise ValueError(f"expand · d_model must be at least 1, got expand={expand!r} and d_model={d_model}")
        self.d_model, self.d_hidden = d_model, hidden
        self.lstm = nn.LSTM(d_model, hidden, batch_first=True)
        with torch.no_grad():
            self.lstm.bias_ih_l0[hidden : 2 * hidden] = forget_bias  # torch's order is i, f, g, o
            self.lstm.bias_hh_l0.zero_()  # torch adds this second bias to the first
        self.out_proj = nn.Linear(hidden, d_model, bias=False)
        nn.init.normal_(self.out_proj.weight, std=hidden**-0.5)

    def init_state(self, batch: int) -> LSTMState:
        zeros = self.out_proj.weight.new_zeros(batch, self.d_hidden)
        return LSTMState(zeros, zeros.clone())

    def prefill(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        with contextlib.ExitStack() as stack:
            if x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
                # on a CPU without AVX-512 torch's LSTM raises under autocast, because oneDNN has none in bfloat16
                stack.enter_context(torch.autocast("cpu", enabled=False))
                x = x.to(self.lstm.weight_ih_l0.dtype)
            before = state.h[None].to(x.dtype), state.c[None].to(x.dtype)
            y, (h, c) = in_pieces(self.lstm, x, before)  # (B, L, H), (1, B, H) twice
        return self.out_proj(y), LSTMState(h[0], c[0])

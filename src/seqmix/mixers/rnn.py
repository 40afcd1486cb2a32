"""The simple recurrent network (Elman 1990, "Finding Structure in Time").

    h_t = tanh(W x_t + U h_{t-1} + b)      y_t = W_o h_t

nn.RNN computes the recurrence. This file adds the initialisation, a state with the batch first, and the projection W_o.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from seqmix.mixers.base import Mixer, in_pieces


class RNNState(NamedTuple):
    h: Tensor  # (B, H)


class RNN(Mixer):
    """One tanh layer of hidden width expand · d_model, and a projection to d_model.

    U starts as a random orthogonal matrix, so that a small state initially neither decays nor grows (Saxe, McClelland &
    Ganguli 2014; Henaff, Szlam & LeCun 2016). W starts at U(±1/√hidden), b at 0.
    """

    def __init__(self, d_model: int, expand: float = 1.0):
        super().__init__()
        hidden = int(expand * d_model)
        if hidden < 1:
            raise ValueError(f"expand · d_model must be at least 1, got expand={expand!r} and d_model={d_model}")
        self.d_model, self.d_hidden = d_model, hidden
        self.rnn = nn.RNN(d_model, hidden, nonlinearity="tanh", batch_first=True)
        nn.init.orthogonal_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        self.out_proj = nn.Linear(hidden, d_model, bias=False)
        nn.init.normal_(self.out_proj.weight, std=hidden**-0.5)

    def init_state(self, batch: int) -> RNNState:
        return RNNState(self.out_proj.weight.new_zeros(batch, self.d_hidden))

    def prefill(self, x: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        y, h = in_pieces(self.rnn, x, state.h[None].to(x.dtype))  # (B, L, H), (1, B, H)
        return self.out_proj(y), RNNState(h[0])

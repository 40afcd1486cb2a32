"""The one backbone: embedding, pre-norm residual blocks, norm, tied head. It names no architecture.

    x = E[tokens]                               (B, L, D), float32 even if the rest has a lower precision
    x = x + mixer(norm(x))                      along time
    x = x + channel_mixer(norm(x))              across channels, if the block has a channel mixer
    logits = norm(x) Eᵀ                         (B, L, V)

An addition and the norm after it are one fused operator (seqmix_kernels/ops/add_rms_norm). So blocks pass on two tensors:
x, and a y that is still to be added to it.

Initialisation. Each part initialises its own parameters where it makes them. No later pass over the whole model overwrites
what a mixer has set (the bias of a step size, a spectrum). The backbone adds two things:

    E                                           is drawn from N(0, 0.02²)
    out_proj.weight of every mixer              is divided by √(number of residual additions), as in GPT-2 (Radford et al.
                                                2019, §2.3)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqmix.mixers.base import Mixer, State
from seqmix_kernels import add_rms_norm, embedding, linear_cross_entropy
from seqmix_kernels.ops import add_rms_norm as norms
from seqmix_kernels.ops import cross_entropy as losses
from seqmix_kernels.ops import embedding as lookup

ModelState = tuple[State, ...]  # one per block


class AddNorm(nn.RMSNorm):
    """x, y -> x + y and its norm; y None adds nothing. The norm has the autocast dtype, or without autocast the dtype of its
    weight, so that a model cast by `model.to(torch.bfloat16)` runs in 16 bits. The sum has the dtype of x."""

    def forward(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, y, self.weight, self.eps)


class Block(nn.Module):
    """Residual block: a mixer along time and, if given, a mixer across channels.

    Takes the residual stream x (..., D), and y (..., D) or None, which is still to be added to x. Returns a new such pair.
    """

    def __init__(self, d_model: int, mixer: Mixer, channel_mixer: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.norm = AddNorm(d_model, eps=1e-5)
        self.mixer = mixer
        self.channel_norm = AddNorm(d_model, eps=1e-5) if channel_mixer is not None else None
        self.channel_mixer = channel_mixer
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        x, h = self.norm(x, y)
        return self._across_channels(x, self.dropout(self.mixer(h)))

    def init_state(self, batch: int) -> State:
        return self.mixer.init_state(batch)

    def prefill(self, x: Tensor, y: Tensor | None, state: State) -> tuple[Tensor, Tensor, State]:
        x, h = self.norm(x, y)
        y, state = self.mixer.prefill(h, state)
        return *self._across_channels(x, self.dropout(y)), state

    def step(self, x_t: Tensor, y_t: Tensor | None, state: State) -> tuple[Tensor, Tensor, State]:
        x_t, h_t = self.norm(x_t, y_t)
        y_t, state = self.mixer.step(h_t, state)
        return *self._across_channels(x_t, self.dropout(y_t)), state

    def _across_channels(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.channel_mixer is None:
            return x, y
        x, h = self.channel_norm(x, y)
        return x, self.dropout(self.channel_mixer(h))


class SequenceModel(nn.Module):
    """A stack of blocks over tokens.

    vocab_size, d_model, n_layer: sizes. mixer, channel_mixer: called with `d_model=`, once per block, to make its parts.
    Tokens are (B, L) int64; logits (B, L, V) in the dtype of the autocast region, or of the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        n_layer: int,
        mixer: Callable[..., Mixer],
        channel_mixer: Callable[..., nn.Module] | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        for name, value in (("vocab_size", vocab_size), ("d_model", d_model), ("n_layer", n_layer)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            Block(d_model, mixer(d_model=d_model), channel_mixer and channel_mixer(d_model=d_model), dropout)
            for _ in range(n_layer)
        )
        self.norm = AddNorm(d_model, eps=1e-5)
        self._shrink_residual_projections()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, L) -> logits (B, L, V); position t sees tokens 0..t."""
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens (B, L) -> the input of the head (B, L, D)."""
        x, y = self._embed(tokens), None  # (B, L, D)
        for block in self.blocks:
            x, y = block(x, y)
        return self.norm(x, y)[1]

    def head(self, h: Tensor) -> Tensor:
        """(..., D) -> logits (..., V)."""
        E = self.embedding.weight
        if h.is_cuda and len(E) % 8 and not torch.compiler.is_compiling():  # torch.compile pads by itself
            return aligned_product(h, E)
        return F.linear(h, E)

    def score(self, tokens: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
        """The loss of each prediction, and whether it is correct, in less memory than the logits would take.

        tokens, targets (B, L) -> losses (B, L), float32, nats, 0 where a target is ignore_index; right (B, L) bool: whether
        the target has the largest logit, False where it is ignore_index.
        """
        return self._judge(self.hidden(tokens), targets, ignore_index)

    def score_from(
        self, tokens: Tensor, targets: Tensor, state: ModelState, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor, ModelState]:
        """As `score`, from the state before the tokens; also returns the state after them."""
        x, y, state = self._take_in(tokens, state)
        return *self._judge(self.norm(x, y)[1], targets, ignore_index), state

    def _judge(self, h: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        nats, right = linear_cross_entropy(h.flatten(0, 1), self.embedding.weight, targets.flatten(), ignore_index)
        return nats.view_as(targets), right.view_as(targets)

    def init_state(self, batch: int) -> ModelState:
        """The state before any token, for `batch` rows."""
        return tuple(block.init_state(batch) for block in self.blocks)

    def prefill(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """tokens (B, L), the state before them -> logits (B, L, V), the state after them. Any L >= 0."""
        x, y, state = self._take_in(tokens, state)
        return self.head(self.norm(x, y)[1]), state

    def prefill_last(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """As `prefill`, with logits (B, V) for the last token only, which is all that generation needs of a prompt. L >= 1."""
        x, y, state = self._take_in(tokens, state)
        return self.head(self.norm(x[:, -1], y[:, -1])[1]), state

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """tokens (B,), the state before them -> logits (B, V), the state after them."""
        x, y = self._embed(tokens), None  # (B, D)
        after = []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, y, block_state = block.step(x, y, block_state)
            after.append(block_state)
        return self.head(self.norm(x, y)[1]), tuple(after)

    def kernels_used(self, batch: int, length: int, device: torch.device | None = None) -> dict[str, str]:
        """Operator -> the implementation that (batch, length) tokens would run under the caller's autocast and gradient mode,
        and the reason for it.

        device: None takes that of the parameters. The model does not run, but "auto" may measure implementations on a GPU.
        ValueError if an implementation that was chosen by name cannot run.
        """
        E = self.embedding.weight
        device, dtype = device or E.device, E.dtype
        if dtype != torch.float64 and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        number = torch.empty((), dtype=dtype, device=device, requires_grad=torch.is_grad_enabled())
        x = number.expand(batch, length, E.shape[1])  # one element: only its metadata is read
        used = {op: what for block in self.blocks for op, what in block.mixer.kernels_used(x).items()}
        own = {
            "embedding": lookup.which_impl(E if device == E.device else x[0]),
            "add_rms_norm": norms.which_impl(x, None, self.norm.weight),
            "linear_cross_entropy": losses.which_impl(x),
        }
        return used | {op: f"{name} ({why})" for op, (name, why) in own.items()}

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """tokens (B, L), L >= 1 -> (B, L + max_new_tokens): the prompt and its continuation.

        temperature 0 takes the largest logit; top_k keeps the k largest (all, if k exceeds V). Sampling is in float32, from
        `generator`. The model runs in eval mode, and each module's mode is restored afterwards. ValueError for an empty
        prompt, a negative count or temperature, and for logits that are not finite.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"generate needs a prompt of at least one token per row, got shape {tuple(tokens.shape)}")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        if temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {top_k}")
        if max_new_tokens == 0:
            return tokens
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            logits, state = self.prefill_last(tokens, self.init_state(len(tokens)))
            out = [tokens]
            for i in range(max_new_tokens):
                new = _draw(logits, temperature, top_k, generator)  # (B,)
                out.append(new[:, None])
                if i + 1 < max_new_tokens:
                    logits, state = self.step(new, state)
        finally:
            for module, mode in modes:
                module.training = mode
        return torch.cat(out, dim=1)

    def _take_in(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, Tensor | None, ModelState]:
        """tokens (B, L) -> the residual stream (B, L, D), what is still to be added to it, and the state after them."""
        x, y = self._embed(tokens), None  # (B, L, D)
        after = []
        for block, block_state in zip(self.blocks, state, strict=True):
            x, y, block_state = block.prefill(x, y, block_state)
            after.append(block_state)
        return x, y, tuple(after)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = embedding(tokens, self.embedding.weight)
        return x.to(torch.promote_types(x.dtype, torch.float32))  # the residual stream stays in float32, or wider

    @torch.no_grad()
    def _shrink_residual_projections(self) -> None:
        into_residual = [block.mixer for block in self.blocks]
        into_residual += [block.channel_mixer for block in self.blocks if block.channel_mixer is not None]
        for part in into_residual:
            part.out_proj.weight /= math.sqrt(len(into_residual))


def aligned_product(x: Tensor, E: Tensor) -> Tensor:
    """x Eᵀ for x (B, D) or (B, L, D), as a view of a tensor whose rows are multiples of 16 bytes. For other row lengths cuBLAS
    only has its slowest kernels: at V = 50277 the three products of training took 30 ms on an H200, and 5 ms this way."""
    V = len(E)
    if x.ndim == 3:
        return F.linear(x, F.pad(E, (0, 0, 0, -V % 64)))[..., :V]
    return F.linear(E, x).t() if len(x) > 1 else F.linear(x, E)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """logits (B, V) -> one token per row (B,)."""
    logits = logits.float()
    if not torch.isfinite(logits).all():
        raise ValueError("the model's logits are not finite, so no token can be sampled from them")
    if temperature < 1e-6:  # dividing by less could overflow; in the limit the largest logit wins
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

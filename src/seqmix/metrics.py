"""What is measured on predictions, over scored positions only (targets other than -100).

    loss               Σ -log p(target) / number of scored tokens            nats a token
    token_accuracy     right tokens / scored tokens
    sequence_accuracy  rows whose scored tokens are all right / rows that have any
    perplexity         exp(loss): of the mean, never a mean of exponentials
    bits_per_byte      Σ -log2 p(target) / bytes the targets stand for       where the task knows its bytes

Sums and counts are kept and divided once at the end, so a value does not depend on how the rows were batched.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from seqmix_kernels.cross_entropy import cross_entropy

IGNORE = -100


def scored_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (B, L, V), targets (B, L) -> (sum of the losses over scored tokens, float64, nats; their number, int64).

    The loss of a token is float32; their sum is float64, so that it does not depend on the batch size.
    """
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORE)
    return losses.sum(dtype=torch.float64), (targets != IGNORE).sum()


class ScoredTokens(Metric):
    """Sums over scored tokens; `compute` gives the values above by name.

    token_bytes: (V,) bytes a token, or None. saved: the sums go into checkpoints; for those that span many steps.
    """

    full_state_update = False

    def __init__(self, token_bytes: Tensor | None = None, saved: bool = False):
        super().__init__()
        for name in ("loss_sum", "bytes"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum", persistent=saved)
        for name in ("tokens", "tokens_right", "rows", "rows_right"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum", persistent=saved)
        self.register_buffer("token_bytes", token_bytes, persistent=False)

    def update(self, logits: Tensor, targets: Tensor, loss_sum: Tensor) -> None:
        """logits (B, L, V), targets (B, L), and the loss summed over the scored tokens (it is known to the caller)."""
        scored = targets != IGNORE  # (B, L)
        right = (logits.argmax(-1) == targets) & scored  # (B, L)
        row_counts = scored.any(-1)  # (B,)
        self.loss_sum += loss_sum.detach()
        self.tokens += scored.sum()
        self.tokens_right += right.sum()
        self.rows += row_counts.sum()
        self.rows_right += ((right | ~scored).all(-1) & row_counts).sum()
        if self.token_bytes is not None:
            self.bytes += self.token_bytes[targets.clamp(min=0)].mul(scored).sum()

    def compute(self) -> dict[str, Tensor]:
        """The values; NaN where nothing was scored."""
        loss = self.loss_sum / self.tokens
        values = {
            "loss": loss,
            "token_accuracy": self.tokens_right / self.tokens,
            "sequence_accuracy": self.rows_right / self.rows,
            "perplexity": loss.exp(),
        }
        if self.token_bytes is not None:
            values["bits_per_byte"] = self.loss_sum / math.log(2) / self.bytes
        return {name: value.float() for name, value in values.items()}

"""Metrics of predictions, over scored positions only (targets other than -100).

    loss               Σ -log p(target) / number of scored tokens            nats per token
    token_accuracy     correct tokens / scored tokens
    sequence_accuracy  rows whose scored tokens are all correct / rows with at least one scored token
    perplexity         exp(loss): the exponential of the mean, not a mean of exponentials
    bits_per_byte      Σ -log2 p(target) / bytes that the targets encode     if the task knows the bytes of its tokens

Sums and counts are kept and divided once at the end, so a value does not depend on how the rows were batched.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

IGNORE = -100


class ScoredTokens(Metric):
    """Sums over scored tokens; `compute` returns the values above by name, over all ranks.

    token_bytes: (V,) bytes per token, or None. saved: checkpoints contain the sums, for sums that span several steps.
    A captured step writes to fixed addresses, so the sums are updated and reset in place.
    """

    full_state_update = False

    def __init__(self, token_bytes: Tensor | None = None, saved: bool = False):
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), persistent=saved)
        # scored tokens, correct tokens, rows with a scored token, rows that are all correct, bytes
        self.add_state("counts", torch.zeros(5, dtype=torch.int64), persistent=saved)
        self.register_buffer("token_bytes", token_bytes, persistent=False)

    def update(self, losses: Tensor, right: Tensor, targets: Tensor) -> None:
        """losses (B, L), 0 where nothing is scored; right (B, L) bool, correct predictions, False there; targets (B, L)."""
        scored = targets != IGNORE  # (B, L)
        tokens, tokens_right = scored.sum(-1), right.sum(-1)  # (B,)
        rows = tokens.clamp(max=1)  # 1 where any is scored
        counts = [tokens, tokens_right, rows, rows * (tokens_right == tokens)]
        if self.token_bytes is not None:
            counts.append(self.token_bytes[targets.clamp(min=0)].mul(scored).sum(-1))
        self.loss_sum += losses.sum(dtype=torch.float64)
        self.counts[: len(counts)] += torch.stack(counts).sum(-1)

    def compute(self) -> dict[str, Tensor]:
        """The values; NaN where nothing was scored."""
        loss_sum, counts = self.loss_sum, self.counts
        if dist.is_initialized():
            loss_sum, counts = loss_sum.clone(), counts.clone()
            dist.all_reduce(loss_sum)
            dist.all_reduce(counts)
        tokens, tokens_right, rows, rows_right, size = counts
        loss = loss_sum / tokens
        values = {
            "loss": loss,
            "token_accuracy": tokens_right / tokens,
            "sequence_accuracy": rows_right / rows,
            "perplexity": loss.exp(),
        }
        if self.token_bytes is not None:
            values["bits_per_byte"] = loss_sum / math.log(2) / size
        return {name: value.float() for name, value in values.items()}

    def reset(self) -> None:
        self.loss_sum.zero_()
        self.counts.zero_()

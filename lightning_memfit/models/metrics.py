"""Means over an evaluation, summed in float32 whatever the precision of the weights."""

from __future__ import annotations

import torch
from torchmetrics import Metric
from typing_extensions import override

from lightning_memfit.memory.conversion import StaysFloat32


class WeightedMean(StaysFloat32, Metric):
    """Weighted mean of all values over all updates and processes; NaN if one of them is, or before the first.

    Unlike `torchmetrics.MeanMetric` it keeps its sums in float32 when the module that it is part of is converted, as
    Lightning's `bf16-true` and `16-true` do: a sum in bfloat16 stands still after 256 equal values. And it doesn't
    leave out values that are NaN, which would make a diverged model look as good as the batches that it survives.
    """

    is_differentiable = False
    full_state_update = False
    total: torch.Tensor
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")

    @override
    def update(self, values: torch.Tensor, weight: torch.Tensor | int = 1) -> None:
        """Add values.

        Args:
            values: Floats of any shape.
            weight: What each of them counts.
        """
        self.total += values.detach().float().sum() * weight
        self.weight += values.numel() * weight

    @override
    def compute(self) -> torch.Tensor:
        """Return the mean so far, a float32 scalar."""
        return self.total / self.weight


class LossPerplexity(WeightedMean):
    """Perplexity `exp(sum of token losses / tokens)`, updated with mean losses in nats and the tokens in each.

    It equals `torchmetrics.text.Perplexity`, which needs the logits and another `(batch, length, vocabulary)` tensor.
    """

    higher_is_better = False

    @override
    def compute(self) -> torch.Tensor:
        """Return the perplexity so far; NaN before the first token."""
        return torch.exp(super().compute())

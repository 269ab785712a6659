"""Perplexity from losses that are there already: no second softmax over the vocabulary."""

import torch
from torchmetrics import Metric


class LossPerplexity(Metric):
    """Perplexity `exp(sum of token losses / tokens)` over all updates and processes.

    Equal to `torchmetrics.text.Perplexity`, which needs the logits and another `(batch, length, vocabulary)` tensor.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    total: torch.Tensor
    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, mean_loss: torch.Tensor, num_tokens: torch.Tensor | int) -> None:
        """Add one batch.

        Args:
            mean_loss: Mean cross-entropy in nats of the batch's predicted tokens.
            num_tokens: How many tokens that mean is over.
        """
        self.total += mean_loss.detach().float() * num_tokens
        self.tokens += num_tokens

    def compute(self) -> torch.Tensor:
        """Perplexity so far; NaN before the first token."""
        return torch.exp(self.total / self.tokens)

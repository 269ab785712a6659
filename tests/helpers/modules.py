"""LightningModules that tests of several folders train."""

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class Layers(pl.LightningModule):
    """Linear layers with tanh between them; the loss is the mean square of their output.

    Args:
        widths: Of the input and of every layer's output.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        self.net = nn.Sequential(layers[0], *(part for layer in layers[1:] for part in (nn.Tanh(), layer)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch if isinstance(batch, torch.Tensor) else batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Toy(pl.LightningModule):
    """Embeds tokens, sends them through two layers, and predicts a class. Built in no time, for commands."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        scores = self.layers(self.embedding(batch["input_ids"])).mean(1)
        return nn.functional.cross_entropy(scores, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class LanguageModel(pl.LightningModule):
    """A Hugging Face model, trained on its own loss of token ids or of the fields of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        fields = {"input_ids": batch, "labels": batch} if isinstance(batch, torch.Tensor) else batch
        return self.model(**fields).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

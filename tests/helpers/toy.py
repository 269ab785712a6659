"""A module that is built in no time, for commands that start processes of their own."""

import lightning.pytorch as pl
import torch
from torch import nn


class Toy(pl.LightningModule):
    """Embeds tokens, sends them through two layers, and predicts a class."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 2))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        scores = self.layers(self.embedding(batch["input_ids"])).mean(1)
        return nn.functional.cross_entropy(scores, batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

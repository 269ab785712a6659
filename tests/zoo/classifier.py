"""The step that the cases of tracing vary, its batch, and its true peak."""

import gc
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memfit.memory.allocations import allocation_events
from tests.helpers.trainers import fit

WIDTH, CLASSES, SAMPLES = 64, 10, 32


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES - 1, (SAMPLES,), generator=generator)
    labels[3] = CLASSES - 1
    return {"x": torch.randn(SAMPLES, WIDTH, generator=generator), "y": labels}


class Classifier(pl.LightningModule):
    """Two layers, a head, cross-entropy and AdamW: what the modules of these tests vary."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.head(self.net(batch["x"])), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Repeated:
    """A loader that gives one batch again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Any:
        return iter([self.batch] * self.count)

    def __len__(self) -> int:
        return self.count


def true_peak(make_module: Any, make_batch: Any, batches: int, *, max_epochs: int = 1, **options: Any) -> int:
    """Peak of a plain Lightning run by the allocator's events."""
    gc.collect()  # what earlier tests left must not be freed in between
    with allocation_events() as changes:
        fit(make_module(), loader=Repeated(make_batch(), batches), max_epochs=max_epochs, **options)
    return int(np.cumsum(changes).max())

"""Losses in which a sample depends on the others of its batch: micro-batches can't be exact."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.zoo.base import (
    FEATURES,
    NUM_SAMPLES,
    Case,
    Lit,
    Supervised,
    classes,
    features,
    floats,
    mlp,
    uniform,
)


class Clip(Lit):
    """Two towers whose diagonal shall win; with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(4), mlp(4)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.data = TensorDataset(features(), floats(NUM_SAMPLES, FEATURES, seed=6))

    def loss_of(self, batch: Any) -> Tensor:
        image, text = (F.normalize(net(x), dim=1) for net, x in zip((self.image, self.text), batch, strict=True))
        scores, own = self.scale.exp() * image @ text.T, torch.arange(len(image))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


class ClipWithDropout(Clip):
    """The same with dropout, so that two runs of one batch differ anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.image.insert(2, torch.nn.Dropout(0.2))


class CoupledLater(Supervised):
    """The batch is spread out after a few steps of warm-up: the first batch doesn't show it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        if self.global_step >= 4:
            loss = loss - out.var(0, unbiased=False).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _barlow(out: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-3) for z in out.unbind(1))
    correlation = a.T @ b / len(a)
    return (correlation - torch.eye(len(correlation))).square().sum()


def _variance_only(out: Tensor) -> Tensor:
    """The part of VICReg that spreads the batch out; zero for most parts that are small."""
    a, b = out.unbind(1)
    spread = F.relu(0.3 - (a.var(0, unbiased=False) + 1e-4).sqrt()).mean()
    return (a - b).square().mean() + spread


def _own_weights(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Weights of samples, divided by their sum over the batch."""
    losses = F.cross_entropy(out, y, reduction="none")
    return (losses * weight).sum() / weight.sum()


def _largest(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none").max()


def _views() -> tuple[Tensor]:
    x = features()
    return (torch.stack([x, x + 0.3 * floats(NUM_SAMPLES, FEATURES, seed=6)], 1),)


def _with_weight() -> tuple[Tensor, ...]:
    return features(), classes(), uniform(NUM_SAMPLES, seed=6) * 3 + 0.05


CASES = (
    Case("clip", "CLIP: images against texts of the batch", Clip, "refused"),
    Case("clip_with_dropout", "CLIP with dropout", ClipWithDropout, "refused"),
    Case("coupled_later", "a variance over the batch, after a warm-up of four steps", CoupledLater, "refused"),
    Case("barlow_twins", "correlations over the batch", lambda: Supervised(mlp(4), _barlow, _views()), "refused"),
    Case("variance_term", "VICReg's variance over the batch", lambda: Supervised(
        mlp(4), _variance_only, _views()
    ), "refused"),
    Case("sample_weights", "weights of samples, divided by their sum", lambda: Supervised(
        mlp(), _own_weights, _with_weight()
    ), "either"),
    Case("largest_loss", "the largest loss of the batch", lambda: Supervised(loss=_largest), "refused"),
)  # fmt: skip

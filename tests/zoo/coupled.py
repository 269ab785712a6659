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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, text = (F.normalize(net(x), dim=1) for net, x in zip((self.image, self.text), batch, strict=True))
        scores, own = self.scale.exp() * image @ text.T, torch.arange(len(image))
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


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


def _sim_clr(out: Tensor) -> Tensor:
    z = F.normalize(out.flatten(0, 1), dim=1)
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(z)) ^ 1)


def _supervised_contrastive(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    own = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T / 0.5).masked_fill(own, -1e9).log_softmax(1)
    same = (y[:, None] == y[None]) & ~own
    return -(logits * same).sum() / same.sum().clamp(min=1)


def _mined_triplets(out: Tensor, y: Tensor) -> Tensor:
    distance = torch.cdist(out, out)
    same = y[:, None] == y[None]
    farthest = (distance * same).max(1).values
    nearest = distance.masked_fill(same, 1e3).min(1).values
    return F.relu(farthest - nearest + 0.5).mean()


def _barlow(out: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-3) for z in out.unbind(1))
    correlation = a.T @ b / len(a)
    return (correlation - torch.eye(len(correlation))).square().sum()


def _variance_only(out: Tensor) -> Tensor:
    """The part of VICReg that spreads the batch out; zero for most parts that are small."""
    a, b = out.unbind(1)
    spread = F.relu(0.3 - (a.var(0, unbiased=False) + 1e-4).sqrt()).mean()
    return (a - b).square().mean() + spread


def _cox(out: Tensor, time: Tensor, seen: Tensor) -> Tensor:
    """Partial likelihood: every subject against all who were still at risk."""
    score, seen = out.squeeze(1)[time.argsort(descending=True)], seen[time.argsort(descending=True)]
    return -((score - score.logcumsumexp(0)) * seen).sum() / seen.sum().clamp(min=1)


def _list_of_batch(out: Tensor, relevance: Tensor) -> Tensor:
    return -(relevance.softmax(0) * out.squeeze(1).log_softmax(0)).sum()


def _pairwise(out: Tensor, relevance: Tensor) -> Tensor:
    difference = out - out.T
    better = (relevance[:, None] > relevance[None]).to(out.dtype)
    return (F.softplus(-difference) * better).sum() / better.sum().clamp(min=1)


def _correlation(out: Tensor, y: Tensor) -> Tensor:
    a, b = out.squeeze(1) - out.mean(), y - y.mean()
    return 1 - (a * b).sum() / ((a.square().sum() * b.square().sum()).sqrt() + 1e-6)


def _own_weights(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Weights of samples, divided by their sum over the batch."""
    losses = F.cross_entropy(out, y, reduction="none")
    return (losses * weight).sum() / weight.sum()


def _distance_of_distributions(out: Tensor, other: Tensor) -> Tensor:
    """Maximum mean discrepancy."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-torch.cdist(a, b).square()).exp().mean()

    return kernel(out, out) + kernel(other, other) - 2 * kernel(out, other)


def _hardest(out: Tensor, y: Tensor) -> Tensor:
    """The mean over the hardest half of the batch."""
    return F.cross_entropy(out, y, reduction="none").topk(max(1, len(out) // 2)).values.mean()


def _largest(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none").max()


def _balanced_codes(out: Tensor) -> Tensor:
    """SwAV's assignments: each prototype gets as much of the batch as the others."""
    a, b = out.unbind(1)
    with torch.no_grad():
        codes = (a / 0.3).exp()
        for _ in range(3):
            codes = codes / codes.sum(0, keepdim=True)
            codes = codes / codes.sum(1, keepdim=True)
    return -(codes * b.log_softmax(1)).sum(1).mean()


def _views() -> tuple[Tensor]:
    x = features()
    return (torch.stack([x, x + 0.3 * floats(NUM_SAMPLES, FEATURES, seed=6)], 1),)


def _with_time() -> tuple[Tensor, Tensor, Tensor]:
    return features(), uniform(NUM_SAMPLES, seed=4), (uniform(NUM_SAMPLES, seed=5) < 0.7).double()


def _with_value(seed: int = 4) -> tuple[Tensor, Tensor]:
    return features(), floats(NUM_SAMPLES, seed=seed)


def _with_weight() -> tuple[Tensor, ...]:
    return features(), classes(), uniform(NUM_SAMPLES, seed=6) * 3 + 0.05


CASES = (
    Case("clip", "CLIP: images against texts of the batch", Clip, "refused"),
    Case("clip_with_dropout", "CLIP with dropout", ClipWithDropout, "refused"),
    Case("coupled_later", "a variance over the batch, after a warm-up of four steps", CoupledLater, "refused"),
    Case("sim_clr", "SimCLR: two views against the batch", lambda: Supervised(
        mlp(4), _sim_clr, _views()
    ), "refused"),
    Case("supervised_contrastive", "SupCon: same class against the batch", lambda: Supervised(
        mlp(4), _supervised_contrastive
    ), "refused"),
    Case("mined_triplets", "triplets mined in the batch", lambda: Supervised(mlp(4), _mined_triplets), "refused"),
    Case("barlow_twins", "correlations over the batch", lambda: Supervised(mlp(4), _barlow, _views()), "refused"),
    Case("variance_term", "VICReg's variance over the batch", lambda: Supervised(
        mlp(4), _variance_only, _views()
    ), "refused"),
    Case("balanced_codes", "SwAV: Sinkhorn's assignments over the batch", lambda: Supervised(
        mlp(4), _balanced_codes, _views()
    ), "refused"),
    Case("cox", "Cox's partial likelihood", lambda: Supervised(mlp(1), _cox, _with_time()), "refused"),
    Case("listwise_batch", "listwise ranking, the batch is the list", lambda: Supervised(
        mlp(1), _list_of_batch, _with_value()
    ), "refused"),
    Case("pairwise_ranking", "all pairs of the batch", lambda: Supervised(mlp(1), _pairwise, _with_value()), "refused"),
    Case("correlation", "1 - correlation over the batch", lambda: Supervised(
        mlp(1), _correlation, _with_value()
    ), "refused"),
    Case("sample_weights", "weights of samples, divided by their sum", lambda: Supervised(
        mlp(), _own_weights, _with_weight()
    ), "either"),
    Case("mean_discrepancy", "distance of two distributions", lambda: Supervised(
        mlp(4), _distance_of_distributions, (features(), floats(NUM_SAMPLES, 4, seed=6))
    ), "refused"),
    Case("hardest_half", "mean over the hardest half of the batch", lambda: Supervised(loss=_hardest), "refused"),
    Case("largest_loss", "the largest loss of the batch", lambda: Supervised(loss=_largest), "refused"),
)  # fmt: skip

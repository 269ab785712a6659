"""Losses of independent samples: weights, sums, constants, several tasks, gradients inside the step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.zoo.base import (
    CLASSES,
    FEATURES,
    NUM_SAMPLES,
    Case,
    Lit,
    Supervised,
    classes,
    features,
    floats,
    ints,
    mlp,
    uniform,
)

WEIGHTS = torch.tensor([0.2, 1.0, 4.0, 0.5, 2.0], dtype=torch.float64)


def _weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHTS)


def _focal(out: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def _quantile(out: Tensor, y: Tensor) -> Tensor:
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
    error = y - out
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def _survival(out: Tensor, time: Tensor, seen: Tensor) -> Tensor:
    """Weibull likelihood with censoring: each subject for itself."""
    scale, shape = F.softplus(out[:, 0]) + 0.1, F.softplus(out[:, 1]) + 0.1
    hazard = shape.log() - scale.log() + (shape - 1) * (time / scale).log()
    return -(seen * hazard - (time / scale) ** shape).mean()


def _lists(out: Tensor, relevance: Tensor) -> Tensor:
    """Listwise ranking in which each sample is a query with its documents."""
    return -(relevance.softmax(-1) * out.squeeze(-1).log_softmax(-1)).sum(-1).mean()


def _triplets(out: Tensor) -> Tensor:
    anchor, positive, negative = out.unbind(1)
    return F.triplet_margin_loss(anchor, positive, negative, margin=0.5)


class SeveralTasks(Lit):
    """Two tasks, weighed by learned uncertainties or by how many labels there are of each."""

    def __init__(self, missing_labels: bool) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.missing_labels = missing_labels
        known = (uniform(NUM_SAMPLES, seed=7) < 0.5) if missing_labels else torch.ones(NUM_SAMPLES, dtype=torch.bool)
        self.data = [
            {"x": x, "class": y, "value": v, "has_value": k}
            for x, y, v, k in zip(features(), classes(), floats(NUM_SAMPLES, seed=8), known, strict=True)
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.body(batch["x"]).tanh()
        first = F.cross_entropy(self.first(hidden), batch["class"])
        known = batch["has_value"]
        second = (self.second(hidden[known]).squeeze(1) - batch["value"][known]).square().mean()
        losses = torch.stack([first, second])
        loss = (losses * (-self.log_variances).exp() + self.log_variances).sum()
        self.log_dict({"loss": loss, "class": first, "value": second}, on_step=True, on_epoch=True)
        return {"loss": loss, "tasks": losses.detach()}


class Experts(Lit):
    """Tokens are sent to one of four experts; an auxiliary loss keeps them busy, or their scores small."""

    def __init__(self, auxiliary: str) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))
        self.auxiliary = auxiliary
        self.data = TensorDataset(features(), classes())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.router(x)
        probability = scores.softmax(-1)
        gate, chosen = probability.max(-1)
        if self.auxiliary == "capacity":  # each expert takes the first three of the batch
            place = F.one_hot(chosen, 4).cumsum(0).gather(1, chosen[:, None]).squeeze(1)
            gate = gate * (place <= 3)
        out = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen] * gate[:, None]
        loss = F.cross_entropy(out, y)
        if self.auxiliary == "balance":
            share = F.one_hot(chosen, 4).to(x.dtype).mean(0)
            loss = loss + 0.5 * 4 * (share * probability.mean(0)).sum()
        elif self.auxiliary == "z":
            loss = loss + 0.1 * scores.logsumexp(-1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class GradientPenalty(Supervised):
    """Gradients by the inputs, inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        score = self.net(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + (gradient.norm(dim=1) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class WeightPenalty(Supervised):
    """A penalty of the weights: it belongs to the loss, not to any sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.05 * sum(p.square().sum() for p in self.net.parameters())


class SumAndPenalty(Supervised):
    """A sum over samples and a penalty of the weights: no one weight makes both right."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        penalty = 0.05 * sum(p.square().sum() for p in self.net.parameters())
        return 0.1 * F.cross_entropy(self.net(x), y, reduction="sum") + penalty


class Equilibrium(nn.Module):
    """A fixed point of its own layer, found without a graph; the gradient is that of one more step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inject, self.head = nn.Linear(8, 8), nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = x.new_zeros(len(x), 8)
        with torch.no_grad():
            for _ in range(20):
                z = (0.5 * self.inner(z) + self.inject(x)).tanh()
        return self.head((0.5 * self.inner(z) + self.inject(x)).tanh())


class InnerStep(Supervised):
    """Meta-learning: a step of gradient descent on the batch itself before its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weights = dict(self.net.named_parameters())
        first = F.cross_entropy(self.net(x), y)
        gradients = torch.autograd.grad(first, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Distilled(Supervised):
    """A frozen teacher, kept out of the module's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [mlp().double().requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        target = self.teacher[0](x).softmax(-1)
        loss = F.kl_div(self.net(x).log_softmax(-1), target, reduction="batchmean")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class ContrastiveDivergence(Lit):
    """A restricted Boltzmann machine in its mean field: the difference of free energies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.1 * floats(FEATURES, 4, seed=5)), nn.Parameter(torch.zeros(4))
        self.data = features().sigmoid()

    def training_step(self, v: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            model = ((v @ self.weight + self.bias).sigmoid() @ self.weight.T).sigmoid()
        loss = (self._energy(v) - self._energy(model)).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def _energy(self, v: Tensor) -> Tensor:
        return -F.softplus(v @ self.weight + self.bias).sum(1)


class WithWeightHook(Supervised):
    """Class weights, with what their mean is taken over."""

    def __init__(self) -> None:
        super().__init__(loss=_weighted)

    def loss_weight(self, batch: Any) -> Tensor:
        return WEIGHTS[batch[1]].sum()


class Counts(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(1)
        counts = ints(0, 9, NUM_SAMPLES, seed=4)
        self.data = [{"x": x, "labels": y} for x, y in zip(features(), counts, strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.poisson_nll_loss(self.net(batch["x"]).squeeze(1), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def _table() -> tuple[Tensor, Tensor, Tensor]:
    return features(), uniform(NUM_SAMPLES, seed=4) * 3 + 0.1, (uniform(NUM_SAMPLES, seed=5) < 0.6).double()


CASES = (
    Case("class_weights", "cross-entropy with class weights", lambda: Supervised(loss=_weighted), "either"),
    Case("class_weights_with_hook", "the same with the module's `loss_weight`", WithWeightHook),
    Case("label_smoothing", "label smoothing", lambda: Supervised(
        loss=lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1)
    )),
    Case("focal", "focal loss", lambda: Supervised(loss=_focal)),
    Case("sum", "a sum over samples", lambda: Supervised(
        loss=lambda out, y: F.cross_entropy(out, y, reduction="sum")
    ), "either"),
    Case("sum_over_constant", "a sum over samples / 8", lambda: Supervised(
        loss=lambda out, y: F.cross_entropy(out, y, reduction="sum") / 8
    ), "either"),
    Case("weight_penalty", "a mean and a penalty of the weights", WeightPenalty),
    Case("sum_and_penalty", "a sum and a penalty of the weights", SumAndPenalty, "either"),
    Case("root_of_mean", "root of the mean squared error", lambda: Supervised(
        mlp(1), lambda out, y: F.mse_loss(out.squeeze(1), y).sqrt(), (features(), floats(NUM_SAMPLES, seed=4))
    ), "either"),
    Case("quantiles", "quantile loss", lambda: Supervised(
        mlp(3), _quantile, (features(), floats(NUM_SAMPLES, 1, seed=4))
    )),
    Case("survival", "Weibull survival with censoring", lambda: Supervised(mlp(2), _survival, _table())),
    Case("listwise_queries", "listwise ranking, a list per sample", lambda: Supervised(
        mlp(1), _lists, (floats(NUM_SAMPLES, 4, FEATURES, seed=1), 3 * uniform(NUM_SAMPLES, 4, seed=2))
    )),
    Case("triplets", "triplets that the data brings", lambda: Supervised(
        loss=_triplets, data=(floats(NUM_SAMPLES, 3, FEATURES, seed=1),)
    )),
    Case("tasks_by_uncertainty", "two tasks, weighed by learned uncertainties", lambda: SeveralTasks(False)),
    Case("tasks_with_missing_labels", "two tasks, one with labels for half of the samples", lambda: SeveralTasks(True),
         "either"),
    Case("experts", "mixture of experts", lambda: Experts("none")),
    Case("experts_balanced", "mixture of experts with a load-balancing loss", lambda: Experts("balance"), "either"),
    Case("experts_z_loss", "mixture of experts with a z-loss", lambda: Experts("z")),
    Case("experts_with_capacity", "experts that take three samples of a batch", lambda: Experts("capacity"), "refused"),
    Case("gradient_penalty", "gradient penalty by `autograd.grad`", lambda: GradientPenalty(
        mlp(1), data=(features(),)
    )),
    Case("equilibrium", "deep equilibrium model", lambda: Supervised(Equilibrium())),
    Case("inner_step", "meta-learning with an inner step on the batch", InnerStep, "refused"),
    Case("distilled", "a frozen teacher outside of the module", Distilled),
    Case("contrastive_divergence", "Boltzmann machine, difference of energies", ContrastiveDivergence),
    Case("one_hot_targets", "targets as probabilities", lambda: Supervised(data=(features(), floats(
        NUM_SAMPLES, CLASSES, seed=4
    ).softmax(-1)))),
    Case("integer_regression", "integer targets under `labels`, mean squared error", Counts),
)  # fmt: skip

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


class SeveralTasks(Lit):
    """Two tasks, weighed by learned uncertainties; of the second one only half of the labels are there."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))
        known = uniform(NUM_SAMPLES, seed=7) < 0.5
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
    """Tokens are sent to one of four experts; an auxiliary loss keeps them busy, or each takes three of a batch."""

    def __init__(self, auxiliary: str) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(4))
        self.auxiliary = auxiliary
        self.data = TensorDataset(features(), classes())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        probability = self.router(x).softmax(-1)
        gate, chosen = probability.max(-1)
        if self.auxiliary == "capacity":  # each expert takes the first three of the batch
            place = F.one_hot(chosen, 4).cumsum(0).gather(1, chosen[:, None]).squeeze(1)
            gate = gate * (place <= 3)
        out = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen] * gate[:, None]
        loss = F.cross_entropy(out, y)
        if self.auxiliary == "balance":
            share = F.one_hot(chosen, 4).to(x.dtype).mean(0)
            loss = loss + 0.5 * 4 * (share * probability.mean(0)).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class GradientPenalty(Supervised):
    """Gradients by the inputs, inside the step."""

    def loss_of(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        score = self.net(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()


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


class InnerStep(Supervised):
    """Meta-learning: a step of gradient descent on the batch itself before its loss."""

    def loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        weights = dict(self.net.named_parameters())
        first = F.cross_entropy(self.net(x), y)
        gradients = torch.autograd.grad(first, list(weights.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, (x,)), y)


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

    def loss_of(self, batch: Any) -> Tensor:
        return F.poisson_nll_loss(self.net(batch["x"]).squeeze(1), batch["labels"])


CASES = (
    Case("class_weights", "cross-entropy with class weights", lambda: Supervised(loss=_weighted), "either"),
    Case("class_weights_with_hook", "the same with the module's `loss_weight`", WithWeightHook),
    Case("label_smoothing", "label smoothing", lambda: Supervised(
        loss=lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1)
    )),
    Case("sum", "a sum over samples", lambda: Supervised(
        loss=lambda out, y: F.cross_entropy(out, y, reduction="sum")
    ), "either"),
    Case("weight_penalty", "a mean and a penalty of the weights", WeightPenalty),
    Case("sum_and_penalty", "a sum and a penalty of the weights", SumAndPenalty, "either"),
    Case("root_of_mean", "root of the mean squared error", lambda: Supervised(
        mlp(1), lambda out, y: F.mse_loss(out.squeeze(1), y).sqrt(), (features(), floats(NUM_SAMPLES, seed=4))
    ), "either"),
    Case("tasks_with_missing_labels", "two tasks, one with labels for half of the samples", SeveralTasks,
         "either"),
    Case("experts_balanced", "mixture of experts with a load-balancing loss", lambda: Experts("balance"), "either"),
    Case("experts_with_capacity", "experts that take three samples of a batch", lambda: Experts("capacity"), "refused"),
    Case("gradient_penalty", "gradient penalty by `autograd.grad`", lambda: GradientPenalty(
        mlp(1), data=(features(),)
    )),
    Case("inner_step", "meta-learning with an inner step on the batch", InnerStep, "refused"),
    Case("one_hot_targets", "targets as probabilities", lambda: Supervised(data=(features(), floats(
        NUM_SAMPLES, CLASSES, seed=4
    ).softmax(-1)))),
    Case("integer_regression", "integer targets under `labels`, mean squared error", Counts),
)  # fmt: skip

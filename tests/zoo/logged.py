"""What modules log: metric objects, their batch sizes, values that aren't means. Weights are exact in all of them."""

from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from tests.zoo.base import CLASSES, NUM_SAMPLES, Case, Supervised, features, floats, mlp
from tests.zoo.text import MASKED, TokenStep, token_loss


class Logging(Supervised):
    """A classifier; subclasses log."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        self.write(out, batch[1], loss)
        return loss

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        raise NotImplementedError


class AccuracyObject(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)


class AccuracyValue(AccuracyObject):
    """The value that a metric's call returns."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("accuracy", self.accuracy(out, y), on_step=True, on_epoch=True)


class MacroValue(AccuracyObject):
    """A mean over classes: not a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="macro")

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("accuracy", self.accuracy(out, y), on_step=True, on_epoch=True)


class UpdatedOnly(AccuracyObject):
    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.accuracy.update(out, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)


class ComputedByHand(AccuracyObject):
    """Updated in the step, computed and reset at the epoch's end."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.accuracy.update(out, y)

    def on_train_epoch_end(self) -> None:
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


class ErrorWithGraph(Supervised):
    """A metric that is the loss: its state has a graph."""

    def __init__(self) -> None:
        super().__init__(mlp(1), data=(features(), floats(NUM_SAMPLES, seed=4)))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.error(self.net(batch[0]).squeeze(1), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss


class MeanOfLoss(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)


class Curve(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.area = BinaryAUROC()

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.area(out[:, 0].sigmoid(), (y == 0).long())
        self.log("area", self.area, on_step=True, on_epoch=True)


class Collection(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = torchmetrics.MetricCollection(
            {name: MulticlassAccuracy(CLASSES, average=name) for name in ("micro", "macro")}
        )

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.metrics(out, y)
        self.log_dict(self.metrics, on_step=True, on_epoch=True)


class WithBatchSize(Logging):
    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        self.log("correct", (out.argmax(1) == y).double().mean(), on_step=True, on_epoch=True, batch_size=len(y))


class Reduced(Logging):
    """Sums, maxima and minima of an epoch."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        losses = F.cross_entropy(out, y, reduction="none")
        self.log("correct", (out.argmax(1) == y).double().sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", losses.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", losses.min(), on_step=True, on_epoch=True, reduce_fx="min")


class Counts(Logging):
    """Numbers of a batch that aren't means of its samples."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("rows", float(len(y)), on_step=True, on_epoch=True)
        self.log("correct", (out.argmax(1) == y).sum().double())


class Nonlinear(Logging):
    """Functions of the mean loss."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("perplexity", loss.exp(), on_step=True, on_epoch=True)
        self.log("deviation", out.std())


class Constants(Logging):
    """Numbers that are the same in every part."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        rate = self.optimizers().param_groups[0]["lr"]
        self.log_dict({"rate": rate, "step": float(self.global_step), "weight": self.net[0].weight.norm()})


class Straight(Logging):
    """Writes to the logger itself."""

    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.logger.log_metrics({"own_loss": float(loss)}, step=self.global_step)


class TokenLog(TokenStep):
    """Token losses and counts, with the number of sentences as batch size."""

    def __init__(self) -> None:
        super().__init__(lambda net, batch: token_loss(net(batch["input_ids"]), batch["labels"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.net(batch["input_ids"]), batch["labels"]
        loss = token_loss(logits, labels)
        known = labels.ne(MASKED)
        right = (logits.argmax(-1) == labels) | ~known
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(labels))
        self.log("tokens", known.sum().double(), on_step=True, on_epoch=True)
        self.log("perplexity", loss.exp())
        self.log("sentences_right", right.all(1).double().mean(), on_step=True, on_epoch=True)
        self.log("share_known", known.double().mean())
        return loss


class NotATensor(Logging):
    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("loss", loss.item(), on_step=True, on_epoch=True)
        self.log("bar", loss, prog_bar=True, logger=False)


class OnlyEpoch(Logging):
    def write(self, out: Tensor, y: Tensor, loss: Tensor) -> None:
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("twice", 2 * loss, on_step=False, on_epoch=True, reduce_fx=torch.mean)


CASES = (
    Case("log_accuracy", "an accuracy object", AccuracyObject),
    Case("log_accuracy_value", "what an accuracy object returns", AccuracyValue, logs_tolerance=1e-6),
    Case("log_macro_value", "what an accuracy by classes returns", MacroValue, logs_tolerance=1e-6),
    Case("log_updated_only", "an accuracy object that is only updated", UpdatedOnly),
    Case("log_computed_by_hand", "an accuracy object computed at the epoch's end", ComputedByHand),
    Case("log_error_with_graph", "a metric object that is the loss", ErrorWithGraph, logs_tolerance=1e-6),
    Case("log_mean_of_loss", "`MeanMetric.update(loss)`", MeanOfLoss),
    Case("log_auroc", "an AUROC object", Curve, logs_tolerance=1e-6),
    Case("log_collection", "a MetricCollection", Collection),
    Case("log_with_batch_size", "`batch_size=len(y)`", WithBatchSize),
    Case("log_reduced", "`reduce_fx` sum, max and min", Reduced),
    Case("log_counts", "counts of a batch", Counts),
    Case("log_nonlinear", "functions of the mean loss", Nonlinear),
    Case("log_constants", "learning rate, step, norm of a weight", Constants),
    Case("log_to_logger", "the logger itself", Straight),
    Case("log_tokens", "token losses and counts with `batch_size=len(x)`", TokenLog),
    Case("log_numbers", "Python numbers and the progress bar", NotATensor),
    Case("log_epoch_only", "values of the epoch alone", OnlyEpoch),
)

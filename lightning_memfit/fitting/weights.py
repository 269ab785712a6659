"""How much each sample counts in the loss of the effective batch.

A mean over the effective batch is the weighted mean of the means over its micro-batches, where a micro-batch weighs as
many as its mean was taken over: samples, or label tokens that are not masked.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

IGNORE_INDEX = -100
_WITHOUT_LABELS = (Tensor, list, tuple)
LossWeight = Callable[[Any], "float | Tensor"]


class SampleWeights:
    """Weights of the samples of one share of the effective batch.

    Args:
        rows: Weight of every sample, where samples weigh independently of each other.
        total: Their sum.
        loss_weight: The user's function, called on every part, where it decides.
    """

    def __init__(self, rows: list[int] | None, total: float, loss_weight: LossWeight | None = None) -> None:
        self._rows = rows
        self._loss_weight = loss_weight
        self.total = total

    def of_parts(self, parts: list[Any], sizes: list[int]) -> list[float]:
        """Weight of each micro-batch.

        Raises:
            ValueError: If the user's weights of the parts don't add up to that of the whole.
        """
        if self._loss_weight is not None:
            weights = [float(self._loss_weight(part)) for part in parts]
            if abs(sum(weights) - self.total) > 1e-6 * max(abs(self.total), 1.0):
                raise ValueError(
                    f"`loss_weight` of the parts {weights} adds up to {sum(weights)}, of the whole batch to "
                    f"{self.total}. Return what the loss is a mean over: a count that adds up."
                )
            return weights
        if self._rows is None:
            return [float(size) for size in sizes]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [float(sum(self._rows[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


def weigh(batch: Any, num_samples: int, shifted: bool, loss_weight: LossWeight | None = None) -> SampleWeights:
    """Weigh the samples of a batch: by the user's function, by unmasked label tokens, or one each.

    Tokens count where the batch has integer `labels`, (samples, ...), with `-100` for what the loss ignores. Reading
    the counts waits for the device once.

    Args:
        batch: The whole share of one device.
        num_samples: Its number of samples.
        shifted: Whether the loss predicts the next token, so that the first label of each sample never counts.
        loss_weight: The user's function, from a batch or part of it to a count that adds up.
    """
    if loss_weight is not None:
        return SampleWeights(None, float(loss_weight(batch)), loss_weight)
    labels = None
    if type(batch) not in _WITHOUT_LABELS:  # looking for them where there are none is slow
        labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim == 0 or len(labels) != num_samples:
        return SampleWeights(None, float(num_samples))
    counted = labels[:, 1:] if shifted and labels.ndim > 1 else labels
    rows = counted.ne(IGNORE_INDEX).reshape(num_samples, -1).sum(1).tolist()
    return SampleWeights(rows, float(sum(rows)))


def predicts_next_token(module: nn.Module) -> bool:
    """Whether a Hugging Face model inside shifts the labels before its loss, as `ForCausalLMLoss` does.

    Decoders of encoder-decoder models get their labels unshifted and don't count.
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is None or not hasattr(child, "loss_function") or not hasattr(config, "is_encoder_decoder"):
            continue
        if type(child).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return True
        if type(child).__name__.endswith("ForConditionalGeneration"):
            return not config.is_encoder_decoder
    return False


def batch_statistics(module: nn.Module) -> list[str]:
    """Names of layers that normalise with statistics of the batch while training."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training
    ]

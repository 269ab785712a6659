"""What `training_step` returned for the micro-batches, as one result for the whole batch."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor


class OutputMerger:
    """Collect the results of micro-batches without keeping their graphs.

    Args:
        num_parts: How many there will be. A single one stays as it is.

    Attributes:
        loss: Sum of the divided losses so far, without a graph.
    """

    def __init__(self, num_parts: int) -> None:
        self._is_single = num_parts == 1
        self._single: ClosureResult | None = None
        self._uncounted: Tensor | None = None
        self._extras: list[tuple[dict[str, Any], float, int]] = []
        self.loss: Tensor | None = None

    def add(self, output: ClosureResult, weight: float, size: int) -> None:
        """Add the result of one micro-batch."""
        if self._is_single:
            self._single = output
            return
        if output.loss is not None and weight:
            self.loss = output.loss if self.loss is None else self.loss + output.loss
        elif output.loss is not None:
            self._uncounted = output.loss
        if output.extra:
            self._extras.append((detached(output.extra), weight, size))

    def merged(self, factor: float) -> ClosureResult:
        """The result of the whole batch.

        Args:
            factor: From the sum of the divided losses to the loss Lightning reports: the mean over this rank's batch,
                divided by `accumulate_grad_batches`.
        """
        if self._single is not None:
            if factor != 1.0 and self._single.loss is not None:
                self._single.loss = self._single.loss * factor
            return self._single
        loss = self.loss if self.loss is not None else self._uncounted
        result = ClosureResult(loss if loss is None or factor == 1.0 else loss * factor)
        if self._extras:
            result.extra = merge(
                [extra for extra, _, _ in self._extras],
                [w for _, w, _ in self._extras],
                [size for _, _, size in self._extras],
            )
        return result


def merge(values: list[Any], weights: list[float], sizes: list[int]) -> Any:
    """Merge equal structures.

    Scalars become their weighted mean, tensors of samples follow one behind the other, the rest becomes a list.

    Args:
        values: One per micro-batch.
        weights: What each micro-batch counts.
        sizes: Samples of each.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Tensor):
        return _merge_tensors(values, weights, sizes)
    if isinstance(first, Mapping):
        return {key: merge([value[key] for value in values], weights, sizes) for key in first}
    if isinstance(first, tuple):
        columns = [merge(list(column), weights, sizes) for column in zip(*values, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [item for value in values for item in value]
    return None if first is None else values


def _merge_tensors(values: list[Tensor], weights: list[float], sizes: list[int]) -> Any:
    if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
        same_shape = len({value.shape[1:] for value in values}) == 1
        return torch.cat(values) if same_shape else values
    if any(value.ndim for value in values):
        return values
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in kept)
    return sum(value * (weight / total) for value, weight in kept) if total else values[0]


def detached(value: Any) -> Any:
    """The same structure without graphs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(detached(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value

"""Values logged by the micro-batches of one step, held back and logged once for the whole batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
    torch.sum: torch.sum,
    sum: torch.sum,
    torch.max: torch.max,
    max: torch.max,
    torch.min: torch.min,
    min: torch.min,
}


@dataclass
class _Record:
    """One name, logged once by every micro-batch."""

    arguments: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)


class StepLogs:
    """Stand in for a `_ResultCollection.log` while micro-batches run.

    Nothing reaches Lightning before `commit`: a failed attempt leaves no trace, `sync_dist=True` reduces once a step and
    never between a failure and its discovery. Means are weighted by the `batch_size` passed to `self.log`, otherwise as
    the loss is; values of micro-batches without weight (all labels masked) are left out.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], _Record] = {}
        self.weight = 1.0

    def clear(self) -> None:
        """Forget what was logged."""
        self._records.clear()

    @contextmanager
    def capture(self, results: Any) -> Iterator[None]:
        """Receive what is logged to a result collection of Lightning."""
        results.log = self._record
        try:
            yield
        finally:
            del results.log

    def commit(self, results: Any) -> None:
        """Log every name once, with its value over the whole batch."""
        records, self._records = self._records, {}
        for (fx, name), record in records.items():
            results.log(fx, name, _combine(record), **record.arguments)

    def metrics_on_step(self) -> set[int]:
        """Ids of the metric objects that were logged with `on_step=True`."""
        return {
            id(record.values[-1])
            for record in self._records.values()
            if isinstance(record.values[-1], Metric) and record.arguments.get("on_step")
        }

    def _record(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        batch_size = arguments.get("batch_size")
        record = self._records.get((fx, name))
        if record is None:
            record = self._records[fx, name] = _Record(arguments)
        # The clone is taken because what is logged may be changed in place by the next micro-batch.
        record.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        record.weights.append(self.weight if batch_size is None else float(batch_size))
        if batch_size is not None:
            record.batch_sizes.append(batch_size)
            record.arguments["batch_size"] = sum(record.batch_sizes)


def _combine(record: _Record) -> Any:
    values, weights = record.values, record.weights
    if len(values) == 1 or isinstance(values[-1], Metric):
        return values[-1]
    kept = [(value, weight) for value, weight in zip(values, weights) if weight] or list(zip(values, weights))
    reduce = _REDUCTIONS.get(record.arguments.get("reduce_fx", "mean"))
    if reduce is not None:
        return reduce(torch.stack([value for value, _ in kept]))
    total = sum(weight for _, weight in kept)
    if not total:
        return kept[-1][0]
    return sum(value * (weight / total) for value, weight in kept)

"""Merge what the micro-batches of a batch return, log and add to metrics, as if the whole batch had run at once.

`StepOutputs` collects all three during an attempt. Nothing reaches Lightning before the attempt has succeeded on all
ranks and `commit` is called.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torchmetrics import Metric


def merge(values: list[Any], weights: list[float], sizes: list[int]) -> Any:
    """Merge values of equal structure.

    Scalars become their weighted mean, tensors of samples are concatenated, everything else becomes a list.

    Args:
        values: Value of each micro-batch.
        weights: Weight of each micro-batch.
        sizes: Number of samples of each micro-batch.
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
    """Return the same structure without graphs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(detached(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value


# --- logged values --------------------------------------------------------------------------------------------------

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", torch.sum, sum), torch.add),
    **dict.fromkeys(("max", torch.max, max), torch.maximum),
    **dict.fromkeys(("min", torch.min, min), torch.minimum),
}


@dataclass
class _Record:
    """One name, logged once by every micro-batch. Values are combined as they come, so that few tensors stay alive."""

    arguments: dict[str, Any]
    last: Any = None
    combined: Tensor | None = None
    weight: float = 0.0
    count: int = 0

    def add(self, value: Any, weight: float) -> None:
        """Add the value of one micro-batch; one without weight (all labels masked) is left out."""
        self.count += 1
        self.last = value
        if not weight or not isinstance(value, Tensor):
            return
        reduce = _REDUCTIONS.get(self.arguments.get("reduce_fx", "mean"))
        if reduce is not None:
            self.combined = value if self.combined is None else reduce(self.combined, value)
        else:
            self.combined = value * weight if self.combined is None else self.combined + value * weight
            self.weight += weight

    def value(self) -> Any:
        """The value over the whole batch."""
        if self.count == 1 or self.combined is None:
            return self.last
        return self.combined / self.weight if self.weight else self.combined


class StepLogs:
    """Replaces `_ResultCollection.log` while micro-batches run.

    Nothing reaches Lightning before `commit`: a failed attempt logs nothing, and `sync_dist=True` reduces once per
    step and never between a failure and its discovery. Means are weighted by the `batch_size` passed to `self.log`,
    otherwise like the loss; values of micro-batches without weight (all labels masked) are left out.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], _Record] = {}
        self.weight = 1.0

    def __bool__(self) -> bool:
        return bool(self._records)

    def clear(self) -> None:
        """Forget what was logged."""
        self._records.clear()

    @contextmanager
    def capture(self, results: Any) -> Iterator[None]:
        """Receive what is logged to a result collection of Lightning within the context."""
        results.log = self.record
        try:
            yield
        finally:
            del results.log

    def commit(self, results: Any) -> None:
        """Log every name once, with its value over the whole batch."""
        records, self._records = self._records, {}
        for (fx, name), record in records.items():
            results.log(fx, name, record.value(), **record.arguments)

    def metrics_on_step(self) -> set[int]:
        """Ids of the metric objects that were logged with `on_step=True`."""
        return {
            id(record.last)
            for record in self._records.values()
            if isinstance(record.last, Metric) and record.arguments.get("on_step")
        }

    def record(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Record a value in place of `_ResultCollection.log`."""
        batch_size = arguments.get("batch_size")
        record = self._records.get((fx, name))
        if record is None:
            record = self._records[fx, name] = _Record(arguments)
        # Cloned because the next micro-batch may change a logged tensor in place.
        value = value.detach().clone() if isinstance(value, Tensor) else value
        record.add(value, self.weight if batch_size is None else float(batch_size))
        if batch_size is not None and record.count > 1:
            record.arguments["batch_size"] += batch_size


# --- metrics --------------------------------------------------------------------------------------------------------


class StepMetrics:
    """Keeps the metrics of a module exact: every sample counts once, and step values are over the whole batch.

    `metric(preds, target)` returns, and `self.log(name, metric, on_step=True)` logs, the value over the last call,
    which is one micro-batch. A second copy of each metric so logged sees all micro-batches of a step and supplies the
    value.

    Args:
        module: The module with the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._shadows: dict[int, Metric] = {}
        self._handles: list[Any] = []
        self._on_step: set[int] | None = None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def begin(self) -> None:
        """Start a step of several micro-batches."""
        for shadow in self._shadows.values():
            shadow.reset()
        self._handles = [
            metric.register_forward_hook(self._observe, with_kwargs=True)
            for metric in self._metrics
            if self._on_step is None or id(metric) in self._on_step
        ]

    def end(self) -> None:
        """End the step, or a failed attempt of it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def finish(self, logged_on_step: set[int]) -> None:
        """Set the step value of the metrics that are logged with `on_step=True` to that of the whole batch."""
        if logged_on_step or self._on_step is not None:
            self._on_step = logged_on_step | (self._on_step or set())
        for metric in self._metrics:
            if id(metric) in logged_on_step and id(metric) in self._shadows:
                metric._forward_cache = self._shadows[id(metric)].compute()

    def _observe(self, metric: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        shadow = self._shadows.get(id(metric))
        if shadow is None:
            assert isinstance(metric, Metric)
            shadow = self._shadows[id(metric)] = metric.clone()
            shadow._forward_hooks.clear()
            shadow._forward_hooks_with_kwargs.clear()
            shadow.reset()
        with torch.no_grad():
            shadow.update(*args, **kwargs)


# --- all three ------------------------------------------------------------------------------------------------------


class StepOutputs:
    """Collects what the micro-batches of a batch produce: `begin`, `add` each, `end`, then `merged`, then `commit`.

    Graphs are not kept. The result of a single micro-batch stays as it is.

    Args:
        module: The module in training.
        results: Lightning's collection that `self.log` writes to.

    Attributes:
        logs: Logged values; set its `weight` before each micro-batch.
        loss: Sum of the divided losses since `begin`, without a graph; None before the first of several.
    """

    def __init__(self, module: nn.Module, results: Any) -> None:
        self._results = results
        self.logs = StepLogs()
        self._metrics = StepMetrics(module)
        self._observes_metrics = False
        self._begin_merging(1)

    def begin(self, num_parts: int) -> None:
        """Start a batch, which will be run in a number of parts."""
        self._begin_merging(num_parts)
        self._observes_metrics = num_parts > 1 and bool(self._metrics)
        if self._observes_metrics:
            self._metrics.begin()
        self._results.log = self.logs.record

    def _begin_merging(self, num_parts: int) -> None:
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

    def end(self) -> None:
        """Receive no more logs and metrics, after the last micro-batch or a failure."""
        del self._results.log
        if self._observes_metrics:
            self._metrics.end()

    def merged(self, factor: float) -> ClosureResult:
        """Return the result of the whole batch.

        Args:
            factor: Factor from the sum of the divided losses to the loss that Lightning reports: the mean over this
                rank's batch, divided by `accumulate_grad_batches`.
        """
        if self._observes_metrics:
            self._metrics.finish(self.logs.metrics_on_step())
        single, extras, loss = self._single, self._extras, self.loss if self.loss is not None else self._uncounted
        self._begin_merging(1)  # the results of a batch are not kept while the next runs
        if single is not None:
            if factor != 1.0 and single.loss is not None:
                single.loss = single.loss * factor
            return single
        result = ClosureResult(loss if loss is None or factor == 1.0 else loss * factor)
        if extras:
            values, weights, sizes = (list(column) for column in zip(*extras, strict=True))
            result.extra = merge(values, weights, sizes)
        return result

    def clear(self) -> None:
        """Forget what was logged and returned since the last `commit`."""
        self.logs.clear()
        self._begin_merging(1)

    def commit(self) -> None:
        """Log every name once, with its value over the whole batch."""
        self.logs.commit(self._results)

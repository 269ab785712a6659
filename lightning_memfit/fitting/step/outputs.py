"""Merge what the micro-batches of a batch return, log and add to metrics, as if the whole batch had run at once.

`StepOutputs` collects all three during an attempt. Nothing reaches Lightning before the attempt has succeeded on all
ranks and `commit` is called.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_memfit.fitting.recovery.step_state import metric_collections
from lightning_memfit.fitting.step.log_rules import LogCall, LogRules
from lightning_memfit.fitting.step.split import is_batched

_RETURNED = "training_step returns"
"""Stands for the hook that logged."""


def merge(
    values: list[Any],
    weights: list[float],
    sizes: list[int],
) -> Any:
    """Merge values of equal structure.

    Scalars become their weighted mean, whole numbers add up, tensors of samples are concatenated, everything else
    becomes a list.

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
        merged = {}
        for key in dict.fromkeys(key for value in values for key in value):
            rows = [row for row in zip(values, weights, sizes, strict=True) if key in row[0]]
            mine, of_loss, of_samples = ([*column] for column in zip(*rows, strict=True))
            merged[key] = merge([value[key] for value in mine], of_loss, of_samples)
        return merged if is_batched(first, sizes[0]) else _of_kind(first, merged)
    if isinstance(first, tuple):
        columns = [merge(list(column), weights, sizes) for column in zip(*values, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, list):
        return [item for value in values for item in value]
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return sum(values) if all(isinstance(value, int) for value in values) else _mean(values, weights)
    is_one = isinstance(first, (str, bool)) and all(value == first for value in values)
    return first if is_one or first is None else values


def _merge_tensors(values: list[Tensor], weights: list[float], sizes: list[int]) -> Any:
    if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
        same_shape = len({value.shape[1:] for value in values}) == 1
        return torch.cat(values) if same_shape else values
    if any(value.ndim for value in values):
        return values
    if not (first := values[0]).is_floating_point() and not first.is_complex():
        return values if first.dtype == torch.bool else sum(values)
    return _mean(values, weights)


def _mean(values: list[Any], weights: list[float]) -> Any:
    """Return the weighted mean; the loss of a part of no weight may be 0/0."""
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in kept)
    return sum(value * (weight / total) for value, weight in kept) if total else values[0]


def _of_kind(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return items in a mapping like another, such as a `ModelOutput`, of which hooks read attributes.

    They stay in a dict where a copy of the other one can't take them.
    """
    if type(value) is dict or not isinstance(value, MutableMapping):
        return items
    try:
        found = copy(value)
        for key, item in items.items():
            found[key] = item
    except Exception:  # it refuses what is not as its own items are, such as other numbers of rows
        return items
    return found


def detached(value: Any) -> Any:
    """Return the same structure without graphs."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return _of_kind(value, {key: detached(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(detached(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value


def _numbers_in(extra: Any, path: str = "outputs") -> Iterator[tuple[str, Any]]:
    """Yield the numbers in what a step returns beside its loss, by their path."""
    if isinstance(extra, Mapping):
        for key, item in extra.items():
            yield from _numbers_in(item, f"{path}[{key!r}]")
    elif isinstance(extra, tuple):
        for index, item in enumerate(extra):
            yield from _numbers_in(item, f"{path}[{index}]")
    elif isinstance(extra, Tensor):
        if not extra.ndim and not extra.is_complex() and extra.dtype != torch.bool:
            yield path, extra
    elif isinstance(extra, (int, float)) and not isinstance(extra, bool):
        yield path, extra


def returned(extra: Any, part: int = 0) -> list[LogCall]:
    """Return the numbers that a step returns as if it logged each by its path.

    Args:
        extra: What the step returns beside its loss.
        part: Index of the micro-batch.
    """
    return [LogCall(part, _RETURNED, path, _as_logged(value), {}) for path, value in _numbers_in(extra)]


def _as_logged(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    is_exact = value.is_floating_point() or value.device.type == "mps"  # which has no float64
    return value.detach() if is_exact else value.double()


# --- logged values --------------------------------------------------------------------------------------------------


class StepLogs:
    """Replaces `_ResultCollection.log` while micro-batches run.

    Nothing reaches Lightning before `commit`: a failed attempt logs nothing, and `sync_dist=True` reduces once per
    step and never between a failure and its discovery. What several micro-batches logged becomes, by the rules, what
    the whole batch would have logged. The `batch_size` passed to `self.log`, the value's weight in the epoch, adds up.

    Args:
        rules: How values of micro-batches make that of the batch. By default nothing has been learned about any name.
    """

    def __init__(self, rules: LogRules | None = None) -> None:
        self.rules = LogRules() if rules is None else rules
        self._calls: list[tuple[int, str, str, Any, dict[str, Any]]] = []
        self._parts: list[tuple[float, int]] = []
        self._registered: dict[str, tuple[Any, dict[str, Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def calls(self) -> list[LogCall]:
        """What was logged since the last `commit`, in order."""
        return [LogCall(*call) for call in self._calls]

    def clear(self) -> None:
        """Forget what was logged."""
        self._calls = []
        self._parts = []

    def begin_part(self, loss_weight: float, num_samples: int) -> None:
        """Start a micro-batch; needed if there are several."""
        self._parts.append((loss_weight, num_samples))

    @contextmanager
    def capture(self, results: Any) -> Iterator[None]:
        """Receive what is logged to a result collection of Lightning within the context."""
        before = vars(results).get("log")
        results.log = self.record
        try:
            yield
        finally:
            if before is None:
                del results.log
            else:
                results.log = before

    def record(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Record a value in place of `_ResultCollection.log`. `LightningModule.log` has cloned and detached it."""
        self._calls.append((len(self._parts) - 1, fx, name, value, arguments))

    def fold(self) -> None:
        """Replace what several micro-batches logged by what the whole batch would have logged."""
        calls, parts = self._calls, self._parts
        self._parts = []
        if calls and len(parts) > 1:
            self._calls = self.rules.merge([LogCall(*call) for call in calls], parts)  # type: ignore[assignment]

    def commit(self, results: Any) -> None:
        """Log to Lightning what the whole batch would have logged."""
        if not self._calls:
            self._parts = []
            return
        self.fold()
        calls, self._calls = self._calls, []
        for _, fx, name, value, arguments in calls:
            self._log(results, fx, name, value, arguments)

    def _log(self, results: Any, fx: str, name: str, value: Any, arguments: dict[str, Any]) -> None:
        """Do what `results.log` does; if nothing but value and `batch_size` is new, a tenth of it.

        Lightning compares the arguments by building all that it keeps about a name, and walks over that to move it to
        the value's device. Both take longer than the rest of a small step.
        """
        key = f"{fx}.{name}"
        batch_size = arguments.pop("batch_size", None)
        entry, with_arguments = self._registered.get(key, (None, None))
        if (
            entry is not None
            and entry is results.get(key)
            and arguments == with_arguments
            and entry.value.device == value.device
            and results.dataloader_idx is None
        ):
            results.update_metrics(key, value, results._extract_batch_size(entry, batch_size, entry.meta))
            return
        results.log(fx, name, value, batch_size=batch_size, **arguments)
        if isinstance(value, Tensor) and results.dataloader_idx is None:
            self._registered[key] = results[key], arguments

    def metrics_on_step(self) -> set[int]:
        """Ids of the metric objects that were logged with `on_step=True`."""
        return {
            id(value)
            for _, _, _, value, arguments in self._calls
            if isinstance(value, Metric) and arguments.get("on_step")
        }


# --- metrics --------------------------------------------------------------------------------------------------------


class StepMetrics:
    """Keeps the metrics of a module exact: every sample counts once, and step values are over the whole batch.

    `metric(preds, target)` returns, and `self.log(name, metric, on_step=True)` logs, the value over the last call,
    which is one micro-batch. A second copy of each metric so logged sees all micro-batches of a step and supplies the
    value.

    A `MetricCollection` lets metrics share one state from its first update on if theirs are equal then. Those of a few
    samples may be so by chance, so that it compares them after the whole batch.

    Args:
        module: The module with the metrics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._collections = metric_collections(module)
        self._ungrouped: list[MetricCollection] = []
        self._to_group: list[MetricCollection] = []
        self._shadows: dict[int, Metric] = {}
        self._handles: list[Any] = []
        self._on_step: set[int] | None = None

    def begin(self) -> None:
        """Start a step of several micro-batches."""
        for shadow in self._shadows.values():
            shadow.reset()
        self._handles = [
            metric.register_forward_hook(self._observe, with_kwargs=True)
            for metric in self._metrics
            if self._on_step is None or id(metric) in self._on_step
        ]
        self._to_group = []
        self._ungrouped = [collection for collection in self._collections if not collection._groups_checked]
        for collection in self._ungrouped:
            vars(collection)["_merge_compute_groups"] = _do_nothing

    def end(self) -> None:
        """End the step, or a failed attempt of it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._to_group = [collection for collection in self._ungrouped if collection._groups_checked]
        for collection in self._ungrouped:
            del vars(collection)["_merge_compute_groups"]
            collection._groups_checked = False
        self._ungrouped = []

    def finish(self, logged_on_step: set[int]) -> None:
        """Set the step value of the metrics that are logged with `on_step=True` to that of the whole batch."""
        for collection in self._to_group:  # as the first update does with the samples that it gets
            collection._merge_compute_groups()
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()
            collection._groups_checked = True
        self._to_group = []
        if logged_on_step or self._on_step is not None:
            self._on_step = logged_on_step | (self._on_step or set())
            self._shadows = {key: shadow for key, shadow in self._shadows.items() if key in self._on_step}
        for metric in self._metrics:
            is_kept = metric._forward_cache is not None  # `Running` keeps none, so that nothing of it is logged
            if is_kept and id(metric) in logged_on_step and id(metric) in self._shadows:
                metric._forward_cache = self._shadows[id(metric)].compute()
        for shadow in self._shadows.values():
            shadow.reset()  # lists of predictions are not kept while the next batch runs

    def _observe(self, metric: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        shadow = self._shadows.get(id(metric))
        if shadow is None:
            assert isinstance(metric, Metric)
            shadow = self._shadows[id(metric)] = self._copy(metric)
        with torch.no_grad():
            shadow.update(*detached(args), **detached(kwargs))

    def _copy(self, metric: Metric) -> Metric:
        """Return an empty copy without our hooks, which shares the parameters of a metric that is a network."""
        memo: dict[int, Any] = {id(self): self, **{id(parameter): parameter for parameter in metric.parameters()}}
        for child in metric.modules():
            for state in child._defaults if isinstance(child, Metric) else ():
                if isinstance(getattr(child, state), list):  # may hold an epoch's predictions
                    memo[id(getattr(child, state))] = []
        with _DetachedCopies():
            copy: Metric = deepcopy(metric, memo)
        for child in copy.modules():
            child._forward_hooks.clear()
            child._forward_hooks_with_kwargs.clear()
            if isinstance(child, Metric):
                # As `forward` does: a value over the batch is this rank's own unless the metric asks for more. Ranks
                # must not wait for each other in an attempt.
                child._to_sync = child.dist_sync_on_step
        copy.reset()
        return copy


def _do_nothing() -> None:
    """Replace the comparison of metrics."""


class _DetachedCopies(TorchFunctionMode):
    """Copies tensors that belong to a graph, which `deepcopy` refuses, without it."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


# --- all three ------------------------------------------------------------------------------------------------------


class StepOutputs:
    """Collects what the micro-batches of a batch produce: `begin`, `add` each, `end`, then `merged`, then `commit`.

    Graphs are not kept. The result of a single micro-batch stays as it is: `begin`, `end`, `commit` is all it needs.

    Args:
        module: The module in training.
        results: Lightning's collection that `self.log` writes to.
        rules: How logged values of micro-batches make that of the batch.

    Attributes:
        logs: Logged values; call its `begin_part` before each micro-batch.
        loss: Sum of the divided losses since `begin`, without a graph; None before the first of several.
    """

    def __init__(self, module: nn.Module, results: Any, rules: LogRules | None = None) -> None:
        self._results = results
        self.logs = StepLogs(rules)
        self._metrics = StepMetrics(module)
        self._is_single = True
        self._uncounted: Tensor | None = None
        self._extras: list[tuple[dict[str, Any], float, int]] = []
        self.loss: Tensor | None = None

    def begin(self, num_parts: int) -> None:
        """Start a batch, which will be run in a number of parts."""
        self._is_single = num_parts == 1
        if not self._is_single:
            self._drop()
            self._metrics.begin()
        self._results.log = self.logs.record

    def _drop(self) -> None:
        """Forget the results of micro-batches, whose tensors should not be kept while the next batch runs."""
        self._uncounted, self._extras, self.loss = None, [], None

    def add(self, output: ClosureResult, weight: float, size: int) -> None:
        """Add the result of one micro-batch of several."""
        if output.loss is not None and weight:
            self.loss = output.loss if self.loss is None else self.loss + output.loss
        elif output.loss is not None:
            self._uncounted = output.loss
        if output.extra:
            self._extras.append((detached(output.extra), weight, size))

    def end(self) -> None:
        """Receive no more logs and metrics, after the last micro-batch or a failure."""
        del self._results.log
        if not self._is_single:
            self._metrics.end()

    @property
    def calls(self) -> list[LogCall]:
        """What was logged since `begin`, and the numbers that were returned beside the loss, by their path."""
        return [*self.logs.calls, *(c for part, (extra, *_) in enumerate(self._extras) for c in returned(extra, part))]

    def merged(self, factor: float) -> ClosureResult:
        """Return the result of the whole batch from those of several micro-batches.

        Args:
            factor: Factor from the sum of the divided losses to the loss that Lightning reports: the mean over this
                rank's batch, divided by `accumulate_grad_batches`.
        """
        self._metrics.finish(self.logs.metrics_on_step())
        self.logs.fold()
        loss = self.loss if self.loss is not None else self._uncounted
        result = ClosureResult(loss if loss is None or factor == 1.0 else loss * factor)
        if self._extras:
            values, weights, sizes = (list(column) for column in zip(*self._extras, strict=True))
            result.extra = merge(values, weights, sizes)
        self._drop()
        return result

    def clear(self) -> None:
        """Forget what was logged and returned since the last `commit`."""
        self.logs.clear()
        self._drop()

    def commit(self) -> None:
        """Log what the whole batch would have logged."""
        self.logs.commit(self._results)

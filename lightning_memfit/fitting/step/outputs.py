"""Merge what the micro-batches of a batch return and log, as if the whole batch had run at once.

`StepOutputs` collects both during an attempt. Nothing reaches Lightning before the attempt has succeeded on all ranks
and `commit` is called. Metric objects need no merging: their states accumulate.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NamedTuple

import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_memfit.fitting.recovery.step_state import metric_collections

# --- returned values ------------------------------------------------------------------------------------------------


def merge(values: list[Any], weights: list[float], sizes: list[int]) -> Any:
    """Merge values of equal structure.

    Scalars become their weighted mean, whole numbers add up, tensors of samples are concatenated, mappings become
    dicts, everything else becomes a list.
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
        return merged
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


# --- logged values --------------------------------------------------------------------------------------------------


class LogCall(NamedTuple):
    """One call of `self.log` while a micro-batch ran: a detached scalar or a metric object, and other arguments."""

    part: int
    fx: str
    name: str
    value: Any
    arguments: dict[str, Any]


_REDUCTIONS = {
    **dict.fromkeys(("sum", torch.sum, sum), "sum"),
    **dict.fromkeys(("max", torch.max, max), "max"),
    **dict.fromkeys(("min", torch.min, min), "min"),
}


def merge_logs(calls: Sequence[LogCall], parts: Sequence[tuple[float, int]]) -> list[LogCall]:
    """Return the calls that the whole batch would have made.

    As `reduce_fx` says sums add up and extremes stay. Everything else is a mean, weighted by the `batch_size` that was
    passed, or as the loss is. The `batch_size`, the value's weight in the epoch, adds up.
    """
    rows: dict[tuple[str, str, int], list[LogCall]] = {}
    for key, call in _numbered(calls):
        rows.setdefault(key, []).append(call)
    return [_merge_row(row, parts) for row in rows.values()]


def _numbered(calls: Sequence[LogCall]) -> Iterator[tuple[tuple[str, str, int], LogCall]]:
    """Yield calls by hook, name, and how often their micro-batch has logged that name before."""
    seen: dict[tuple[int, str, str], int] = {}
    for call in calls:
        number = seen[call[:3]] = seen.get(call[:3], -1) + 1
        yield (call.fx, call.name, number), call


def _merge_row(calls: list[LogCall], parts: Sequence[tuple[float, int]]) -> LogCall:
    first, last = calls[0], calls[-1]
    sizes = [call.arguments.get("batch_size") for call in calls]
    arguments = first.arguments
    if len(calls) > 1 and None not in sizes:
        arguments = {**arguments, "batch_size": sum(sizes)}
    if len(calls) == 1 or not all(isinstance(call.value, Tensor) for call in calls):
        return last._replace(part=0, arguments=arguments)
    reduce_fx = arguments.get("reduce_fx", "mean")
    kind = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx, "mean")
    # The loss of a micro-batch whose labels are all masked is 0/0; other values of it count.
    counted = [call for call in calls if parts[call.part][0] or not call.value.isnan()] or calls
    weights = [float(parts[call.part][0]) for call in counted]
    of_calls = [call.arguments.get("batch_size") for call in counted]
    # One that is the number of samples, or the same whatever that is, was not chosen for the value: Lightning asks for
    # it with any.
    is_chosen = any(size not in (None, parts[call.part][1]) for call, size in zip(counted, of_calls, strict=True))
    if is_chosen and len(set(of_calls)) > 1:
        weights = [float(w if size is None else size) for w, size in zip(weights, of_calls, strict=True)]
    value = _reduced(kind, [call.value for call in counted], weights)
    return first._replace(part=0, value=value, arguments=arguments)


def _reduced(kind: str, values: list[Tensor], weights: list[float]) -> Tensor:
    dtype = torch.get_default_dtype()
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    stacked = torch.stack([value.reshape(()).to(values[0].device, dtype) for value in values])
    if kind != "mean":
        return stacked.sum() if kind == "sum" else stacked.max() if kind == "max" else stacked.min()
    if any(weights) and not all(weights):
        stacked, weights = stacked[[bool(weight) for weight in weights]], [weight for weight in weights if weight]
    shares = torch.tensor(weights if any(weights) else [1.0] * len(weights), dtype=dtype)
    shares = (shares / shares.sum()).to(stacked.device, non_blocking=True)
    # Rounding must not carry a mean out of the range of its values: constants stay what they are.
    return (stacked * shares).sum().clamp(stacked.min(), stacked.max())


def differing(
    whole: Sequence[LogCall], calls: Sequence[LogCall], parts: Sequence[tuple[float, int]], tolerance: float
) -> list[str]:
    """Return the names of logged values that micro-batches don't make those of the whole batch.

    Of metric objects those that log the value of a step: it is that of the last micro-batch.
    """
    ours, theirs = dict(_numbered(whole)), dict(_numbered(merge_logs(calls, parts)))
    names = [call.name for call in whole if isinstance(call.value, Metric) and call.arguments.get("on_step")]
    for key in dict.fromkeys((*ours, *theirs)):
        largest = max((_size(call) for call in calls if call.name == key[1]), default=0.0)
        if not _are_close(ours.get(key), theirs.get(key), tolerance, largest):
            names.append(key[1])
    return list(dict.fromkeys(names))


def _size(call: LogCall) -> float:
    value = 0.0 if isinstance(call.value, Metric) else abs(float(call.value))
    return value if isfinite(value) else 0.0


def _are_close(one: LogCall | None, other: LogCall | None, tolerance: float, scale: float) -> bool:
    if one is None or other is None or isinstance(one.value, Metric):
        return one is not None and other is not None
    a, b = float(one.value), float(other.value)
    return not isfinite(a) or abs(a - b) <= tolerance * max(abs(a), scale) + 1e-12


class StepLogs:
    """Replaces `_ResultCollection.log` while micro-batches run.

    Nothing reaches Lightning before `commit`: a failed attempt logs nothing, and `sync_dist=True` reduces once per
    step and never between a failure and its discovery.
    """

    def __init__(self) -> None:
        self.calls: list[LogCall] = []
        self.parts: list[tuple[float, int]] = []
        self._registered: dict[str, tuple[Any, dict[str, Any]]] = {}

    def clear(self) -> None:
        """Forget what was logged."""
        self.calls = []
        self.parts = []

    def begin_part(self, loss_weight: float, num_samples: int) -> None:
        """Start a micro-batch; needed if there are several."""
        self.parts.append((loss_weight, num_samples))

    @contextmanager
    def capture(self, results: Any) -> Iterator[None]:
        """Receive what is logged to a result collection of Lightning within the context."""
        results.log = self.record
        try:
            yield
        finally:
            del results.log

    def record(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Record a value in place of `_ResultCollection.log`. `LightningModule.log` has cloned and detached it."""
        self.calls.append(LogCall(len(self.parts) - 1, fx, name, value, arguments))

    def commit(self, results: Any) -> None:
        """Log to Lightning what the whole batch would have logged."""
        calls, parts = self.calls, self.parts
        self.clear()
        if calls and len(parts) > 1:
            calls = merge_logs(calls, parts)
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


# --- metric objects -------------------------------------------------------------------------------------------------


class ComputeGroups:
    """Lets the `MetricCollection`s of a module compare the states of their metrics after a whole batch.

    A collection lets metrics share one state from its first update on if theirs are equal then. Those of the few
    samples of a micro-batch may be so by chance, and what the epoch computes would be wrong.
    """

    def __init__(self, module: nn.Module) -> None:
        self._collections = metric_collections(module)
        self._waiting: list[MetricCollection] = []
        self._updated: list[MetricCollection] = []

    def begin(self) -> None:
        """Start a step of several micro-batches."""
        self._waiting = [collection for collection in self._collections if not collection._groups_checked]
        for collection in self._waiting:
            vars(collection)["_merge_compute_groups"] = _do_nothing

    def end(self) -> None:
        """End the step, or a failed attempt of it."""
        self._updated = [collection for collection in self._waiting if collection._groups_checked]
        for collection in self._waiting:
            del vars(collection)["_merge_compute_groups"]
            collection._groups_checked = False
        self._waiting = []

    def compare(self) -> None:
        """Compare states after a whole batch, as the first update does with the samples that it gets."""
        for collection in self._updated:
            collection._merge_compute_groups()
            collection._state_is_copy = False
            collection._compute_groups_create_state_ref()
            collection._groups_checked = True
        self._updated = []


def _do_nothing() -> None:
    """Replace the comparison of metrics."""


# --- all of them ----------------------------------------------------------------------------------------------------


class StepOutputs:
    """Collects what the micro-batches of a batch produce: `begin`, `add` each, `end`, then `merged`, then `commit`.

    Graphs are not kept. The result of a single micro-batch stays as it is: `begin`, `end`, `commit` is all it needs.
    `results` is Lightning's collection that `self.log` writes to.
    """

    def __init__(self, module: nn.Module, results: Any) -> None:
        self._results = results
        self.logs = StepLogs()  # call its `begin_part` before each micro-batch
        self._groups = ComputeGroups(module)
        self._is_single = True
        self._uncounted: Tensor | None = None
        self._extras: list[tuple[dict[str, Any], float, int]] = []
        self.loss: Tensor | None = None  # sum of the divided losses since `begin`, without a graph

    def begin(self, num_parts: int) -> None:
        """Start a batch, which will be run in a number of parts."""
        self._is_single = num_parts == 1
        if not self._is_single:
            self._drop()
            self._groups.begin()
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
            self._extras.append((recursive_detach(output.extra), weight, size))

    def end(self) -> None:
        """Receive no more logs, after the last micro-batch or a failure."""
        del self._results.log
        if not self._is_single:
            self._groups.end()

    def merged(self, factor: float) -> ClosureResult:
        """Return the result of the whole batch from those of several micro-batches.

        The factor makes the sum of the divided losses what Lightning reports: the mean over this rank's batch, divided
        by `accumulate_grad_batches`.
        """
        self._groups.compare()
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

"""`LogRules`: how the values that micro-batches log under one name make the value of the whole batch.

As `reduce_fx` says: sums add up, extremes stay, and everything else is a mean, weighted as the loss is or by the
`batch_size` that was passed to `self.log`; a mean over samples or a sum, if the self-check shows that. What none of
these makes the whole's value of is named in one warning.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memfit.fitting.recovery.step_state import alike, hidden_metrics, reading_of

Key = tuple[str, str]
"""The hook that logged, and the name."""


class LogCall(NamedTuple):
    """One call of `self.log` while a micro-batch ran.

    Attributes:
        part: Index of the micro-batch.
        fx: Name of the hook that logged.
        name: The logged name.
        value: A detached scalar, or the metric object.
        arguments: The other arguments of `_ResultCollection.log`.
    """

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


_WAYS = ("mean", "mean over samples", "sum")


class LogRules:
    """Makes one logged value of those of micro-batches."""

    def __init__(self) -> None:
        self._ways: dict[Key, tuple[str, ...]] = {}
        self._with_constant_batch_size: set[Key] = set()
        self._logged_by_sample: set[Key] = set()
        self._warned: set[str] = set()

    def compare(
        self,
        whole: Sequence[LogCall],
        parts: Sequence[LogCall],
        weights: Sequence[tuple[float, int]],
        tolerance: float,
    ) -> None:
        """Compare what a pass over some samples logged with what parts of them did; name in a warning what differs.

        Args:
            whole: Logged by the samples at once.
            parts: Logged by the parts.
            weights: Loss weight and number of samples of each part.
            tolerance: Largest relative difference of equal values.
        """
        ours, theirs = _by_key(whole), _by_key(parts)
        for key, calls in theirs.items():
            sizes = {call.arguments.get("batch_size") for call in (*calls, *ours.get(key, ()))}
            if len(sizes) == 1 and None not in sizes and len(weights) > 1:
                self._with_constant_batch_size.add(key)
            if len(calls) == len(ours.get(key, ())) and len(calls) > 1:
                self._logged_by_sample.add(key)
        wrong = [
            key[1] for key in dict.fromkeys((*ours, *theirs)) if not self._learn(key, ours, theirs, weights, tolerance)
        ]
        if new := [name for name in dict.fromkeys(wrong) if name not in self._warned]:
            self._warned.update(new)
            rank_zero_warn(
                "With micro-batches some values that are logged or returned will not be those of the whole batch; "
                f"training is not affected: {', '.join(map(repr, new))}. They are means over the micro-batches. For "
                "exact values log a torchmetrics object, which sees every sample, or name the reduction: "
                '`self.log(..., reduce_fx="sum")`.'
            )

    def _learn(
        self,
        key: Key,
        ours: dict[Key, list[LogCall]],
        theirs: dict[Key, list[LogCall]],
        weights: Sequence[tuple[float, int]],
        tolerance: float,
    ) -> bool:
        """Keep the ways that make the whole's values of those of the parts; return whether there is one."""
        whole, parts = ours.get(key, []), theirs.get(key, [])
        scale = max(map(_size, parts), default=0.0)
        known = self._ways.get(key, _WAYS)
        right = []
        for way in known:
            self._ways[key] = (way,)
            if _agree(whole, self.merge(parts, weights), tolerance, scale):
                right.append(way)
        self._ways[key] = tuple(right) or known
        return bool(right)

    def merge(self, calls: Sequence[LogCall], parts: Sequence[tuple[float, int]]) -> list[LogCall]:
        """Return the calls that the whole batch would have made.

        Args:
            calls: Those of all micro-batches of a batch.
            parts: Loss weight and number of samples of each micro-batch.
        """
        merged: list[LogCall] = []
        for key, of_key in _by_key(calls).items():
            by_part: dict[int, list[LogCall]] = defaultdict(list)
            for call in of_key:
                by_part[call.part].append(call)
            if key in self._logged_by_sample:
                merged += of_key
                continue
            for index in range(max(map(len, by_part.values()))):
                rows = [found[index] for found in by_part.values() if len(found) > index]
                merged.append(self._merge_calls(key, rows, parts))
        return merged

    def _merge_calls(self, key: Key, calls: list[LogCall], parts: Sequence[tuple[float, int]]) -> LogCall:
        first, last = calls[0], calls[-1]
        sizes = [call.arguments.get("batch_size") for call in calls]
        arguments = first.arguments
        if len(calls) > 1 and None not in sizes and key not in self._with_constant_batch_size:
            arguments = {**arguments, "batch_size": sum(sizes)}
        if len(calls) == 1 or not all(isinstance(call.value, Tensor) for call in calls):
            return LogCall(last.part, *key, last.value, arguments)
        reduce_fx = arguments.get("reduce_fx", "mean")
        kind = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        kind = kind or self._ways.get(key, _WAYS)[0]
        # The loss of a micro-batch whose labels are all masked is 0/0; other values of it count.
        counted = [call for call in calls if parts[call.part][0] or not call.value.isnan()] or calls
        weights = [float(parts[call.part][kind == "mean over samples"]) for call in counted]
        of_calls = [call.arguments.get("batch_size") for call in counted]
        chosen = (size not in (None, parts[call.part][1]) for call, size in zip(counted, of_calls, strict=True))
        if kind == "mean" and any(chosen):
            # Chosen for the value; else Lightning asks for it with any.
            weights = [float(w if size is None else size) for w, size in zip(weights, of_calls, strict=True)]
        value = _reduced(kind, [call.value for call in counted], weights)
        return LogCall(first.part, *key, value, arguments)


def _reduced(kind: str, values: list[Tensor], weights: list[float]) -> Tensor:
    dtype = torch.get_default_dtype()
    for value in values:
        dtype = torch.promote_types(dtype, value.dtype)
    stacked = torch.stack([value.reshape(()).to(values[0].device, dtype) for value in values])
    if not kind.startswith("mean"):
        return stacked.sum() if kind == "sum" else stacked.max() if kind == "max" else stacked.min()
    if any(weights) and not all(weights):
        stacked, weights = stacked[[bool(weight) for weight in weights]], [weight for weight in weights if weight]
    shares = torch.tensor(weights if any(weights) else [1.0] * len(weights), dtype=dtype)
    shares = (shares / shares.sum()).to(stacked.device, non_blocking=True)
    # Rounding must not carry a mean out of the range of its values: constants stay what they are.
    return (stacked * shares).sum().clamp(stacked.min(), stacked.max())


def _by_key(calls: Iterable[LogCall]) -> dict[Key, list[LogCall]]:
    found: dict[Key, list[LogCall]] = {}
    for call in calls:
        found.setdefault((call.fx, call.name), []).append(call)
    return found


def _size(call: LogCall) -> float:
    value = 0.0 if isinstance(call.value, Metric) else abs(float(call.value))
    return value if isfinite(value) else 0.0


def _agree(calls: list[LogCall], others: list[LogCall], tolerance: float, scale: float) -> bool:
    if len(calls) != len(others):
        return False
    for one, other in zip(calls, others, strict=True):
        if isinstance(one.value, Metric) or isinstance(other.value, Metric):
            continue
        a, b = float(one.value), float(other.value)
        if not (abs(a - b) <= tolerance * max(abs(a), scale) + 1e-12 or not isfinite(a)):
            return False
    return True


# --- metric objects -------------------------------------------------------------------------------------------------


def metric_values(module: nn.Module) -> dict[str, Any]:
    """Return what every updated metric of a module would compute now, on this rank alone; the metrics stay as they are.

    Those that can't compute yet are left out.
    """
    values: dict[str, Any] = {}
    for name, metric in (*module.named_modules(), *hidden_metrics(module)):
        if not isinstance(metric, Metric) or not metric.update_called:
            continue
        before = metric._computed, metric._to_sync
        try:
            metric._computed, metric._to_sync = None, False
            with torch.no_grad():
                values[name] = metric.compute()
        except Exception:  # nosec B112  # too few samples for this metric: nothing to compare
            continue
        finally:
            metric._computed, metric._to_sync = before
    return values


def check_metrics(whole: dict[str, Any], parts: dict[str, Any], tolerance: float = 1e-4) -> list[str]:
    """Warn of metric objects that give another value when a batch reaches them in parts.

    Args:
        whole: `metric_values` after some samples at once.
        parts: `metric_values` after the same samples in parts, from the same start.
        tolerance: Largest relative difference of equal values.

    Returns:
        The names of these metrics.
    """
    pairs = {name: (reading_of(value), reading_of(parts[name])) for name, value in whole.items() if name in parts}
    names = [name for name, (one, other) in pairs.items() if not alike(one, other, tolerance)]
    if names:
        rank_zero_warn(
            "With micro-batches these metrics will not be those of the whole batch: "
            f"{', '.join(map(repr, names))}. They weigh their updates alike, whatever the number of samples or tokens. "
            "Pass it, as in `MeanMetric.update(loss, "
            "weight=num_tokens)`, or update them with samples instead of means."
        )
    return names

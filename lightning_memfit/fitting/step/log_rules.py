"""`LogRules`: how the values that micro-batches log under one name make the value of the whole batch.

A name does not tell whether it stands for a mean over tokens, a count or a perplexity. So a few samples are run whole
and in parts, and the folds below that reproduce the whole's value from those of the parts stay possible for the name.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_memfit.fitting.recovery.rollback import MetricStates
from lightning_memfit.fitting.recovery.step_state import hidden_metrics

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


class Share(NamedTuple):
    """What one micro-batch contributes to a logged value.

    Attributes:
        value: The value that it logged.
        loss_weight: The number that its loss is a mean over: unmasked tokens or samples.
        num_samples: Its samples.
        batch_size: The `batch_size` passed to `self.log`; None if there was none.
    """

    value: Tensor
    loss_weight: float
    num_samples: int
    batch_size: float | None = None


# --- folds ----------------------------------------------------------------------------------------------------------


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    # Rounding must not carry a mean out of the range of its values: constants stay what they are.
    return ((values * weights).sum() / weights.sum()).clamp(values.min(), values.max())


_EXTREMES = ("max", "min")
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "sum": lambda values, _: values.sum(),
    "max": lambda values, _: values.max(),
    "min": lambda values, _: values.min(),
    "geometric mean": lambda values, weights: _mean(values.log(), weights).exp(),
    "root mean square": lambda values, weights: _mean(values.square(), weights).sqrt(),
    "root of the sum of squares": lambda values, _: values.square().sum().sqrt(),
}
_WEIGHED = ("mean", "geometric mean", "root mean square")
_PROOFS_OF_RARE, _PROOFS_OF_EXTREMES = 2, 4
_ALWAYS = 32
"""Uses of a name at which its possible folds are compared; after that at the 64th, 128th, 256th, ..."""
_BY_LOSS, _BY_SAMPLES, _BY_BATCH_SIZE = "loss weight", "samples", "batch_size"


class Fold(NamedTuple):
    """A way to make one value of several: the kind of fold, and what it weighs by, if anything."""

    kind: str
    by: str = ""

    def __call__(self, shares: Sequence[Share]) -> Tensor:
        """Return the value of all micro-batches together, on the device of the first, as a floating point number."""
        # The loss of a micro-batch whose labels are all masked is 0/0; other values of it count.
        shares = [share for share in shares if share.loss_weight or not share.value.isnan()] or shares
        weights = [self._weight(share) for share in shares]
        if self.by and any(weights):
            shares = [share for share, weight in zip(shares, weights, strict=True) if weight]
            weights = [weight for weight in weights if weight]
        elif self.by:
            weights = [1.0] * len(shares)
        first = shares[0].value
        dtype = torch.get_default_dtype()
        for share in shares:
            dtype = torch.promote_types(dtype, share.value.dtype)
        values = torch.stack([share.value.reshape(()).to(first.device, dtype) for share in shares])
        return _FOLDS[self.kind](values, torch.tensor(weights, dtype=dtype).to(first.device, non_blocking=True))

    def _weight(self, share: Share) -> float:
        if self.by == _BY_SAMPLES:
            return float(share.num_samples)
        if self.by == _BY_BATCH_SIZE and share.batch_size is not None:
            return float(share.batch_size)
        return share.loss_weight


FOLDS: tuple[Fold, ...] = tuple(
    Fold(kind, by) for kind in _FOLDS for by in ((_BY_LOSS, _BY_SAMPLES, _BY_BATCH_SIZE) if kind in _WEIGHED else ("",))
)
_REDUCTIONS: dict[Any, Fold] = {
    **dict.fromkeys(("sum", torch.sum, sum), Fold("sum")),
    **dict.fromkeys(("max", torch.max, max), Fold("max")),
    **dict.fromkeys(("min", torch.min, min), Fold("min")),
}


def _by_preference(shares: Sequence[Share], reduce_fx: Any) -> tuple[Fold, ...]:
    """Return all folds, the likeliest first.

    A `batch_size` that is the number of samples says nothing: Lightning asks for it with any value. Any other was
    chosen for the value.
    """
    first = _REDUCTIONS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
    if first is None:
        is_chosen = any(share.batch_size not in (None, share.num_samples) for share in shares)
        first = Fold("mean", _BY_BATCH_SIZE if is_chosen else _BY_LOSS)
    return (first, *(fold for fold in FOLDS if fold != first))


# --- rules ----------------------------------------------------------------------------------------------------------


class LogRules:
    """Folds that are possible for each logged name: all of them, until `learn` has seen it.

    Several folds may agree in what was seen: with equal weights, or a value of 0. They stay possible, and the
    likeliest is used: what `reduce_fx` says, else a mean. `unsettled` names those for which the choice has mattered
    since, so that another `learn`, with other samples, can decide.

    Attributes:
        unsettled: Names whose possible folds have given different values since the last `learn`, or whose fold is a
            rare one that has been seen once.
    """

    def __init__(self) -> None:
        self._possible: dict[Key, frozenset[Fold]] = {}
        self._logged_by_sample: set[Key] = set()
        self._with_constant_batch_size: set[Key] = set()
        self._inexact: set[str] = set()
        self._tolerance = 1e-4
        self._uses: dict[Key, int] = defaultdict(int)
        self._num_rare: dict[Key, int] = defaultdict(int)
        self._extremes: dict[Key, set[float]] = {}
        self.unsettled: set[str] = set()

    # --- learning ---------------------------------------------------------------------------------------------------

    def learn(
        self,
        whole: Sequence[LogCall],
        parts: Sequence[Sequence[LogCall]],
        loss_weights: Sequence[float],
        sizes: Sequence[int],
        tolerance: float = 1e-4,
        again: Sequence[LogCall] | None = None,
    ) -> None:
        """Compare what a pass over some samples logged with what passes over parts of them logged.

        Names that no fold explains are named in one warning.

        Args:
            whole: Logged by the samples at once.
            parts: Logged by each part; best of different sizes and weights, which tell more folds apart.
            loss_weights: Loss weight of each part.
            sizes: Samples of each part.
            tolerance: Largest relative difference of equal values.
            again: Logged by the samples at once under other random numbers; names whose values differ from those
                in `whole` are random and not judged.
        """
        self._tolerance = tolerance
        self.unsettled.clear()
        ours, theirs = _by_key(whole), [_by_key(calls) for calls in parts]
        noise = None if again is None else _by_key(again)
        keys = dict.fromkeys(key for calls in (ours, *theirs) for key in calls)
        inexact: dict[str, Fold | None] = {}
        for key in keys:
            calls, of_parts = ours.get(key, []), [part.get(key, []) for part in theirs]
            if any(isinstance(call.value, Metric) for found in (calls, *of_parts) for call in found):
                continue
            if noise is not None and not self._agree(calls, noise.get(key, [])):
                continue
            self._learn_name(key, calls, of_parts, loss_weights, sizes, inexact)
        new = {name: fold for name, fold in inexact.items() if name not in self._inexact}
        self._inexact |= new.keys()
        if new:
            rank_zero_warn(_explain(new))

    def _learn_name(
        self,
        key: Key,
        whole: list[LogCall],
        parts: list[list[LogCall]],
        loss_weights: Sequence[float],
        sizes: Sequence[int],
        inexact: dict[str, Fold | None],
    ) -> None:
        present = [
            (calls, weight, size) for calls, weight, size in zip(parts, loss_weights, sizes, strict=True) if calls
        ]
        if {len(calls) for calls, _, _ in present} != {len(whole)}:
            if self._agree(whole, list(chain(*parts))):
                self._logged_by_sample.add(key)
            elif key[1] not in self._inexact:
                inexact[key[1]] = None
            return
        possible = self._possible.get(key, frozenset(FOLDS))
        for index, call in enumerate(whole):
            shares = [
                Share(_on_host(calls[index].value), weight, size, calls[index].arguments.get("batch_size"))
                for calls, weight, size in present
            ]
            wanted = _on_host(call.value)
            if not wanted.isfinite():
                continue
            if not all(share.value.isfinite() for share in shares if share.loss_weight):
                possible = frozenset()  # a deviation of one sample, for example
            possible = frozenset(fold for fold in possible if self._equal(fold(shares), wanted, shares))
            batch_sizes = {share.batch_size for share in shares}
            if batch_sizes == {call.arguments.get("batch_size")} != {None}:
                self._with_constant_batch_size.add(key)
            if not possible:
                likeliest = _by_preference(shares, call.arguments.get("reduce_fx", "mean"))[0]
                self._possible[key], inexact[key[1]] = frozenset((likeliest,)), likeliest
                return
        self._possible[key] = possible
        first = whole[0].arguments.get("reduce_fx", "mean") if whole else "mean"
        if first == "mean" and not any(fold.kind == "mean" for fold in possible):
            # No mean: that may be chance, as the least of two values often is what they make together.
            self._num_rare[key] += 1
            num_proofs = self._num_rare[key]
            if is_extreme := any(fold.kind in _EXTREMES for fold in possible):
                # The largest accuracy of a class is 1 while all of its samples are told right: that proves it once.
                seen = self._extremes.setdefault(key, set())
                seen.update(float(call.value) for call in whole)
                num_proofs = len(seen)
            if num_proofs < (_PROOFS_OF_EXTREMES if is_extreme else _PROOFS_OF_RARE):
                self.unsettled.add(key[1])

    def warn_of_doubts(self) -> None:
        """Name the values that were taken for an extreme of the micro-batches' and of which too few have been seen."""
        found = {
            key[1]: fold.kind
            for key, seen in self._extremes.items()
            if key[1] in self.unsettled - self._inexact and len(seen) < _PROOFS_OF_EXTREMES
            for fold in FOLDS
            if fold.kind in _EXTREMES and fold in self._possible[key]
        }
        self._inexact |= found.keys()
        if found:
            rank_zero_warn(
                "With micro-batches some logged values may not be those of the whole batch; training is not affected. "
                "Logged as the largest or least of the micro-batches' values, which too few different ones have shown: "
                f"{', '.join(f'{name!r} ({kind})' for name, kind in found.items())}. For exact values log a "
                "torchmetrics object, which sees every sample."
            )

    def _agree(self, calls: Sequence[LogCall], others: Sequence[LogCall]) -> bool:
        return len(calls) == len(others) and all(
            self._equal(_on_host(one.value), _on_host(other.value)) for one, other in zip(calls, others, strict=True)
        )

    def _equal(self, found: Tensor, wanted: Tensor, shares: Sequence[Share] = ()) -> bool:
        """Whether two values are equal but for rounding, which grows with the values that they are made of."""
        sizes = (abs(float(value)) for value in (found, wanted, *(share.value for share in shares)))
        largest = max((size for size in sizes if isfinite(size)), default=0.0)
        return abs(float(found) - float(wanted)) <= self._tolerance * largest + 1e-12

    def knows(self, call: LogCall) -> bool:
        """Whether a comparison has shown what micro-batches make of a name."""
        key = call.fx, call.name
        return key in self._possible or key in self._logged_by_sample

    # --- use --------------------------------------------------------------------------------------------------------

    def merge(self, calls: Sequence[LogCall], parts: Sequence[tuple[float, int]]) -> list[LogCall]:
        """Return the calls that the whole batch would have made.

        Args:
            calls: Those of all micro-batches of a batch.
            parts: Loss weight and number of samples of each micro-batch.
        """
        merged: list[LogCall] = []
        for key, of_key in _by_key(calls).items():
            if key in self._logged_by_sample:
                merged += of_key
                continue
            by_part: dict[int, list[LogCall]] = defaultdict(list)
            for call in of_key:
                by_part[call.part].append(call)
            for index in range(max(len(found) for found in by_part.values())):
                merged.append(
                    self._merge_calls(key, [found[index] for found in by_part.values() if len(found) > index], parts)
                )
        return merged

    def _merge_calls(self, key: Key, calls: list[LogCall], parts: Sequence[tuple[float, int]]) -> LogCall:
        first, last = calls[0], calls[-1]
        sizes = [call.arguments.get("batch_size") for call in calls]
        arguments = first.arguments
        if len(calls) > 1 and None not in sizes and key not in self._with_constant_batch_size:
            arguments = {**arguments, "batch_size": sum(sizes)}
        if len(calls) == 1 or not all(isinstance(call.value, Tensor) for call in calls):
            return LogCall(last.part, *key, last.value, arguments)
        shares = [
            Share(call.value, *parts[call.part], batch_size) for call, batch_size in zip(calls, sizes, strict=True)
        ]
        possible = self._possible.get(key)
        likeliest, *others = (
            fold
            for fold in _by_preference(shares, arguments.get("reduce_fx", "mean"))
            if possible is None or fold in possible
        )
        value = likeliest(shares)
        self._notice(key, value, others, shares)
        return LogCall(first.part, *key, value, arguments)

    def _notice(self, key: Key, value: Tensor, others: Iterable[Fold], shares: list[Share]) -> None:
        """See, less and less often, whether the possible folds of a name differ; it waits for the device."""
        self._uses[key] += 1
        if self._uses[key] <= _ALWAYS or self._uses[key] & (self._uses[key] - 1) == 0:
            shares = [Share(_on_host(share.value), *share[1:]) for share in shares]
            if not all(self._equal(fold(shares), value, shares) for fold in others):
                self.unsettled.add(key[1])


def _by_key(calls: Iterable[LogCall]) -> dict[Key, list[LogCall]]:
    found: dict[Key, list[LogCall]] = {}
    for call in calls:
        found.setdefault((call.fx, call.name), []).append(call)
    return found


def _on_host(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _explain(inexact: dict[str, Fold | None]) -> str:
    counted = [repr(name) for name, fold in inexact.items() if fold is None]
    folded = [
        f"{name!r} (the {fold.kind} over them{f' by {fold.by}' if fold.by else ''})"
        for name, fold in inexact.items()
        if fold is not None
    ]
    text = (
        "With micro-batches some values that are logged or returned will not be those of the whole batch; training is "
        "not affected. "
    )
    if folded:
        text += (
            "No mean, sum or extreme of the micro-batches' values makes that of the whole. Logged instead: "
            f"{', '.join(folded)}. "
        )
    if counted:
        text += f"Logged more or less often by micro-batches than by the whole: {', '.join(counted)}. "
    return text + (
        "For exact values log a torchmetrics object, which sees every sample, or the parts that the value is made of, "
        "each a sum or a mean over samples."
    )


# --- metric objects -------------------------------------------------------------------------------------------------


def metric_values(module: nn.Module) -> dict[str, Any]:
    """Return what every updated metric object of a module would compute now, on this rank alone.

    The metrics stay as they are. Those that can't compute yet are left out, as are metrics inside other metrics.
    """
    values: dict[str, Any] = {}
    inner: set[int] = set()
    for name, metric in (*module.named_modules(), *hidden_metrics(module)):
        if not isinstance(metric, Metric) or id(metric) in inner:
            continue
        chain = [child for child in metric.modules() if isinstance(child, Metric)]
        # Wrappers count no updates, and `Running` takes those of its inner metric away.
        if not any(child.update_called or vars(child).get("_num_vals_seen") for child in chain):
            continue
        inner |= {id(child) for child in chain}
        before = [(child, child._computed, child._to_sync) for child in chain]
        states = MetricStates(metric) if isinstance(metric, WrapperMetric) else None
        saved = states.save() if states is not None else []  # `compute` of `MinMaxMetric` is an update, too
        try:
            for child in chain:
                child._computed, child._to_sync = None, False
            with torch.no_grad():
                values[name] = metric.compute()
            if isinstance(metric, Running):  # its window counts updates
                values[name] = [values[name], vars(metric)["_num_vals_seen"]]
        except Exception:  # nosec B112  # too few samples for this metric: nothing to compare
            continue
        finally:
            if states is not None:
                states.load(saved)
            for child, computed, to_sync in before:
                child._computed, child._to_sync = computed, to_sync
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
    names = [name for name in whole if name in parts and not _same(whole[name], parts[name], tolerance)]
    if names:
        rank_zero_warn(
            "With micro-batches these metrics will not be those of the whole batch: "
            f"{', '.join(map(repr, names))}. They weigh their updates alike, whatever the number of samples or tokens. "
            "Pass it, as in `MeanMetric.update(loss, "
            "weight=num_tokens)`, or update them with samples instead of means."
        )
    return names


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        one, other = _on_host(one), _on_host(other)
        return bool(torch.allclose(one, other, rtol=tolerance, atol=1e-12, equal_nan=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key], tolerance) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return type(one) is not int or one == other

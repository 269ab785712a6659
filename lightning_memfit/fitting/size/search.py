"""Find the largest micro-batch size that fits: a candidate is named by a prediction or by measured peaks, then tried.

The search is pure: predictions and trials come in as functions. It assumes one thing only, that a larger size never
needs less memory. `longest_samples` and `lengthened` make the batch to try sizes with, which is the one that needs the
most memory.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_memfit.memory.oom import release

PeakPredictor = Callable[[int], int]
"""From a micro-batch size to the predicted peak of a training step in bytes; must not decrease as the size grows."""

MAX_PROBES = 2  # where there is a prediction
MAX_MEASURED = 5  # where sizes are drawn from trials alone
_STEP_BACK = 0.97  # after a failed trial; the prediction is better than 3 %
_CLOSE = 0.01  # a bracket this narrow is not narrowed further
_AGREES = 0.01  # of the growth since the smallest size: where a rough prediction is taken to be right
_MAX_EXACT = 20  # exact predictions, each of which may take seconds


class NoPrediction(Exception):
    """There is no prediction for a size; the message says why."""


@runtime_checkable
class ExactPredictor(Protocol):
    """A prediction of any curve, one traced size at a time."""

    def __call__(self, size: int) -> int:
        """Return the predicted peak in bytes.

        Raises:
            NoPrediction: If the step can't be traced.
        """

    def calibrate(self, rest_bytes: int) -> None:
        """Say how many bytes are alive between two steps."""

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        """Return the largest size from 1 to `upper` whose predicted peak is within the limit, or 0 if none is.

        Raises:
            NoPrediction: If the step can't be traced.
        """


@dataclass(frozen=True)
class Probe:
    """A trial step that was run.

    Attributes:
        size: Micro-batch size.
        fits: Whether memory sufficed.
        peak_bytes: The measured peak; None if it can't be measured or the trial failed.
        work_bytes: The peak of forward and backward alone, without the optimizer step.
        is_in_optimizer: Whether memory ran out in the optimizer step, behind forward and backward.
        error: What the module raised instead of running so few samples.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    work_bytes: int | None = None
    is_in_optimizer: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class SizeSearchResult:
    """What a search found.

    Attributes:
        largest: The largest size that was tried and fits.
        is_verified: Whether a trial step of that size succeeded.
        predicted_bytes: Predicted peak at that size, corrected by what was measured; None without prediction.
        probes: The trials near the limit, in order.
        num_trials: Number of all trial steps, including smaller ones for the prediction.
        missed_bytes: What was measured at that size beyond an exact prediction; 0 without one.
    """

    largest: int
    is_verified: bool
    predicted_bytes: int | None
    probes: tuple[Probe, ...]
    num_trials: int = 0
    missed_bytes: int = 0


def find_largest(
    upper: int,
    predict: PeakPredictor | ExactPredictor,
    limit_bytes: int,
    run_probe: Callable[[int], Probe],
    first: Probe | None = None,
    agree: Callable[[int], int] = int,
) -> SizeSearchResult:
    """Find the largest size up to `upper` that fits, from a prediction and usually one or two trials.

    The prediction names a candidate, and measured peaks correct it: the error found at one size is taken to be the same
    at others, that found at two sizes to grow linearly. If the first candidate fits and the corrected prediction
    promises more, that is tried as well. If it fails, the next trial is 3 % lower; if that fails, too, the prediction
    is wrong, and further trials go down until one fits. A size that was not tried is never returned.

    Where the optimizer step is the peak at the size that an exact prediction named, memory is flat up to there,
    whatever was predicted. Then what forward and backward took alone says how far one can go.

    Args:
        upper: The largest size of interest.
        predict: The prediction.
        limit_bytes: Memory of the device.
        run_probe: Runs a trial step.
        first: An earlier trial of a small size, which corrects the constant.
        agree: Returns the smallest of all ranks' numbers, so that all of them try the same sizes.

    Raises:
        NoPrediction: If `predict` raises it, on any rank.
    """
    measured = [] if first is None or first.peak_bytes is None else [first]
    best = 0 if first is None or not first.fits else first.size
    probes: list[Probe] = []
    failed = upper + 1
    while True:
        promised, reason = _promised(predict, measured, limit_bytes, upper, is_free=first is None)
        promised = agree(promised)
        if promised < 0:
            raise NoPrediction(reason or "another rank has none")
        candidate = min(max(promised, 1), failed - 1)
        if failed <= upper:
            num_failed = sum(not probe.fits for probe in probes)
            share = _STEP_BACK if num_failed == 1 else 0.75 if num_failed == MAX_PROBES else 0.5
            candidate = min(candidate, math.ceil(failed * share) if num_failed == 1 else int(failed * share))
        most = MAX_PROBES + 1 if first is None and _is_flat(measured) else MAX_PROBES
        if candidate <= best or (len(probes) >= most and best > (first.size if first else 0)):
            break
        probe = run_probe(candidate)
        probes.append(probe)
        if not probe.fits:
            failed = candidate
            continue
        best = candidate
        if probe.peak_bytes is None:
            break
        measured.append(probe)
    predicted = missed = None
    with contextlib.suppress(NoPrediction):
        predicted = _corrected(predict, measured)(best) if best else None
        missed = next((p.peak_bytes - predict(best) for p in measured if p.size == best and p.peak_bytes), None)
    is_exact = isinstance(predict, ExactPredictor)
    return SizeSearchResult(
        best, best > 0, predicted, tuple(probes), missed_bytes=max(0, missed or 0) if is_exact else 0
    )


def _promised(
    predict: PeakPredictor | ExactPredictor,
    measured: Sequence[Probe],
    limit_bytes: int,
    upper: int,
    is_free: bool,
) -> tuple[int, str]:
    """The size that a prediction promises, corrected by what was measured; -1 and the reason if there is none.

    With `is_free`, a trial that fails can be taken back, and all measured sizes were named by the prediction.
    """
    try:
        if not isinstance(predict, ExactPredictor):
            return largest_under(_corrected(predict, measured), limit_bytes, upper), ""
        if is_free and _is_flat(measured):
            work = _through({probe.size: probe.work_bytes or 0 for probe in measured[-2:]})
            return largest_under(work, limit_bytes, upper), ""
        taken = [(probe, (is_free and probe.work_bytes) or probe.peak_bytes or 0) for probe in measured[-1:]]
        errors = [taken_bytes - predict(probe.size) for probe, taken_bytes in taken]
        return predict.largest_under(limit_bytes - sum(errors), upper), ""
    except NoPrediction as error:
        refused = error
    reason = str(refused)
    release(refused)  # frames of a refused trace may form a cycle that holds the batch (contextlib of Python 3.12)
    return -1, reason


def _is_flat(measured: Sequence[Probe]) -> bool:
    """Whether two sizes had one peak, which lies in the optimizer step."""
    peaks = {probe.peak_bytes for probe in measured[-2:]}
    return (
        len(measured) > 1 and len(peaks) == 1 and all((p.work_bytes or 0) < (p.peak_bytes or 0) for p in measured[-2:])
    )


def largest_under(predict: PeakPredictor, limit_bytes: int, upper: int) -> int:
    """The largest size from 1 to `upper` whose predicted peak is within the limit, or 0 if none is."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if predict(middle) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _corrected(predict: PeakPredictor, measured: Sequence[Probe]) -> PeakPredictor:
    errors = [
        (probe.size, probe.peak_bytes - predict(probe.size)) for probe in measured if probe.peak_bytes is not None
    ]
    if not errors:
        return predict
    size, error = errors[-1]
    if len(errors) == 1:
        return lambda n: predict(n) + error
    other_size, other_error = errors[-2]
    slope = (error - other_error) / (size - other_size)
    return lambda n: round(predict(n) + error + slope * (n - size))


# --- a curve of which single values are expensive -------------------------------------------------------------------


def largest_by_exact(
    exact: PeakPredictor,
    limit_bytes: int,
    upper: int,
    known: Mapping[int, int],
    rough: PeakPredictor | None = None,
    is_out_of_time: Callable[[], bool] = lambda: False,
) -> int:
    """The largest size from 1 to `upper` whose peak is within the limit, or 0, asking for few values of its curve.

    A rough prediction that is right at the size that it names needs one value more. If it is wrong there, a parabola
    through the values known nearest to the limit names the next size, and where that narrows the bracket too slowly
    (the curve has steps), half of the bracket does. The result is the largest size known to fit if values run out.

    Args:
        exact: The curve; a value may take seconds.
        limit_bytes: The limit.
        upper: The largest size of interest.
        known: Values that are known already.
        rough: A cheap prediction, which may be wrong.
        is_out_of_time: Whether no more values may be asked for.
    """
    known = {size: peak for size, peak in known.items() if size <= upper}
    rough = rough if rough is None or agrees(rough, known) else None
    low = max((size for size, peak in known.items() if peak <= limit_bytes), default=0)
    high = min((size for size, peak in known.items() if peak > limit_bytes), default=upper + 1)
    slow = 0
    for _ in range(_MAX_EXACT):
        if high - low <= max(1, _CLOSE * low) or is_out_of_time():
            break
        nearest = sorted(known, key=lambda size: min(abs(size - low), abs(size - high)))[:3]
        model = rough or _through({size: known[size] for size in nearest})
        guess = min(max(largest_under(model, limit_bytes, high - 1), low + 1), high - 1)
        if slow >= 2:
            guess = (low + high) // 2 if low else max(1, math.isqrt(high))
        known[guess] = peak = exact(guess)
        if rough is not None and not agrees(rough, known):
            rough = None
        elif rough is not None and peak <= limit_bytes:
            return guess
        width = high - low
        low, high = (guess, high) if peak <= limit_bytes else (low, guess)
        slow = slow + 1 if 2 * (high - low) > width else 0
    return low


def agrees(rough: PeakPredictor, exact: Mapping[int, int]) -> bool:
    """Whether a prediction is within 1 % of the growth that the curve really has between known sizes."""
    growth = max(exact.values()) - min(exact.values())
    return all(abs(rough(size) - peak) <= _AGREES * growth for size, peak in exact.items())


def _through(values: Mapping[int, int]) -> PeakPredictor:
    """The curve of lowest degree through some values; 0 everywhere if there are none."""

    def value(size: int) -> int:
        total = 0.0
        for at, peak in values.items():
            total += peak * math.prod((size - other) / (at - other) for other in values if other != at)
        return round(total)

    return value


# --- without a prediction -------------------------------------------------------------------------------------------


def find_by_trials(
    upper: int, rest_bytes: int, limit_bytes: int, run_probe: Callable[[int], Probe], least: int = 1
) -> SizeSearchResult:
    """Find the largest size up to `upper` that fits by trials alone, of which there are at most `MAX_MEASURED`.

    The bytes that forward and backward need beyond what is alive between steps are taken to grow at most with the
    square of the size, so that the second trial is safe for any such curve. The later ones follow what was measured: a
    parabola where the curve is smooth, whole steps where it has some (batches padded to a multiple). A curve with steps
    can't be found exactly by so few trials: the result fits, but may be some steps too low.

    Args:
        upper: The largest size of interest.
        rest_bytes: Bytes alive between steps.
        limit_bytes: Memory of the device.
        run_probe: Runs a trial step.
        least: The fewest samples that the module can run.
    """
    probes: list[Probe] = []
    points: list[tuple[int, int]] = []
    room = max(limit_bytes - rest_bytes, 1)
    best, failed = 0, upper + 1
    while len(probes) < MAX_MEASURED or not best:
        candidate = min(max(least, _by_growth(points, room, failed, is_free=failed > upper)), failed - 1)
        if candidate <= best or candidate < least:
            break
        probe = run_probe(candidate)
        probes.append(probe)
        if not probe.fits:
            failed = candidate
            continue
        best = candidate
        if probe.work_bytes is None:
            break
        points.append((candidate, max(probe.work_bytes - rest_bytes, 1)))
    peak = next((probe.peak_bytes for probe in probes if probe.size == best and probe.fits), None)
    return SizeSearchResult(best, best > 0, peak, tuple(probes))


_BETWEEN = 0.35  # from what is safe for a parabola (0) to what a line promises (1)
_MARGIN = 0.04  # of an extrapolated distance
_FAR = 2.2  # times the largest size measured
_FLAT = 0.02  # growth that shows a step, as a share of proportional growth
_STEP = 8  # batches are padded to multiples of this


def _by_growth(points: Sequence[tuple[int, int]], room: float, failed: int, is_free: bool) -> int:
    """Name the next size to try.

    Args:
        points: Sizes that fit, rising, and the bytes that forward and backward took beyond what was alive.
        room: The bytes that they may take.
        failed: The smallest size that failed; the next trial is below.
        is_free: Whether none has failed yet.
    """
    if not points:
        return max(1, min(2, failed - 1))
    size, used = points[-1]
    safe = size * math.sqrt(room / used)
    if len(points) == 1:
        return max(size + 1, int(safe))
    if any(after - before <= _FLAT * before * (b - a) / a for (a, before), (b, after) in pairwise(points)):
        return _by_steps(points, room, failed, is_free)
    before_size, before = points[-2]
    line = max(safe, size + (room - used) * (size - before_size) / (used - before))
    if len(points) == 2:
        return max(size + 1, int(safe ** (1 - _BETWEEN) * line**_BETWEEN)) if is_free else int(safe)
    curve = _through(dict(points[-3:]))
    named = largest_under(lambda n: curve(n) if n > size else 0, int(room), int(line))
    named = int(max(named, safe))
    # What is far from all that was measured is approached, and never from above.
    margin = _MARGIN * (named - size) if named <= _FAR * size else (named - safe) / 2
    named -= math.ceil(margin) if named > size + _STEP else int(margin)
    if named < failed:
        return named
    # The curve was wrong: by a little if it had been measured nearby, else by a jump that lies anywhere between.
    is_near = size > failed / 2 and named <= (1 + _CLOSE) * failed
    return int(_STEP_BACK * failed if is_near else max(safe, (size + failed) / 2))


def _by_steps(points: Sequence[tuple[int, int]], room: float, failed: int, is_free: bool) -> int:
    """Name the next size for memory that grows in equal steps, each as high as the first measured."""
    size, used = points[-1]
    height = points[0][1]
    named = size * max(1, int(room / height + _FLAT)) / max(1, round(used / height))
    at_edge = -(-int(named) // _STEP) * _STEP
    if at_edge <= max(1.15 * named, 3 * _STEP):
        named = at_edge
    return max(size + 1, int(named if is_free else min(named, (size + failed) / 2)))


# --- the batch that needs the most memory: the longest sequences the data can give ----------------------------------


def longest_samples(loader: Any, num_samples: int) -> Any | None:
    """Collate the longest samples of a loader's data set, independently of the loader's own iteration.

    Lengths come from the data set's attribute `lengths` or its column `length`; without either the result is None.

    Args:
        loader: The training loader.
        num_samples: Number of samples.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    lengths = _lengths(loader.dataset)
    if lengths is None or len(lengths) < num_samples or loader.collate_fn is None:
        return None
    order = torch.as_tensor(lengths).argsort(descending=True, stable=True)
    return loader.collate_fn([loader.dataset[int(index)] for index in order[:num_samples]])


def lengthened(batch: Any, length: int) -> Any:
    """Lengthen the sequences of a batch by repeating their last column.

    Sequences are the tensors (samples, length, ...) that agree with `input_ids` in their second dimension, or, in
    batches without it, all integer tensors of two dimensions.

    Args:
        batch: The batch.
        length: Length wanted; longer sequences stay as they are.
    """
    if isinstance(batch, Mapping):
        current = batch["input_ids"].size(1) if "input_ids" in batch else None
        longer = dict(batch)
        for key, value in batch.items():
            if isinstance(value, Tensor) and _is_sequence(value, current):
                longer[key] = _repeat_last(value, length)
        return longer
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(
            _repeat_last(v, length) if isinstance(v, Tensor) and _is_sequence(v, None) else v for v in batch
        )
    if isinstance(batch, Tensor) and _is_sequence(batch, None):
        return _repeat_last(batch, length)
    return batch


def _is_sequence(value: Tensor, current: int | None) -> bool:
    if current is not None:
        return value.ndim >= 2 and value.size(1) == current
    return value.ndim == 2 and not value.is_floating_point()


def _repeat_last(value: Tensor, length: int) -> Tensor:
    missing = length - value.size(1)
    if missing <= 0:
        return value
    return torch.cat([value, value[:, -1:].expand(-1, missing, *value.shape[2:])], dim=1)


def _lengths(dataset: Any) -> Sequence[int] | None:
    if isinstance(dataset, Subset):
        lengths = _lengths(dataset.dataset)
        return None if lengths is None else [lengths[index] for index in dataset.indices]
    lengths = getattr(dataset, "lengths", None)
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset["length"]
    return lengths if lengths is None or hasattr(lengths, "__len__") else None

"""Find the largest micro-batch size that fits, from a prediction and at most two measured trials.

The search is pure: trials come in as functions. `longest_samples` and `lengthened` make the batch to try sizes with,
which is the one that needs the most memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

PeakPredictor = Callable[[int], int]
"""From a micro-batch size to the predicted peak of a training step in bytes; must not decrease as the size grows."""

MAX_PROBES = 2
_STEP_BACK = 0.97  # after a failed trial; the prediction is better than 3 %


@dataclass(frozen=True)
class Probe:
    """A trial step that was run.

    Attributes:
        size: Micro-batch size.
        fits: Whether memory sufficed.
        peak_bytes: The measured peak; None if it can't be measured or the trial failed.
        work_bytes: The peak of forward and backward alone, without the optimizer step.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    work_bytes: int | None = None


@dataclass(frozen=True)
class SizeSearchResult:
    """What a search found.

    Attributes:
        largest: The largest size believed to fit.
        is_verified: Whether a trial step of that size succeeded.
        predicted_bytes: Predicted peak at that size, corrected by what was measured; None without prediction.
        probes: The trials near the limit, in order.
        num_trials: Number of all trial steps, including smaller ones for the prediction.
    """

    largest: int
    is_verified: bool
    predicted_bytes: int | None
    probes: tuple[Probe, ...]
    num_trials: int = 0


def find_largest(
    upper: int,
    predict: PeakPredictor,
    limit_bytes: int,
    run_probe: Callable[[int], Probe],
    first: Probe | None = None,
) -> SizeSearchResult:
    """Find the largest size up to `upper` that fits.

    The prediction names a candidate. Measured peaks correct it: the error at the sizes tried is interpolated and
    extrapolated linearly, because a prediction errs by a constant (libraries' workspaces) and a slope (bytes per
    sample). If the first candidate fits and the corrected prediction promises more, that is tried as well. If it fails,
    the next trial is 3 % lower. An untried size is returned only if both trials failed.

    Args:
        upper: The largest size of interest.
        predict: The prediction.
        limit_bytes: Memory of the device.
        run_probe: Runs a trial step.
        first: An earlier trial of a small size, which corrects the constant.
    """
    measured = [] if first is None or first.peak_bytes is None else [first]
    probes: list[Probe] = []
    corrected = _corrected(predict, measured)
    candidate = largest_under(corrected, limit_bytes, upper)
    best = first.size if first is not None and first.fits else 0
    while candidate > best and len(probes) < MAX_PROBES:
        probe = run_probe(candidate)
        probes.append(probe)
        if not probe.fits:
            upper = candidate - 1
            candidate = min(upper, math.ceil(candidate * _STEP_BACK))
            continue
        best = candidate
        if probe.peak_bytes is None:
            break
        measured.append(probe)
        corrected = _corrected(predict, measured)
        candidate = largest_under(corrected, limit_bytes, upper)
    failed = [probe.size for probe in probes if not probe.fits]
    if len(failed) == MAX_PROBES:
        # Nothing near the prediction fits. Leave ample room; training lowers the size further if it must.
        best = max(best, failed[-1] * 3 // 4, 1)
    best = max(best, 1)
    is_verified = any(probe.fits and probe.size == best for probe in (*probes, *measured))
    return SizeSearchResult(best, is_verified, corrected(best), tuple(probes))


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


def line_through(small: Probe, large: Probe) -> PeakPredictor:
    """Return a prediction from two measured trials, for use without a memory model.

    Forward and backward grow linearly; the optimizer step needs the same for every size.

    Raises:
        ValueError: If a peak is missing or the sizes are equal.
    """
    if small.work_bytes is None or large.work_bytes is None or large.peak_bytes is None or small.size >= large.size:
        raise ValueError(f"`small={small}` and `large={large}` must be measured trials of growing sizes.")
    slope = max(0.0, (large.work_bytes - small.work_bytes) / (large.size - small.size))
    offset = large.work_bytes - slope * large.size
    step_bytes = large.peak_bytes if large.peak_bytes > large.work_bytes else 0
    return lambda size: max(step_bytes, round(offset + slope * size))


def _corrected(predict: PeakPredictor, measured: list[Probe]) -> PeakPredictor:
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

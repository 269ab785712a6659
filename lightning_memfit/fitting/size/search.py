"""Find the largest micro-batch size that fits while the first steps of training run, each of which trains.

The search is pure: predictions come in as a function, and what steps took as numbers. It assumes one thing only, that a
larger size never needs less memory.
"""

import contextlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_memfit.fitting.size.shapes import NoPrediction
from lightning_memfit.memory.oom import release

PeakPredictor = Callable[[int], int]
"""From a micro-batch size to the predicted peak of a training step in bytes; must not decrease as the size grows."""

MAX_MEASURED = 6  # steps that are measured where sizes are drawn from them alone
MAX_STEPS = 8  # after which a search ends, however little the batches were alike
_FEWEST = 2  # samples of the first step where nothing is predicted: layers of batch statistics can't run one
_MAX_RAISES = 2
_STEP_BACK = 0.97
_SHARES = (_STEP_BACK, 0.75)
"""Of a predicted size that failed, one after the other: the prediction is better than 3 %; if not, it is wrong."""
_FAILING_SHARE = 0.5  # of any later one
_ENDING_MARGIN = 0.03  # of the memory for more than few samples, where running out of it ends the run
_RIGHT = 0.001  # of the peak: as near as a prediction comes that is right
_CLOSE = 0.01  # a bracket this narrow is not narrowed further
_AGREES = 0.01  # of the growth since the smallest size: where a rough prediction is taken to be right
_MAX_EXACT = 20  # exact predictions, each of which may take seconds


class ExactPredictor(Protocol):
    """A prediction of any curve, one traced size at a time; raises `NoPrediction` if the step can't be traced."""

    def __call__(self, size: int) -> int:
        """Return the predicted peak in bytes."""

    def calibrate(self, live_bytes: int, is_after_step: bool) -> None:
        """Say how many bytes are alive before the first step, or between two."""

    def largest_under(self, limit_bytes: int, upper: int) -> int:
        """Return the largest size from 1 to `upper` whose predicted peak is within the limit, or 0 if none is."""


@dataclass(frozen=True)
class StepMemory:
    """What a training step took, on the rank that took most."""

    size: int
    peak_bytes: int
    work_bytes: int  # the peak of forward and backward, without the optimizer step
    rest_bytes: int = 0  # alive after it
    is_alike: bool = True  # whether its batch had the shapes of the one that is predicted for, on all ranks


class SizeSearch:
    """Names the micro-batch size of the next training step, from a prediction and from what the last ones took.

    A prediction names the size of the first step, and is held against the second one, by which the optimizer has its
    states: if its error leaves room for a size that saves a micro-batch, training goes on with that. Where the
    optimizer step is the peak, what forward and backward took alone says how far one can go. If a predicted size fails,
    the next one is 3 % lower, then a quarter, then half. Without a prediction the first step has micro-batches of two
    samples, and up to six steps of growing sizes replace it. Where a failure ends the run, training begins with two
    samples as well, and 3 % of the memory beyond what they take is left free.
    """

    def __init__(
        self,
        upper: int,  # samples per device and loader batch
        limit_bytes: int,
        predict: ExactPredictor | None,
        can_fail: bool,  # whether a step in which memory runs out is repeated
        is_measured: bool = True,  # if it can't be measured what steps take, the first size that runs is the last
        agree: Callable[[int], int] = int,  # returns the smallest of all ranks' numbers
    ) -> None:
        self._upper = upper
        self._limit_bytes = limit_bytes
        self._predict = predict
        self._can_fail = can_fail
        self._is_measured = is_measured
        self._agree = agree
        self._failed = upper + 1
        self._num_failed_in_step = self._num_raises = 0
        self._measured: list[StepMemory] = []
        self._rest_bytes = 0
        self.largest = 0  # that has room, as far as is known
        self.tried = 0  # the largest that has run
        self.num_steps = self.num_failed = 0
        self.predicted_bytes: int | None = None  # at `largest`, before anything was measured
        self.no_prediction = ""  # why there is none, if one was expected
        self.missed_bytes = 0  # measured beyond an exact prediction
        self.is_done = False

    @property
    def is_predicted(self) -> bool:
        """Whether a prediction names sizes."""
        return self._predict is not None

    def first(self, live_bytes: int | None = None) -> int:
        """Return the size of the first step, before which so many bytes are alive, if they can be measured."""
        if live_bytes is not None and self._predict is not None:
            self._predict.calibrate(live_bytes, is_after_step=False)
        promised = self._promised()
        if self._predict is not None and self._can_fail:
            self.largest = min(max(1, promised), self._upper)
            with contextlib.suppress(NoPrediction):
                self.predicted_bytes = self._predict(self.largest)
        elif self._is_measured or not self._can_fail:
            self.largest = min(_FEWEST, self._upper)
        else:
            self.largest = self._upper
        return self.largest

    def needs_more(self, size: int) -> int:
        """Return the size to begin with if the module can't run so few samples; 0 if there is none above."""
        if self.num_steps or self.num_failed or size >= self._upper:
            return 0
        self.largest = min(2 * size, self._upper)
        return self.largest

    def fail(self, size: int) -> int:
        """Return the size with which a batch is repeated after memory has run out; 0 if there is none below."""
        self._failed = min(self._failed, size)
        self.num_failed += 1
        self._num_failed_in_step += 1
        shares = _SHARES[self._num_failed_in_step - 1 :] if self.is_predicted else ()
        share = shares[0] if shares else _FAILING_SHARE
        smaller = min(math.ceil(size * share) if share == _STEP_BACK else int(size * share), size - 1)
        if 0 < self.tried < size:
            smaller = max(smaller, self.tried) if share == _STEP_BACK else self.tried
        self.largest = smaller
        return smaller

    def after(self, step: StepMemory) -> int:
        """Return the size of the step that follows one that has run."""
        self.num_steps += 1
        self._num_failed_in_step = 0
        self.tried = max(self.tried, step.size)
        self._rest_bytes = step.rest_bytes
        if self._predict is not None and self._is_measured:
            self._predict.calibrate(step.rest_bytes, is_after_step=True)
        if not self._is_measured or (self.num_steps >= MAX_STEPS):
            self.is_done = True
        elif self.num_steps == 1:  # in which the optimizer has made its states
            if self._predict is not None and self._can_fail:
                return self._name(min(step.size, max(1, self._promised())))
        elif step.is_alike:
            self._measured.append(step)
            return self._name(self._next_of_prediction(step) if self._predict else self._next_by_growth(step))
        return self._name(step.size)

    def _name(self, size: int) -> int:
        self.largest = max(size, self.tried) if self.is_done else size
        return self.largest

    # --- with a prediction ------------------------------------------------------------------------------------------

    def _next_of_prediction(self, step: StepMemory) -> int:
        promised = min(self._promised(), self._failed - 1)
        most = _MAX_RAISES + (self._can_fail and _is_flat(self._measured))
        if self._num_parts(promised) >= self._num_parts(step.size) or self._num_raises >= most:
            self.is_done = True
            return max(promised, step.size)
        self._num_raises += 1
        return promised

    def _num_parts(self, size: int) -> int:
        return -(-self._upper // max(size, 1))

    def _promised(self) -> int:
        """The size that a prediction promises, corrected by what was measured; without one, 0 from now on."""
        promised, reason = self._promise()
        promised = self._agree(promised)
        if promised < 0:
            self.no_prediction = reason or "another rank has none"
            self._predict = None
        return max(promised, 0)

    def _promise(self) -> tuple[int, str]:
        """The size promised; -1 and the reason if there is no prediction."""
        predict, measured, limit_bytes = self._predict, self._measured, self._limit_bytes
        if predict is None:
            return 0, ""
        if not self._can_fail and measured:
            limit_bytes -= int(_ENDING_MARGIN * max(0, limit_bytes - measured[0].peak_bytes))
        try:
            if self._can_fail and _is_flat(measured):
                work = _through({step.size: step.work_bytes for step in measured[-2:]})
                return largest_under(work, limit_bytes, self._upper), ""
            error = self._error_of(predict, measured[-1]) if measured else 0
            return predict.largest_under(limit_bytes - error, self._upper), ""
        except NoPrediction as error:
            refused = error
        reason = str(refused)
        release(refused)  # frames of a refused trace may form a cycle that holds the batch (contextlib of Python 3.12)
        return -1, reason

    def _error_of(self, predict: ExactPredictor, step: StepMemory) -> int:
        """What a step took beyond the prediction; less than nothing may be that of forward and backward alone."""
        predicted = predict(step.size)
        self.missed_bytes = max(0, step.peak_bytes - predicted)
        is_too_high = step.peak_bytes < (1.0 - _RIGHT) * predicted
        return (step.work_bytes if is_too_high and self._can_fail else step.peak_bytes) - predicted

    # --- without a prediction ---------------------------------------------------------------------------------------

    def _next_by_growth(self, step: StepMemory) -> int:
        """Name the next size from steps alone.

        The bytes that forward and backward need beyond what is alive between steps are taken to grow at most with the
        square of the size, so that the second size is safe for any such curve. The later ones follow a parabola through
        what was measured. A curve with steps (batches padded to a multiple) can't be found exactly by so few: the
        result fits, but may be some steps too low.
        """
        limit_bytes = self._limit_bytes
        if not self._can_fail:
            limit_bytes -= int(_ENDING_MARGIN * max(0, limit_bytes - self._measured[0].peak_bytes))
        room = max(limit_bytes - self._rest_bytes, 1)
        taken = {one.size: max(one.work_bytes - one.rest_bytes, 1) for one in self._measured}
        points = sorted(taken.items())
        named = _by_growth(points, room, self._failed)
        if not self._can_fail:  # then not even one sample may be too many
            size, used = points[-1]
            line = largest_under(_through(dict(points[-2:])), int(room), self._upper)
            named = min(named, line if len(points) > 1 else int(size * math.sqrt(room / used)))
        named = self._agree(min(named, self._failed - 1))
        if named <= self.tried or len(self._measured) >= MAX_MEASURED:
            self.is_done = True
            return self.tried
        return named


# --- corrections -----------------------------------------------------------------------------------------------------


def _is_flat(measured: Sequence[StepMemory]) -> bool:
    """Whether two sizes had one peak, which lies in the optimizer step."""
    last = measured[-2:]
    sizes, peaks = {step.size for step in last}, {step.peak_bytes for step in last}
    return len(sizes) > 1 and len(peaks) == 1 and all(step.work_bytes < step.peak_bytes for step in last)


def largest_under(predict: PeakPredictor, limit_bytes: int, upper: int) -> int:
    """The largest size from 1 to `upper` whose predicted peak is within the limit, or 0 if none is."""
    return bisect_right(range(1, upper + 1), limit_bytes, key=predict)


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

    A value of the curve (`exact`) may take seconds; those in `known` are known already.
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


# --- growth without a prediction ------------------------------------------------------------------------------------

_MARGIN = 0.04  # of an extrapolated distance
_FAR, _FARTHEST = 2.2, 8  # times the largest size measured: from where a size is approached, and up to where
_BACK = 0.6  # of the way from what a parabola would allow at most to what the curve promises


def _by_growth(points: Sequence[tuple[int, int]], room: float, failed: int) -> int:
    """Name the next size to try, below the smallest that failed.

    Points are sizes that fit, rising, with the bytes that forward and backward took beyond what was alive, for which
    there is some room.
    """
    if not points:
        return max(1, min(2, failed - 1))
    size, used = points[-1]
    safe = size * math.sqrt(room / used)
    if len(points) == 1:
        return max(size + 1, int(safe))
    before_size, before = points[-2]
    line = size + (room - used) * (size - before_size) / max(used - before, 1)
    curve = _through(dict(points[-3:]))
    named = largest_under(lambda n: curve(n) if n > size else 0, int(room), int(max(safe, min(line, _FARTHEST * size))))
    # What is far from all that was measured is approached, and never from above.
    named -= math.ceil(_MARGIN * (named - size) if named <= _FAR * size else max(0.0, named - safe) * _BACK)
    named = max(named, int(safe))
    return named if named < failed else int(max(safe, (size + failed) / 2))

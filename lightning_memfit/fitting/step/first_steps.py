"""`FirstSteps`: the first steps of a run, which train as any other and show which micro-batch size is best."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memfit.fitting.size.search import SizeSearch, StepMemory
from lightning_memfit.fitting.size.shapes import ShapeGuard, shape_of
from lightning_memfit.fitting.size.sizes import prefer
from lightning_memfit.fitting.step.effective_step import EffectiveStep
from lightning_memfit.fitting.step.loop import Fitting, StepRequest
from lightning_memfit.fitting.step.passes import PartFailedError
from lightning_memfit.memory import format_bytes
from lightning_memfit.reliability.consensus import At


def guard_of(fitting: Fitting, shape: Any, size: int, limit_bytes: int | None) -> ShapeGuard:
    """Return what gives batches of larger shapes than this one (`shape_of` a batch) a smaller size."""
    prediction, splitter = fitting.prediction, fitting.splitter
    if prediction is None or limit_bytes is None:
        return ShapeGuard(shape, size, None)

    def predict(other: Any, upper: int) -> int:
        count = splitter.count(other)
        found = prediction.for_batch(other, count, splitter.first).largest_under(limit_bytes, min(upper, count))
        return upper if found == count else found

    return ShapeGuard(shape, size, predict)


class FirstSteps:
    """Runs steps with the size that a search names, until it has ended and the loop calls the step itself."""

    def __init__(self, fitting: Fitting, step: EffectiveStep, limit_bytes: int) -> None:
        self._fitting, self._step, self._limit_bytes = fitting, step, limit_bytes
        self._sizes, self._memory = fitting.sizes, fitting.memory
        self._started = time.monotonic()
        self._shape: Any = None  # of the batch that sizes are predicted for, or that was measured
        self._is_alike = True
        self._work_bytes: int | None = None  # that the step before this batch took, without its optimizer step
        self._num_failed = 0
        self.search = SizeSearch(
            self._sizes.local_batch_size,
            limit_bytes,
            fitting.prediction,
            step.can_fail,
            self._memory is not None,
            partial(self._agreed, min),
        )

    def begin(self, request: StepRequest) -> tuple[int, str]:
        """Name the size of the first step, and say why."""
        search, memory, local_batch_size = self.search, self._memory, self._sizes.local_batch_size
        has_states = any(
            optimizer.state for optimizer in self._fitting.loop.trainer.optimizers
        )  # of a run that is resumed
        largest = search.first(None if memory is None or has_states else self._agreed(max, memory.live_bytes))
        if search.no_prediction:
            why = f"for there is no prediction: {search.no_prediction}"
            rank_zero_info(f"MicroBatching: the size grows in the first steps, {why}")
        self._shape = shape_of(request.batch)
        self._fitting.shapes = guard_of(self._fitting, self._shape, largest, self._limit_bytes)
        self._sizes.name_smaller = lambda failed: prefer(local_batch_size, search.fail(failed))
        size = prefer(local_batch_size, largest)
        return size, self._described(size)

    def run(self, request: StepRequest) -> ClosureResult:
        """Run a batch of the first steps, and measure what a step takes."""
        search, sizes, memory = self.search, self._sizes, self._memory
        if request.is_complete:
            return self._step.run(request)
        if request.zero_grad is not None:
            if self._work_bytes is not None:
                self._learn(request.batch, self._work_bytes)
                if search.is_done:
                    sizes.begin(sizes.current, sizes.current)
                    sizes.name_smaller, self._fitting.loop.run_step = None, self._step.run
                    return self._step.run(request)
            self._is_alike = True
            self._num_failed = search.num_failed
            if memory is not None:
                memory.reset_peak()
        shape, count = shape_of(request.batch), self._fitting.splitter.count(request.batch)
        if not search.is_predicted and count == sizes.local_batch_size:
            self._shape = shape
        self._is_alike &= shape == self._shape
        result = self._run_or_enlarge(request)
        if request.is_last:
            self._work_bytes = 0 if memory is None else memory.peak_bytes
        return result

    def _run_or_enlarge(self, request: StepRequest) -> ClosureResult:
        """Run a batch, at the beginning of the run with more samples at once if the module can't run so few."""
        while True:
            try:
                return self._step.run(request)
            except PartFailedError:
                size = self.search.needs_more(self._sizes.current)
                if not size:
                    raise
            self._sizes.begin(size, size)
            self._fitting.note(size, "the module can't run fewer samples")

    def _learn(self, batch: Any, work_bytes: int) -> None:
        """Take what the step before this batch has shown, and go on with the size that the search names."""
        search, sizes, memory, before = self.search, self._sizes, self._memory, self._sizes.current
        peak_bytes, rest_bytes = (0, 0) if memory is None else (memory.peak_bytes, memory.live_bytes)
        if self._fitting.prediction is not None:
            rest_bytes -= self._fitting.prediction.bytes_beyond(batch)
        is_alike = self._is_alike and search.num_failed == self._num_failed
        told = self._fitting.consensus.exchange(work_bytes, peak_bytes, rest_bytes, not is_alike, at=At.BATCH)
        work, peak, rest, unlike = (int(max(numbers)) for numbers in zip(*told, strict=True))
        largest = search.after(StepMemory(before, peak, work, rest, not unlike))
        size = prefer(sizes.local_batch_size, largest)
        if size != before:
            sizes.begin(size, size)
            limit_bytes = self._limit_bytes - search.missed_bytes
            self._fitting.shapes = guard_of(self._fitting, self._shape, largest, limit_bytes)
            self._fitting.note(size, self._described(size))

    def _described(self, size: int) -> str:
        """Return one line that says which size is in use, and why."""
        search, why, local_batch_size = self.search, "so far", self._sizes.local_batch_size
        if search.num_steps:
            why = "by what the first steps took"
        elif search.predicted_bytes is not None and search.predicted_bytes > self._limit_bytes:
            return (
                f"MicroBatching: not even one sample fits {format_bytes(self._limit_bytes)}, by its prediction of "
                f"{format_bytes(search.predicted_bytes)}; training begins with one, and saves memory where it can."
            )
        elif search.predicted_bytes is not None:
            why = f"by its prediction of {format_bytes(search.predicted_bytes)}"
        return (
            f"MicroBatching: micro-batch {size} x {math.ceil(local_batch_size / size)} for {local_batch_size} samples "
            f"per device; {format_bytes(self._limit_bytes)} have room for {search.largest}, {why} "
            f"({time.monotonic() - self._started:.1f} s)."
        )

    def _agreed(self, choose: Callable[[list[float]], float], number: int) -> int:
        return int(choose([theirs for (theirs,) in self._fitting.consensus.exchange(number, at=At.BATCH)]))

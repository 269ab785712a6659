"""Steps that read what only real data can tell: trace with several values, and refuse where memory depends on them."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lightning_memfit.memory import Category
from lightning_memfit.profile.events import CATEGORIES, EventList, canonical, without_small
from lightning_memfit.profile.integers import AssumedValues, UnknownSizeError

if TYPE_CHECKING:
    from lightning_memfit.profile.trace import Trace

UNKNOWN_VALUES = (UnknownSizeError, DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where even an assumed value doesn't help."""

WAY_OUT = "Measure it instead with `measure_step` (two real steps of a small micro-batch)."

_CHOICES = (
    AssumedValues(),
    AssumedValues(floating=1e6, boolean=True, integer=2),
    AssumedValues(floating=-1e6, boolean=True, integer=0),
    AssumedValues(floating=1e-6, boolean=False, integer=0),
)
"""Either side of the thresholds that programs compare values with."""

_SCALAR_BYTES = 512
"""What is smaller takes one block of the CUDA allocator, whatever its size."""

_TOLERANCE = 0.005
_WORKING = [CATEGORIES.index(Category.ACTIVATION), CATEGORIES.index(Category.TEMPORARY)]


class TraceError(RuntimeError):
    """The module's training step can't be traced; the message says what stopped it and what to do instead.

    Args:
        message: What stopped the trace.
        assumptions: Values that had been assumed until then.
    """

    def __init__(self, message: str, assumptions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.assumptions = assumptions


def over_assumptions(name: str, trace: Callable[[AssumedValues], "Trace"], several: bool = True) -> "Trace":
    """Trace once if no value has to be assumed, otherwise with several; the trace with the highest peak is returned.

    Choices with which the step ends in an error of the module's own (`assert (scores >= 0).all()`) don't count.

    Args:
        name: Of the module, for messages.
        trace: Traces the step with given values.
        several: False takes the first trace that succeeds.

    Raises:
        TraceError: If the traces differ by more than scalars and 0.5 % of the working memory, or none succeeds.
    """
    found: list[Trace] = []
    failure: TraceError | None = None
    for assumed in _CHOICES:
        try:
            result = trace(assumed)
        except TraceError as error:
            if isinstance(error.__cause__, UNKNOWN_VALUES) or not error.assumptions:
                raise
            failure = failure or error
            continue
        if not result.assumptions or not several:
            return result
        if found and not _allocate_alike(found[0].events, result.events):
            raise TraceError(
                f"What {name}'s training step allocates depends on values that only real data can tell: "
                f"{'; '.join(found[0].assumptions)}. {WAY_OUT}"
            )
        found.append(result)
    if not found:
        assert failure is not None
        raise failure
    return max(found, key=lambda result: int(result.events.live_bytes().max()))


def _allocate_alike(first: EventList, second: EventList) -> bool:
    a, b = (canonical(without_small(events, _SCALAR_BYTES)) for events in (first, second))
    if np.array_equal(a.events, b.events) and np.array_equal(a.sizes, b.sizes):
        return True
    if [name for _, name in first.phases] != [name for _, name in second.phases]:
        return False
    tolerated = _TOLERANCE * _working_bytes(first)
    return _only_in_one(a, b) <= tolerated and bool(
        np.all(np.abs(_phase_peaks(first) - _phase_peaks(second)) <= tolerated)
    )


def _working_bytes(events: EventList) -> int:
    """Peak of activations and temporaries: the part that grows with the batch."""
    working = np.isin(events.categories, _WORKING)
    steps = np.sign(events.events) * (events.sizes * working)[events.storages]
    return int(np.cumsum(steps).max(initial=0))


def _only_in_one(a: EventList, b: EventList) -> int:
    """Bytes of storages that only one of two traces has."""
    of_a, of_b = (Counter(zip(e.categories.tolist(), e.sizes.tolist(), strict=True)) for e in (a, b))
    return sum(count * size for (_, size), count in ((of_a - of_b) + (of_b - of_a)).items())


def _phase_peaks(events: EventList) -> np.ndarray:
    live = events.live_bytes()
    edges = [at for at, _ in events.phases]
    return np.array([part.max(initial=0) for part in np.split(live, edges)])

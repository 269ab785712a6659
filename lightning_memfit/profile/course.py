"""How long a traced or measured run goes on: two windows, and eight more at most where these differ.

A window ends with the batch after which every optimizer has stepped since the last one: one batch for most modules,
several for manual accumulation or a critic that steps more often. Two windows that allocate alike and keep nothing end
the run. Memory that still grows when it ends is a `Growth`. What a step does at a later batch, in another epoch or
below a learning rate isn't looked for: `StepOptions.batch_idx` asks for one.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory import Category
from lightning_memfit.profile.record import Growth
from lightning_memfit.profile.recorder import EventRecorder, Mark


@dataclass(frozen=True)
class TraceLimits:
    """Where a traced or measured run ends at the latest.

    Raises:
        ValueError: If a limit leaves no room for two batches.
    """

    seconds: float = 120.0
    """Time of one run. After a third of it no more windows are run than two."""
    batches: int = 1000
    """Batches from the loader."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0), ("batches", 1)):
            if not getattr(self, name) > least:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be more than {least}.")


class LimitReached(BaseException):
    """A run came to one of its limits; not an `Exception`, so that no handler of the module's goes on with it."""


_MOST_WINDOWS = 10

_TOLERANCE = 0.005
"""Share of what a window allocates in which two windows that are alike may differ."""

_NEGLIGIBLE_BYTES = 4096
"""What a batch may keep in counters and logged values. Growth of no more than that counts only if it goes on."""

DRAWS = "the step draws random numbers, by which it may need more in other batches"

_LASTING = (Category.GRADIENT, Category.OPTIMIZER_STATE)

_Made = Counter[tuple[int, int]]
"""Number of storages by category and size."""


@dataclass(frozen=True)
class _Window:
    """What happened from one step of every optimizer to the next."""

    batches: int
    made: _Made
    """Without gradients and optimizer states."""
    end: Mark

    def is_like(self, other: "_Window") -> bool:
        """Whether another window allocated the same, but for scalars and little else."""
        differing = (self.made - other.made) + (other.made - self.made)
        return _bytes_in(differing) <= _TOLERANCE * _bytes_in(self.made)


def _bytes_in(made: _Made) -> int:
    return sum(size * count for (_, size), count in made.items())


class Course:
    """Decides after every batch whether a run goes on.

    Attributes:
        batches: Batches that have ended.
        growth: Memory that had not stopped growing when the run ended.
        remarks: What the figures don't cover, or are the largest of, in clauses.
        draws: Whether a step drew from Python's or NumPy's generator.
        callback_bytes: What the user's callbacks made.
    """

    def __init__(self, recorder: EventRecorder, limits: TraceLimits, window_batches: int = 1) -> None:
        self.recorder = recorder
        self.limits = limits
        self.batches = 0
        self.growth: Growth | None = None
        self.remarks: list[str] = []
        self.draws = False
        self.callback_bytes = 0
        self._began = time.process_time()
        self._window_batches = window_batches
        self._optimizers: list[Any] = []
        self._steps: Counter[int] = Counter()
        self._steps_before: Counter[int] = Counter()
        self._windows: list[_Window] = []
        self._first_batch, self._start = 0, recorder.mark()  # of the window
        self._generators: Any = None

    def follow(self, optimizers: list[Any], manual: bool) -> None:
        """Count the steps of optimizers, which are thrown away after the run."""
        if manual:
            self._window_batches = 1
        self._optimizers = optimizers
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self.stepped(stepped))

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer."""
        self._steps[id(optimizer)] += 1

    def steps_of(self, optimizer: Any) -> int:
        """Steps of an optimizer so far."""
        return self._steps[id(optimizer)]

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Count what is made by a hook of one of the user's callbacks."""
        before = self.recorder.mark()
        try:
            yield
        finally:
            self.callback_bytes += _bytes_in(self.recorder.made_between(before, self.recorder.mark(), ()))

    def begin_batch(self) -> None:
        """Note where a batch begins."""
        if self.batches >= self.limits.batches:
            counts = [f"{type(optimizer).__name__} {self.steps_of(optimizer)}" for optimizer in self._optimizers]
            raise LimitReached(f"{self.batches:,} batches (steps: {', '.join(counts)})")
        if self.batches == self._first_batch:
            self._start = self.recorder.mark()  # the first batch, unlike others, was fetched before the run
        self._generators = _generators()

    def end_batch(self) -> bool:
        """Note where a batch ended, if one had begun; True if the run may end."""
        if self._generators is None:  # an epoch begins
            return False
        self.draws = self.draws or _generators() != self._generators
        self._generators = None
        self.batches += 1
        batches = self.batches - self._first_batch
        stepped = (self.steps_of(optimizer) > self._steps_before[id(optimizer)] for optimizer in self._optimizers)
        if batches % self._window_batches or not all(stepped):
            return False
        end = self.recorder.mark()
        self._windows.append(_Window(batches, self.recorder.made_between(self._start, end, _LASTING), end))
        self._first_batch, self._steps_before = self.batches, self._steps.copy()
        return len(self._windows) > 1 and self._is_known()

    def _is_known(self) -> bool:
        """Whether the last windows show what all later ones do, or the run has to end."""
        *_, before, last = self._windows
        *grown_before, grown = (b.end.kept_bytes - a.end.kept_bytes for a, b in pairwise(self._windows))
        is_alike, is_little = last.is_like(before), abs(grown) <= _NEGLIGIBLE_BYTES * last.batches
        goes_on = grown > 0 and grown_before[-1:] == [grown]
        is_late = time.process_time() - self._began > self.limits.seconds / 3
        is_steady = is_alike and is_little and (grown <= 0 or goes_on)
        if not is_steady and not is_late and len(self._windows) < _MOST_WINDOWS:
            return False
        if grown > 0 and (goes_on or not is_little):
            site = self.recorder.kept_site(before.end, _LASTING)
            self.growth = Growth(-(-grown // last.batches), self.batches, site)
        elif not is_steady and not self.draws:
            self.remarks.append(
                f"what a step allocates differs from batch to batch: the figures are the largest of {self.batches} "
                "batches, others may need more"
            )
        if self.draws:
            self.remarks.append(DRAWS)
        return True


def _generators() -> tuple[object, object]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002  (the global generator, which user code may draw from)
    return random.getstate(), (of_numpy[1].tobytes(), of_numpy[2:])

"""How long a traced or measured run goes on: until its steps are known, and never beyond its limits.

A run is cut into windows. A window ends with the batch after which every optimizer has stepped since the last one: one
batch for most modules, several for manual accumulation or a critic that steps more often. Two windows that allocate
alike and keep nothing end the run. If they differ, or memory grows, more of them follow: a memory bank that fills,
states that are made later. What still grows when the run has to end is a `Growth`. What a step does at a later batch,
in another epoch or below a learning rate isn't looked for: `StepOptions.batch_idx` asks for one.
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
from lightning_memfit.profile.events import EventList, leave_out
from lightning_memfit.profile.record import Growth
from lightning_memfit.profile.recorder import EventRecorder, Mark


@dataclass(frozen=True)
class TraceLimits:
    """Where a traced or measured run ends at the latest.

    Raises:
        ValueError: If a limit leaves no room for two batches.
    """

    seconds: float = 120.0
    """Time of one run, less what it waited for a core that other programs used (Linux). After a third of it no more
    batches are run than those that show every optimizer's second step."""
    batches: int = 1000
    """Batches from the loader."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0), ("batches", 1)):
            if not getattr(self, name) > least:
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be more than {least}.")


class LimitReached(BaseException):
    """A run came to one of its limits; not an `Exception`, so that no handler of the module's goes on with it."""


@dataclass(frozen=True)
class RunLength:
    """How long the real run is, as far as that is known before it."""

    batches: int | None = None
    """Batches of an epoch."""
    epochs: int | None = None

    @classmethod
    def of(cls, module: Any) -> "RunLength":
        """What the Trainer that a module belongs to says."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            return cls()
        batches = _count(getattr(trainer, "num_training_batches", None))
        limit = getattr(trainer, "limit_train_batches", None)
        if batches is None and isinstance(limit, int):
            batches = _count(limit)
        return cls(batches, _count(getattr(trainer, "max_epochs", None)))


def _count(value: Any) -> int | None:
    """A number that Lightning gives as such; None for one that stands for no limit."""
    return int(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


def _generators() -> tuple[object, object]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002  (the global generator, which user code may draw from)
    return random.getstate(), (of_numpy[1].tobytes(), of_numpy[2:])


_TOLERANCE = 0.005
"""Share of what a window allocates in which two windows that are alike may differ."""

_NEGLIGIBLE_BYTES = 4096
"""A difference between windows that is no more than counters and logged values. Growth of no more than that counts only
if it goes on."""

_SMALL_GROWTH = 8
"""Windows after which memory that grows little, and not by the same, is no longer waited for."""

_MOST_GROWTH = 64
"""Batches after which memory that still grows is taken to go on growing."""

_DRAWING_WINDOWS = 8
"""Windows of a step that draws: they differ, and say no more than whether memory grows."""

_ALIKE_AGAIN = 3
"""Pairs of windows that must be alike where more than the first differed."""

_KEPT_WINDOWS = 4

_LASTING = (Category.GRADIENT, Category.OPTIMIZER_STATE)


@dataclass(frozen=True)
class _Window:
    """What happened from one step of every optimizer to the next."""

    batches: int
    made: Counter[tuple[int, int]]
    """Storages by category and size, without gradients and optimizer states."""
    kept_bytes: int
    """What is alive at its end, without gradients."""

    def is_like(self, other: "_Window") -> bool:
        """Whether another window allocated the same, but for scalars and little else."""
        if self.made == other.made:
            return True
        differing = sum(
            size * count for (_, size), count in ((self.made - other.made) + (other.made - self.made)).items()
        )
        return differing <= _TOLERANCE * sum(size * count for (_, size), count in self.made.items())


class Course:
    """Decides after every batch whether a run goes on.

    Args:
        recorder: Records the run.
        limits: Where it ends at the latest.
        window_batches: Batches of an optimizer step in automatic optimization.
        length: Length of the real run.

    Attributes:
        batches: Batches that have ended.
        growth: Memory that had not stopped growing when the run ended.
        remarks: What the figures don't cover, or are the largest of, in clauses.
        draws: Whether a step drew from Python's or NumPy's generator.
        callback_bytes: What the user's callbacks made.
    """

    def __init__(
        self, recorder: EventRecorder, limits: TraceLimits, window_batches: int = 1, length: RunLength | None = None
    ) -> None:
        self.recorder = recorder
        self.limits = limits
        self.length = length or RunLength()
        self.batches = 0
        self.growth: Growth | None = None
        self.remarks: list[str] = []
        self.draws = False
        self.callback_bytes = 0
        self._began = time.process_time()
        self._window_batches = window_batches
        self._by_batches = True
        self._optimizers: list[Any] = []
        self._steps: dict[int, int] = {}
        self._steps_before: dict[int, int] = {}
        self._windows: list[_Window] = []
        self._alike = 0
        self._marks: list[Mark] = []  # the run's beginning, then the end of every window
        self._window_first_batch, self._window_start = 0, recorder.mark()
        self._in_batch = False
        self._generators: Any = None

    # --- following the run ------------------------------------------------------------------------------------------

    def follow(self, optimizers: list[Any], manual: bool) -> None:
        """Count the steps of optimizers, which are thrown away after the run.

        Args:
            optimizers: Those of the run. Without any, a window is one batch.
            manual: Whether the module steps them itself, so that windows are told by their steps.
        """
        self._by_batches = not manual
        self._optimizers = list(optimizers)
        self._steps = {id(optimizer): 0 for optimizer in optimizers}
        self._steps_before = dict(self._steps)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self.stepped(stepped))

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer."""
        self._steps[id(optimizer)] = self.steps_of(optimizer) + 1

    def steps_of(self, optimizer: Any) -> int:
        """Steps of an optimizer so far."""
        return self._steps.get(id(optimizer), 0)

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Count what is made by a hook of one of the user's callbacks."""
        before = self.recorder.mark()
        try:
            yield
        finally:
            made = self.recorder.made_between(before, self.recorder.mark(), ())
            self.callback_bytes += sum(count * size for (_, size), count in made.items())

    def begin_batch(self) -> None:
        """Note where a batch begins.

        Raises:
            LimitReached: If there were too many batches.
        """
        if self.batches >= self.limits.batches:
            counts = [f"{type(optimizer).__name__} {self.steps_of(optimizer)}" for optimizer in self._optimizers]
            raise LimitReached(f"{self.batches:,} batches (steps: {', '.join(counts)})")
        if not self._marks:
            self._marks.append(self.recorder.mark())
        if self.batches == self._window_first_batch:
            self._window_start = self.recorder.mark()  # the first batch, unlike others, was fetched before the run
        self._generators = _generators()
        self._in_batch = True

    def end_batch(self) -> bool:
        """Note where a batch ended, if one had begun; True if the run may end."""
        if not self._in_batch:  # an epoch begins
            return False
        self._in_batch = False
        self.batches += 1
        self.draws = self.draws or _generators() != self._generators
        return self._closes_window() and self._is_known()

    def _closes_window(self) -> bool:
        batches = self.batches - self._window_first_batch
        if self._by_batches and batches % self._window_batches:
            return False
        if any(self._steps[key] == self._steps_before.get(key, 0) for key in self._awaited()):
            return False
        now = self.recorder.mark()
        made = self.recorder.made_between(self._window_start, now, _LASTING)
        self._windows.append(_Window(batches, made, now.kept_bytes))
        self._marks.append(now)
        self._window_first_batch, self._steps_before = self.batches, dict(self._steps)
        return True

    def _awaited(self) -> list[int]:
        """Optimizers whose steps end a window: all, until another one has stepped so often that some never may."""
        most = max(self._steps.values(), default=0)
        is_enough = most >= _MOST_GROWTH or (most > 1 and self._is_late)
        return [key for key, count in self._steps.items() if count or not is_enough]

    # --- are the steps known? ---------------------------------------------------------------------------------------

    @property
    def _is_late(self) -> bool:
        """Whether there is no time for more batches than needed."""
        return time.process_time() - self._began > self.limits.seconds / 3

    def _is_known(self) -> bool:
        """Whether the last windows show what all later ones do, or there is no time for more."""
        if len(self._windows) < 2:
            return False
        before, last = self._windows[-2:]
        keeps = abs(last.kept_bytes - before.kept_bytes) > _NEGLIGIBLE_BYTES * last.batches
        self._alike = self._alike + 1 if last.is_like(before) and not keeps else 0
        # Where only the first window differs, it made what the later ones use.
        if self._alike >= (1 if len(self._windows) <= 3 else _ALIKE_AGAIN):
            return self._knows_small_growth()
        if self.draws and len(self._windows) >= _DRAWING_WINDOWS and self._growth_per_batch() <= _NEGLIGIBLE_BYTES:
            return True
        if self.batches < min(_MOST_GROWTH, self.length.batches or _MOST_GROWTH) and not self._is_late:
            return False
        self._note_growth()
        return True

    def _knows_small_growth(self) -> bool:
        """Whether windows that are alike but for counters end without growth, or with one that goes on."""
        grown = [later.kept_bytes - earlier.kept_bytes for earlier, later in pairwise(self._windows[-3:])]
        if grown[-1] <= 0 or self._is_late or len(self._windows) >= _SMALL_GROWTH:
            return True
        if len(grown) == 1 or grown[0] != grown[1]:
            return False
        self._set_growth(-(-grown[-1] // self._windows[-1].batches), self._marks[-2])
        return True

    def _growth_per_batch(self) -> int:
        """How fast memory grew in the second half of the windows."""
        first = len(self._windows) // 2 if len(self._windows) > 2 else 0
        batches = sum(window.batches for window in self._windows[first + 1 :])
        return (self._windows[-1].kept_bytes - self._windows[first].kept_bytes) // batches

    def _note_growth(self) -> None:
        per_batch = self._growth_per_batch()
        if per_batch > _NEGLIGIBLE_BYTES:
            self._set_growth(per_batch, self._marks[len(self._windows) // 2])
        elif not self.draws:
            self.remarks.append(
                f"what a step allocates differs from batch to batch: the figures are the largest of {self.batches} "
                "batches, others may need more"
            )

    def _set_growth(self, per_batch: int, since: Mark) -> None:
        self.growth = Growth(per_batch, self.batches, self.recorder.kept_site(since, _LASTING))

    # --- the result -------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Say which optimizers never stepped; raise if none did.

        Raises:
            LimitReached: If no optimizer stepped.
        """
        if self.draws:
            self.remarks.append("the step draws random numbers, by which it may need more in other batches")
        idle = [type(optimizer).__name__ for optimizer in self._optimizers if not self.steps_of(optimizer)]
        if not idle:
            return
        if len(idle) == len(self._optimizers):
            raise LimitReached(f"{self.batches:,} batches in which no optimizer stepped")
        self.remarks.append(
            f"{', '.join(idle)} had not stepped after {self.batches} batches: its states are not in the figures"
        )

    def essential(self, events: EventList) -> EventList:
        """The events without windows that say nothing more.

        What is left has the first window, in which states are made and an allocator's segments with them, the one with
        the peak, and the last two.
        """
        starts = [mark.num_events for mark in self._marks]
        if len(starts) <= _KEPT_WINDOWS + 1:
            return events
        live = events.live_bytes()
        peaks = [int(live[start:stop].max(initial=0)) for start, stop in pairwise(starts)]
        last = len(self._windows)
        kept = {0, peaks.index(max(peaks)), last - 2, last - 1}
        return leave_out(events, [span for place, span in enumerate(pairwise(starts)) if place not in kept])

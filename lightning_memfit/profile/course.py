"""How long a traced or measured run goes on: until its steps are known, and never beyond its limits.

A run is cut into windows. A window ends with the batch after which every optimizer has stepped since the last one: one
batch for most modules, several for manual accumulation or a critic that steps more often. Two windows that allocate
alike and keep nothing end the run. If they differ, or memory grows, more of them follow: a memory bank that fills,
states that are made later. What still grows when the run has to end is a `Growth`.

Two windows don't show what a step does once in a while. So a step that asks for its number, or draws from Python's or
NumPy's generator, is run for a few more batches: at the numbers at which its own comparisons and remainders change
(`profile.watched`, which finds the module's own counters, too), and with the lowest and highest draws; a trace, also
one that depends on a single number of `torch.rand`. Where hooks run at the start of every epoch, so are the epochs in
which these may do something else.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from lightning_memfit.memory import Category
from lightning_memfit.profile.budget import Budget, LimitReached
from lightning_memfit.profile.events import EventList, leave_out
from lightning_memfit.profile.rates import ScheduledRates
from lightning_memfit.profile.record import Growth
from lightning_memfit.profile.recorder import EventRecorder, Mark
from lightning_memfit.profile.replaced import replaced_everywhere
from lightning_memfit.profile.watched import AskedNumbers, Counters, FakeDraws, WatchedInt


@dataclass(frozen=True)
class RunLength:
    """How long the real run is, as far as that is known before it."""

    batches: int | None = None
    """Batches of an epoch."""
    steps: int | None = None
    epochs: int | None = None

    @classmethod
    def of(cls, module: Any) -> "RunLength":
        """What the Trainer that a module belongs to says."""
        trainer = getattr(module, "_trainer", None)
        if trainer is None:
            return cls()
        known = {name: getattr(trainer, name, None) for name in ("limit_train_batches", "max_steps", "max_epochs")}
        batches, limit = _count(getattr(trainer, "num_training_batches", None)), known["limit_train_batches"]
        if batches is None and isinstance(limit, int):
            batches = _count(limit)
        return cls(batches, _count(known["max_steps"]), _count(known["max_epochs"]))

    @property
    def all_steps(self) -> int | None:
        """Optimizer steps of the whole run, as `global_step` counts them."""
        if self.steps is not None:
            return self.steps
        return self.batches * self.epochs if self.batches is not None and self.epochs is not None else None


def _count(value: Any) -> int | None:
    """A number that Lightning gives as such; None for one that stands for no limit."""
    return int(value) if isinstance(value, (int, float)) and 0 < value < float("inf") else None


# --- draws ------------------------------------------------------------------------------------------------------------


def _generators() -> tuple[object, object]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002  (the global generator, which user code may draw from)
    return random.getstate(), (of_numpy[1].tobytes(), of_numpy[2:])


@contextmanager
def extreme_draws(highest: bool, fake_draws: FakeDraws) -> Iterator[None]:
    """Let Python's and NumPy's module-level generators draw their lowest or highest value, wherever they are known.

    Args:
        highest: Which of the two.
        fake_draws: What draws as they do.
    """
    share = 1 - 2**-53 if highest else 0.0

    def uniform(low: float = 0.0, high: float = 1.0) -> float:
        return low + share * (high - low)

    def of_range(start: int, stop: int | None = None, step: int = 1) -> int:
        choices = range(start) if stop is None else range(start, stop, step)
        return choices[-1 if highest else 0]

    def filled(*shape: int) -> Any:
        return np.full(shape, share) if shape else share

    def sized(size: Any = None) -> Any:
        return share if size is None else np.full(size, share)

    def integers(low: int, high: int | None = None, size: Any = None, dtype: Any = int) -> Any:
        value = of_range(low, high)
        return value if size is None else np.full(size, value, dtype=dtype)

    others: dict[Any, Callable[..., Any]] = {
        random.random: lambda: share,
        random.uniform: uniform,
        random.randint: lambda low, high: high if highest else low,
        random.randrange: of_range,
        random.choice: lambda sequence: sequence[-1 if highest else 0],
        np.random.rand: filled,
        np.random.random: sized,
        np.random.random_sample: sized,
        np.random.randint: integers,
    }
    before, fake_draws.share = fake_draws.share, 1 - 2**-24 if highest else 0.0  # the highest that float32 has
    try:
        with replaced_everywhere(others):
            yield
    finally:
        fake_draws.share = before


# --- the course of a run ----------------------------------------------------------------------------------------------


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
        budget: Where it ends at the latest.
        window_batches: Batches of an optimizer step in automatic optimization.
        length: Length of the real run.
        counters: Finds numbers that change from batch to batch.
        fake_draws: What `torch.rand` draws where tensors are fakes.

    Attributes:
        batches: Batches that have ended.
        growth: Memory that had not stopped growing when the run ended.
        remarks: What the figures don't cover, or are the largest of, in clauses.
        draws: Whether a step drew from Python's or NumPy's generator, or depended on what torch drew for fakes.
        is_extra: Whether the batch at hand is one beyond those that show steady steps.
        callback_bytes: What the user's callbacks made.
        begins_epoch: Whether the next batch is the first of another epoch.
    """

    def __init__(
        self,
        recorder: EventRecorder,
        budget: Budget,
        window_batches: int = 1,
        length: RunLength | None = None,
        counters: Counters | None = None,
        fake_draws: FakeDraws | None = None,
    ) -> None:
        self.recorder = recorder
        self.limits = budget.limits
        self.length = length or RunLength()
        self.batches = 0
        self.growth: Growth | None = None
        self.remarks: list[str] = []
        self.draws = False
        self.is_extra = False
        self.callback_bytes = 0
        self.begins_epoch = False
        self._counters = counters or Counters(())
        self._fake_draws = fake_draws or FakeDraws()
        self._of_optimizers = self._counters.of_others(())
        """Numbers by which optimizers count their steps, from window to window."""
        self._budget = budget
        recorder.on_operator = budget.count_operator
        self._window_batches = window_batches
        self._by_batches = True
        self._optimizers: list[Any] = []
        self._steps: dict[int, int] = {}
        self._steps_before: dict[int, int] = {}
        self._windows: list[_Window] = []
        self._alike = 0
        self._marks: list[Mark] = []  # the run's beginning, then the end of every window and of every extra batch
        self._window_first_batch, self._window_start = 0, recorder.mark()
        self._in_batch = False
        self._generators: Any = None
        self._extra: Iterator[None] | None = None
        self._asked = {name: AskedNumbers() for name in ("batch", "total", "step", "epoch")}
        self._rates = ScheduledRates()
        self._number: int | None = None
        self._epoch = 0
        self._epoch_hooks = False
        self._in_run = False
        self._in_hook = False
        self._found_in_epoch = False
        self._asks_for_last = False
        self._is_last = False
        self._draw = ExitStack()
        self._tried: list[str] = []
        """What was tried in each extra batch, in words."""

    # --- following the run ------------------------------------------------------------------------------------------

    def follow(
        self, optimizers: list[Any], manual: bool, epoch_hooks: bool = False, schedulers: Iterable[Any] = ()
    ) -> None:
        """Count the steps of optimizers, which are thrown away after the run.

        Args:
            optimizers: Those of the run. Without any, a window is one batch.
            manual: Whether the module steps them itself, so that windows are told by their steps.
            epoch_hooks: Whether hooks of the user's run at the start of every epoch.
            schedulers: Lightning's configurations of learning rate schedulers.
        """
        self._rates = ScheduledRates(schedulers)
        self._in_run, self._epoch_hooks = True, epoch_hooks
        if epoch_hooks:
            self._counters.note()
        self._by_batches = not manual
        self._optimizers = list(optimizers)
        self._steps = {id(optimizer): 0 for optimizer in optimizers}
        self._steps_before = dict(self._steps)
        self._of_optimizers = self._counters.of_others(optimizers)
        self._of_optimizers.note()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self.stepped(stepped))

    def note_left_out(self, hooks: list[str]) -> None:
        """Say that hooks around the steps are not in the figures."""
        if hooks:
            names = " and ".join(f"`{name}`" for name in hooks)
            self.remarks.append(f"tensors that {names} may make are not in the figures, as no trial step ran with it")

    def stepped(self, optimizer: Any) -> None:
        """Count a step of an optimizer."""
        self._steps[id(optimizer)] = self.steps_of(optimizer) + 1

    def steps_of(self, optimizer: Any) -> int:
        """Steps of an optimizer so far."""
        return self._steps.get(id(optimizer), 0)

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Count what is made by a hook of one of the user's callbacks."""
        before, outer = self.recorder.mark(), self._in_hook
        self._in_hook = True
        try:
            yield
        finally:
            self._in_hook = outer
        made = self.recorder.made_between(before, self.recorder.mark(), ())
        self.callback_bytes += sum(count * size for (_, size), count in made.items())

    def begin_batch(self) -> None:
        """Note where a batch begins.

        Raises:
            LimitReached: If there were too many batches, or the time is over.
        """
        self._budget.check_time()
        if self.batches >= self.limits.batches:
            counts = [f"{type(optimizer).__name__} {self.steps_of(optimizer)}" for optimizer in self._optimizers]
            raise LimitReached(f"{self.batches:,} batches (steps: {', '.join(counts)})")
        if not self._marks:
            self._budget.start()
            self._marks.append(self.recorder.mark())
        if not self._counters.is_noted:
            self._counters.note()
        if self.batches == self._window_first_batch:
            self._window_start = self.recorder.mark()  # the first batch, unlike others, was fetched before the run
        self._rates.watch()
        self._generators = _generators()
        self._in_batch = True

    def end_batch(self) -> bool:
        """Note where a batch ended, if one had begun; True if the run may end."""
        if not self._in_batch:  # an epoch begins
            self._counters.note(self._counters.by_epoch if self._epoch_hooks else None)
            self._found_in_epoch = self._counters.unwatched
            return False
        self._in_batch = False
        self.batches += 1
        self._draw.close()
        self._counters.note(self._counters.by_batch)
        if self._extra is not None:
            self._marks.append(self.recorder.mark())
            return self._go_beyond(self._extra)
        self.draws = self.draws or self._fake_draws.decided or _generators() != self._generators
        if not self._closes_window() or not self._is_known() or self._has_unseen_state():
            return False
        self._extra = self._extra_batches()
        return self._go_beyond(self._extra)

    def end(self) -> None:
        """Leave nothing patched, whatever ended the run."""
        self._draw.close()

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
        self._of_optimizers.note(self._of_optimizers.by_batch)
        return True

    def _awaited(self) -> list[int]:
        """Optimizers whose steps end a window: all, until another one has stepped so often that some never may."""
        most = max(self._steps.values(), default=0)
        is_enough = most >= _MOST_GROWTH or (most > 1 and self._is_late)
        return [key for key, count in self._steps.items() if count or not is_enough]

    # --- are the steps known? ---------------------------------------------------------------------------------------

    @property
    def _is_late(self) -> bool:
        return self._budget.is_mostly_used

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

    def _has_unseen_state(self) -> bool:
        """Whether the last batch changed what it may act on in the next one."""
        if self._is_late:
            return False
        unsettled = (*self._counters.unsettled, *self._of_optimizers.unsettled)
        if unsettled and len(self._windows) >= _UNSETTLED_WINDOWS:
            names = " and ".join(f"`{name}`" for name in unsettled[:_MOST_NAMES])
            self.remarks.append(
                f"{names} {'change' if len(unsettled) > 1 else 'changes'} with every batch: what a step does once in a "
                f"while depending on that is in the figures only as far as {self.batches} batches show it"
            )
            return False
        return bool(unsettled) or self._counters.unwatched or self._of_optimizers.unwatched

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

    # --- batches beyond ---------------------------------------------------------------------------------------------

    def _go_beyond(self, extra: Iterator[None]) -> bool:
        """Prepare one more batch; True if there is none."""
        self._number = None
        self.is_extra = False
        if self._is_late and (self.draws or self._asks or self._epoch_hooks):
            self.remarks.append(
                f"{self._reason()}: not all that this may change was tried in {self.limits.seconds:g} s"
            )
            return True
        self.is_extra = next(extra, _ENDED) is not _ENDED
        return not self.is_extra

    def _extra_batches(self) -> Iterator[None]:
        """Prepare one more batch at each turn."""
        if self.draws:
            for highest in (False, True):
                for _ in range(2 * self._window_batches):  # twice, as gradients of the step before are alive in a step
                    self._draw.enter_context(extreme_draws(highest, self._fake_draws))
                    self._tried.append(f"with its {'highest' if highest else 'lowest'} draws")
                    yield
        if self._asks_for_last:
            for _ in range(self._window_batches):
                self._is_last = True
                self._tried.append("in the last batch of an epoch")
                yield
            self._is_last = False
        yield from self._at_numbers()
        yield from self._at_rates()
        if self._epoch_hooks:
            yield from self._in_epochs()

    def _at_numbers(self) -> Iterator[None]:
        """Prepare a batch at each number at which the step may do something else."""
        counters, of_optimizers, first = self._counters, self._of_optimizers, self.batches
        tried: set[int] = set()
        counters.fix(counters.by_batch, first)
        of_optimizers.fix(of_optimizers.by_batch, first)
        while numbers := sorted(self._telling_numbers(first) - tried):
            if len(tried) >= _MOST_NUMBERS:
                self.remarks.append(
                    f"{self._reason()}: more than {_MOST_NUMBERS} numbers decide what it does, not all were tried"
                )
                return
            tried.add(numbers[0])
            of_optimizers.go_on(of_optimizers.by_batch, numbers[0])
            for batch in range(self._batches_at(numbers[0], first)):
                self._number = numbers[0] + (0 if self._by_batches else batch)
                counters.go_on(counters.by_batch, self._number)
                self._tried.append(f"at {numbers[0]:,}")
                yield
            of_optimizers.note(of_optimizers.by_batch)
            for known in (counters, of_optimizers):
                known.fix(known.by_batch, numbers[0] + 1)

    def _at_rates(self) -> Iterator[None]:
        """Prepare batches at learning rates with which the step may do something else."""
        for _ in range(_MOST_NUMBERS):
            rates = self._rates.unseen(self.length.all_steps, self.length.epochs)
            if not rates:
                return
            with self._rates.tried(rates[0]):
                for _ in range(2 * self._batches_of_window):  # twice, as states are made at the end of a step
                    self._tried.append(f"at a learning rate of {min(rates[0]):g}")
                    yield
        self.remarks.append(
            f"{self._reason()}: more than {_MOST_NUMBERS} of them decide what it does, not all were tried"
        )

    def _batches_at(self, number: int, first: int) -> int:
        """Batches in which a number is tried: where optimizers have counted to it, until each has stepped."""
        is_of_optimizers = self._by_batches or number in self._telling_steps(first)
        return self._batches_of_window if is_of_optimizers else 1

    @property
    def _batches_of_window(self) -> int:
        return self._window_batches if self._by_batches else self._windows[-1].batches

    def _telling_steps(self, first: int) -> set[int]:
        """Numbers at which an optimizer may do something else, one for each of its steps.

        Args:
            first: The batch that would come next.
        """
        steps = self.length.all_steps
        last = None if steps is None else first + steps - len(self._windows) - 1
        return self._of_optimizers.telling_turns(self._of_optimizers.by_batch, last)

    def _telling_numbers(self, first: int) -> set[int]:
        """Numbers at which the step may do something else.

        Args:
            first: The batch that would come next.
        """
        begin = {"batch": first, "total": first, "step": min(first, sum(self._steps.values())), "epoch": 1}
        found = self._telling_steps(first)
        for name, asked in self._asked.items():
            found |= set(asked.telling_numbers(self._last(name), begin[name]))
        return found | self._counters.telling_turns(self._counters.by_batch, self._last("total"))

    def _in_epochs(self) -> Iterator[None]:
        """Prepare batches of the second epoch, and of those in which a hook at their start may do something else."""
        counters, last = self._counters, self._last("epoch")
        for number in range(_MOST_EPOCHS + 1):
            counters.fix(counters.by_epoch, self._epoch + 1)
            telling = counters.telling_turns(counters.by_epoch, last) | {
                1,
                *self._asked["epoch"].telling_numbers(last, 1),
            }
            if self._found_in_epoch:
                telling.add(self._epoch + 1)
            epochs = sorted(epoch for epoch in telling if epoch > self._epoch and (last is None or epoch <= last))
            if not epochs:
                return
            if number == _MOST_EPOCHS:
                self.remarks.append(f"{self._reason()}: epochs from {epochs[0]} on were not tried")
                return
            self._epoch = epochs[0]
            counters.go_on(counters.by_epoch, self._epoch)
            for turn in range(2 * self._window_batches):  # twice, as states are made at the end of a step
                self.begins_epoch = turn == 0
                self._tried.append(f"in epoch {self._epoch:,}")
                yield

    def _last(self, name: str) -> int | None:
        """The last number of the real run; None if that isn't known."""
        batches, epochs = self.length.batches, self.length.epochs
        if name == "total":
            count = None if batches is None or epochs is None else batches * epochs
        else:
            count = {"batch": batches, "step": self.length.all_steps, "epoch": epochs}[name]
        return None if count is None else count - 1

    def number(self, name: str, value: int) -> int:
        """A number of the batch at hand as the step shall see it: the real one, or one that is tried.

        Args:
            name: `batch`, `step`, `epoch`, or `total`: that of the batch in all epochs.
            value: The real one.
        """
        if not self._in_run:
            return value
        if name == "epoch":
            value = self._epoch
        if self._number is not None:
            last = self._last(name)
            value = self._number if last is None else min(self._number, last)
        return WatchedInt.of(value, self._asked[name])

    def is_last_batch(self) -> bool:
        """Whether the batch at hand shall be the last of its epoch for a step that asks."""
        self._asks_for_last = True
        return self._is_last

    @property
    def in_hook(self) -> bool:
        """Whether a hook of one of the user's callbacks runs."""
        return self._in_hook

    # --- the result -------------------------------------------------------------------------------------------------

    def leave_last_batch(self, error: BaseException) -> None:
        """Forget a batch beyond the least that ended in an error, which a real one at that number may not do."""
        self.recorder.cut(self._marks[-1])
        self.recorder.phase("end")
        tried = self._tried.pop()
        self.remarks.append(
            f"{self._reason()}, and was not tried {tried} and beyond, where it ends in {type(error).__name__}: {error}"
        )

    def _check_optimizers(self) -> None:
        """Refuse a run that shows no step, and say which optimizers never stepped in a run that shows some.

        Raises:
            LimitReached: If no optimizer stepped.
        """
        idle = [type(optimizer).__name__ for optimizer in self._optimizers if not self.steps_of(optimizer)]
        if not idle:
            return
        if len(idle) == len(self._optimizers):
            raise LimitReached(f"{self.batches:,} batches in which no optimizer stepped")
        self.remarks.append(
            f"{', '.join(idle)} had not stepped after {self.batches} batches: its states are not in the figures"
        )

    def conclude(self) -> None:
        """Say so if a batch beyond the others needs the most memory; raise if no optimizer stepped.

        Raises:
            LimitReached: If no optimizer stepped.
        """
        self._check_optimizers()
        if not self._tried:
            return
        peaks, last = self._peaks(self.recorder.result()), len(self._windows)
        extra = peaks[last:]
        if max(extra) > max(peaks[:last]):
            where = self._tried[extra.index(max(extra))]
            share = 100 * max(extra) / max(peaks[:last]) - 100
            self.remarks.append(
                f"{self._reason()}: more than the first {last} steps were tried, and the figures are those {where}, "
                f"{share:.1f} % above the first"
            )

    def _reason(self) -> str:
        """Why a step was tried further."""
        names = [_ASKED[name] for name, asked in self._asked.items() if asked]
        names += ["its learning rate"] * self._rates.is_asked
        names += ["whether its batch is the last"] * self._asks_for_last
        names += [f"`{name}`, which counts" for name in self._counted_names()[:_MOST_NAMES]]
        parts = ["draws random numbers"] * self.draws + [f"asks for {' and '.join(names)}"] * bool(names)
        if self._epoch_hooks and not parts:
            return "hooks run at the start of every epoch"
        return f"the step {' and '.join(parts)}"

    @property
    def _asks(self) -> bool:
        """Whether a step asked for what later ones have otherwise."""
        return any(self._asked.values()) or self._asks_for_last or self._rates.is_asked or bool(self._counted_names())

    def _counted_names(self) -> list[str]:
        return [*self._counters.asked_names(), *self._of_optimizers.asked_names()]

    def _peaks(self, events: EventList) -> list[int]:
        """Highest level of every window and extra batch."""
        live = events.live_bytes()
        return [int(live[a.num_events : b.num_events].max(initial=0)) for a, b in pairwise(self._marks)]

    def essential(self, events: EventList) -> EventList:
        """The events without windows that say nothing more.

        What is left has the first window, in which states are made and an allocator's segments with them, the one with
        the peak, and the last two.
        """
        starts = [mark.num_events for mark in self._marks]
        if len(starts) <= _KEPT_WINDOWS + 1:
            return events
        peaks, last = self._peaks(events), len(self._windows)
        kept = {0, peaks.index(max(peaks)), last - 2, last - 1}
        return leave_out(events, [span for place, span in enumerate(pairwise(starts)) if place not in kept])


_ENDED = object()

_KEPT_WINDOWS = 4

_MOST_NUMBERS = 32

_MOST_EPOCHS = 16

_UNSETTLED_WINDOWS = 8
"""Windows of a step that changes more than numbers."""

_MOST_NAMES = 3

_ASKED = {
    "batch": "the number of its batch",
    "total": "the number of its batch in all epochs",
    "step": "`global_step`",
    "epoch": "`current_epoch`",
}

_LASTING = (Category.GRADIENT, Category.OPTIMIZER_STATE)

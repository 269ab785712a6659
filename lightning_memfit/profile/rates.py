"""Learning rates that schedulers set, and which of them a step acts on.

A rate changes with no fixed step, so that the turn at which a comparison changes can't be computed as for counters
(`profile.watched`). The schedulers themselves tell it: they are stepped to the end of the run and put back.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lightning_memfit.profile.watched import AskedNumbers, WatchedFloat

_MOST_TURNS = 10_000
"""Turns of a scheduler that are looked at."""

_Rates = tuple[float, ...]
"""Learning rates of all groups."""


class ScheduledRates:
    """Watches the learning rates that schedulers set, and finds later ones at which a step may do something else.

    Args:
        schedulers: What Lightning keeps of them (`trainer.lr_scheduler_configs`).
    """

    def __init__(self, schedulers: Iterable[Any] = ()) -> None:
        self._schedulers = list(schedulers)
        self._asked: list[AskedNumbers] = []
        self._seen: set[_Rates] = set()
        self._tried: _Rates | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a step compared a rate with a number."""
        return any(asked.thresholds for asked in self._asked)

    def watch(self) -> None:
        """Watch the rates of the next batch, which are those that are tried, if any are."""
        groups = self._groups()
        self._asked += [AskedNumbers() for _ in groups[len(self._asked) :]]
        rates = self._tried if self._tried is not None and len(self._tried) == len(groups) else _plain_rates(groups)
        self._seen.add(rates)
        for group, rate, asked in zip(groups, rates, self._asked, strict=False):
            group["lr"] = WatchedFloat.of(rate, asked)
        for config in self._schedulers:
            if isinstance(getattr(config.scheduler, "_last_lr", None), list):
                config.scheduler._last_lr = [group["lr"] for group in config.scheduler.optimizer.param_groups]

    @contextmanager
    def tried(self, rates: _Rates) -> Iterator[None]:
        """Let the batches in this context have other rates."""
        before = _plain_rates(self._groups())
        self._tried = rates
        try:
            yield
        finally:
            self._tried = None
            for group, rate in zip(self._groups(), before, strict=False):
                group["lr"] = rate

    def unseen(self, steps: int | None, epochs: int | None) -> list[_Rates]:
        """Rates of later turns, one for each outcome of a comparison that no batch has had yet.

        Args:
            steps: Optimizer steps of the real run, if that is known.
            epochs: Its epochs.
        """
        if not self.is_asked:
            return []
        found: dict[_Rates, None] = {}
        outcomes = {one for rates in self._seen for one in self._outcomes(rates)}
        for rates in self._later(steps, epochs):
            new = self._outcomes(rates) - outcomes
            if new:
                found[rates] = None
                outcomes |= new
        return list(found)

    def _outcomes(self, rates: _Rates) -> set[tuple[int, float, int]]:
        """Which side of each threshold the rates are on, by group."""
        return {
            (place, threshold, (rate > threshold) - (rate < threshold))
            for place, (rate, asked) in enumerate(zip(rates, self._asked, strict=False))
            for threshold in asked.thresholds
        }

    def _groups(self) -> list[dict[str, Any]]:
        """Groups with a rate that a scheduler sets; a rate that is a tensor is left alone."""
        optimizers = {id(config.scheduler.optimizer): config.scheduler.optimizer for config in self._with_optimizer()}
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        return [group for group in groups if isinstance(group.get("lr"), (int, float))]

    def _with_optimizer(self) -> list[Any]:
        return [config for config in self._schedulers if getattr(config.scheduler, "optimizer", None) is not None]

    def _later(self, steps: int | None, epochs: int | None) -> Iterator[_Rates]:
        """Rates of the turns to come, each scheduler on its own."""
        for config in self._with_optimizer():
            turns = (epochs if config.interval == "epoch" else steps) or _MOST_TURNS
            last = (min(turns, _MOST_TURNS) - 1) // max(1, config.frequency or 1)
            kept = list(_states_of(config.scheduler, set()))
            groups = self._groups()
            rates = _plain_rates(groups)
            try:
                # Some raise past their last step, or need more than a step gives them.
                with suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for _ in range(last - getattr(config.scheduler, "last_epoch", 0)):
                        if not _step(config.scheduler):
                            break
                        yield _plain_rates(groups)
            finally:
                for state, before in kept:
                    state.clear()
                    state.update(before)
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate


def _plain_rates(groups: list[dict[str, Any]]) -> _Rates:
    rates = (group["lr"] for group in groups)
    return tuple(rate.plain() if isinstance(rate, WatchedFloat) else float(rate) for rate in rates)


def _step(scheduler: Any) -> bool:
    """Go on by a turn; False if there is none."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step()
        return True
    before = [group["lr"] for group in scheduler.optimizer.param_groups]
    scheduler._reduce_lr(0)  # when it does so, only the metric tells
    return before != [group["lr"] for group in scheduler.optimizer.param_groups]


def _states_of(scheduler: Any, known: set[int]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Attributes of a scheduler and of those that it holds, and what they are."""
    if id(scheduler) in known:
        return
    known.add(id(scheduler))
    state = vars(scheduler)
    yield state, {name: list(value) if type(value) is list else value for name, value in state.items()}
    for value in list(state.values()):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.optim.lr_scheduler.LRScheduler):
                yield from _states_of(one, known)

"""`Search`: the fastest setting of a workload that fits, by branch and bound over combinations of techniques.

It proves its answer against all others while most of them are never traced.
"""

from __future__ import annotations

import heapq
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from lightning_memfit.estimate.division import estimate_rank
from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.estimate.zero_rank import why_states_stay_whole
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.planner.candidates import Rejected, by_need, candidates, with_losses
from lightning_memfit.planner.lower_bound import LowerBound
from lightning_memfit.planner.numerics import UNSURE
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.solve import TIE, Solution, Solver, complexity_of, is_better, key_of
from lightning_memfit.planner.trace_store import NotTraced, TraceStore
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting

_Waiting = tuple[float, tuple[str, ...], bool, Setting]
"""Bound on a combination's cost, key among equal ones, whether its pass was traced for the bound, combination."""


@dataclass
class Working:
    """How far a search is."""

    traced: str = ""
    """What is being traced, in a few words."""
    traces: int = 0
    """Traces begun, that one included."""
    left: int = 0
    """Combinations that may still be better."""
    best: str = ""
    """The best setting so far, with its time; empty if nothing fits yet."""
    checked: int = 0
    """Combinations that were worked out or ruled out."""

    def words(self) -> str:
        """All of it in one line."""
        parts = [f"tracing {self.traced} (trace {self.traces})"] if self.traced else []
        parts += [f"{self.left} combinations left"] if self.left else []
        found = "nothing fits so far" if self.checked else "none checked yet"
        return ", ".join([*parts, f"best so far: {self.best}" if self.best else found])


class Progress(Protocol):
    """Is told at every change, several times a second at most when traces are cached."""

    def __call__(self, working: Working) -> None:
        """Show it, or don't."""


def unseen(working: Working) -> None:
    """Show nothing."""


@dataclass
class Outcome:
    """What a search found, and what it passed over."""

    best: Solution | None = None
    solutions: list[Solution] = field(default_factory=list)
    """The best of every combination that was worked out, fastest first."""
    rejected: list[Rejected] = field(default_factory=list)
    unvisited: list[_Waiting] = field(default_factory=list)
    """What the bound left out."""


class Search:
    """Search for the fastest setting of a workload that fits, and keeps the recipe's numbers if that costs little.

    Combinations are visited in order of a bound on their time (products alone, no recomputation) and, if that is equal,
    of their names; a combination whose bound is no better than the best found is never traced. Times of combinations
    that change the recipe's numbers count for more by the workload's tolerance (`NumericsOf`), bounds included. The
    result depends neither on the order of the registry nor on what is cached.

    Args:
        store: Makes the traces.
        progress: Is told how far the search is.

    Attributes:
        plain: Profile of the step without techniques (`TraceStore.plain`).
        solver: Solves one combination.
        bound: The least time and memory that combinations take.
    """

    def __init__(self, store: TraceStore, progress: Progress = unseen) -> None:
        self.store = store
        self._progress, self._working = progress, Working()
        self._verified: dict[Setting, Solution] = {}
        store.on_trace = self._begin_trace
        self.plain = store.plain()
        store.workload = self.workload = store.workload.knowing(self.plain)
        self.solver = Solver(store)
        self.bound = LowerBound(store, self.solver)

    def run(self) -> Outcome:
        """Visit combinations until no other can be faster."""
        settings, refused = candidates(self.workload)
        outcome = Outcome(rejected=refused)
        waiting = [self._waiting(setting) for setting in self._possible(settings, outcome)]
        self._visit(waiting, settings, outcome)
        return outcome

    def exact(self, outcome: Outcome) -> Solution | Rejected | None:
        """The best setting that keeps the recipe's numbers, searched for among what the bound left out of a search.

        Args:
            outcome: Of `run`.

        Returns:
            What needs the least if none fits; None if nothing keeps the numbers.
        """
        known = [solution for solution in outcome.solutions if not solution.severity]
        found = Outcome(best=min(known, key=lambda one: one.cost, default=None), solutions=known)
        if outcome.best is None or outcome.best.severity:
            left = [entry for entry in outcome.unvisited if not self._changes(entry[-1])]
            passed_over = [one.setting for one in outcome.rejected if one.seconds is not None]
            left += [self._waiting(setting) for setting in passed_over if not self._changes(setting)]
            self._visit(left, [entry[-1] for entry in left], found)
        else:
            found.best = outcome.best
        if found.best is not None:
            return found.best
        refused = [one for one in (*outcome.rejected, *found.rejected) if not self._changes(one.setting)]
        return next(iter((*by_need(refused), *refused)), None)

    def _begin_trace(self, words: str) -> None:
        self._working.traced, self._working.traces = words, self._working.traces + 1
        self._progress(self._working)

    def _tell(self, left: int, best: Solution | None) -> None:
        self._working.left = left
        if best is not None:
            self._working.best = f"{label(best.setting)}, {best.time.total:.3g} s per step"
        self._progress(self._working)

    def _changes(self, setting: Setting) -> bool:
        return self.solver.numerics.severity(setting) > 0

    def _waiting(self, setting: Setting) -> _Waiting:
        return self.bound.seconds(setting) * self.bound.weight(setting), key_of(setting), False, setting

    def _visit(self, waiting: list[_Waiting], settings: list[Setting], outcome: Outcome) -> None:
        """Visit combinations until no other can be better, and leave the others in `unvisited`."""
        heapq.heapify(waiting)
        while waiting:
            if outcome.best is not None and waiting[0][0] > outcome.best.cost * (1 + self._unsure):
                break
            self._tell(len(waiting), outcome.best)
            cost, key, traced, setting = heapq.heappop(waiting)
            try:
                if not traced:
                    least = self.bound.traced_seconds(setting) * self.bound.weight(setting)
                    heapq.heappush(waiting, (max(cost, least), key, True, setting))
                    continue
                hopeless = self._hopeless(setting, settings, outcome.best) or self._yields(setting, settings)
                self._take(hopeless or self.solver.solve(setting), outcome)
                self._working.checked += 1
            except NotTraced:
                continue
            except TraceError as error:
                outcome.rejected.append(Rejected(setting, str(error)))
        outcome.solutions.sort(key=lambda solution: (solution.time.total, key_of(solution.setting)))
        if self._unsure and outcome.solutions:
            outcome.best = self._simplest(outcome.solutions)
        outcome.unvisited = waiting

    def elsewhere(self, workload: Workload) -> Search:
        """A search for a workload with another device of that type, other limits or permissions, on the same traces."""
        store = copy(self.store)
        store.workload = workload
        there = Search(store)
        store.on_trace = self._begin_trace
        there.solver.budget.withheld = self.solver.budget.withheld
        there.solver.models = self.solver.models
        return there

    def figures(self, solution: Solution) -> Solution:
        """A solution as every table shows it: under a strategy as a trace of itself says, if `verify` made one."""
        return self._verified.get(solution.setting, solution)

    def verify(self, solution: Solution) -> Solution | None:
        """Trace a plan under a strategy, as `memfit estimate` does, and return it with what one rank of that needs.

        Returns:
            None if this process belongs to a process group: no other rank can be traced there.

        Raises:
            TraceError: If it can't be traced.
        """
        setting, runtime = solution.setting, self.workload.target.runtime
        strategy, sharding = setting.of_kind("strategy"), setting.sharding
        assert strategy is not None
        assert sharding is not None
        division = self.workload.division_of(strategy.name, sharding, setting.world_size)
        if division.traced and torch.distributed.is_initialized():
            return None
        found = estimate_rank(self.store.exactly(setting, division), division, setting.micro_batch_size, runtime)
        waiting = self.workload.waiting_bytes(setting)
        self._verified[setting] = replace(
            solution,
            peak_bytes=found.allocated_bytes - found.spare_bytes + waiting,
            needed_bytes=found.total_bytes + waiting,
            breakdown=found.breakdown + MemoryBreakdown.device({Category.INPUT: waiting}),
        )
        return self._verified[setting]

    @property
    def tie(self) -> float:
        """Share of each other's time within which settings count as equal."""
        return max(TIE, self._unsure)

    @property
    def _unsure(self) -> float:
        """Share of each other's time within which strategies count as equal, so that the simplest one is taken."""
        return UNSURE if self.workload.devices.total > 1 else 0.0

    def _simplest(self, solutions: list[Solution]) -> Solution:
        """The one that changes the recipe's numbers least, and of these the simplest, of all that cost about as little.

        What keeps the numbers has already counted for less by the tolerance: it doesn't win by both shares together.
        """
        cheapest = min(solutions, key=lambda solution: solution.cost)
        alike = [
            solution
            for solution in solutions
            if solution.cost <= cheapest.cost * (1 + self._unsure)
            and bool(solution.severity) >= bool(cheapest.severity)
        ]
        return min(alike, key=lambda one: (one.severity, complexity_of(one.setting), one.time.total))

    def _possible(self, settings: list[Setting], outcome: Outcome) -> list[Setting]:
        """Leave out settings that can't fit by closed form or can't be divided, and note them as rejected."""
        kept, whole = [], why_states_stay_whole(self.plain)
        for setting in settings:
            divides = setting.sharding is not None and setting.sharding.deepspeed
            refusal = Rejected(setting, whole) if whole and divides else self.bound.refuse(setting)
            if refusal is None:
                kept.append(setting)
            else:
                outcome.rejected.append(refusal)
        return kept

    def _hopeless(self, setting: Setting, others: list[Setting], best: Solution | None) -> Rejected | None:
        """Why a combination can't be the best, by existing traces; None if it may be."""
        better = self._better_loss(setting, others)
        if better is not None:
            return Rejected(setting, f"{better} needs less memory and no more time")
        if best is None:
            return None
        least = self.bound.solve(setting)
        if least is None:
            return None
        if isinstance(least, Rejected):
            return least
        dearer = least.cost / best.cost - 1
        worse = (least.severity, complexity_of(setting)) > (best.severity, complexity_of(best.setting))
        if dearer > max(TIE, self._unsure) or (not self._unsure and dearer >= -TIE and worse):
            return Rejected(setting, "slower", seconds=least.time.total)
        return None

    def _yields(self, setting: Setting, others: list[Setting]) -> Rejected | None:
        """Why a technique whose cost is not known well enough is passed over: what it yields to fits as well."""
        for choice in setting.chosen:
            first = choice.technique.yields_to
            other = setting.choose(first) if first else None
            if other is None or other not in others or self.bound.refuse(other) is not None:
                continue
            if isinstance(self.solver.solve(other), Solution):
                return Rejected(setting, f"{first} fits as well, and is taken first, as {choice.name} is not measured")
        return None

    def _better_loss(self, setting: Setting, others: list[Setting]) -> str | None:
        """The technique for the loss that needs neither more time nor more memory than the plain loss, if any."""
        for name, other in with_losses(setting):
            if other not in others:
                continue
            try:
                plain, less = self.store.passes(setting, "none"), self.store.passes(other, "none")
            except TraceError:
                continue
            size = plain.micro_batch_size
            saves = predict_peak_bytes(less, size) < predict_peak_bytes(plain, size)
            if saves and self.bound.traced_seconds(other) <= self.bound.traced_seconds(setting):
                return name
        return None

    @staticmethod
    def _take(found: Solution | Rejected, outcome: Outcome) -> None:
        if isinstance(found, Rejected):
            outcome.rejected.append(found)
            return
        outcome.solutions.append(found)
        if outcome.best is None or is_better(found, outcome.best):
            outcome.best = found

"""`make_plan`: search for the fastest setting of a workload that fits, and say why it was chosen.

`Search` is branch and bound over combinations of techniques: it proves its answer against all others while most of them
are never traced. `make_plan` turns the result into a `Plan`: what every technique contributes, what was passed over and
why, and what would help if nothing fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from lightning_memfit.estimate.division import estimate_rank
from lightning_memfit.estimate.estimate import estimate_step, predict_peak_bytes
from lightning_memfit.memory import Category, MemoryBreakdown, format_bytes
from lightning_memfit.planner.advice import advice_of
from lightning_memfit.planner.candidates import Rejected, candidates, with_losses
from lightning_memfit.planner.lower_bound import LowerBound
from lightning_memfit.planner.numerics import UNSURE
from lightning_memfit.planner.plan import Alternative, Plan, TechniqueEffect, label
from lightning_memfit.planner.progress import Progress, Working, unseen
from lightning_memfit.planner.rows import rows_of
from lightning_memfit.planner.solve import TIE, Solution, Solver, TooLarge, Unknown, complexity_of, is_better, key_of
from lightning_memfit.planner.time import uncorrected
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting

_NUM_ALTERNATIVES = 6
_MAX_MICRO_BATCH = 1 << 12


_Waiting = tuple[float, tuple[str, ...], bool, Setting]
"""Bound on a combination's cost, key among equal ones, whether its pass was traced for the bound, combination."""


@dataclass
class Outcome:
    """What a search found, and what it passed over."""

    best: Solution | None = None
    solutions: list[Solution] = field(default_factory=list)
    """The best of every combination that was worked out, fastest first."""
    rejected: list[Rejected] = field(default_factory=list)
    num_candidates: int = 0
    num_traces: int = 0
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
        plain: Profile of the step without techniques.
        solver: Solves one combination.
        bound: The least time and memory that combinations take.
    """

    def __init__(self, store: TraceStore, progress: Progress = unseen) -> None:
        self.store = store
        self._progress, self._working = progress, Working()
        store.on_trace = self._begin_trace
        self.plain = store.plain()
        store.workload = self.workload = store.workload.knowing_optimizers(self.plain.optimizer)
        self.solver = Solver(store)
        self.bound = LowerBound(store, self.solver)

    def run(self) -> Outcome:
        """Visit combinations until no other can be faster."""
        settings, refused = candidates(self.workload)
        outcome = Outcome(rejected=refused, num_candidates=len(settings) + len(refused))
        waiting = [self._waiting(setting) for setting in self._possible(settings, outcome)]
        self._visit(waiting, settings, outcome)
        outcome.num_traces = self.store.num_traces
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
            passed_over = [one.setting for one in outcome.rejected if one.slower is not None]
            left += [self._waiting(setting) for setting in passed_over if not self._changes(setting)]
            self._visit(left, [entry[-1] for entry in left], found)
        else:
            found.best = outcome.best
        if found.best is not None:
            return found.best
        refused = [one for one in (*outcome.rejected, *found.rejected) if not self._changes(one.setting)]
        too_large = [one for one in refused if one.needed_bytes is not None]
        least = min(too_large, key=lambda one: (one.needed_bytes, key_of(one.setting)), default=None)
        return least or next(iter(refused), None)

    def _begin_trace(self, words: str) -> None:
        self._working.traced, self._working.traces = words, self._working.traces + 1
        self._progress(self._working)

    def _tell(self, left: int, best: Solution | None) -> None:
        self._working.left = left
        self._working.best = "" if best is None else f"{label(best.setting)}, {best.time.total:.3g} s per step"
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
            except TraceError as error:
                outcome.rejected.append(Rejected(setting, str(error)))
        outcome.solutions.sort(key=lambda solution: (solution.time.total, key_of(solution.setting)))
        if self._unsure and outcome.solutions:
            outcome.best = self._simplest(outcome.solutions)
        outcome.unvisited = waiting

    def verify(self, solution: Solution) -> Solution | None:
        """Trace the plan itself, as `memfit estimate` does, and return it with what that says it needs.

        Under a strategy the figures are those of one rank.

        Returns:
            None if no trace of this process shows it: parts are in host memory by a technique's own doing, or the
            process belongs to a process group, and no other rank can be traced there.

        Raises:
            TraceError: If it can't be traced.
        """
        setting, runtime = solution.setting, self.workload.target.runtime
        strategy, sharding, size = setting.of_kind("strategy"), setting.sharding, setting.micro_batch_size
        if strategy is None or sharding is None:
            if self.solver.models.of(setting).off_device().entries:
                return None
            found = estimate_step(self.store.exactly(setting), size, runtime)
        else:
            division = self.workload.division_of(strategy.name, sharding, setting.world_size)
            if division.traced and torch.distributed.is_initialized():
                return None
            found = estimate_rank(self.store.exactly(setting, division), division, size, runtime)
        waiting = self.workload.waiting_bytes(size or 1)
        return replace(
            solution,
            peak_bytes=found.allocated_bytes + waiting,
            needed_bytes=found.total_bytes + waiting,
            breakdown=found.breakdown + MemoryBreakdown.device({Category.INPUT: waiting}),
        )

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
        """Leave out settings that can't fit by closed form, and note them as rejected."""
        kept = []
        for setting in settings:
            refusal = self.bound.refuse(setting)
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
        if isinstance(least, Unknown):
            return None
        if isinstance(least, Rejected):
            return least
        slower, dearer = least.time.total / best.time.total - 1, least.cost / best.cost - 1
        worse = (least.severity, complexity_of(setting)) > (best.severity, complexity_of(best.setting))
        if dearer > max(TIE, self._unsure) or (not self._unsure and dearer >= -TIE and worse):
            return Rejected(setting, why_slower(slower, least.severity > best.severity, "at least "), slower=slower)
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


def make_plan(
    workload: Workload,
    cache: ProfileCache | None = None,
    overlap: bool = False,
    verify: bool = False,
    withheld_bytes: int = 0,
    compare: bool = False,
    progress: Progress = unseen,
    observe: Callable[[Search, Outcome, Plan], object] | None = None,
) -> Plan:
    """Find the fastest setting of a workload that fits.

    Args:
        workload: What is trained, where, within which limits.
        cache: Where traces are kept between runs; none by default.
        overlap: Trace two sizes at a time, in a fork; for commands only.
        verify: Trace the plan itself as well, and plan again if it needs more than the device has. Plans under a
            strategy are always traced, where they can be.
        withheld_bytes: Bytes of the device that a run of an earlier plan needed beyond its prediction.
        compare: Compare the plan with the recipe as it is, the best exact and the best allowed one.
        progress: Is told how far the search is.
        observe: Is given the search, what it found and the plan made of it.

    Raises:
        TraceError: If the plain step can't be traced.
        ValueError: If there is no device to plan for.
    """
    search = Search(TraceStore(workload, cache, overlap), progress)
    search.solver.budget.withheld_bytes = withheld_bytes
    outcome, verified = _verified(search, verify)
    searched = {
        "combinations": outcome.num_candidates,
        "worked_out": len(outcome.solutions),
        "traces": search.store.num_traces,
    }
    plan = Plan(
        model=type(workload.module).__name__,
        num_parameters=search.plain.num_parameters,
        batch_size=workload.samples_per_step,
        sequence_length=sequence_length(workload.batch),
        device=workload.target.name,
        devices=workload.devices.total,
        usable_bytes=search.solver.budget.usable_bytes,
        setting=None,
        alternatives=tuple(_alternatives(outcome)),
        notes=(*_limits_of(search.plain), *(f"Assumed: {assumption}." for assumption in search.plain.assumptions)),
        rows=tuple(rows_of(search, outcome)) if compare else (),
        optimizer=search.plain.optimizer,
        searched=searched,
    )
    best = outcome.best
    if best is None:
        plan = replace(plan, advice=tuple(advice_of(search, outcome)))
    else:
        plan = _with_figures(search, plan, best, verified)
    if observe is not None:
        observe(search, outcome, plan)
    return plan


def _with_figures(search: Search, plan: Plan, best: Solution, verified: Solution | None) -> Plan:
    """Complete a plan for the setting that was chosen."""
    workload = search.workload
    # The figures of a plan under a strategy are those that `memfit estimate` gives for it, and so is its limit.
    is_estimate = verified is not None and best.setting.sharding is not None
    shown = verified if verified is not None and is_estimate else best
    return replace(
        as_plan(search, plan, best),
        usable_bytes=(workload.target.usable_bytes or 0) if is_estimate else plan.usable_bytes,
        peak_bytes=shown.peak_bytes,
        needed_bytes=shown.needed_bytes,
        breakdown=shown.breakdown,
        verified_bytes=None if verified is None else verified.needed_bytes,
        bought=tuple(_effects(search, best)),
        largest_micro_batch=largest_micro_batch(search, best.setting),
    )


def as_plan(search: Search, plan: Plan, solution: Solution) -> Plan:
    """Return a plan with the setting of a solution and its figures, which are not verified, in place of its own."""
    return replace(
        plan,
        usable_bytes=search.solver.budget.usable_bytes,
        setting=solution.setting,
        peak_bytes=solution.peak_bytes,
        needed_bytes=solution.needed_bytes,
        breakdown=solution.breakdown,
        written_bytes=search.solver.time.written_bytes(solution.setting),
        seconds=dict(solution.time.seconds),
        verified_bytes=None,
        uncorrected=uncorrected(solution.time.seconds, search.workload.rates),
        rates=search.workload.rates.name,
        changes=search.solver.numerics.changes(solution.setting),
    )


def _limits_of(plain: ModelProfile) -> Iterator[str]:
    """What the plain step's trace keeps a plan from considering."""
    if not plain.knows_every_size:
        size, reason = plain.micro_batch_size, plain.only_this_size
        yield f"Only micro-batch {size} was considered: at others, memory can't be told from the trace ({reason})."


def _verified(search: Search, always: bool) -> tuple[Outcome, Solution | None]:
    """Search until a trace of the plan itself fits, each time with less of the device by the bytes it was over.

    Args:
        search: The search.
        always: Whether a plan is traced that has no strategy, too.
    """
    capacity = search.workload.target.usable_bytes or 0
    while True:
        outcome = search.run()
        if outcome.best is None or not (always or outcome.best.setting.sharding is not None):
            return outcome, None
        found = search.verify(outcome.best)
        if found is None or found.needed_bytes <= capacity:
            return outcome, found
        # At some point nothing is left, and nothing fits.
        search.solver.budget.withheld_bytes += found.needed_bytes - capacity


def largest_micro_batch(search: Search, setting: Setting) -> int:
    """Largest micro-batch that would still fit with the same techniques, with checkpointing as needed."""
    alone = replace(setting, accumulate_grad_batches=1).without("checkpointing")
    assert setting.micro_batch_size is not None
    model = search.solver.models.of(alone)
    if not model.knows_every_size:
        return setting.micro_batch_size

    def fits(size: int) -> bool:
        return not isinstance(search.solver.solve_at_size(model, replace(alone, micro_batch_size=size)), TooLarge)

    low, high = setting.micro_batch_size, setting.micro_batch_size
    while high < _MAX_MICRO_BATCH and fits(2 * high):
        low, high = 2 * high, 2 * high
    high = min(2 * high, _MAX_MICRO_BATCH)
    while high - low > max(1, low // 16):  # to about 6 %
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _effects(search: Search, best: Solution) -> Iterator[TechniqueEffect]:
    """Compare the plan with the one without each technique: by traces for loss and checkpointing, else closed form."""
    setting, size = best.setting, best.setting.micro_batch_size
    assert size is not None
    model = search.solver.models.of(setting)
    for choice in setting.chosen:
        kind = choice.technique.kind
        without = setting.without(kind)
        if kind == "strategy":
            without = replace(without, world_size=1)  # one device that holds everything
        if kind == "checkpointing":
            saved = model.peak_bytes(size) - best.peak_bytes
            frontier = model.frontier(size)
            extra = frontier.problem.seconds(best.choices) if frontier is not None else 0.0
            yield TechniqueEffect(choice.name, saved, extra * setting.accumulate_grad_batches)
            continue
        seconds = search.bound.seconds(setting) - search.bound.seconds(without)
        if kind == "loss":
            plain, less = (search.store.passes(s, "none") for s in (without, setting))
            saved = predict_peak_bytes(plain, size) - predict_peak_bytes(less, size)
        else:
            saved = search.bound.least_bytes(without) - search.bound.least_bytes(setting)
        yield TechniqueEffect(choice.name, saved, seconds)


def _alternatives(outcome: Outcome) -> Iterator[Alternative]:
    """The next best settings: slower ones first, then those that need too much, then refusals; each reason once."""
    slower = sorted(_slower(outcome), key=lambda item: item[0])[: _NUM_ALTERNATIVES // 2]
    yield from (alternative for _, alternative in slower)
    shown = len(slower)
    too_large = sorted(
        (r for r in outcome.rejected if r.needed_bytes is not None),
        key=lambda r: (r.needed_bytes or 0, label(r.setting)),
    )
    for rejected in too_large:
        if shown < _NUM_ALTERNATIVES:
            yield Alternative(label(rejected.setting), rejected.reason)
            shown += 1
    reasons: set[str] = set()
    # Settings that a larger machine would make possible come first.
    for rejected in sorted(outcome.rejected, key=lambda r: not r.resource_limited):
        if rejected.needed_bytes is not None or rejected.slower is not None:
            continue
        if rejected.reason not in reasons and len(reasons) < _NUM_ALTERNATIVES // 2:
            reasons.add(rejected.reason)
            yield Alternative(label(rejected.setting), rejected.reason)


def why_slower(slower: float, changes_more: bool, least: str = "") -> str:
    """Why a setting that takes so much longer than the plan was not chosen.

    Args:
        slower: Share of the plan's time that it takes longer; below zero if it is faster.
        changes_more: Whether it changes more of the recipe's numbers.
        least: What to say before a figure that is a bound.
    """
    if slower >= 0.005:
        return f"{least}{slower:.0%} slower"
    if not changes_more:
        return "no faster, and no simpler"
    faster = f"{'at most ' if least else ''}{-slower:.0%} faster" if slower <= -0.005 else "no faster"
    return f"{faster}, and changes more of the recipe's numbers"


def _slower(outcome: Outcome) -> Iterator[tuple[float, Alternative]]:
    """Settings that would fit, with the share of the best one's time that they take longer."""
    best = outcome.best
    for solution in outcome.solutions:
        if best is not None and solution is not best:
            slower = solution.time.total / best.time.total - 1
            reason = why_slower(slower, solution.severity > best.severity)
            needs = f"{reason}, needs {format_bytes(solution.needed_bytes)}"
            yield slower, Alternative(label(solution.setting), needs)
    for rejected in outcome.rejected:
        if rejected.slower is not None:
            yield rejected.slower, Alternative(label(rejected.setting), rejected.reason)

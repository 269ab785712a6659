"""`rows_of`: the recipe as it is, the best that keeps its numbers and the fastest allowed, beside what was chosen.

Rows that were not chosen are read off the search's own traces and bounds. Only the recipe's own step is traced, at its
micro-batch, where no closed form refuses it, and what would be faster than a plan that keeps the recipe's numbers;
nothing is traced as several ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.planner.candidates import by_need
from lightning_memfit.planner.plan import Row, label
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.solve import TIE, Solution
from lightning_memfit.planner.time import PassWork
from lightning_memfit.planner.workload import KEEP_NUMBERS
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting

RECIPE, EXACT, ALLOWED = "the recipe as it is", "the best that keeps its numbers", "the fastest allowed plan"
_SOLVED, _TRACED, _CLOSED = "by the search", "by a trace", "at least, by closed forms"


def rows_of(search: Search, outcome: Outcome) -> Iterator[Row]:
    """Compare what was chosen with three settings that a user asks about."""
    if search.workload.own is not None:
        own = search.workload.own
        known = next((one for one in outcome.solutions if one.setting == own), None)
        yield _recipe(search, own) if known is None else _solved(search, RECIPE, known)
    yield _exact(search, outcome)
    yield _allowed(search, outcome)


def _recipe(search: Search, own: Setting) -> Row:
    """The recipe's own setting, whether it fits or not."""
    least, usable = search.bound.least_bytes(own), search.solver.budget.usable_bytes
    refusal = search.bound.refuse(own)
    if refusal is not None or own.sharding is not None or search.solver.models.of_host(own):
        note = refusal.reason if refusal is not None else ""
        fits = None if refusal is None else False
        return _row(search, RECIPE, own, fits, least, search.bound.seconds(own), _CLOSED, note)
    try:
        profile = search.store.exactly(own)
    except (TraceError, ValueError) as error:
        return _row(search, RECIPE, own, None, least, search.bound.seconds(own), _CLOSED, str(error))
    size = own.micro_batch_size or 1
    needed = estimate_step(profile, size, search.workload.target.runtime).total_bytes
    needed += search.workload.waiting_bytes(own)
    time = search.solver.time.step(own, PassWork.of(profile, size), own.accumulate_grad_batches).total
    note = "" if needed <= usable else search.solver.budget.over(own, needed)
    return _row(search, RECIPE, own, needed <= usable, needed, time, _TRACED, note)


def _exact(search: Search, outcome: Outcome) -> Row:
    """The best plan that keeps the recipe's numbers, or the least that one would need."""
    found = search.exact(outcome)
    if isinstance(found, Solution):
        return _solved(search, EXACT, found)
    if found is None:
        return Row(EXACT, "", None, None, None, None, (), "", "no combination keeps the recipe's numbers")
    return _row(search, EXACT, found.setting, False, found.needed_bytes, None, _CLOSED, found.reason)


def _allowed(search: Search, outcome: Outcome) -> Row:
    """The fastest plan whatever it changes: one that was worked out, or the one with the least bound below that."""
    best = min(outcome.solutions, key=lambda solution: solution.time.total, default=None)
    if best is None or outcome.best is None:
        least = next(iter(by_need(outcome.rejected)), None)
        if least is None:
            return Row(ALLOWED, "", None, None, None, None, (), "", "nothing fits")
        return _row(search, ALLOWED, least.setting, False, least.needed_bytes, None, _CLOSED, least.reason)
    if best.time.total >= outcome.best.time.total * (1 - TIE):
        best = outcome.best
    bounds = [(cost / search.bound.weight(setting), key, setting) for cost, key, _, setting in outcome.unvisited]
    bounds += [
        (rejected.seconds, (), rejected.setting) for rejected in outcome.rejected if rejected.seconds is not None
    ]
    seconds, setting = _least(search, bounds) or (best.time.total, best.setting)
    if seconds >= best.time.total * (1 - TIE):
        return _solved(search, ALLOWED, best)
    faster = 1 - seconds / outcome.best.time.total
    note = f"at most {faster:.0%} faster than the plan, by a bound"
    if search.workload.tolerance == KEEP_NUMBERS and search.solver.numerics.severity(setting):
        note += ", `--prefer speed` plans it"
    return _row(search, ALLOWED, setting, None, search.bound.least_bytes(setting), seconds, _CLOSED, note)


def _least(search: Search, bounds: list[tuple[float, tuple[str, ...], Setting]]) -> tuple[float, Setting] | None:
    """What takes the least time by its bound, which a trace makes closer where the search visited none of its kind."""
    is_close = search.workload.tolerance < KEEP_NUMBERS
    waiting = [(seconds, key, place, is_close) for place, (seconds, key, _) in enumerate(bounds)]
    heapq.heapify(waiting)
    while waiting:
        seconds, key, place, is_close = heapq.heappop(waiting)
        setting = bounds[place][-1]
        if is_close:
            return seconds, setting
        try:
            heapq.heappush(waiting, (max(seconds, search.bound.traced_seconds(setting)), key, place, True))
        except TraceError:
            continue
    return None


def _solved(search: Search, name: str, solution: Solution) -> Row:
    needed = search.figures(solution).needed_bytes
    return _row(search, name, solution.setting, True, needed, solution.time.total, _SOLVED, "")


def _row(
    search: Search,
    name: str,
    setting: Setting,
    fits: bool | None,
    needed_bytes: int | None,
    seconds: float | None,
    basis: str,
    note: str,
) -> Row:
    length = sequence_length(search.workload.batch)
    samples = search.workload.samples_per_step
    rate = None if not seconds else samples * (length or 1) / seconds
    changes = search.solver.numerics.changes(setting)
    return Row(name, label(setting), fits, needed_bytes, seconds, rate, changes, basis, note)

"""`tried_of`: the settings that a search knows enough about to compare them at any limit.

A search proves its plan for one limit and traces as little as it can. What it has traced says more: a combination of
techniques whose passes and whose optimizer's step are traced can be worked out at every micro-batch and under every
limit, without another trace. They are the dots of the page of `memfit plan --html`; of others only bounds are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_memfit.device.catalogue import DEVICES
from lightning_memfit.memory import GIB, MIB
from lightning_memfit.planner.candidates import conflict
from lightning_memfit.planner.make import as_plan
from lightning_memfit.planner.plan import Plan
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.solve import Solution, key_of, rank_of
from lightning_memfit.planner.workload import Budget
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting

_FROM, _TO = 0.4, 4.5
"""Shares of the device's capacity between which other devices' sizes are offered."""


@dataclass(frozen=True)
class Limit:
    """A device's capacity, and what a plan may need of it."""

    capacity_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Tried:
    """A setting that was worked out."""

    plan: Plan
    """The setting with its own figures, as if it had been chosen."""
    combination: int
    """Number of its techniques among all that were worked out."""
    weight: float
    """What its time is multiplied by in comparisons, because it changes the recipe's numbers."""
    rank: int
    """Place among settings that cost the same."""


@dataclass(frozen=True)
class Explored:
    """All settings that were worked out, what was left out, and the limits under which they can be compared."""

    tried: tuple[Tried, ...]
    """By bytes needed, then by time."""
    limits: tuple[Limit, ...]
    """Ascending."""
    planned: int
    """Place among `limits` of the device that was planned for."""
    yields: tuple[tuple[int, ...], ...]
    """For every combination those that are taken first where they fit, because its own cost was never measured."""
    tie: float
    """Share of each other's time within which settings count as equally fast."""


def tried_of(search: Search, outcome: Outcome, plan: Plan) -> Explored:
    """Work out what the traces of a search allow, at all limits. Makes no trace."""
    limits, planned = _limits(search)
    numbers: dict[Setting, int] = {}
    found: list[tuple[int, Solution]] = []
    worked_out = [solution.setting.without_sizes().without("checkpointing") for solution in outcome.solutions]
    others = [one.setting for one in outcome.rejected] + [setting for *_, setting in outcome.unvisited]
    with search.store.closed():
        for setting in sorted({*worked_out, *others}, key=key_of):
            try:
                if _refusal(search, setting):
                    continue
                solutions = list(search.solver.fastest_within(setting, [limit.usable_bytes for limit in limits]))
            except TraceError:
                continue
            if solutions:
                numbers[setting] = len(numbers)
                found += [(numbers[setting], search.figures(solution)) for solution in solutions]
        tried = tuple(_tried(search, plan, found))
    yields = tuple(tuple(_yielding(setting, numbers)) for setting in numbers)
    return Explored(tried, tuple(limits), planned, yields, search.tie)


def _refusal(search: Search, setting: Setting) -> str | None:
    """Why no limit on the device lets a combination in; None if one may."""
    off_device = search.solver.models.of(setting).off_device()
    refusal = search.solver.budget.refuse_off_device(off_device, setting.world_size)
    return conflict(setting, search.workload) or refusal


def _tried(search: Search, plan: Plan, found: list[tuple[int, Solution]]) -> Iterator[Tried]:
    ranks = sorted((rank_of(solution), index) for index, (_, solution) in enumerate(found))
    place = {index: rank for rank, (_, index) in enumerate(ranks)}
    for index in sorted(place, key=lambda i: (found[i][1].needed_bytes, found[i][1].time.total, place[i])):
        combination, solution = found[index]
        shown = plan if solution.setting == plan.setting else as_plan(search, plan, solution)
        yield Tried(shown, combination, solution.weight, place[index])


def _yielding(setting: Setting, numbers: dict[Setting, int]) -> Iterator[int]:
    for choice in setting.chosen:
        first = choice.technique.yields_to
        other = setting.choose(first) if first else None
        if other in numbers:
            yield numbers[other]


# --- limits -----------------------------------------------------------------------------------------------------------


def _limits(search: Search) -> tuple[list[Limit], int]:
    """Sizes of devices around the planned one, and its place among them."""
    capacity = search.workload.target.capacity_bytes or 0
    if capacity >= 2 * GIB:
        sizes = {math.ceil(spec.memory_bytes / GIB) * GIB for spec in DEVICES}
    else:
        sizes = {round(capacity * share / MIB) * MIB for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5, 2.0, 3.0, 4.0)}
    near = sorted({size for size in sizes if _FROM * capacity <= size <= _TO * capacity} | {capacity})
    limits = [Limit(size, max(0, Budget(search.workload.on(size)).usable_bytes)) for size in near]
    return limits, near.index(capacity)

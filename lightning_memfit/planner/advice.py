"""`advice_of`: what would make a workload fit. Whatever is advised was solved with it, or says that it was not.

Advice is made where nothing fits, so that few traces were needed before. Every kind of it solves a few combinations at
most, on the traces that there are where the device computes alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

from lightning_memfit.device.catalogue import DEVICES
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import MIB, Tier, format_bytes
from lightning_memfit.planner.candidates import Rejected, by_need, candidates, missing_permissions
from lightning_memfit.planner.lower_bound import LowerBound
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.solve import Solution, Solver
from lightning_memfit.planner.workload import NUMERICS, Workload
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import TOLERANCES

_TRIED = 3
"""Combinations that are solved for one kind of advice."""

_NAMED = 4
"""Sets of permissions that are named."""

_ROUNDS = 4
"""How often a limit is raised until the plan fits within it."""


def advice_of(search: Search, outcome: Outcome) -> Iterator[str]:
    """What would make it fit, the least that anything needs first.

    Args:
        search: A search that has run.
        outcome: What it found: nothing that fits.
    """
    least = next(iter(by_need(outcome.rejected)), None)
    if least is not None and least.needed_bytes is not None:
        usable = format_bytes(search.solver.budget.usable_bytes)
        alone = " at the least" if search.bound.least_bytes(least.setting) == least.needed_bytes else ""
        needs = f"needs {format_bytes(least.needed_bytes)}{alone} where {usable} are usable"
        yield f"the least is {label(least.setting)}, which {needs}."
        yield from _larger(search, outcome, least)
    yield from _clipping(search)
    yield from _permissions(search)
    yield from _shorter(search, outcome)
    yield from _limits(search, outcome)


def _elsewhere(search: Search, workload: Workload) -> Solver:
    """A solver for a changed workload, with the traces of the search, whose device must be of the same type."""
    store = copy(search.store)
    store.workload = workload
    return Solver(store)


def _solved(search: Search, workload: Workload, settings: Sequence[Setting]) -> Solution | None:
    """The first solution of a changed workload among the first few settings that no closed form refuses."""
    solver = _elsewhere(search, workload)
    bound = LowerBound(search.store, solver)
    for setting in [one for one in settings if bound.refuse(one) is None][:_TRIED]:
        try:
            found = solver.solve(setting)
        except TraceError:
            continue
        if isinstance(found, Solution):
            return found
    return None


def _larger(search: Search, outcome: Outcome, least: Rejected) -> Iterator[str]:
    """A larger device, or a larger limit where the device is the host, on which one of what needs least fits."""
    workload = search.workload
    target = workload.target
    if target.device_kind.is_host or target.counts_tensors:
        yield from _larger_limit(search, least)
        return
    capacity = target.capacity_bytes or 0
    larger = [spec for spec in DEVICES if spec.memory_bytes > capacity and spec.platform == "CUDA"]
    too_large = by_need(outcome.rejected)
    for spec in sorted(larger, key=lambda spec: (spec.memory_bytes, spec.name)):
        usable = spec.memory_bytes - safety_margin_bytes(spec.memory_bytes)
        small = [one.setting for one in too_large if (one.needed_bytes or 0) <= usable]
        # Its rates don't matter here, and traces are those of the device that was asked for.
        there = replace(named_target(spec.name), capability=target.capability)
        found = _solved(search, replace(workload, target=there), small)
        if found is not None:
            several = workload.devices.total
            which = f"{several} x {spec.name}" if several > 1 else f"A {spec.name}"
            yield f"{which} would do: {label(found.setting)} needs {format_bytes(found.needed_bytes)} there."
            return


def _larger_limit(search: Search, least: Rejected) -> Iterator[str]:
    target, needed = search.workload.target, least.needed_bytes or 0
    for _ in range(_ROUNDS):
        share = needed / max(1, search.solver.budget.usable_bytes)
        capacity = -(-round((target.capacity_bytes or 0) * share) // MIB) * MIB
        margin = target.margin_bytes if target.counts_tensors else safety_margin_bytes(capacity)
        there = replace(target, capacity_bytes=capacity, margin_bytes=margin)
        solver = _elsewhere(search, replace(search.workload, target=there))
        try:
            found = solver.solve(least.setting)
        except TraceError:
            return
        if isinstance(found, Solution):
            needs = f"{label(found.setting)} needs {format_bytes(found.needed_bytes)}"
            yield f"A limit of {format_bytes(capacity)} would do: {needs}."
            return
        needed = round(max(needed, found.needed_bytes or 0) * 1.02)


def _clipping(search: Search) -> Iterator[str]:
    """Clipping by value, which lets gradients be freed one by one where clipping by norm needs all of them."""
    options, facts = search.workload.options, search.workload.facts
    if not options.gradient_clip_val or facts.gradient_clip_algorithm != "norm":
        return
    changed = replace(
        search.workload,
        options=replace(options, gradient_clip_algorithm="value"),
        facts=replace(facts, gradient_clip_algorithm="value"),
    )
    before = set(candidates(search.workload)[0])
    let_in = [one for one in candidates(changed)[0] if one not in before]
    found = _solved(search, changed, sorted(let_in, key=lambda one: (search.bound.least_bytes(one), label(one))))
    if found is not None:
        yield (
            f"Clipping by value (`gradient_clip_algorithm: value`, other numbers than by norm) would let in "
            f"{label(found.setting)}, which needs {format_bytes(found.needed_bytes)} and fits."
        )


def _permissions(search: Search) -> Iterator[str]:
    """Numerics that would have to be allowed, by closed forms: what they let in is not traced here."""
    workload, bound = search.workload, search.bound
    kept, _ = candidates(replace(workload, allow=frozenset(NUMERICS)))
    fitting = [one for one in kept if bound.refuse(one) is None and not search.solver.models.of_host(one)]
    best: dict[tuple[str, ...], Setting] = {}
    for technique, names in missing_permissions(workload):
        having = [one for one in fitting if technique in one.techniques() and one.numerics <= workload.allow | {*names}]
        having += [best[names]] if names in best else []
        if having:
            best[names] = min(having, key=lambda one: (bound.least_bytes(one), len(one.chosen), label(one)))
    if best:
        mildest = sorted(best.items(), key=lambda item: sum(TOLERANCES[name] for name in NUMERICS if name in item[0]))
        each = [f"{', '.join(names)} ({label(one)}: {format_bytes(bound.least_bytes(one))})" for names, one in mildest]
        yield (
            f"`--allow` may help with {'; or '.join(each[:_NAMED])}. These are weights, gradients and states; the rest "
            "was not worked out."
        )


def _shorter(search: Search, outcome: Outcome) -> Iterator[str]:
    """Shorter sequences, where not weights and states but activations are too much."""
    length, usable = sequence_length(search.workload.batch), search.solver.budget.usable_bytes
    if length is None or length < 2:
        return
    too_large = [one.setting for one in outcome.rejected if one.needed_bytes is not None]
    having_room = [one for one in too_large if search.bound.least_bytes(one) < usable]
    if having_room:
        least = min(having_room, key=lambda one: (search.bound.least_bytes(one), label(one)))
        needs = format_bytes(search.bound.least_bytes(least))
        yield (
            f"Shorter sequences than {length} tokens need less for activations: {label(least)} leaves them what its "
            f"weights, gradients and states don't need, {needs} of {format_bytes(usable)}."
        )


def _limits(search: Search, outcome: Outcome) -> Iterator[str]:
    """More host memory, page-locked memory or disk, where a limit of the machine is what refuses combinations."""
    limits = search.workload.limits
    limited = [one for one in outcome.rejected if one.resource_limited]
    for words, option, lifted, tiers in (
        ("of page-locked", "--pinned-memory", replace(limits, pinned_bytes=None), (Tier.PINNED_HOST,)),
        ("of host memory", "--host-memory", replace(limits, host_bytes=None), (Tier.HOST, Tier.PINNED_HOST)),
        ("disk", "--disk", replace(limits, disk_bytes=None, disk_writes_per_day=None), (Tier.DISK,)),
    ):
        refused = sorted((one.setting for one in limited if words in one.reason), key=search.bound.seconds)
        found = _solved(search, replace(search.workload, limits=lifted), refused) if refused else None
        if found is not None:
            each = search.workload.devices_per_machine(found.setting.world_size)
            needed = each * sum(found.breakdown.total(tier) for tier in tiers)
            yield f"With {format_bytes(needed)} (`{option}`) it would fit: {label(found.setting)}."

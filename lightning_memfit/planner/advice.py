"""`advice_of`: what would make a workload fit. Whatever is advised was solved with it.

Advice is made where nothing fits, so that few traces were needed before. Every kind of it solves a few combinations at
most, on the traces that there are where the device computes alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_memfit.device.catalogue import DEVICES
from lightning_memfit.device.runtime import safety_margin_bytes
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import MIB, Tier, format_bytes
from lightning_memfit.planner.candidates import Rejected, by_need, candidates, missing_permissions
from lightning_memfit.planner.plan import label
from lightning_memfit.planner.search import Outcome, Search
from lightning_memfit.planner.solve import Solution, Solver
from lightning_memfit.planner.workload import NUMERICS, Workload, spell_allow
from lightning_memfit.profile.build import sequence_length, shortened
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.technique import TOLERANCES, Numerics

_TRIED = 3
"""Combinations that are solved for one kind of advice."""

_LENGTHS = 3
"""Lengths of sequences that are tried."""

_TOKENS = 64
"""Lengths are multiples of this."""

_ROUNDS = 4
"""How often a limit is raised until the plan fits within it."""


def advice_of(search: Search, outcome: Outcome) -> Iterator[str]:
    """What would make it fit, the least that anything needs first."""
    least = next(iter(by_need(outcome.rejected)), None)
    if least is not None and least.needed_bytes is not None:
        usable = format_bytes(search.solver.budget.usable_bytes)
        alone = " at the least" if search.bound.least_bytes(least.setting) == least.needed_bytes else ""
        needs = f"needs {format_bytes(least.needed_bytes)}{alone} where {usable} are usable"
        yield f"the least is {label(least.setting)}, which {needs}."
        yield from _larger(search, outcome, least)
    if search.workload.kept_size is not None:
        yield f"Smaller micro-batches are not planned: {search.workload.kept_size}."
    yield from _permissions(search)
    yield from _shorter(search, outcome)
    yield from _limits(search, outcome)


def _solved(search: Search, workload: Workload, settings: Sequence[Setting]) -> Solution | None:
    """The first solution of a changed workload among the first few settings that no closed form refuses."""
    there = search.elsewhere(workload)
    for setting in [one for one in settings if there.bound.refuse(one) is None][:_TRIED]:
        try:
            found = there.solver.solve(setting)
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
    larger = [spec for spec in DEVICES if spec.memory_bytes > capacity]
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
        capacity = target.capacity_bytes or 0
        missing = needed - search.solver.budget.usable_bytes + max(0, target.margin_bytes - capacity)
        capacity = -(-(capacity + missing) // MIB) * MIB
        try:
            found = search.elsewhere(search.workload.on(capacity)).solver.solve(least.setting)
        except TraceError:
            return
        if isinstance(found, Solution):
            needs = f"{label(found.setting)} needs {format_bytes(found.needed_bytes)}"
            yield f"A limit of {format_bytes(capacity)} would do: {needs}."
            return
        needed = round(max(needed, found.needed_bytes or 0) * 1.02)


def _permissions(search: Search) -> Iterator[str]:
    """Numerics that would have to be allowed: the mildest of which a setting fits, traced where it must be."""
    workload, bound = search.workload, search.bound
    kept, _ = candidates(replace(workload, allow=frozenset(NUMERICS)))
    fitting = [one for one in kept if bound.refuse(one) is None and not search.solver.models.of_host(one)]
    having: dict[tuple[Numerics, ...], list[Setting]] = {}
    for technique, names in missing_permissions(workload):
        allowed = workload.allow | {*names}
        let_in = [one for one in fitting if technique in one.techniques() and workload.must_allow(one) <= allowed]
        if let_in:
            having[names] = having.get(names, []) + let_in
    mildest = sorted(having, key=lambda names: sum(TOLERANCES[name] for name in NUMERICS if name in names))
    for names in mildest[:_TRIED]:
        allow = workload.allow.union(names)
        settings = sorted(having[names], key=lambda one: (bound.least_bytes(one), len(one.chosen), label(one)))
        found = _solved(search, replace(workload, allow=allow), settings[:1])
        if found is not None:
            changes = ", ".join(search.solver.numerics.changes(found.setting))
            needs = f"{label(found.setting)}, which needs {format_bytes(found.needed_bytes)} and fits"
            yield f"`--allow {spell_allow(allow)}` (`allow` of `MemFit`) would let in {needs}. It changes {changes}."
            return


def _shorter(search: Search, outcome: Outcome) -> Iterator[str]:
    """A shorter sequence that fits, traced at its length, where activations and not weights and states are too much."""
    workload, usable = search.workload, search.solver.budget.usable_bytes
    length = sequence_length(workload.batch)
    roomy = [one for one in by_need(outcome.rejected) if search.bound.least_bytes(one.setting) < usable]
    if length is None or not roomy:
        return
    needed, least = roomy[0].needed_bytes or 0, search.bound.least_bytes(roomy[0].setting)
    # Activations grow with the length or faster. Those of a bound are the least, so that a second one may be needed.
    shorter = int(length * min(1.0, (usable - least) / max(1, needed - least)))
    for _ in range(_LENGTHS):
        shorter -= shorter % (_TOKENS if shorter >= 2 * _TOKENS else 1)
        if not 0 < shorter < length:
            return
        there = replace(workload, batch=shortened(workload.batch, length, shorter))
        try:
            found = Solver(search.store.of(there)).solve(roomy[0].setting)
        except (TraceError, ValueError):
            return
        if isinstance(found, Solution):
            needs = f"{label(found.setting)} needs {format_bytes(found.needed_bytes)}"
            yield f"Sequences of {shorter:,} tokens instead of {length:,} would fit: {needs}."
            return
        shorter = shorter * 3 // 4


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

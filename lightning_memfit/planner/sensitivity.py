"""`sensitivities_of`: what more memory, another number of devices or other permissions would bring.

Each is a search of its own for a workload that differs in one thing, on the traces that there are: something that isn't
traced might be better still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_memfit.memory import GIB, Tier, format_bytes
from lightning_memfit.planner.candidates import candidates, missing_permissions
from lightning_memfit.planner.plan import Sensitivity, label
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.solve import Solution
from lightning_memfit.planner.workload import NUMERICS, Devices, Workload, spell_allow
from lightning_memfit.techniques.core.technique import Numerics

_MORE = (1, 4)
"""GiB of the device."""

_Change = tuple[str, Workload]
"""What is different, in words; empty if that is told by what the plan then uses."""


def sensitivities_of(search: Search, best: Solution) -> list[Sensitivity]:
    """What would be the plan under other limits, of which those that every machine has come first.

    Args:
        search: A search that has run.
        best: What it chose.
    """
    with search.store.closed():
        always = (_solved(search, workload, best, change) for change, workload in _always(search))
        better = (_solved(search, workload, best, change) for change, workload in _if_better(search))
        return [one for one in always if one] + [one for one in better if one and one.saved > search.tie]


def _solved(search: Search, workload: Workload, best: Solution, change: str) -> Sensitivity | None:
    """The best plan of a changed workload; None if nothing that is traced fits there."""
    found = search.elsewhere(workload).run().best
    if found is None:
        return None
    return Sensitivity(
        change or _used(search, found),
        label(found.setting),
        search.figures(found).needed_bytes,
        found.time.total,
        1 - found.time.total / best.time.total,
        search.solver.numerics.changes(found.setting),
    )


def _always(search: Search) -> Iterator[_Change]:
    """More of the device, and more devices."""
    workload = search.workload
    target, devices = workload.target, workload.devices
    for gibs in _MORE:
        capacity = (target.capacity_bytes or 0) + gibs * GIB
        where = "of memory" if target.device_kind.is_host else f"on {'every' if devices.total > 1 else 'the'} device"
        yield f"{gibs} GiB more {where}", workload.on(capacity)
    more = _more_devices(workload)
    if more is not None:
        yield f"{more.total} devices", replace(workload, devices=more)


def _more_devices(workload: Workload) -> Devices | None:
    """The next number of devices, or of machines, that shares the step's samples equally, up to twice as many."""
    devices = workload.devices
    if not workload.strategies or workload.division is not None or workload.target.device_kind.is_host:
        return None
    several = devices.machines > 1
    now = devices.machines if several else devices.per_machine
    options = (
        replace(devices, **{"machines" if several else "per_machine": count}) for count in range(now + 1, 2 * now + 1)
    )
    return next((one for one in options if workload.samples_per_step % one.total == 0), None)


def _if_better(search: Search) -> Iterator[_Change]:
    """Limits of the machine and of numerics that may stand in the way; each is lifted alone."""
    workload = search.workload
    limits = workload.limits
    if limits.host_bytes is not None or limits.pinned_bytes is not None:
        yield "", replace(workload, limits=replace(limits, host_bytes=None, pinned_bytes=None))
    if limits.disk_bytes is not None or limits.disk_writes_per_day is not None:
        yield "", replace(workload, limits=replace(limits, disk_bytes=None, disk_writes_per_day=None))
    if workload.tolerance:
        yield "speed alone (`--tolerance 0%`)", replace(workload, tolerance=0.0)
    for allow in _permissions(search):
        yield f"`--allow {spell_allow(allow)}`", replace(workload, allow=allow)


def _permissions(search: Search) -> Iterator[frozenset[Numerics]]:
    """Classes of numerics that would let in something of which forward and backward are traced."""
    workload = search.workload
    kept, _ = candidates(replace(workload, allow=frozenset(NUMERICS)))
    traced = [workload.must_allow(one) for one in kept if search.store.has_passes(one, "none")]
    for names in dict.fromkeys(needed for _, needed in missing_permissions(workload)):
        allow = workload.allow.union(names)
        if any(one <= allow and not one <= workload.allow for one in traced):
            yield allow


def _used(search: Search, found: Solution) -> str:
    """What a plan takes of a machine beside its devices, as the options that allow it."""
    each = search.workload.devices_per_machine(found.setting.world_size)
    taken = {tier: each * found.breakdown.total(tier) for tier in (Tier.HOST, Tier.PINNED_HOST, Tier.DISK)}
    host = taken[Tier.HOST] + taken[Tier.PINNED_HOST]
    parts = [f"{format_bytes(host)} of host memory (`--host-memory`)"] if host else []
    parts += [f"{format_bytes(taken[Tier.DISK])} of disk (`--disk`)"] if taken[Tier.DISK] else []
    return " and ".join(parts) or "other limits on host memory and disk"

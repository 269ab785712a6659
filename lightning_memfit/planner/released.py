"""Levels of a traced step as they would be if every gradient were stepped and freed as soon as it is complete."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from lightning_memfit.memory import Category
from lightning_memfit.profile.events import CATEGORIES, EventList, Integers

Transients = tuple[tuple[int, int], ...]
"""`(bytes of a gradient, highest level while it is made and stepped, the gradient included)`, ascending."""

_NEGLIGIBLE = 4096
"""Bytes of the loss, of its gradient and the like, which are alive between two gradients of parameters."""

_PRODUCT = "aten.mm.default"
_GRADIENT = CATEGORIES.index(Category.GRADIENT)


def transients_of(levels: Integers) -> Transients:
    """What gradients take that are stepped one after the other, read off the levels of a backward pass of steps alone.

    Args:
        levels: Live bytes after every event; the first is what is alive between two gradients.

    Returns:
        By size of the gradient, which is the first allocation above that level; empty where the pass ends higher than
        it began, as gradients are kept.
    """
    above = levels - levels[0]
    if above[-1] > _NEGLIGIBLE:
        return ()
    found: dict[int, int] = {}
    size = 0
    for level in above.tolist():
        if level <= _NEGLIGIBLE:
            size = 0
            continue
        size = size or level
        found[size] = max(found.get(size, 0), level)
    return tuple(sorted(found.items()))


def released_levels(events: EventList, rounding: int, transients: Transients) -> tuple[Integers, Integers]:
    """Live bytes after every event without gradients, and with those that are on their way.

    A gradient is on its way from its allocation until another operator allocates: before that, what its own operator
    read is freed, autograd hands the gradient on, and it is stepped with what that takes beside it. A product that
    follows a single gradient is the other half of the same operator: the gradient of its input.

    Args:
        events: Of steps that keep their gradients.
        rounding: Of the allocator, in bytes.
        transients: Of the optimizer that steps them.
    """
    rounded = events.rounded_sizes(rounding)
    is_gradient = (events.categories == _GRADIENT)[events.storages]
    levels = events.live_bytes(rounding)
    levels = levels - np.cumsum(np.where(is_gradient, np.sign(events.events) * rounded[events.storages], 0))
    is_made = is_gradient & (events.events > 0)
    made, others = np.flatnonzero(is_made), np.flatnonzero(~is_made & (events.events > 0))
    nexts = np.searchsorted(others, made)
    alone = np.append(np.diff(nexts) > 0, True) & np.append(True, np.diff(nexts) > 0)
    of_product = np.array([name.endswith(_PRODUCT) for name in events.site_names])[events.sites]
    others = np.append(others, [len(events), len(events)])
    halves = alone & np.append(of_product, False)[np.append(events.storages, -1)[others[nexts]]]
    ends = others[nexts + halves]
    sizes = rounded[events.storages[made]]
    on_their_way = np.zeros(len(events), dtype=np.int64)
    last_end, pending, beside = -1, 0, 0
    for at, end, size in zip(made.tolist(), ends.tolist(), sizes.tolist(), strict=True):
        if end != last_end:
            last_end, pending, beside = end, 0, 0
        pending += size
        beside = max(beside, _transient(transients, size) - size)
        on_their_way[at:end] = pending
        on_their_way[end - 1] += beside
    return levels, levels + on_their_way


def _transient(transients: Transients, size: int) -> int:
    """Of a gradient of that size; of the next larger one where there was none, as its step takes no less."""
    place = bisect_left(transients, (size, 0))
    return transients[min(place, len(transients) - 1)][1]

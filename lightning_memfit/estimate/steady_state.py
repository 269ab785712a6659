"""`SteadyState`: the memory that weights, gradients and optimizer states take from the second optimizer step on.

It is read off a trace (`SteadyState.of`). If gradients are stepped and freed during backward (gradient release), the
trace of the optimizer's steps shows how much each gradient takes while that happens (`ReleasedGradients`), and
`released_levels` applies this to a trace of forward and backward that keeps its gradients.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_memfit.memory import Category, Tier
from lightning_memfit.profile.events import CATEGORIES, EventList, Integers
from lightning_memfit.profile.record import ModelProfile

ReleasedGradients = tuple[tuple[int, int], ...]
"""`(bytes of a gradient, highest level in bytes while it is made and stepped, the gradient included)`, ascending."""

HELD: ReleasedGradients = ((0, 0),)
"""Gradients that are made one by one, whatever their size, and moved to where memory is kept for all: DDP's buckets."""

_NEGLIGIBLE = 4096
"""Bytes of the loss, its gradient and other small tensors that are alive between two gradients of parameters."""

_PRODUCT = "aten.mm.default"
_GRADIENT = CATEGORIES.index(Category.GRADIENT)
LASTING = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)
"""What is a module's or an optimizer's, whatever a step makes."""


def released_gradients_of(levels: Integers) -> ReleasedGradients:
    """Read off a backward pass of steps alone how much each gradient takes if it is stepped and freed at once.

    Returns:
        Levels by size of the gradient, which is the first allocation above that level; empty if the pass ends higher
        than it began, because gradients are kept.
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


def released_levels(events: EventList, rounding: int, released: ReleasedGradients) -> tuple[Integers, Integers]:
    """Compute live bytes after every event as if gradients were stepped and freed as soon as they are complete.

    A gradient is on its way from its allocation until another operator allocates: before that, the inputs of its own
    operator are freed, autograd hands the gradient on, and it is stepped with the extra memory that this takes. A
    product that follows a single gradient is the other half of the same operator: the gradient of its input. Where
    gradients follow each other, those of a module are complete if something is freed before those of another module.

    Returns:
        Live bytes without any gradient, and with those gradients that are on their way.
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
    for at in np.flatnonzero(_complete_before_next(events, made, nexts))[::-1].tolist():
        ends[: at + 1][nexts[: at + 1] == nexts[at]] = made[at + 1] - 1  # where something was freed
    sizes = rounded[events.storages[made]]
    on_their_way = np.zeros(len(events), dtype=np.int64)
    last_end, pending, stepping = -1, 0, 0
    for at, end, size in zip(made.tolist(), ends.tolist(), sizes.tolist(), strict=True):
        if end != last_end:
            last_end, pending, stepping = end, 0, 0
        pending += size
        stepping = max(stepping, _highest_level(released, size) - size)
        on_their_way[at:end] = pending
        on_their_way[end - 1] += stepping
    return levels, levels + on_their_way


def _complete_before_next(events: EventList, made: Integers, nexts: Integers) -> npt.NDArray[np.bool_]:
    """Which gradients are complete before the next one is made, though no other operator allocates in between."""
    modules = [
        events.site_names[site].partition(" | ")[0].rpartition(".")[0]
        for site in events.sites[events.storages[made]].tolist()
    ]
    others = np.array([one != other for one, other in pairwise(modules)], dtype=bool)
    freed = np.cumsum(events.events < 0)
    complete: npt.NDArray[np.bool_] = (np.diff(nexts) == 0) & others & (np.diff(freed[made]) > 0)
    return complete


def _highest_level(released: ReleasedGradients, size: int) -> int:
    """Look up a gradient of that size, or the next larger one, whose step takes no less."""
    place = bisect_left(released, (size, 0))
    return released[min(place, len(released) - 1)][1]


@dataclass(frozen=True)
class SteadyState:
    """Bytes on the device from the second optimizer step on, when optimizer states exist."""

    kept_bytes: int
    """Bytes alive when the second step begins: weights, gradients, states."""
    backward_bytes: int
    """Highest level of the second backward pass."""
    step_bytes: int
    """Highest level of the optimizer's second step."""
    state_bytes: int
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    communication_bytes: int = 0
    """Bytes of a strategy's buckets and gathered weights."""
    other_bytes: int = 0
    """Bytes of what else a step leaves for the next one, such as tensors that a module or a callback holds on to."""
    host_state_bytes: int = 0
    """Bytes of optimizer states in host memory, paged ones included."""
    released_gradients: ReleasedGradients = ()
    """Bytes of gradients that are stepped and freed during backward; empty if gradients are kept."""

    @classmethod
    def of(cls, profile: ModelProfile, rounding: int) -> SteadyState:
        """Read the steady state off a trace of two steps; `rounding` is the allocator's, in bytes."""
        events = profile.events
        live = events.live_bytes(rounding)
        spans = second_step(events)
        start = spans["forward"][0]
        alive = events.breakdown_at(start - 1, rounding)
        backwards = later_phases(events, "backward")
        first, stop = backwards[-1]
        # Where a forward pass kept more than a loss, the level falls in backward although gradients stay.
        keeps = events.breakdown_at(stop - 1).get(Category.GRADIENT) > 0
        return cls(
            kept_bytes=int(live[start - 1]),
            backward_bytes=max(int(live[a:b].max()) for a, b in backwards),
            step_bytes=max(int(live[a:b].max()) for a, b in later_phases(events, "step")),
            state_bytes=events.breakdown_at(spans["step"][1] - 1, rounding).get(Category.OPTIMIZER_STATE),
            parameter_bytes=alive.get(Category.PARAMETER),
            buffer_bytes=alive.get(Category.BUFFER),
            gradient_bytes=alive.get(Category.GRADIENT),
            other_bytes=alive.total() - sum(alive.get(category) for category in LASTING),
            host_state_bytes=profile.host.get(Tier.HOST, {}).get(Category.OPTIMIZER_STATE, 0),
            released_gradients=() if keeps else released_gradients_of(live[first - 1 : stop]),
        )

    def extended(self, larger: SteadyState, blocks: int, larger_blocks: int, num_blocks: int) -> SteadyState:
        """Extrapolate to more repeated blocks from two traced numbers of blocks, each block adding the same."""
        values = {}
        for name in (field.name for field in fields(self) if field.name != "released_gradients"):
            own, other = getattr(self, name), getattr(larger, name)
            values[name] = own + (num_blocks - blocks) * (other - own) // (larger_blocks - blocks)
        return SteadyState(**values, released_gradients=larger.released_gradients)


def later_phases(events: EventList, wanted: str) -> list[tuple[int, int]]:
    """Find the spans of events of every phase of a name, leaving out those before the second optimizer step."""
    second = [name for _, name in events.phases].index("step") + 1
    return [(first, stop) for name, first, stop in events.phase_spans[second:] if name == wanted and stop > first]


def second_step(events: EventList) -> dict[str, tuple[int, int]]:
    """Find the span of events of the first phase of every name after the first optimizer step."""
    found = {name: later_phases(events, name) for name in ("forward", "backward", "step")}
    return {name: spans[0] for name, spans in found.items() if spans}

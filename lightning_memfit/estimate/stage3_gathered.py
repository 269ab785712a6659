"""Which weights ZeRO's stage 3 has gathered at every moment of a traced micro-batch.

DeepSpeed gathers a module's weights before it runs. Once it has seen a whole forward and backward pass in one order, it
also gathers the weights of the modules that come next, and keeps those that are needed again soon
(`PartitionedParameterCoordinator` in DeepSpeed 0.19.8, `runtime/zero/partitioned_param_coordinator.py`). It begins
anew with every call of the root module: a `training_step` that calls `self(...)`, beside the engine's own call of the
module, never lets it see a whole pass (`ModelProfile.calls_itself`). Then nothing is gathered ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_memfit.estimate.steady_state import later_phases
from lightning_memfit.memory import Category
from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.profile.events import CATEGORIES, OUTSIDE, Integers
from lightning_memfit.profile.record import ModelProfile

Weight = Hashable


@dataclass(frozen=True)
class GatherSizes:
    """The sizes that decide how far ahead weights are gathered, in elements."""

    prefetch: int = 0
    """`stage3_prefetch_bucket_size`."""
    live: int = 0
    """`stage3_max_live_parameters`."""
    reuse: int = 0
    """`stage3_max_reuse_distance`."""
    persistent: int = 0
    """`stage3_param_persistence_threshold`: weights up to this size stay gathered and are left out here."""


@dataclass(frozen=True)
class Use:
    """A module with weights of its own that runs, forward or backward."""

    at: int
    """Index of its first event."""
    weights: tuple[tuple[Weight, int], ...]
    """Each with its elements."""


@dataclass
class _Buffer:
    """What one collective gathered for several weights. Each is copied out of it when the first of them is used."""

    elements: int
    unused: set[Weight]
    copied: bool = False


@dataclass
class _Gathering:
    """The coordinator's state. A step is a use; `coming` holds the weights of all uses in order, with their steps."""

    uses: Sequence[Use]
    sizes: GatherSizes
    live: dict[Weight, int] = field(default_factory=dict)
    coming: deque[tuple[Weight, int, int]] = field(default_factory=deque)
    fetched_for: dict[Weight, int] = field(default_factory=dict)
    """The last step that each weight was fetched for."""
    buffers: list[_Buffer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coming.extend((weight, numel, step) for step, use in enumerate(self.uses) for weight, numel in use.weights)

    def fetch(self, step: int) -> int:
        """Gather what a use needs, then what comes next; return the elements of buffers that are beside the copies."""
        weights = self.uses[step].weights
        self.live |= dict(weights)
        awaited = {weight for weight, _ in weights if self.fetched_for.get(weight, -1) < step}
        while self.coming and awaited:
            weight, _, at = self.coming.popleft()
            self.fetched_for[weight] = at
            awaited.discard(weight)
        beside = self._copy_out({weight for weight, _ in weights})
        self.fetch_ahead()
        return beside

    def fetch_ahead(self) -> None:
        """Gather what comes next, as far as sizes allow. The last weight may exceed them."""
        allowed = min(self.sizes.live - sum(self.live.values()), self.sizes.prefetch)
        ahead: dict[Weight, int] = {}
        while self.coming and sum(ahead.values()) < allowed:
            weight, numel, at = self.coming.popleft()
            self.fetched_for[weight] = max(self.fetched_for.get(weight, -1), at)
            if weight not in self.live:
                ahead[weight] = numel
        self.live |= ahead
        if len(ahead) > 1:
            self.buffers.append(_Buffer(sum(ahead.values()), set(ahead)))

    def release(self, step: int) -> None:
        """Let go of a use's weights, but for those that are needed soon, or that were fetched for a later use."""
        soon: set[Weight] = set()
        passed, later = 0, step + 1
        while later < len(self.uses) and passed < self.sizes.reuse:
            soon.update(weight for weight, _ in self.uses[later].weights)
            passed += sum(numel for _, numel in self.uses[later].weights)
            later += 1
        for weight, _ in self.uses[step].weights:
            if weight not in soon and self.fetched_for.get(weight, -1) <= step:
                self.live.pop(weight, None)

    def _copy_out(self, used: set[Weight]) -> int:
        """Elements of the buffers that weights were copied out of; each stays until the last of its weights is used."""
        for buffer in self.buffers:
            buffer.copied |= bool(buffer.unused & used)
            buffer.unused -= used
        self.buffers = [buffer for buffer in self.buffers if buffer.unused]
        return sum(buffer.elements for buffer in self.buffers if buffer.copied)


def gathered_elements(uses: Sequence[Use], sizes: GatherSizes) -> list[int]:
    """Elements of weights and of collectives' buffers from the start of each use to that of the next one.

    Args:
        uses: Of a forward and a backward pass, in order.
        sizes: How far ahead weights are gathered.
    """
    gathering, found = _Gathering(uses, sizes), []
    gathering.fetch_ahead()  # when the root module begins
    for step in range(len(uses)):
        buffers = gathering.fetch(step)
        found.append(sum(gathering.live.values()) + buffers)
        gathering.release(step)
        gathering.fetch_ahead()  # when the next module begins, which usually has no weights: a norm, an activation
    return found


def gathered_levels(profile: ModelProfile, sizes: GatherSizes) -> Integers:
    """Elements of gathered weights after every event of a trace, 0 outside the passes of later steps.

    Args:
        profile: Of one device that holds everything.
        sizes: How far ahead weights are gathered.
    """
    events = profile.events
    levels = np.zeros(len(events), dtype=np.int64)
    passes = zip(later_phases(events, "forward"), later_phases(events, "backward"), strict=False)
    for (first, _), (middle, stop) in passes:
        if not (uses := uses_of(profile, first, middle, stop, sizes.persistent)):
            continue
        starts = [first, *(use.at for use in uses[1:]), stop]
        for number, elements in enumerate(gathered_elements(uses, sizes)):
            levels[starts[number] : starts[number + 1]] = elements
    return levels


def uses_of(profile: ModelProfile, first: int, middle: int, stop: int, persistent: int = 0) -> list[Use]:
    """Uses of weights in a forward and a backward pass, by the modules and gradients that allocate.

    A module whose weights all stay gathered is a use without weights: what was used before it is let go of. A
    recomputed module is used once more. A frozen weight is taken to be used in backward where its place in forward
    says, unless no weight before it is trained.

    Args:
        profile: A trace.
        first: First event of the forward pass.
        middle: First event of the backward pass.
        stop: The event after the last.
        persistent: Elements up to which a weight stays gathered, and is left out.
    """
    events = profile.events
    by_module = _by(profile.parameters, lambda p: p.name.rpartition(".")[0])
    by_name = _by(profile.parameters, lambda p: p.name)
    of_site = [_of_site(name, by_module, by_name) for name in events.site_names]
    known = np.array([bool(owned) for owned in of_site], dtype=bool)
    is_gradient = events.categories == CATEGORIES.index(Category.GRADIENT)
    passes: tuple[list[Use], list[Use]] = ([], [])
    last_module = ""
    within = np.arange(first, stop)
    makes = (events.events[first:stop] > 0) & known[events.sites[events.storages[first:stop]]]
    for at in within[makes].tolist():
        storage, block = int(events.storages[at]), int(events.event_blocks[at])
        name = events.site_names[events.sites[storage]]
        if " | " not in name and not is_gradient[storage]:
            continue  # a state
        module, last_module = last_module, _module_of(name)
        large = [p for p in of_site[events.sites[storage]] if p.numel > persistent]
        weights = tuple(((p.shared_with or p.name, block), p.numel) for p in large)
        found = passes[at >= middle]
        same = not weights and module == last_module  # the gradient of a bias, which its weight's came with
        if not same and not (found and found[-1].weights == weights):
            found.append(Use(at, weights))
    return [*passes[0], *_with_frozen(*passes)]


def left_gathered(profile: ModelProfile, persistent: int) -> int:
    """Elements of weights that are still gathered when a backward pass ends.

    A module lets go of its weights when the gradient of its input has been computed (`PostBackwardFunctionModule`),
    which one that reads the batch never does. Those are taken to be the modules that run after all blocks, or where
    there are none the one that runs last.

    Args:
        profile: A trace.
        persistent: Elements up to which a weight stays gathered, and is left out.
    """
    events = profile.events
    (first, _), (middle, stop) = (later_phases(events, name)[0] for name in ("forward", "backward"))
    uses = [use for use in uses_of(profile, first, middle, stop, persistent) if use.at >= middle]
    outside = [events.event_blocks[use.at] == OUTSIDE for use in uses]
    behind = len(uses) - outside[::-1].index(False) if False in outside else len(uses) - 1
    return sum(dict(weight for use in uses[max(0, behind) :] for weight in use.weights).values())


def _of_site(
    name: str, by_module: dict[str, list[ParameterInfo]], by_name: dict[str, list[ParameterInfo]]
) -> list[ParameterInfo]:
    """Weights that are used where a storage is made: by a module that runs, or the one whose gradient it is."""
    place, is_module, _ = name.partition(" | ")
    return (by_module if is_module else by_name).get(place, [])


def _module_of(name: str) -> str:
    """The module that runs where a storage is made, or the one whose gradient it is."""
    place, is_module, _ = name.partition(" | ")
    return place if is_module else place.rpartition(".")[0]


def _with_frozen(forward: Sequence[Use], backward: Sequence[Use]) -> list[Use]:
    """Uses in backward, with those of modules whose weights get no gradient."""
    last = {weight: at for at, use in enumerate(backward) for weight, _ in use.weights}
    before: dict[int, list[Use]] = {}
    place = 0
    for use in reversed(forward):
        places = [last[weight] + 1 for weight, _ in use.weights if weight in last]
        if places:
            place = max(places)
        elif place < len(backward):
            before.setdefault(place, []).append(Use(backward[place].at, use.weights))
    return [one for at, use in enumerate(backward) for one in (*before.get(at, ()), use)]


def _by(parameters: Iterable[ParameterInfo], key: Callable[[ParameterInfo], str]) -> dict[str, list[ParameterInfo]]:
    found: dict[str, list[ParameterInfo]] = {}
    for parameter in parameters:
        found.setdefault(key(parameter), []).append(parameter)
    return found

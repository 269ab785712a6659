"""`Passes`: forward and backward under every checkpointing choice, and what is read off them, each figure once.

Settings that differ in optimizer or strategy alone share them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.block_figures import BlockFigures, block_figures
from lightning_memfit.estimate.estimate import predict_peak_bytes, predict_total_bytes
from lightning_memfit.memory import Category
from lightning_memfit.planner.cost import RECOMPUTED_OPERATOR, PassWork
from lightning_memfit.planner.released import Transients, released_levels
from lightning_memfit.planner.standing import Standing, later_phases
from lightning_memfit.planner.traces import CHOICES, Laboratory
from lightning_memfit.profile.events import CATEGORIES, EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.setting import Setting

_TEMPORARY = CATEGORIES.index(Category.TEMPORARY)
_INPUT = CATEGORIES.index(Category.INPUT)


class Passes:
    """Traces of a setting's forward and backward.

    Args:
        laboratory: Makes the traces.
        setting: Whose passes; what decides how the optimizer steps doesn't matter.
        rounding: Of the allocator, in bytes.

    Attributes:
        none: Profile without checkpointing.

    Raises:
        TraceError: If a step can't be traced.
    """

    def __init__(self, laboratory: Laboratory, setting: Setting, rounding: int) -> None:
        self.rounding = rounding
        self.none: ModelProfile = laboratory.passes(setting, "none")
        self._laboratory = laboratory
        self._setting = setting
        self._figures: dict[tuple[Choice, int, Transients], BlockFigures] = {}
        self._fragmentation: dict[tuple[Choice, int, bool], int] = {}
        self._peaks: dict[tuple[int, Transients], int] = {}
        self._inputs: dict[int, int] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Of checkpointing that all blocks may follow; without blocks only `none`."""
        return CHOICES if self.none.num_blocks > 1 else CHOICES[:1]

    @property
    def is_traced(self) -> bool:
        """Whether every choice was traced already."""
        return all(self._laboratory.has_passes(self._setting, choice) for choice in self.choices)

    @property
    def knows_every_size(self) -> bool:
        """Whether another micro-batch than the traced one can be had by arithmetic."""
        return all(self._profile(choice).knows_every_size for choice in self.choices)

    @cached_property
    def standing(self) -> Standing:
        """What the module's own optimizer keeps alive in these traces."""
        return Standing.of(self.none, self.rounding)

    def figures(self, choice: Choice, size: int, released: Transients = ()) -> BlockFigures:
        """What blocks keep and need at a micro-batch.

        Args:
            choice: Of all blocks.
            size: Micro-batch.
            released: Of gradients that are stepped and freed during backward, which are none of these figures then.

        Raises:
            BudgetError: If the blocks can't be told apart.
        """
        key = (choice, size, released)
        if key not in self._figures:
            profile = _at(self._profile(choice), size)
            levels = released_levels(profile.events, self.rounding, released) if released else None
            self._figures[key] = block_figures(profile, self.rounding, levels)
        return self._figures[key]

    def recomputed(self, choice: Choice, size: int) -> PassWork:
        """What a pass does beyond the plain one when every block follows a choice."""
        weight = RECOMPUTED_OPERATOR.get(choice, 1.0)
        return PassWork.of(self.none, size).recomputing(PassWork.of(self._profile(choice), size), weight)

    def peak_bytes(self, size: int, released: Transients = ()) -> int:
        """Highest level of forward and backward without checkpointing; `released` as in `figures`."""
        key = (size, released)
        if key not in self._peaks:
            events = self.none.events_at(size)
            live = events.live_bytes(self.rounding)
            if released:
                _, live = released_levels(events, self.rounding, released)
            spans = [span for name in ("forward", "backward") for span in later_phases(events, name)]
            self._peaks[key] = max(int(live[first:stop].max()) for first, stop in spans)
        return self._peaks[key]

    def input_bytes(self, size: int) -> int:
        """Of the batches in these traces."""
        if size not in self._inputs:
            events = self.none.events_at(size)
            self._inputs[size] = int(events.sizes[events.categories == _INPUT].sum())
        return self._inputs[size]

    def fragmentation_bytes(self, choice: Choice, size: int, other_steps: bool) -> int:
        """What the caching allocator reserves beyond the live tensors.

        Args:
            choice: Of all blocks.
            size: Micro-batch.
            other_steps: Whether another optimizer steps than in these traces, which leaves other cached blocks.
        """
        key = (choice, size, other_steps)
        if key not in self._fragmentation:
            profile = _at(self._profile(choice), size)
            if other_steps:
                profile = replace(profile, events=_without_scratch(profile.events))
            beyond = predict_total_bytes(profile, size) - predict_peak_bytes(profile, size)
            self._fragmentation[key] = max(0, beyond)
        return self._fragmentation[key]

    def _profile(self, choice: Choice) -> ModelProfile:
        return self._laboratory.passes(self._setting, choice)


def _at(profile: ModelProfile, size: int) -> ModelProfile:
    return replace(profile, events=profile.events_at(size), micro_batch_size=size, slopes=None, larger=None)


def _without_scratch(events: EventList) -> EventList:
    """Events without the scratch memory of optimizer steps, whose cached blocks another optimizer doesn't leave."""
    allocations = np.flatnonzero(events.events > 0)
    made_in_step = np.zeros(len(events.sizes), dtype=bool)
    starts = [*(at for at, _ in events.phases), len(events)]
    for (first, name), stop in zip(events.phases, starts[1:], strict=True):
        if name == "step":
            made = allocations[(allocations >= first) & (allocations < stop)]
            made_in_step[events.storages[made]] = True
    scratch = made_in_step & (events.categories == _TEMPORARY)
    return replace(events, sizes=np.where(scratch, 0, events.sizes))

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
        profiles: By checkpointing choice of all blocks; without blocks only `none`.

    Raises:
        TraceError: If a step can't be traced.
    """

    def __init__(self, laboratory: Laboratory, setting: Setting, rounding: int) -> None:
        self.rounding = rounding
        self.profiles: dict[Choice, ModelProfile] = {"none": laboratory.passes(setting, "none")}
        if self.none.num_blocks > 1:
            self.profiles |= {choice: laboratory.passes(setting, choice) for choice in CHOICES if choice != "none"}
        self._figures: dict[tuple[Choice, int], BlockFigures] = {}
        self._fragmentation: dict[tuple[Choice, int, bool], int] = {}
        self._peaks: dict[int, int] = {}
        self._inputs: dict[int, int] = {}

    @property
    def none(self) -> ModelProfile:
        """Profile without checkpointing."""
        return self.profiles["none"]

    @property
    def knows_every_size(self) -> bool:
        """Whether another micro-batch than the traced one can be had by arithmetic."""
        return all(profile.knows_every_size for profile in self.profiles.values())

    @cached_property
    def standing(self) -> Standing:
        """What the module's own optimizer keeps alive in these traces."""
        return Standing.of(self.none, self.rounding)

    def figures(self, choice: Choice, size: int) -> BlockFigures:
        """What blocks keep and need at a micro-batch.

        Raises:
            BudgetError: If the blocks can't be told apart.
        """
        key = (choice, size)
        if key not in self._figures:
            self._figures[key] = block_figures(_at(self.profiles[choice], size), self.rounding)
        return self._figures[key]

    def peak_bytes(self, size: int) -> int:
        """Highest level of forward and backward without checkpointing."""
        if size not in self._peaks:
            events = self.none.events_at(size)
            live = events.live_bytes(self.rounding)
            spans = [span for name in ("forward", "backward") for span in later_phases(events, name)]
            self._peaks[size] = max(int(live[first:stop].max()) for first, stop in spans)
        return self._peaks[size]

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
            profile = _at(self.profiles[choice], size)
            if other_steps:
                profile = replace(profile, events=_without_scratch(profile.events))
            beyond = predict_total_bytes(profile, size) - predict_peak_bytes(profile, size)
            self._fragmentation[key] = max(0, beyond)
        return self._fragmentation[key]


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

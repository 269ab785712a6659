"""`MemoryModel`: what a setting needs at any micro-batch and checkpointing plan, put together from a few traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from lightning_memfit.checkpointing.knapsack import BlockOption, CheckpointingProblem, PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.block_figures import BlockFigures, BudgetError, block_figures
from lightning_memfit.estimate.estimate import CUDA_ROUNDING, predict_peak_bytes, predict_total_bytes
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.planner.placement import Placement, torch_placement
from lightning_memfit.planner.steady_state import Standing, Transients, later_phases, released_levels
from lightning_memfit.planner.time import RECOMPUTED_OPERATOR, PassWork, Rates, pass_seconds
from lightning_memfit.planner.trace_store import CHOICES, Laboratory
from lightning_memfit.profile.events import CATEGORIES, EventList
from lightning_memfit.profile.record import ModelProfile, trained
from lightning_memfit.techniques.core.setting import Setting

# `Passes`: forward and backward under every checkpointing choice, and what is read off them, each figure once.
# Settings that differ in optimizer or strategy alone share them.


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


# ===


class MemoryModel:
    """Memory and recomputation time of one setting's techniques.

    The peak of forward and backward comes from traces with the module's own optimizer. What another optimizer or
    other master weights keep is a constant, which is added; the peak of the step comes from a trace of steps alone.

    Args:
        laboratory: Makes the traces of steps.
        setting: Techniques; its sizes and its checkpointing don't matter.
        passes: Traces of the setting's forward and backward.
        dtype: Of matrix products.
        placement: What DeepSpeed keeps where, if it is the strategy: it replaces what a trace keeps.

    Raises:
        TraceError: If a step can't be traced.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        setting: Setting,
        passes: Passes,
        dtype: str,
        placement: Placement | None = None,
    ) -> None:
        self._laboratory = laboratory
        self._setting = setting
        self._dtype = dtype
        self._placement = placement
        self._cuda = laboratory.workload.target.device_kind.has_own_memory
        self._rounding = CUDA_ROUNDING if self._cuda else 1
        self._passes = passes

    @property
    def none(self) -> ModelProfile:
        """Profile without checkpointing."""
        return self._passes.none

    @property
    def knows_every_size(self) -> bool:
        """Whether another micro-batch than the traced one can be had by arithmetic."""
        return self._passes.knows_every_size

    # --- what is alive all the time ---------------------------------------------------------------------------------

    @cached_property
    def _standing(self) -> Standing:
        """Of the setting, on a rank's device."""
        if self._placement is not None:
            return self._placement.standing
        sharding = self._setting.sharding
        if sharding is None:
            return self._on_one_device
        parameters = self.none.parameters
        return torch_placement(self._on_one_device, sharding, self._setting.world_size, parameters, self._cuda).standing

    @cached_property
    def _on_one_device(self) -> Standing:
        """Of the setting's techniques where one device holds everything."""
        if not self._setting.changes_step:
            return self._passes.standing
        if self._setting.masters_on_host:
            return self._beside_host()
        own = self._laboratory.stepping(self._setting, self._rounding)
        if not self._cuda:
            return own
        if self._setting.pages_states:
            less = own.state_bytes
            return replace(
                own,
                kept_bytes=own.kept_bytes - less,
                backward_bytes=own.backward_bytes - less,
                step_bytes=own.step_bytes - less,
            )
        return own

    def _beside_host(self) -> Standing:
        """Half-precision weights stay; gradients are on their way one or two at a time; states are float32."""
        parameters = [replace(p, itemsize=2) for p in self.none.parameters if not p.shared_with]
        weights = sum(_rounded(p.numel * p.itemsize, self._rounding) for p in parameters)
        largest = max((p.numel * p.itemsize for p in trained(parameters)), default=0)
        in_half = self._passes.standing.state_bytes  # they follow the weights' dtype in the trace
        buffers = self._passes.standing.buffer_bytes
        beside = Standing(weights, weights + 2 * largest, weights, 2 * in_half, weights, buffers)
        if self._cuda:
            return beside
        masters = 4 * sum(p.numel for p in trained(self.none.parameters))  # and gradients, on the same host
        here = 2 * masters + beside.state_bytes
        return replace(
            beside,
            kept_bytes=beside.kept_bytes + here,
            backward_bytes=beside.backward_bytes + here,
            step_bytes=beside.step_bytes + here,
            parameter_bytes=beside.parameter_bytes + masters,
            gradient_bytes=masters,
        )

    @cached_property
    def _shift(self) -> int:
        """What the setting keeps alive in forward and backward beyond the traces with the module's own optimizer."""
        plain, released = self._passes.standing, self._standing.transients
        shift = self._standing.kept_bytes - plain.kept_bytes
        if released:
            shift += plain.gradient_bytes  # levels without any gradient, but with those on their way
        elif self._setting.frees_gradients:
            shift += max(0, self._standing.backward_bytes - self._standing.kept_bytes)
        return shift

    def off_device(self) -> MemoryBreakdown:
        """Bytes per rank elsewhere: what DeepSpeed offloads, paged states, master weights with gradients and states."""
        if self._placement is not None:
            return self._placement.elsewhere
        if not self._cuda:
            return MemoryBreakdown()
        states = {Category.OPTIMIZER_STATE: self._standing.state_bytes}
        if self._setting.masters_on_host:
            count = sum(p.numel for p in trained(self.none.parameters))
            masters = {Category.PARAMETER: 4 * count, Category.GRADIENT: 4 * count, **states}
            staging = {Category.COMMUNICATION: 2 * count}
            return MemoryBreakdown.on(Tier.HOST, masters) + MemoryBreakdown.on(Tier.PINNED_HOST, staging)
        if self._setting.pages_states:
            return MemoryBreakdown.on(Tier.HOST, states)
        return MemoryBreakdown()

    # --- checkpointing ----------------------------------------------------------------------------------------------

    def frontier(self, size: int, rates: Rates) -> PlanFrontier | None:
        """Every checkpointing plan worth having at a micro-batch; None where there are no blocks to choose among."""
        if len(self._passes.choices) == 1:
            return None
        try:
            released = self._standing.transients
            figures = {choice: self._passes.figures(choice, size, released) for choice in self._passes.choices}
        except BudgetError:
            return None
        seconds = {choice: self._recompute_seconds(choice, size, rates) for choice in self._passes.choices}
        plain, shift = figures["none"], self._shift
        blocks = tuple(
            tuple(
                BlockOption(choice, int(found.kept[i]), int(found.peak[i]) + shift, seconds[choice] / len(plain.kept))
                for choice, found in figures.items()
            )
            for i in range(len(plain.kept))
        )
        head = max(found.head for found in figures.values()) + shift
        outside = max(found.outside for found in figures.values()) + shift
        floor = max(outside, self._step_bytes(size))
        return PlanFrontier(CheckpointingProblem(blocks, max(0, head), floor))

    def peak_bytes(self, size: int) -> int:
        """Peak of live tensors without checkpointing."""
        peak = self._passes.peak_bytes(size, self._standing.transients)
        return max(peak + self._shift, self._step_bytes(size))

    def fragmentation_bytes(self, choices: Collection[Choice], size: int) -> int:
        """What the caching allocator reserves beyond the live tensors, at most over uniform plans of these choices."""
        if not self._cuda:
            return 0
        used = [choice for choice in self._passes.choices if choice in choices] or list[Choice](("none",))
        other_steps = self._setting.changes_step or self._setting.sharding is not None
        return max(self._passes.fragmentation_bytes(choice, size, other_steps) for choice in used)

    def breakdown(self, peak_bytes: int, size: int) -> MemoryBreakdown:
        """Bytes on the device by category at a peak: what is always there, and activations for the rest."""
        standing = self._standing
        fixed = {
            Category.PARAMETER: standing.parameter_bytes,
            Category.BUFFER: standing.buffer_bytes,
            Category.GRADIENT: 0 if self._cuda and self._setting.frees_gradients else standing.gradient_bytes,
            Category.OPTIMIZER_STATE: 0 if self._has_moved_states else standing.state_bytes,
            Category.COMMUNICATION: standing.communication_bytes,
            Category.INPUT: self._passes.input_bytes(size),
        }
        rest = max(0, peak_bytes - sum(fixed.values()))
        return MemoryBreakdown.device({**fixed, Category.ACTIVATION: rest})

    def work(self, size: int, choices: Sequence[Choice] = ()) -> PassWork:
        """Forward and backward of one micro-batch, with what the blocks recompute by their choices."""
        work = PassWork.of(self.none, size)
        for choice, count in Counter(choices).items():
            work += self._passes.recomputed(choice, size) * (count / len(choices))
        return work

    @property
    def _has_moved_states(self) -> bool:
        """Whether the states of the standing lie in host memory."""
        return self._placement is None and bool(self.off_device().total(Tier.HOST))

    def _step_bytes(self, size: int) -> int:
        traced = self.none.micro_batch_size
        more = self._passes.input_bytes(size) - self._passes.input_bytes(traced)
        return self._standing.step_bytes + max(0, more)

    def _recompute_seconds(self, choice: Choice, size: int, rates: Rates) -> float:
        plain = PassWork.of(self.none, size)
        with_it = plain + self._passes.recomputed(choice, size)
        seconds = [sum(pass_seconds(work, rates, self._dtype).values()) for work in (plain, with_it)]
        return max(0.0, seconds[1] - seconds[0])


def _rounded(size_bytes: int, rounding: int) -> int:
    return -(-size_bytes // rounding) * rounding

"""`MemoryModel`: the memory that a setting needs at any micro-batch and checkpointing plan, from a few traces.

`ForwardBackward` reads figures off the traces of forward and backward; settings that differ only in optimizer or
strategy share one. A `MemoryModel` adds what the optimizer and the strategy keep. `MemoryModels` makes both, in two
ways: `of` traces what is missing; `at_least` traces nothing and gives a model that needs no more than the setting will.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

from lightning_memfit.checkpointing.knapsack import BlockOption, CheckpointingProblem, PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.block_figures import BlockFigures, BudgetError, block_figures
from lightning_memfit.estimate.deepspeed import NCCL_BYTES, DeepSpeedRun
from lightning_memfit.estimate.estimate import CUDA_ROUNDING, predict_peak_bytes, predict_total_bytes
from lightning_memfit.estimate.placement import Placement, deepspeed_placement, torch_placement
from lightning_memfit.estimate.steady_state import ReleasedGradients, SteadyState, later_phases, released_levels
from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.memory.parameters import ParameterInfo, trained
from lightning_memfit.optim.optimizers import find_optimizer
from lightning_memfit.planner.candidates import with_losses
from lightning_memfit.planner.time import RECOMPUTED, PassWork, TimeModel
from lightning_memfit.planner.trace_store import CHOICES, TraceStore, passes_of
from lightning_memfit.profile.events import CATEGORIES, EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core import step_cost
from lightning_memfit.techniques.core.setting import Setting
from lightning_memfit.techniques.core.sharding import Sharding
from lightning_memfit.techniques.core.technique import Numerics

_TEMPORARY = CATEGORIES.index(Category.TEMPORARY)
_INPUT = CATEGORIES.index(Category.INPUT)
_PLAIN = find_optimizer("adamw").states


class ForwardBackward:
    """Traces of a setting's forward and backward under every checkpointing choice, and the figures read off them.

    Args:
        store: Makes the traces.
        setting: A setting, of which the techniques that only decide how the optimizer steps don't matter.
        rounding: Rounding of the allocator, in bytes.

    Attributes:
        none: Profile without checkpointing.

    Raises:
        TraceError: If a step can't be traced.
    """

    def __init__(self, store: TraceStore, setting: Setting, rounding: int) -> None:
        self.rounding = rounding
        self.none: ModelProfile = store.passes(setting, "none")
        self._store = store
        self._setting = setting
        self._figures: dict[tuple[Choice, int, ReleasedGradients], BlockFigures] = {}
        self._fragmentation: dict[tuple[Choice, int, bool], int] = {}
        self._peaks: dict[tuple[Choice, int, ReleasedGradients], int] = {}
        self._inputs: dict[int, int] = {}
        self._work: dict[tuple[Choice, int], PassWork] = {}
        self._lender: ForwardBackward | None = None

    def with_blocks_of(self, lender: ForwardBackward) -> ForwardBackward:
        """Make a lower bound when only the pass without checkpointing is traced.

        Blocks keep and recompute the same under every loss. If the plain blocks of another loss need no more than these
        (`is_bounded_at`), its checkpointed blocks bound these, allocator effects left out.

        Args:
            lender: Passes with the same blocks and with every choice traced.
        """
        borrowed = copy(self)  # shares the figures that are known already
        borrowed._lender = lender
        return borrowed

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Checkpointing choices that all blocks may follow; only `none` if there are no blocks.

        A choice whose step is known at the traced micro-batch only is left out where the plain step is known at others:
        one layout that changes with the size must not bind all of them to the traced one.
        """
        if self._lender is not None:
            return self._lender.choices
        if not self.none.knows_every_size:
            return self._possible
        return tuple(one for one in self._possible if one == "none" or self._profile(one).knows_every_size)

    @property
    def _possible(self) -> tuple[Choice, ...]:
        return CHOICES if self.none.num_blocks > 1 else CHOICES[:1]

    @property
    def has_other_blocks(self) -> bool:
        """Whether there are blocks besides the largest group, which a run checkpoints and traces don't tell apart."""
        return (self._store.workload.facts.num_blocks or 0) > self.none.num_blocks

    @property
    def is_traced(self) -> bool:
        """Whether every choice was traced already."""
        return all(self._store.has_passes(self._setting, choice) for choice in self._possible)

    @property
    def knows_every_size(self) -> bool:
        """Whether the figures of a micro-batch that was not traced can be computed from the traces."""
        if self._lender is not None:
            return self.none.knows_every_size and self._lender.knows_every_size
        return all(self._profile(choice).knows_every_size for choice in self.choices)

    @cached_property
    def steady_state(self) -> SteadyState:
        """What the module's own optimizer keeps alive in these traces."""
        return SteadyState.of(self.none, self.rounding)

    def figures(self, choice: Choice, size: int, released: ReleasedGradients = ()) -> BlockFigures:
        """Bytes that blocks keep and need at a micro-batch.

        Args:
            choice: Checkpointing of all blocks.
            size: Micro-batch.
            released: Sizes of gradients that are stepped and freed during backward; the figures leave them out.

        Raises:
            BudgetError: If the blocks can't be told apart.
        """
        if self._lender is not None and choice != "none":
            return self._lender.figures(choice, size, released)
        key = (choice, size, released)
        if key not in self._figures:
            profile = _at(self._profile(choice), size)
            levels = released_levels(profile.events, self.rounding, released) if released else None
            self._figures[key] = block_figures(profile, self.rounding, levels)
        return self._figures[key]

    def is_bounded_at(self, size: int, released: ReleasedGradients = ()) -> bool:
        """Whether `figures` are exact or a lower bound at a micro-batch; only borrowed blocks may be no bound."""
        if self._lender is None or len(self.choices) == 1:
            return True
        if self.has_other_blocks:
            return False
        try:
            own, plain = (passes.figures("none", size, released) for passes in (self, self._lender))
        except BudgetError:
            return False  # all blocks follow one choice, of which the peak is the setting's own
        return bool(np.all(plain.kept <= own.kept) and np.all(plain.peak <= own.peak) and plain.head <= own.head)

    def recomputed(self, choice: Choice, size: int) -> PassWork:
        """Work of a pass beyond the plain one when every block follows a choice."""
        if self._lender is not None:
            return self._lender.recomputed(choice, size)
        each, per_block = RECOMPUTED.get(choice, (1.0, 0.0))
        blocks = per_block * max(self.none.num_blocks, self._store.workload.facts.num_blocks or 0)
        return self.work("none", size).recomputing(self.work(choice, size), each, blocks)

    def work(self, choice: Choice, size: int) -> PassWork:
        """Work of a pass when every block follows a choice."""
        key = (choice, size)
        if key not in self._work:
            self._work[key] = PassWork.of(self._profile(choice), size)
        return self._work[key]

    def peak_bytes(self, size: int, released: ReleasedGradients = (), choice: Choice = "none") -> int:
        """Highest level of forward and backward; `released` as in `figures`."""
        key = (choice, size, released)
        if key not in self._peaks:
            events = self._profile(choice).events_at(size)
            live = events.live_bytes(self.rounding)
            if released:
                _, live = released_levels(events, self.rounding, released)
            spans = (span for name in ("forward", "backward") for span in later_phases(events, name))
            self._peaks[key] = max((int(live[first:stop].max()) for first, stop in spans), default=0)
        return self._peaks[key]

    def input_bytes(self, size: int) -> int:
        """Bytes of the batches in these traces."""
        if size not in self._inputs:
            events = self.none.events_at(size)
            self._inputs[size] = int(events.sizes[events.categories == _INPUT].sum())
        return self._inputs[size]

    def fragmentation_bytes(self, choice: Choice, size: int, other_steps: bool) -> int:
        """Bytes that the caching allocator reserves beyond the live tensors.

        Args:
            choice: Checkpointing of all blocks.
            size: Micro-batch.
            other_steps: Whether the step uses another optimizer than these traces, which leaves other cached blocks.
        """
        if self._lender is not None:
            return 0
        key = (choice, size, other_steps)
        if key not in self._fragmentation:
            profile = _at(self._profile(choice), size)
            if other_steps:
                profile = replace(profile, events=_without_scratch(profile.events))
            beyond = predict_total_bytes(profile, size) - predict_peak_bytes(profile, size)
            self._fragmentation[key] = max(0, beyond)
        return self._fragmentation[key]

    def _profile(self, choice: Choice) -> ModelProfile:
        return self._store.passes(self._setting, choice)


def _at(profile: ModelProfile, size: int) -> ModelProfile:
    return replace(profile, events=profile.events_at(size), micro_batch_size=size, slopes=None, larger=None)


def _without_scratch(events: EventList) -> EventList:
    """Events without the scratch memory of optimizer steps, because another optimizer leaves other cached blocks."""
    allocations = np.flatnonzero(events.events > 0)
    made_in_step = np.zeros(len(events.sizes), dtype=bool)
    starts = [*(at for at, _ in events.phases), len(events)]
    for (first, name), stop in zip(events.phases, starts[1:], strict=True):
        if name == "step":
            made = allocations[(allocations >= first) & (allocations < stop)]
            made_in_step[events.storages[made]] = True
    scratch = made_in_step & (events.categories == _TEMPORARY)
    return replace(events, sizes=np.where(scratch, 0, events.sizes))


class MemoryModel:
    """Memory and recomputation time of one setting's techniques.

    The peak of forward and backward comes from traces with the module's own optimizer. What another optimizer or other
    master weights keep is a constant, which is added; the peak of the step comes from a trace of steps alone.

    Args:
        store: Makes the traces of steps.
        setting: Techniques; sizes and checkpointing don't matter.
        passes: Traces of the setting's forward and backward.
        time: Gives the time of recomputation.
        placement: What is kept where, if that is known without a trace, as for DeepSpeed.

    Raises:
        TraceError: If a step can't be traced.
    """

    def __init__(
        self,
        store: TraceStore,
        setting: Setting,
        passes: ForwardBackward,
        time: TimeModel,
        placement: Placement | None = None,
    ) -> None:
        self._store = store
        self._setting = setting
        self._time = time
        self._placement = placement
        self._cuda = store.workload.target.device_kind.has_own_memory
        self._rounding = CUDA_ROUNDING if self._cuda else 1
        self._passes = passes

    @property
    def none(self) -> ModelProfile:
        """Profile without checkpointing."""
        return self._passes.none

    @property
    def knows_every_size(self) -> bool:
        """Whether the memory of a micro-batch that was not traced can be computed from the traces."""
        return self._passes.knows_every_size

    # --- what is alive all the time ---------------------------------------------------------------------------------

    def _steady_state(self, size: int) -> SteadyState:
        """What the setting keeps on a rank's device at a micro-batch."""
        workload = self._store.workload
        # `MicroBatching` synchronizes no pass.
        accumulates = workload.batching is not None or workload.samples_on_each(self._setting.world_size) > size
        return self._standing[accumulates]

    @cached_property
    def _standing(self) -> tuple[SteadyState, SteadyState]:
        """What is kept without and with accumulated micro-batches."""
        return self._stands(accumulates=False), self._stands(accumulates=True)

    def _stands(self, accumulates: bool) -> SteadyState:
        if self._placement is not None:
            return self._placement.standing
        strategy, sharding = self._setting.of_kind("strategy"), self._setting.sharding
        if strategy is None or sharding is None:
            return self._on_one_device
        division = self._store.workload.division_of(strategy.name, sharding, self._setting.world_size)
        placed = torch_placement(
            self._on_one_device,
            sharding.stage,
            self._setting.world_size,
            self.none.parameters,
            self._cuda,
            # Micro-batches that aren't synchronized accumulate beside DDP's buckets.
            division.copies_gradients or accumulates,
        )
        return placed.standing

    @cached_property
    def _on_one_device(self) -> SteadyState:
        """What the setting's techniques keep if one device holds everything."""
        if not self._setting.changes_step:
            return self._passes.steady_state
        if self._setting.masters_on_host:
            return self._with_host_masters()
        own = self._store.stepping(self._setting, self._rounding)
        if not self._cuda:
            return own
        if self._setting.pages_states and not own.host_state_bytes:  # traced as states that are not paged
            less = own.state_bytes
            return replace(
                own,
                kept_bytes=own.kept_bytes - less,
                backward_bytes=own.backward_bytes - less,
                step_bytes=own.step_bytes - less,
                state_bytes=0,
                host_state_bytes=less,
            )
        return own

    def _with_host_masters(self) -> SteadyState:
        """Half-precision weights stay; gradients leave one or two at a time; states are float32."""
        parameters = [replace(p, itemsize=2) for p in self.none.parameters if not p.shared_with]
        weights = sum(_rounded(p.numel * p.itemsize, self._rounding) for p in parameters)
        largest = max((p.numel * p.itemsize for p in trained(parameters)), default=0)
        states = self._host_masters[Category.OPTIMIZER_STATE]
        buffers = self._passes.steady_state.buffer_bytes
        kept = weights + buffers
        on_device = SteadyState(kept, kept + 2 * largest, kept, 0, weights, buffers)
        if self._cuda:
            return on_device
        here = self._host_masters  # and all of that on the same host
        more = sum(here.values())
        return replace(
            on_device,
            kept_bytes=on_device.kept_bytes + more,
            backward_bytes=on_device.backward_bytes + more,
            step_bytes=on_device.step_bytes + more,
            state_bytes=states,
            parameter_bytes=on_device.parameter_bytes + here[Category.PARAMETER],
            buffer_bytes=on_device.buffer_bytes + here[Category.BUFFER],
            gradient_bytes=here[Category.GRADIENT],
        )

    @cached_property
    def _host_masters(self) -> dict[Category, int]:
        """Host memory of masters, their gradients and states, and of float32 values of what is not trained."""
        masters = 4 * sum(p.numel for p in trained(self.none.parameters))
        in_half = self._passes.steady_state.state_bytes  # they follow the weights' dtype in the trace
        untrained = self._store.rounded_bytes()
        return {
            Category.PARAMETER: masters + untrained[Category.PARAMETER],
            Category.BUFFER: untrained[Category.BUFFER],
            Category.GRADIENT: masters,
            Category.OPTIMIZER_STATE: 2 * in_half,
        }

    def _shift(self, size: int) -> int:
        """Bytes alive in forward and backward beyond those in the traces with the module's own optimizer."""
        plain, steady = self._passes.steady_state, self._steady_state(size)
        shift = steady.kept_bytes - plain.kept_bytes + self._held_bytes(steady)
        if steady.released_gradients:
            shift += plain.gradient_bytes  # these levels have no gradients but those being released
        elif self._setting.frees_gradients:
            shift += max(0, steady.backward_bytes - steady.kept_bytes)
        return shift

    def _held_bytes(self, steady: SteadyState) -> int:
        """What the module's steps leave for each other, which a trace of the optimizer's steps alone doesn't show."""
        return max(0, self._passes.steady_state.other_bytes - steady.other_bytes)

    def off_device(self) -> MemoryBreakdown:
        """Bytes per rank off the device: DeepSpeed's offload, paged states, host master weights and their states."""
        if self._placement is not None:
            return self._placement.elsewhere
        if not self._cuda:
            return MemoryBreakdown()
        if self._setting.masters_on_host:
            staging = (2 * p.numel for p in trained(self.none.parameters))
            on_host = MemoryBreakdown.on(Tier.HOST, self._host_masters)
            return on_host + MemoryBreakdown.pinned(Category.COMMUNICATION, staging)
        if self._setting.pages_states:
            states = {Category.OPTIMIZER_STATE: self._standing[0].host_state_bytes}
            return MemoryBreakdown.on(Tier.HOST, states)
        return MemoryBreakdown()

    # --- checkpointing ----------------------------------------------------------------------------------------------

    def is_bounded_at(self, size: int) -> bool:
        """Whether this model needs no more than the setting at a micro-batch; always true if everything is traced."""
        return self._passes.is_bounded_at(size, self._steady_state(size).released_gradients)

    def frontier(self, size: int) -> PlanFrontier | None:
        """Every checkpointing plan worth having at a micro-batch; None if there are no blocks to choose among.

        Blocks of several groups all follow one choice, which counts as that of a single block, and so do blocks that
        can't be told apart, as those that run twice in a pass.
        """
        if len(self._passes.choices) == 1:
            return None
        figures = None
        if not self._passes.has_other_blocks:
            released = self._steady_state(size).released_gradients
            with suppress(BudgetError):
                figures = {choice: self._passes.figures(choice, size, released) for choice in self._passes.choices}
        if figures is None:
            return PlanFrontier(CheckpointingProblem((self._uniform_options(size),), 0, self._step_bytes(size)))
        seconds = {choice: self._recompute_seconds(choice, size) for choice in self._passes.choices}
        plain, shift = figures["none"], self._shift(size)
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

    def _uniform_options(self, size: int) -> tuple[BlockOption, ...]:
        released, shift = self._steady_state(size).released_gradients, self._shift(size)
        peaks = {choice: self._passes.peak_bytes(size, released, choice) for choice in self._passes.choices}
        return tuple(
            BlockOption(choice, 0, max(0, peak + shift), self._recompute_seconds(choice, size))
            for choice, peak in peaks.items()
        )

    def peak_bytes(self, size: int) -> int:
        """Peak of live tensors without checkpointing."""
        peak = self._passes.peak_bytes(size, self._steady_state(size).released_gradients)
        return max(peak + self._shift(size), self._step_bytes(size))

    def fragmentation_bytes(self, choices: Collection[Choice], size: int) -> int:
        """Bytes that the allocator caches beyond live tensors, the most over uniform plans of these choices."""
        if not self._cuda:
            return 0
        used = [choice for choice in self._passes.choices if choice in choices] or list[Choice](("none",))
        other_steps = self._setting.changes_step or self._setting.sharding is not None
        return max(self._passes.fragmentation_bytes(choice, size, other_steps) for choice in used)

    def breakdown(self, peak_bytes: int, size: int) -> MemoryBreakdown:
        """Bytes on the device by category at a peak: what is always alive, and activations for the rest."""
        steady = self._steady_state(size)
        fixed = {
            Category.PARAMETER: steady.parameter_bytes,
            Category.BUFFER: steady.buffer_bytes,
            Category.GRADIENT: 0 if self._cuda and self._setting.frees_gradients else steady.gradient_bytes,
            Category.OPTIMIZER_STATE: steady.state_bytes,
            Category.COMMUNICATION: steady.communication_bytes,
            Category.INPUT: self._passes.input_bytes(size),
        }
        rest = max(0, peak_bytes - sum(fixed.values()))
        return MemoryBreakdown.device({**fixed, Category.ACTIVATION: rest})

    def work(self, size: int, choices: Sequence[Choice] = ()) -> PassWork:
        """Forward and backward of one micro-batch, including what the blocks recompute by their choices."""
        work = self._passes.work("none", size)
        for choice, count in Counter(choices).items():
            work += self._passes.recomputed(choice, size) * (count / len(choices))
        return work

    def _step_bytes(self, size: int) -> int:
        traced = self.none.micro_batch_size
        more = self._passes.input_bytes(size) - self._passes.input_bytes(traced)
        steady = self._steady_state(size)
        return steady.step_bytes + self._held_bytes(steady) + max(0, more)

    def _recompute_seconds(self, choice: Choice, size: int) -> float:
        plain = self._passes.work("none", size)
        with_it = plain + self._passes.recomputed(choice, size)
        seconds = [self._time.micro_batch_seconds(self._setting, work) for work in (plain, with_it)]
        return max(0.0, seconds[1] - seconds[0])


class MemoryModels:
    """Memory models of the settings of one workload. Each is made once.

    Args:
        store: Makes the traces.
        time: Gives the time of recomputation.
    """

    def __init__(self, store: TraceStore, time: TimeModel) -> None:
        self._store = store
        self._stored: dict[int, tuple[ParameterInfo, ...]] = {}
        self._plain = store.plain()
        self._time = time
        self._cuda = store.workload.target.device_kind.has_own_memory
        self._rounding = CUDA_ROUNDING if self._cuda else 1
        self._passes: dict[Setting, ForwardBackward] = {}
        self._models: dict[Setting, MemoryModel] = {}
        self._bounds: dict[Setting, MemoryModel] = {}
        self._placements: dict[Setting, Placement | None] = {}

    def of(self, setting: Setting) -> MemoryModel:
        """Memory of a setting's techniques; missing traces are made.

        Raises:
            TraceError: If the setting's step can't be traced.
        """
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._models:
            passes, placement = self._passes_of(techniques), self.deepspeed(techniques)
            self._models[techniques] = MemoryModel(self._store, techniques, passes, self._time, placement)
        return self._models[techniques]

    def at_least(self, setting: Setting) -> MemoryModel | None:
        """A lower bound on the memory of a setting's techniques, from existing traces; None if there are too few.

        Closed forms (`least_bytes`) replace a trace of the optimizer's step, and the blocks of another loss replace a
        trace of checkpointing. The setting's pass without checkpointing must be traced already.
        """
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._bounds:
            passes = self._traced_passes(techniques)
            if passes is None:
                return None
            placement = self.deepspeed(techniques)
            if placement is None:
                least = self.least_bytes(techniques)
                placement = Placement(SteadyState(least, least, least, state_bytes=0))
            self._bounds[techniques] = MemoryModel(self._store, techniques, passes, self._time, placement)
        return self._bounds[techniques]

    def of_host(self, setting: Setting) -> bool:
        """Whether a technique keeps states in host memory, of which a trace of the whole step shows nothing."""
        return self._cuda and (setting.masters_on_host or setting.pages_states)

    def _passes_of(self, techniques: Setting) -> ForwardBackward:
        pure = passes_of(techniques)
        if pure not in self._passes:
            self._passes[pure] = ForwardBackward(self._store, techniques, self._rounding)
        return self._passes[pure]

    def _traced_passes(self, setting: Setting) -> ForwardBackward | None:
        """A setting's passes, or its plain pass with the blocks of another loss; None if neither is traced."""
        own = self._passes_of(setting)
        if own.is_traced:
            return own
        for _, other in with_losses(setting):
            if self._store.has_passes(other, "none") and (lender := self._passes_of(other)).is_traced:
                return own.with_blocks_of(lender)
        return None

    # --- closed forms -----------------------------------------------------------------------------------------------

    def least_bytes(self, setting: Setting) -> int:
        """The least bytes of tensors that weights, gradients and states keep on the device, by closed form."""
        placement = self.deepspeed(setting)
        if placement is not None:
            return max(placement.standing.kept_bytes, placement.standing.step_bytes)
        itemsize = 2 if setting.precision.endswith("-true") and setting.precision != "32-true" else 4
        if itemsize not in self._stored:
            self._stored[itemsize] = stored_as(self._plain.parameters, itemsize)
        states = standing_bytes(setting, self._plain.optimizer, self._stored[itemsize])
        sharding = setting.sharding
        if sharding is None:
            return states
        nccl = NCCL_BYTES if self._cuda else 0
        return states // (setting.world_size if sharding.stage == 3 else 1) + nccl

    def deepspeed(self, setting: Setting) -> Placement | None:
        """What DeepSpeed keeps where, by the plain step's parameters; None if it isn't the strategy."""
        if setting not in self._placements:
            sharding = setting.sharding
            is_deepspeed = sharding is not None and sharding.deepspeed
            run = self.deepspeed_run(setting, sharding) if is_deepspeed and sharding is not None else None
            self._placements[setting] = None if run is None else deepspeed_placement(run)
        return self._placements[setting]

    def deepspeed_run(self, setting: Setting, sharding: Sharding) -> DeepSpeedRun:
        """A setting as DeepSpeed would run it, with the sizes that the run or our strategies configure.

        The micro-batch isn't chosen yet: buffers for accumulating are counted if a step has more than one sample.
        """
        optimizer = setting.of_kind("optimizer")
        if optimizer is not None and optimizer.technique.states is not None:  # an optimizer that DeepSpeed supports
            states, scratch = optimizer.technique.states.bytes_per_parameter(), 0
        else:
            stepped = sum(p.numel * p.itemsize for p in self._plain.parameters if p.trainable and not p.shared_with)
            states = 4 * step_cost.state_bytes(self._plain) / max(1, stepped)
            scratch = 4 if self._cuda else 0  # on the CPU, strategies choose the fused kernel
        division = self._store.workload.division_of("", sharding, setting.world_size)
        return division.run_of(
            self._plain.parameters,
            sharding.weight_bytes(setting.precision),
            self._plain.calls_itself,
            state_bytes=states,
            scratch_bytes=scratch,
            accumulates=self._store.workload.samples_on_each(setting.world_size) > 1,
            on_cpu=not self._cuda,
            buffer_bytes=self._buffer_bytes,
            is_fp16=setting.precision.startswith("16"),
        )

    @cached_property
    def _buffer_bytes(self) -> int:
        return SteadyState.of(self._plain, self._rounding).buffer_bytes


_FROZEN_BITS: Mapping[Numerics, int] = {"4bit": 4, "8bit": 8}
"""Bits of frozen weights by an adapter's numerics; else they keep the precision's."""


def standing_bytes(setting: Setting, optimizer: str, parameters: tuple[ParameterInfo, ...]) -> int:
    """Weights, gradients and optimizer states in closed form: the least that a setting needs on the device.

    Args:
        setting: What is chosen.
        optimizer: Name of the module's own optimizer.
        parameters: As the setting's precision stores them (`stored_as`).
    """
    weights = sum(p.numel * p.itemsize for p in parameters if not p.shared_with)
    adapter = setting.of_kind("adapter")
    if adapter is not None:  # which chooses what is trained; frozen weights stay, some of them in fewer bits
        widths = [bits for name, bits in _FROZEN_BITS.items() if name in adapter.technique.numerics]
        least = min(widths, default=32) / 8
        return int(sum(p.numel * min(p.itemsize, least) for p in parameters if not p.shared_with))
    if not setting.frees_gradients:
        weights += sum(p.numel * p.itemsize for p in trained(parameters))
    choice = setting.of_kind("optimizer")
    states = _PLAIN if choice is None else choice.technique.states
    elsewhere = setting.masters_on_host or states is None or states.paged
    if elsewhere or "Adam" not in optimizer or not trained(parameters):
        return weights
    assert states is not None
    return weights + states.total_bytes(parameters)


def stored_as(parameters: Iterable[ParameterInfo], itemsize: int) -> tuple[ParameterInfo, ...]:
    """Parameters as a precision stores them; quantized and integer weights stay as they are."""
    return tuple(replace(one, itemsize=itemsize) if one.itemsize in (2, 4) else one for one in parameters)


def _rounded(size_bytes: int, rounding: int) -> int:
    return -(-size_bytes // rounding) * rounding

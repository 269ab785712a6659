"""`Solver`: the fastest micro-batch and checkpointing plan of one combination of techniques, and what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_memfit.checkpointing.knapsack import PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.estimate.estimate import CUDA_ROUNDING
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.planner.bounds import Bounds
from lightning_memfit.planner.candidates import Rejected, conflict_of_sizes
from lightning_memfit.planner.memory import MemoryModel, Passes
from lightning_memfit.planner.time import StepTime, step_seconds
from lightning_memfit.planner.trace_store import Laboratory, passes_of
from lightning_memfit.planner.workload import Workload
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.activation_checkpointing import TECHNIQUE as CHECKPOINTING
from lightning_memfit.techniques.activation_checkpointing import options_for
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.setting import Setting

_CORRECTIONS = 4
"""How often a checkpointing plan is made again for what its fragmentation takes."""

TIE = 0.005
"""Settings within this share of each other's time are alike; the simpler one is taken, then that of less memory."""

_NO_CHOICES: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A setting that fits, with what is predicted for it."""

    setting: Setting
    time: StepTime
    peak_bytes: int
    """Of live tensors, library workspaces included."""
    needed_bytes: int
    """Of the device: fragmentation and runtime context, too."""
    breakdown: MemoryBreakdown
    choices: tuple[Choice, ...] = ()
    """Of checkpointing, by block."""


class Solver:
    """Solve combinations of techniques, one at a time.

    Args:
        laboratory: Makes the traces.

    Attributes:
        bounds: What is known of combinations without tracing them.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        self.laboratory = laboratory
        self.workload: Workload = laboratory.workload
        self.plain: ModelProfile = laboratory.plain()
        self.bounds = Bounds(self.workload, self.plain)
        self._models: dict[Setting, MemoryModel] = {}
        self._passes: dict[Setting, Passes] = {}

    def solve(self, setting: Setting) -> Solution | Rejected:
        """The fastest micro-batch and checkpointing plan of a combination of techniques.

        Raises:
            TraceError: If its step can't be traced.
        """
        refusal = self.bounds.refuse_elsewhere(setting, self.model(setting).off_device())
        if refusal is not None:
            return Rejected(setting, refusal, is_limit=True)
        best: Solution | None = None
        least: int | None = None
        reason, writes = "", ""
        for sized in self._sized(setting):
            conflict = conflict_of_sizes(sized, self._run_of(sized), self.workload.loader_batch)
            if conflict is not None:
                reason = reason or conflict
                continue
            found = self.at_size(sized, best)
            if found is None:
                continue
            if isinstance(found, int):
                least = found if least is None else min(least, found)
                break  # larger micro-batches need more
            too_much = self.bounds.refuse_writes(setting, found.time)
            if too_much is not None:
                writes = too_much
                continue
            if best is None or is_better(found, best):
                best = found
        if best is not None:
            return best
        if writes:
            return Rejected(setting, writes, is_limit=True)
        if least is not None:
            return Rejected(setting, self.bounds.over(least, "needs"), least)
        return Rejected(setting, reason)

    def at_size(self, setting: Setting, rival: Solution | None = None) -> Solution | int | None:
        """The fastest plan of a setting at its micro-batch; what it needs at least where none fits.

        Args:
            setting: With its sizes.
            rival: Where given, None is returned as soon as it is clear that no plan can be better.
        """
        assert setting.micro_batch_size is not None
        size, model = setting.micro_batch_size, self.model(setting)
        overhead = self._overhead_at(size)
        frontier = model.frontier(size, self.bounds.rates(setting))
        if frontier is None:
            peak = model.peak_bytes(size)
            needed = peak + overhead + model.fragmentation_bytes((), size)
            return self._solution(setting, (), peak, needed) if needed <= self.bounds.usable_bytes else needed
        budget = self.bounds.usable_bytes - overhead
        smallest = frontier.minimum_bytes + overhead
        for _ in range(_CORRECTIONS):
            if budget < frontier.minimum_bytes:
                break
            plan = frontier.plan_for(budget)
            # Replaying the allocator takes long, and what it takes of the budget never makes a plan faster.
            if rival is not None and self._time(setting, plan.choices).total > rival.time.total * (1 + TIE):
                return None
            taken = model.fragmentation_bytes(plan.choices, size)
            needed = plan.peak_bytes + taken + overhead
            if needed <= self.bounds.usable_bytes:
                return self._solution(setting, plan.choices, plan.peak_bytes, needed)
            budget = min(budget, plan.peak_bytes) - (needed - self.bounds.usable_bytes)
        return smallest if rival is not None else max(smallest, self._least_needed(model, frontier, size))

    def uniformly(self, setting: Setting) -> Solution:
        """What is predicted for a complete setting whose blocks are all checkpointed alike, whether it fits or not.

        Raises:
            TraceError: If its step can't be traced.
            ValueError: If its blocks are not checkpointed alike.
        """
        assert setting.micro_batch_size is not None
        size, model = setting.micro_batch_size, self.model(setting)
        choice = setting.of_kind("checkpointing")
        if choice is not None and "choices" in choice.options:
            raise ValueError("`choices` differ from block to block. Give `mode`, or leave checkpointing out.")
        wanted: Choice = "none"
        if choice is not None:
            wanted = "keep_matmul_attention" if choice.options.get("mode") == "selective" else "full"
        frontier = model.frontier(size, self.bounds.rates(setting))
        peak, choices = model.peak_bytes(size), _NO_CHOICES
        if frontier is not None:
            choices = (wanted,) * len(frontier.problem.blocks)
            peak = frontier.problem.peak_bytes(choices)
        needed = peak + self._overhead_at(size) + model.fragmentation_bytes(choices, size)
        return self._solution(setting, choices, peak, needed)

    def model(self, setting: Setting) -> MemoryModel:
        """Memory of a setting's techniques, traced once."""
        techniques = setting.without_sizes().without("checkpointing")
        if techniques not in self._models:
            dtype = self.bounds.dtype(techniques, self.bounds.cost(techniques))
            sharding = techniques.sharding
            placement = self.bounds.placement(techniques) if sharding is not None and sharding.deepspeed else None
            passes = self._passes_of(techniques)
            self._models[techniques] = MemoryModel(self.laboratory, techniques, passes, dtype, placement)
        return self._models[techniques]

    def _passes_of(self, techniques: Setting) -> Passes:
        pure = passes_of(techniques)
        if pure not in self._passes:
            rounding = CUDA_ROUNDING if self.bounds.is_cuda else 1
            self._passes[pure] = Passes(self.laboratory, techniques, rounding)
        return self._passes[pure]

    def _least_needed(self, model: MemoryModel, frontier: PlanFrontier, size: int) -> int:
        plan = frontier.plan_for(frontier.minimum_bytes)
        return plan.peak_bytes + model.fragmentation_bytes(plan.choices, size) + self._overhead_at(size)

    def _overhead_at(self, size: int) -> int:
        """What a micro-batch finds on the device beside what a trace of it shows."""
        return self.bounds.overhead_bytes + self.workload.waiting_bytes(size)

    def _solution(self, setting: Setting, choices: tuple[Choice, ...], peak_bytes: int, needed_bytes: int) -> Solution:
        model, size = self.model(setting), setting.micro_batch_size
        assert size is not None
        runtime = self.workload.target.runtime
        workspace = runtime.allocated_bytes if runtime is not None else 0
        context = runtime.context_bytes if runtime is not None else 0
        waiting = self.workload.waiting_bytes(size)
        around = {
            Category.TEMPORARY: workspace,
            Category.FRAGMENTATION: needed_bytes - peak_bytes - workspace - context - waiting,
            Category.RUNTIME_CONTEXT: context,
            Category.INPUT: waiting,
        }
        return Solution(
            _with_checkpointing(setting, choices),
            self._time(setting, choices),
            peak_bytes + workspace + waiting,
            needed_bytes,
            model.breakdown(peak_bytes, size) + model.off_device() + MemoryBreakdown.device(around),
            choices,
        )

    def _time(self, setting: Setting, choices: tuple[Choice, ...]) -> StepTime:
        assert setting.micro_batch_size is not None
        cost = self.bounds.cost(setting)
        return step_seconds(
            self.model(setting).work(setting.micro_batch_size, choices),
            cost,
            self.plain,
            self.bounds.rates(setting),
            self.bounds.dtype(setting, cost),
            setting.accumulate_grad_batches,
        )

    def _sized(self, setting: Setting) -> Iterator[Setting]:
        """The setting at every micro-batch that divides the step; only the traced one where no other is known."""
        share = self.workload.samples_on_each(setting.world_size)
        sizes: tuple[int, ...] = self.workload.sizes(setting.world_size)
        model = self.model(setting)
        if not model.knows_every_size:
            sizes = tuple(size for size in sizes if size == model.none.micro_batch_size)
        for size in sizes:
            yield replace(setting, micro_batch_size=size, accumulate_grad_batches=share // size)

    def _run_of(self, setting: Setting) -> Run:
        run = setting.without_sizes().run(self.workload.facts)
        return replace(run, accumulate_grad_batches=setting.accumulate_grad_batches)


def is_better(one: Solution, other: Solution) -> bool:
    """Clearly faster; or as fast, and simpler, or needing less."""
    if one.time.total < other.time.total * (1 - TIE):
        return True
    if one.time.total > other.time.total * (1 + TIE):
        return False
    return _rank(one) < _rank(other)


def _rank(solution: Solution) -> tuple[int, int, int, float, tuple[str, ...]]:
    setting = solution.setting
    checkpointed = sum(choice != "none" for choice in solution.choices)
    return complexity_of(setting), len(setting.chosen), checkpointed, solution.time.total, key_of(setting)


def complexity_of(setting: Setting) -> int:
    """How much has to work together for a setting's strategy; least of all on one device that holds everything."""
    return setting.sharding.complexity if setting.sharding is not None else -1


def key_of(setting: Setting) -> tuple[str, ...]:
    """A setting's place among others that are alike: fewer devices first, then fewer techniques, then by name."""
    chosen = (f"{choice.name}{sorted(choice.options.items())}" for choice in setting.chosen)
    return (f"{setting.world_size:04}", f"{len(setting.chosen):02}", *chosen)


def _with_checkpointing(setting: Setting, choices: tuple[Choice, ...]) -> Setting:
    """The setting with a checkpointing plan, as short as it can be said."""
    plain = setting.without("checkpointing")
    options = options_for(choices)
    return plain if options is None else plain.choose(CHECKPOINTING.name, **options)

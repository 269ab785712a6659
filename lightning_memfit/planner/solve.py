"""`Solver`: the fastest micro-batch and checkpointing plan of one combination of techniques, and what it needs.

`solve` tries all micro-batches and answers with the best `Solution`, or with `Rejected` and the reason. `solve_with`
takes another `MemoryModel`, so that the same search runs on a setting's own traces and on a lower bound
(`planner.lower_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_memfit.checkpointing.knapsack import PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.planner.candidates import Rejected, conflict
from lightning_memfit.planner.memory import MemoryModel, MemoryModels
from lightning_memfit.planner.numerics import NumericsOf
from lightning_memfit.planner.time import StepTime, TimeModel
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Budget, Workload
from lightning_memfit.techniques.activation_checkpointing import TECHNIQUE as CHECKPOINTING
from lightning_memfit.techniques.activation_checkpointing import options_for
from lightning_memfit.techniques.core.setting import Setting

_CORRECTIONS = 4
"""How often a checkpointing plan is made again with less memory because of fragmentation."""

TIE = 0.005
"""Settings within this share of each other's time count as equal: the simpler one wins, then the smaller one."""

_NO_CHOICES: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A complete setting and its predicted time and memory."""

    setting: Setting
    time: StepTime
    peak_bytes: int
    """Peak bytes of live tensors, library workspaces included."""
    needed_bytes: int
    """Bytes needed of the device, including fragmentation and runtime context."""
    breakdown: MemoryBreakdown
    choices: tuple[Choice, ...] = ()
    """Checkpointing choice of every block."""
    severity: float = 0.0
    """How much it changes the recipe's numbers (`NumericsOf`)."""
    weight: float = 1.0
    """What its time is multiplied by in comparisons, because of that."""

    @property
    def cost(self) -> float:
        """What the search minimises."""
        return self.time.total * self.weight


class Solver:
    """Solve combinations of techniques, one at a time.

    Args:
        store: Makes the traces.

    Attributes:
        workload: What is trained, and where.
        budget: Limits on what a plan may need.
        time: Predicts how long plans take.
        models: Predict how much memory plans need.
        numerics: Says how far plans are from the recipe's numbers.
    """

    def __init__(self, store: TraceStore) -> None:
        self.workload: Workload = store.workload
        devices = self.workload.devices
        self.budget = Budget(self.workload)
        self.time = TimeModel(store.plain(), self.workload.rates, devices.per_machine, devices.machines)
        self.models = MemoryModels(store, self.time)
        self.numerics = NumericsOf(self.workload)

    def solve(self, setting: Setting) -> Solution | Rejected:
        """Find the fastest micro-batch and checkpointing plan of a combination of techniques.

        Raises:
            TraceError: If its step can't be traced.
        """
        found = self.solve_with(self.models.of(setting), setting)
        assert found is not None, "only a lower bound can be unknown"
        return found

    def solve_with(self, model: MemoryModel, setting: Setting) -> Solution | Rejected | None:
        """Do the same as `solve` with another memory model.

        Args:
            model: What the setting's techniques need, or need at least.
            setting: Techniques without sizes.

        Returns:
            None if the model is a lower bound that doesn't hold at one of the micro-batches tried.
        """
        refusal = self.budget.refuse_off_device(model.off_device(), setting.world_size)
        if refusal is not None:
            return Rejected(setting, refusal, resource_limited=True)
        best: Solution | None = None
        least: int | None = None
        first_conflict, too_many_writes = "", ""
        for sized in self._sized(model, setting):
            # Larger micro-batches need more, except where nothing is accumulated any more beside DDP's buckets.
            if least is not None and sized.accumulate_grad_batches > 1:
                continue
            reason = conflict(sized, self.workload)
            if reason is not None:
                first_conflict = first_conflict or reason
                continue
            size = _size_of(sized)
            if not model.is_bounded_at(size):
                return None
            found = self._fastest(model, sized, model.frontier(size), self.budget.usable_by(setting), best)
            if isinstance(found, Solution):
                refusal = self.budget.refuse_writes(self.time.written_bytes(setting), found.time.total)
                if refusal is not None:
                    too_many_writes = refusal
                elif best is None or is_better(found, best):
                    best = found
            elif found is not None:
                least = found if least is None else min(least, found)
        if best is not None:
            return best
        if too_many_writes:
            return Rejected(setting, too_many_writes, resource_limited=True)
        if least is not None:
            return Rejected(setting, self.budget.over(setting, least), least)
        return Rejected(setting, first_conflict)

    def fastest_within(self, setting: Setting, usable_bytes: Sequence[int]) -> Iterator[Solution]:
        """Every micro-batch's fastest plan within each of several limits on the device, and the one that needs least.

        Limits on host memory and disk are not considered.

        Args:
            setting: Techniques without sizes.
            usable_bytes: Limits, ascending.

        Yields:
            Plans by micro-batch; a plan that is the fastest within several limits comes once.

        Raises:
            TraceError: If the step can't be traced.
        """
        model = self.models.of(setting)
        for sized in self._sized(model, setting):
            if conflict(sized, self.workload) is not None:
                continue
            frontier = model.frontier(_size_of(sized))
            limits, last = list(usable_bytes), None
            least = self._fastest(model, sized, frontier, 0)
            if least is not None and not isinstance(least, Solution):
                limits = [least, *(limit for limit in limits if limit > least)]
            for limit in limits:
                found = self._fastest(model, sized, frontier, limit)
                if isinstance(found, Solution) and found.choices != last:
                    last = found.choices
                    yield found
                if isinstance(found, Solution) and frontier is None:
                    break

    def _fastest(
        self,
        model: MemoryModel,
        setting: Setting,
        frontier: PlanFrontier | None,
        usable: int,
        rival: Solution | None = None,
    ) -> Solution | int | None:
        """The fastest plan within a limit; the least bytes that any needs if none fits; None if none beats a rival.

        With a rival, the least bytes leave fragmentation out.
        """
        size = _size_of(setting)
        overhead = self._overhead_at(setting)
        if frontier is None:
            peak = model.peak_bytes(size)
            needed = peak + overhead + model.fragmentation_bytes((), size)
            return self._solution(model, setting, (), peak, needed) if needed <= usable else needed
        budget = usable - overhead
        smallest = frontier.minimum_bytes + overhead
        for _ in range(_CORRECTIONS):
            if budget < frontier.minimum_bytes:
                break
            plan = frontier.plan_for(budget)
            # Replaying the allocator is slow, and the memory it takes from the budget never makes a plan faster.
            if rival is not None and self._time(model, setting, plan.choices).total > rival.time.total * (1 + TIE):
                return None
            needed = plan.peak_bytes + model.fragmentation_bytes(plan.choices, size) + overhead
            if needed <= usable:
                return self._solution(model, setting, plan.choices, plan.peak_bytes, needed)
            budget = min(budget, plan.peak_bytes) - (needed - usable)
        if rival is not None:
            return smallest
        return max(smallest, self._least_needed(model, frontier, setting))

    def solve_uniform(self, setting: Setting) -> Solution:
        """Predict a complete setting whose blocks are all checkpointed alike, whether it fits or not.

        Raises:
            TraceError: If its step can't be traced.
            ValueError: If its blocks are not checkpointed alike.
        """
        size, model = _size_of(setting), self.models.of(setting)
        choice = setting.of_kind("checkpointing")
        if choice is not None and "choices" in choice.options:
            raise ValueError("`choices` differ from block to block. Give `mode`, or leave checkpointing out.")
        wanted: Choice = "none"
        if choice is not None:
            wanted = "keep_matmul_attention" if choice.options.get("mode") == "selective" else "full"
        frontier = model.frontier(size)
        peak, choices = model.peak_bytes(size), _NO_CHOICES
        if frontier is not None:
            choices = (wanted,) * len(frontier.problem.blocks)
            peak = frontier.problem.peak_bytes(choices)
        needed = peak + self._overhead_at(setting) + model.fragmentation_bytes(choices, size)
        return self._solution(model, setting, choices, peak, needed)

    def _least_needed(self, model: MemoryModel, frontier: PlanFrontier, setting: Setting) -> int:
        size = _size_of(setting)
        plan = frontier.plan_for(frontier.minimum_bytes)
        return plan.peak_bytes + model.fragmentation_bytes(plan.choices, size) + self._overhead_at(setting)

    def _overhead_at(self, setting: Setting) -> int:
        """Bytes on the device that a trace of a micro-batch doesn't show."""
        return self.budget.overhead_bytes + self.workload.waiting_bytes(setting)

    def _solution(
        self, model: MemoryModel, setting: Setting, choices: tuple[Choice, ...], peak_bytes: int, needed_bytes: int
    ) -> Solution:
        size = _size_of(setting)
        runtime = self.workload.target.runtime
        workspace = runtime.allocated_bytes if runtime is not None else 0
        context = runtime.context_bytes if runtime is not None else 0
        waiting = self.workload.waiting_bytes(setting)
        around = {
            Category.TEMPORARY: workspace,
            Category.FRAGMENTATION: needed_bytes - peak_bytes - workspace - context - waiting,
            Category.RUNTIME_CONTEXT: context,
            Category.INPUT: waiting,
        }
        return Solution(
            _with_checkpointing(setting, choices),
            self._time(model, setting, choices),
            peak_bytes + workspace + waiting,
            needed_bytes,
            model.breakdown(peak_bytes, size) + model.off_device() + MemoryBreakdown.device(around),
            choices,
            self.numerics.severity(setting),
            self.numerics.weight(setting),
        )

    def _time(self, model: MemoryModel, setting: Setting, choices: tuple[Choice, ...]) -> StepTime:
        return self.time.step(setting, model.work(_size_of(setting), choices), setting.accumulate_grad_batches)

    def _sized(self, model: MemoryModel, setting: Setting) -> Iterator[Setting]:
        """The setting at every micro-batch that divides the step; only the traced one if no other is known."""
        samples = self.workload.samples_on_each(setting.world_size)
        sizes: tuple[int, ...] = self.workload.sizes(setting.world_size)
        if not model.knows_every_size:
            sizes = tuple(size for size in sizes if size == model.none.micro_batch_size)
        for size in sizes:
            yield replace(setting, micro_batch_size=size, accumulate_grad_batches=samples // size)


def _size_of(setting: Setting) -> int:
    assert setting.micro_batch_size is not None, "the setting has no sizes yet"
    return setting.micro_batch_size


def is_better(one: Solution, other: Solution) -> bool:
    """Whether a solution costs clearly less, or as much and changes less of the recipe's numbers, or is simpler."""
    if one.cost < other.cost * (1 - TIE):
        return True
    if one.cost > other.cost * (1 + TIE):
        return False
    return rank_of(one) < rank_of(other)


def rank_of(solution: Solution) -> tuple[float, int, int, int, float, tuple[str, ...]]:
    """Sort key among solutions that cost the same."""
    setting = solution.setting
    checkpointed = sum(choice != "none" for choice in solution.choices)
    simpler = complexity_of(setting), len(setting.chosen), checkpointed
    return solution.severity, *simpler, solution.time.total, key_of(setting)


def complexity_of(setting: Setting) -> int:
    """How many parts have to work together for a setting's strategy; least if one device holds everything."""
    return setting.sharding.complexity if setting.sharding is not None else -1


def key_of(setting: Setting) -> tuple[str, ...]:
    """Sort key among equal settings: fewer devices first, then fewer techniques, then by name."""
    chosen = (f"{choice.name}{sorted(choice.options.items())}" for choice in setting.chosen)
    return (f"{setting.world_size:04}", f"{len(setting.chosen):02}", *chosen)


def _with_checkpointing(setting: Setting, choices: tuple[Choice, ...]) -> Setting:
    """The setting with a checkpointing plan, written as briefly as possible."""
    plain = setting.without("checkpointing")
    options = options_for(choices)
    return plain if options is None else plain.choose(CHECKPOINTING.name, **options)

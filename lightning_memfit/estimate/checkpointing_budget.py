"""Plan activation checkpointing to a memory budget: traces in, one choice per block out.

One trace per choice, in which all blocks follow it, shows what each block keeps and how high memory rises while it
runs. The knapsack turns that into a plan, and a trace of the plan verifies it. `device_rate` and `cpu_rate` give the
rates by which the extra time is predicted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightning_memfit.checkpointing.check import InexactRecomputationError
from lightning_memfit.checkpointing.knapsack import BlockOption, CheckpointingPlan, CheckpointingProblem, PlanFrontier
from lightning_memfit.checkpointing.policies import Choice
from lightning_memfit.device.catalogue import find_device
from lightning_memfit.estimate.block_figures import BlockFigures, BudgetError, block_figures, find_chain
from lightning_memfit.estimate.estimate import CUDA_ROUNDING
from lightning_memfit.memory import Category, format_bytes
from lightning_memfit.memory.float32_products import precision_on_cuda
from lightning_memfit.profile.events import EventList
from lightning_memfit.profile.trace import Trace, TraceError

RECOMPUTED: tuple[Choice, ...] = ("none", "full", "keep_attention", "keep_matmul", "keep_matmul_attention")
"""Choices that are possible on every device."""

_MOVED: dict[Choice, Choice] = {"offload": "none", "offload_inputs": "full"}
"""Choices that move to the host what another one keeps on the device."""

_MAX_VERIFICATIONS = 5
_TRAFFIC = 3
"""Bytes moved per byte that an operator allocates: its output written, and inputs of about twice that size read."""


@dataclass(frozen=True)
class ComputeRate:
    """How fast a device computes; only the ratios of the rates matter to a plan."""

    flops_per_s: float
    bytes_per_s: float
    host_link_bytes_per_s: float | None = None
    """Rate to pinned host memory; None where offloading is not possible."""

    def seconds(self, flops: float, traffic_bytes: float) -> float:
        """Time of matrix products at `flops_per_s` and of everything else at `bytes_per_s`."""
        return flops / self.flops_per_s + traffic_bytes / self.bytes_per_s


class BudgetPlanner:
    """Plans activation checkpointing of a module for any budget, from one trace per choice.

    Args:
        trace_uniform: Traces the step with every block following a choice.
        trace_plan: Traces the step in full, with one choice per block.
        rate: Rates of the device that will train.
        rounding_bytes: Sizes are rounded up to a multiple of this, as CUDA's allocator does.

    Raises:
        BudgetError: If there are no blocks, or nothing trains.
    """

    def __init__(
        self,
        trace_uniform: Callable[[Choice], Trace],
        trace_plan: Callable[[tuple[Choice, ...]], Trace],
        rate: ComputeRate,
        rounding_bytes: int = CUDA_ROUNDING,
    ) -> None:
        self._trace_plan = trace_plan
        self._rounding = rounding_bytes
        choices = (*RECOMPUTED, *_MOVED) if rate.host_link_bytes_per_s is not None else RECOMPUTED
        traces: dict[Choice, Trace] = {}
        for choice in choices:
            try:
                traces[choice] = trace_uniform(choice)
            except TraceError as error:
                # Blocks that change in place what it would keep, as Falcon's, can still be recomputed as a whole.
                if not choice.startswith("keep_") or not isinstance(error.__cause__, InexactRecomputationError):
                    raise
        plain = traces["none"]
        if plain.num_blocks < 1:
            raise BudgetError("`budget` needs repeated blocks to choose among, and none were found.")
        self._num_blocks = plain.num_blocks
        self._chain = find_chain(traces.values())
        figures = {c: block_figures(trace, self._rounding, chain=self._chain) for c, trace in traces.items()}
        self.plain_peak_bytes, self.plain_activation_bytes = _peak(plain.events, self._rounding)
        self.plain_seconds = rate.seconds(sum(plain.flops.values()), _TRAFFIC * float(figures["none"].traffic.sum()))
        seconds = {c: _extra_seconds(c, figures, rate) for c in figures}
        self._frontiers = _frontiers(figures, seconds)
        self._uniform = [
            (
                CheckpointingPlan(
                    (c,) * self._num_blocks, int(self._live(trace.events).max()), float(seconds[c].sum())
                ),
                trace,
            )
            for c, trace in traces.items()
        ]
        self._traces = {plan.choices: trace for plan, trace in self._uniform}

    @property
    def minimum_bytes(self) -> int:
        """Least peak that any plan is predicted to reach."""
        predicted = min(frontier.minimum_bytes + reserve for frontier, reserve in self._frontiers)
        return min(predicted, *(plan.peak_bytes for plan, _ in self._uniform))

    @property
    def floor_bytes(self) -> int:
        """Peak outside the blocks' forward and backward, which no plan changes."""
        return self._frontiers[0][0].problem.floor_bytes

    def share_bytes(self, share: float) -> int:
        """Budget that leaves a share of the plain step's activations at the peak of its forward and backward passes.

        If something outside these passes needs more, such as the optimizer step, that is the budget.
        """
        return max(self.floor_bytes, round(self.plain_peak_bytes - (1 - share) * self.plain_activation_bytes))

    def predict(self, budget_bytes: int) -> CheckpointingPlan:
        """The fastest plan that is predicted to stay within a budget. Never slower for a larger budget.

        Raises:
            BudgetError: If there is none.
        """
        plans = [
            self._for_blocks(frontier.plan_for(budget_bytes - reserve))
            for frontier, reserve in self._frontiers
            if frontier.minimum_bytes <= budget_bytes - reserve
        ]
        plans += [plan for plan, _ in self._uniform if plan.peak_bytes <= budget_bytes]
        if not plans:
            raise self._out_of_reach(budget_bytes, self.minimum_bytes)
        return min(plans, key=lambda plan: plan.seconds)

    def plan(
        self, budget_bytes: int, overhead_bytes: int = 0, measure: Callable[[EventList], int] | None = None
    ) -> tuple[CheckpointingPlan, Trace]:
        """The fastest plan within a budget, verified by a trace of the plan itself.

        If the trace needs more than predicted, planning is repeated with a budget reduced by the difference.

        Returns:
            The plan, with the verified peak, and the trace.

        Raises:
            BudgetError: If there is none; the message names the least that can be reached.
        """

        def needed_by(trace: Trace) -> int:
            return measure(trace.events) if measure else int(self._live(trace.events).max()) + overhead_bytes

        target = budget_bytes - overhead_bytes
        least = self.minimum_bytes + overhead_bytes
        for attempt in range(_MAX_VERIFICATIONS):
            if target < self.minimum_bytes and attempt == 0:
                raise self._out_of_reach(budget_bytes, least)
            last = attempt == _MAX_VERIFICATIONS - 1 or target <= self.minimum_bytes
            plan = self.predict(self.minimum_bytes if last else target)
            if plan.choices not in self._traces:
                self._traces[plan.choices] = self._trace_plan(plan.choices)
            trace = self._traces[plan.choices]
            needed = needed_by(trace)
            if needed <= budget_bytes:
                return replace(plan, peak_bytes=needed), trace
            least = needed
            if last:
                break
            target = min(target, plan.peak_bytes) - (needed - budget_bytes)
        # All blocks alike have been traced: these need no prediction.
        for plan, trace in sorted(self._uniform, key=lambda pair: pair[0].seconds):
            needed = needed_by(trace)
            if needed <= budget_bytes:
                return replace(plan, peak_bytes=needed), trace
            least = min(least, needed)
        raise self._out_of_reach(budget_bytes, least)

    def _for_blocks(self, plan: CheckpointingPlan) -> CheckpointingPlan:
        """A plan for links as one for blocks. Those that didn't run are recomputed: it costs nothing unless they do."""
        choices: list[Choice] = ["full"] * self._num_blocks
        for members, choice in zip(self._chain, plan.choices, strict=True):
            for block in members:
                choices[block] = choice
        return replace(plan, choices=tuple(choices))

    def _live(self, events: EventList) -> np.ndarray:
        return events.live_bytes(self._rounding)[events.phases[0][0] :]

    def _out_of_reach(self, budget_bytes: int, least_bytes: int) -> BudgetError:
        given, least = format_bytes(budget_bytes), format_bytes(least_bytes)
        if given == least:
            given, least = f"{budget_bytes:,} bytes", f"{least_bytes:,} bytes"
        return BudgetError(
            f"`budget`: {given} is less than the least that any plan needs, {least}. Of this, "
            f"{format_bytes(self.floor_bytes)} are needed outside of the blocks "
            "(weights, gradients, optimizer). Raise the budget to at least that, make the micro-batch smaller, or "
            "combine it with techniques for the rest (8-bit optimizer, gradient release, chunked loss)."
        )


def _frontiers(
    figures: Mapping[Choice, BlockFigures], seconds: Mapping[Choice, np.ndarray]
) -> list[tuple[PlanFrontier, int]]:
    """Frontiers, each with the bytes to set aside.

    With offloading, one block's tensors are being copied at any time, whichever blocks are chosen. Traces with all
    blocks alike count them where the first block runs, so they are set aside for the plan as a whole.
    """
    usable: dict[Choice, BlockFigures] = {c: found for c, found in figures.items() if c not in _MOVED}
    result = [(PlanFrontier(_problem(usable, seconds)), 0)]
    moved = {c: int((figures[_MOVED[c]].kept - figures[c].kept).max()) for c in _MOVED if c in figures}
    for choice in sorted(moved, key=lambda one: moved[one]):
        usable[choice] = figures[choice]
        result.append((PlanFrontier(_problem(usable, seconds)), moved[choice]))
    return result


def _problem(figures: Mapping[Choice, BlockFigures], seconds: Mapping[Choice, np.ndarray]) -> CheckpointingProblem:
    blocks = tuple(
        tuple(
            BlockOption(choice, int(found.kept[i]), int(found.peak[i]), float(seconds[choice][i]))
            for choice, found in figures.items()
        )
        for i in range(len(figures["none"].kept))
    )
    head = max(found.head for found in figures.values())
    return CheckpointingProblem(blocks, head, max(found.elsewhere for found in figures.values()))


def _extra_seconds(choice: Choice, figures: Mapping[Choice, BlockFigures], rate: ComputeRate) -> np.ndarray:
    found, plain = figures[choice], figures["none"]
    if choice in _MOVED:
        assert rate.host_link_bytes_per_s is not None
        base = figures[_MOVED[choice]]
        share = base.traffic / max(1.0, float(base.traffic.sum()))
        computing = _TRAFFIC * base.traffic / rate.bytes_per_s + base.flops * share / rate.flops_per_s
        moving = 2 * np.maximum(base.kept - found.kept, 0) / rate.host_link_bytes_per_s
        exposed = np.maximum(moving - computing, 0.0)  # what the block's computation doesn't hide
        return np.asarray(_extra_seconds(_MOVED[choice], figures, rate) + exposed + 1e-9)
    extra = np.maximum(found.traffic - plain.traffic, 0)
    share = extra / max(1.0, float(extra.sum()))
    flops = max(0, found.flops - plain.flops) * share
    return np.asarray(flops / rate.flops_per_s + _TRAFFIC * extra / rate.bytes_per_s)


def _peak(events: EventList, rounding: int) -> tuple[int, int]:
    """Peak of live bytes in forward and backward passes, and the activations among them."""
    live = events.live_bytes(rounding)
    spans = [
        (first, stop) for name, first, stop in events.phase_spans if name in ("forward", "backward") and stop > first
    ]
    peak = max((first + int(live[first:stop].argmax()) for first, stop in spans), key=lambda index: int(live[index]))
    return int(live[peak]), events.breakdown_at(peak, rounding).get(Category.ACTIVATION)


# --- rates before anything was measured -------------------------------------------------------------------------------


_UNKNOWN = "A100 80GB"
"""Used for devices that are not in the catalogue: a plan needs only the ratios of the rates."""


def device_rate(name: str, dtype: torch.dtype) -> ComputeRate:
    """Rates of a CUDA device."""
    try:
        spec = find_device(name)
    except ValueError:
        spec = find_device(_UNKNOWN)
    if spec.bandwidth_bytes_per_s is None or not spec.flops:
        spec = find_device(_UNKNOWN)
    kind = "tf32" if dtype is torch.float32 and precision_on_cuda() == "tf32" else str(dtype)
    reached = spec.reached()
    assert reached.bytes_per_s is not None
    flops = reached.flops.get(kind.removeprefix("torch."), reached.flops["float32"])
    return ComputeRate(flops, reached.bytes_per_s, reached.link_bytes_per_s)


def cpu_rate(dtype: torch.dtype) -> ComputeRate:
    """Measured rates of two CPU cores with AVX-512: 75 GFLOP/s in fp32, 330 with bf16 instructions, 10 GB/s.

    In fp64 vectors hold half as many numbers. Offloading makes no sense here, as tensors are in host memory already.
    """
    return ComputeRate({torch.float32: 75e9, torch.float64: 37.5e9}.get(dtype, 330e9), 10e9)

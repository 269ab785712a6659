"""Choose for each block what to keep, so that the step's peak stays within a budget at the least extra time.

While block `i` runs, forward or backward, the tensors kept by the blocks before it are alive, and none of the blocks
after it. Let `peak[i]` be the highest level during that time, less the bytes kept by the blocks before it. The step's
peak is the maximum over all `i` of `kept[0] + ... + kept[i - 1] + peak[i]`, where the part after the last block (head
and loss) counts as one more block. From the end this is a recursion in one number: blocks `i, i + 1, ...` need
`need[i] = max(peak[i], kept[i] + need[i + 1])` on top of the blocks before them. A dynamic program over it finds every
plan for which no other needs less memory *and* less time. A budget picks from that list. The list does not depend on
the budget, therefore a larger budget never gives a slower plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_memfit.checkpointing.policies import Choice

_Integers = npt.NDArray[np.int64]

_PICOSECONDS = 1e12
_MAX_EXACT = 4096
"""Number of plans that are followed exactly; with more, plans of nearly the same cost are merged."""


@dataclass(frozen=True)
class BlockOption:
    """Memory and time of one choice for one block."""

    choice: Choice
    kept_bytes: int
    """Bytes alive from the end of the block's forward pass until its backward pass."""
    peak_bytes: int
    """Highest level of live bytes while the block runs, less the bytes that the blocks before it keep."""
    seconds: float
    """Extra time, for recomputation or transfers."""


@dataclass(frozen=True)
class CheckpointingProblem:
    """Options of every block in forward order, and the parts of the step outside the blocks."""

    blocks: tuple[tuple[BlockOption, ...], ...]
    head_bytes: int = 0
    """Highest level between the last block's forward and backward, less the bytes that the blocks keep."""
    floor_bytes: int = 0
    """Highest level elsewhere, for instance in the optimizer step, which no choice changes."""

    def __post_init__(self) -> None:
        if not self.blocks or not all(self.blocks):
            raise ValueError("`blocks` must hold at least one block, each with at least one option.")
        for option in (option for options in self.blocks for option in options):
            if option.seconds < 0:
                raise ValueError(f"`seconds={option.seconds}` of the choice {option.choice!r} is negative.")

    def peak_bytes(self, choices: Sequence[Choice]) -> int:
        """Peak of a step in which block `i` follows `choices[i]`."""
        need = self.head_bytes
        for option in reversed(self._chosen(choices)):
            need = max(option.peak_bytes, option.kept_bytes + need)
        return max(need, self.floor_bytes)

    def seconds(self, choices: Sequence[Choice]) -> float:
        """Extra time of a step."""
        return sum(option.seconds for option in self._chosen(choices))

    def _chosen(self, choices: Sequence[Choice]) -> list[BlockOption]:
        return [
            next(option for option in options if option.choice == choice)
            for options, choice in zip(self.blocks, choices, strict=True)
        ]


@dataclass(frozen=True)
class CheckpointingPlan:
    """One choice per block, with the peak and the extra time that follow from the options."""

    choices: tuple[Choice, ...]
    peak_bytes: int
    seconds: float


class PlanFrontier:
    """Every plan of a problem that no other beats in both memory and time.

    The list is exact with at most a few thousand plans, as for equal blocks; with more, every plan's time is within
    `tolerance` of the least for its memory. The result is deterministic.

    Args:
        problem: Options of the blocks.
        tolerance: Relative tolerance of the time.
    """

    def __init__(self, problem: CheckpointingProblem, tolerance: float = 0.01) -> None:
        self.problem = problem
        self._growth = tolerance / len(problem.blocks)
        self._steps: list[tuple[_Integers, _Integers]] = []
        needs, costs = np.array([problem.head_bytes], dtype=np.int64), np.zeros(1, dtype=np.int64)
        for options in reversed(problem.blocks):
            needs, costs = self._extend(options, needs, costs)
        self._needs = np.maximum(needs, problem.floor_bytes)

    @property
    def minimum_bytes(self) -> int:
        """Least peak that can be reached."""
        return int(self._needs[0])

    @property
    def maximum_bytes(self) -> int:
        """Peak of the fastest plan; more memory brings nothing."""
        return int(self._needs[-1])

    def plan_for(self, budget_bytes: int) -> CheckpointingPlan:
        """The fastest plan whose peak is within a budget.

        Raises:
            ValueError: If the budget is below `minimum_bytes`.
        """
        index = int(np.searchsorted(self._needs, budget_bytes, side="right")) - 1
        if index < 0:
            raise ValueError(
                f"`budget_bytes={budget_bytes}` is below the least peak that can be reached, {self.minimum_bytes}."
            )
        choices: list[Choice] = []
        for options, (chosen, parents) in zip(self.problem.blocks, reversed(self._steps), strict=True):
            choices.append(options[chosen[index]].choice)
            index = int(parents[index])
        return CheckpointingPlan(tuple(choices), self.problem.peak_bytes(choices), self.problem.seconds(choices))

    def _extend(
        self, options: tuple[BlockOption, ...], needs: _Integers, costs: _Integers
    ) -> tuple[_Integers, _Integers]:
        """Put one block before the plans so far; both arrays are sorted, needs ascending and costs descending."""
        extended_needs = np.concatenate([np.maximum(o.peak_bytes, o.kept_bytes + needs) for o in options])
        # Whole picoseconds: sums don't depend on their order.
        extended_costs = np.concatenate([costs + round(o.seconds * _PICOSECONDS) for o in options])
        order = np.lexsort((extended_costs, extended_needs))
        lowest = np.minimum.accumulate(extended_costs[order])
        kept = order[np.concatenate(([True], lowest[1:] < lowest[:-1]))]
        if len(kept) > _MAX_EXACT:
            kept = kept[_first_of_each(extended_costs[kept], self._growth)]
        self._steps.append((kept // len(needs), kept % len(needs)))
        return extended_needs[kept], extended_costs[kept]


def _first_of_each(costs: _Integers, growth: float) -> npt.NDArray[np.bool_]:
    """Mark the first, which needs least memory, of every run of descending costs within a factor of `1 + growth`."""
    buckets = np.floor(np.log(np.maximum(costs, 1)) / np.log1p(growth)).astype(np.int64)
    buckets[costs == 0] = -1
    first: npt.NDArray[np.bool_] = np.concatenate(([True], buckets[1:] != buckets[:-1]))
    return first

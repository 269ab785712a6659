"""`Course`: the level of live tensors over a step, block by block, as the planner puts it together from its traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class BlockRun:
    """Bytes around one block."""

    kept: int
    """Bytes alive from the end of its forward until its backward."""
    forward: int
    """Highest level while it runs forward, less what the blocks before it keep."""
    backward: int
    """The same while it runs backward."""


@dataclass(frozen=True)
class Course:
    """Levels of a step in its order: blocks forward, what comes after the last one, blocks backward, optimizer step.

    Every level is the highest among the micro-batches of a step. A step without blocks that could be told apart has one
    entry for the whole of its passes.
    """

    blocks: tuple[BlockRun, ...]
    head: int
    """Highest level between the last block's forward and its backward, less what the blocks keep."""
    outside: int
    """Highest level of the passes outside of the blocks and the head: before the first one and after the last one."""
    step: int
    """Highest level of the optimizer's step."""

    def raised(self, more_bytes: int) -> Course:
        """The course with as many more bytes at every moment."""
        blocks = tuple(
            replace(run, forward=run.forward + more_bytes, backward=run.backward + more_bytes) for run in self.blocks
        )
        return Course(blocks, self.head + more_bytes, self.outside + more_bytes, self.step + more_bytes)

    def levels(self) -> Iterator[tuple[int, int]]:
        """Levels in order, each with the bytes among them that blocks keep: `4 + 2 * len(blocks)` of them at most.

        The passes begin and end with the level outside, where there is one.
        """
        kept = 0
        for run in self.blocks:
            yield kept + run.forward, kept
            kept += run.kept
        yield kept + self.head, kept
        for run in reversed(self.blocks):
            kept -= run.kept
            yield kept + run.backward, kept
        yield self.outside, 0
        yield self.step, 0

    @property
    def peak_bytes(self) -> int:
        """The highest of all levels."""
        return max(level for level, _ in self.levels())

    def to_dict(self) -> dict[str, object]:
        """Plain figures, ready for JSON; equal neighbours among blocks are counted."""
        runs = [(len(list(alike)), run) for run, alike in groupby(self.blocks)]
        blocks = [[count, run.kept, run.forward, run.backward] for count, run in runs]
        return {"blocks": blocks, "head": self.head, "outside": self.outside, "step": self.step}

"""Memory that repeated blocks keep and need, read off a trace in which all of them follow one checkpointing choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_memfit.profile.events import EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import Trace


class BudgetError(ValueError):
    """No plan stays within the budget, or the blocks can't be planned for; the message says what would work."""


@dataclass(frozen=True)
class BlockFigures:
    """Effect of one choice that all blocks follow; arrays have one entry per block."""

    kept: np.ndarray
    peak: np.ndarray
    """Highest level while a block runs, less what the blocks before it keep."""
    head: int
    elsewhere: int
    """Highest level outside the blocks, the optimizer's step included."""
    outside: int
    """Highest level outside the blocks in forward and backward alone."""
    traffic: np.ndarray
    """Bytes allocated in forward and backward of a block."""
    flops: int


def block_figures(
    trace: Trace | ModelProfile, rounding: int, levels: tuple[np.ndarray, np.ndarray] | None = None
) -> BlockFigures:
    """Read off a trace what its blocks keep and need: the maximum over the traced micro-batches and steps.

    Args:
        trace: Trace of a whole step.
        rounding: Bytes to which the allocator rounds sizes up.
        levels: Live bytes after every event, where they differ from the trace's own: without and with tensors that
            exist only for a moment. Each has shape (events,).
    """
    events, num_blocks = trace.events, trace.num_blocks
    own = events.live_bytes(rounding)
    staying, live = (own, own) if levels is None else levels
    rounded = events.rounded_sizes(rounding)
    made = np.where(events.events > 0, rounded[events.storages], 0)
    kept, peak = np.zeros(num_blocks, dtype=np.int64), np.zeros(num_blocks, dtype=np.int64)
    traffic = np.zeros(num_blocks, dtype=np.int64)
    head = 0
    inside = np.zeros(len(events), dtype=bool)
    for edges in _passes(events, num_blocks):
        forward, backward = edges
        kept_now = np.diff(staying[np.maximum(forward - 1, 0)])
        kept = np.maximum(kept, kept_now)
        before = np.concatenate(([0], np.cumsum(kept_now)))
        for block in range(num_blocks):
            spans = (forward[block], forward[block + 1]), (backward[block + 1], backward[block])
            for first, stop in spans:
                peak[block] = max(peak[block], int(live[first:stop].max()) - int(before[block]))
            traffic[block] = sum(int(made[first:stop].sum()) for first, stop in spans)
        head = max(head, int(live[forward[-1] : backward[-1]].max(initial=0)) - int(before[-1]))
        inside[forward[0] : backward[0]] = True
    inside[: events.phases[0][0]] = True  # building the module is not part of a step
    elsewhere = int(live[~inside].max(initial=0))
    outside = int(live[~inside & _in_passes(events)].max(initial=0))
    return BlockFigures(kept, peak, head, elsewhere, outside, traffic, sum(trace.flops.values()))


def _in_passes(events: EventList) -> np.ndarray:
    """Mark the events of forward and backward phases."""
    found = np.zeros(len(events), dtype=bool)
    bounds = [*(at for at, _ in events.phases), len(events)]
    for (first, name), stop in zip(events.phases, bounds[1:], strict=True):
        found[first:stop] = name in ("forward", "backward")
    return found


def _passes(events: EventList, num_blocks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Find where blocks begin, in every forward pass and the backward pass after it.

    Returns:
        For each pass two arrays of length `num_blocks + 1`. Block `i` runs forward from the first array's entry `i` to
        its entry `i + 1`, and backward from the second's entry `i + 1` to its entry `i`.

    Raises:
        BudgetError: If blocks don't run one after the other, once per pass.
    """
    bounds = [*(at for at, _ in events.phases), len(events)]
    spans = [(name, at, stop) for (at, name), stop in zip(events.phases, bounds[1:], strict=True)]
    found = []
    for (name, first, middle), (following, _, last) in pairwise(spans):
        if name == "forward" and following == "backward":
            forward = _starts(events, first, middle, range(num_blocks))
            backward = _starts(events, middle, last, range(num_blocks - 1, -1, -1))
            found.append((forward, backward[::-1]))
    if not found:
        raise BudgetError("`budget` needs a training step with a forward and a backward pass; none was traced.")
    return found


def _starts(events: EventList, first: int, stop: int, order: Sequence[int]) -> np.ndarray:
    """Index of each block's first allocation in a phase, and of the end of the last block's run."""
    blocks = np.where(events.events[first:stop] > 0, events.event_blocks[first:stop], -1)
    starts, end = [], 0
    for block in order:
        places = np.flatnonzero(blocks == block)
        if not len(places) or int(places[0]) < end:
            raise BudgetError(
                f"`budget`: block {block} {'is not alone' if len(places) else 'allocates nothing'} in its turn; blocks "
                "must run one after the other, once per pass. Choose `mode` or `choices` instead."
            )
        starts.append(int(places[0]))
        end = int(places[-1]) + 1
    own = events.event_blocks[first:stop]
    while end < stop - first and own[end] == order[-1]:
        end += 1
    return first + np.array([*starts, end])

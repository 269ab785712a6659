"""Memory that repeated blocks keep and need, read off a trace in which all of them follow one checkpointing choice."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from lightning_memfit.profile.events import OUTSIDE, EventList
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.trace import Trace


class BudgetError(ValueError):
    """No plan stays within the budget, or the blocks can't be planned for; the message says what would work."""


@dataclass(frozen=True)
class BlockFigures:
    """Effect of one choice that all blocks follow; arrays have one entry per block."""

    kept: np.ndarray
    peak: np.ndarray
    """Highest level while a block runs in either direction, less what the blocks before it keep."""
    head: int
    elsewhere: int
    """Highest level outside the blocks, the optimizer's step included."""
    outside: int
    """Highest level outside the blocks in forward and backward alone."""
    traffic: np.ndarray
    """Bytes allocated in forward and backward of a block."""
    flops: int


Chain = tuple[tuple[int, ...], ...]
"""Numbers of blocks, in links that run one after the other."""


def find_chain(traces: Iterable[Trace]) -> Chain:
    """Put blocks into links that run one after the other in every forward pass, and in reverse in every backward pass.

    Blocks that run in turns, twice in a pass (towers that share weights), or whose backward begins before those after
    them are done (losses on the way), are joined into one link. Blocks that don't run are in none.

    Raises:
        BudgetError: If nothing was traced that trains.
    """
    found = [(_in_turns(trace.events), trace.num_blocks) for trace in traces]
    spans = [_spans(events, phases, number) for events, number in found for phases in _phase_pairs(events)]
    if not spans:
        raise BudgetError(_NO_PASS)
    first = np.min([forward[0] for forward, _ in spans], axis=0)
    order = [int(block) for block in np.argsort(first, kind="stable") if first[block] < _NEVER]
    links: list[tuple[int, ...]] = []
    start = 0
    for stop in range(1, len(order) + 1):
        early, late = order[:stop], order[stop:]
        if not late or all(_is_cut(forward, backward, early, late) for forward, backward in spans):
            links.append(tuple(sorted(order[start:stop])))
            start = stop
    return tuple(links)


def _in_turns(events: EventList) -> EventList:
    """Count to blocks only what is allocated in their run: gradients of long skips are summed in the turn of others."""
    event_blocks = events.event_blocks.copy()
    event_blocks[events.between] = OUTSIDE
    return replace(events, event_blocks=event_blocks)


_NEVER = np.iinfo(np.int64).max
_NO_PASS = "`budget` needs a training step with a forward and a backward pass; none was traced."


def _is_cut(forward: np.ndarray, backward: np.ndarray, early: list[int], late: list[int]) -> bool:
    return bool(forward[1][early].max() < forward[0][late].min() and backward[1][late].max() < backward[0][early].min())


def _spans(events: EventList, phases: tuple[int, int, int], num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last allocation of every block in a forward and its backward pass; each has shape (2, blocks)."""
    found = []
    for start, stop in pairwise(phases):
        span = np.stack([np.full(num_blocks, _NEVER), np.full(num_blocks, -1)])
        blocks = events.event_blocks[start:stop]
        places = np.flatnonzero((events.events[start:stop] > 0) & (blocks >= 0))
        np.minimum.at(span[0], blocks[places], places)
        np.maximum.at(span[1], blocks[places], places)
        found.append(span)
    return found[0], found[1]


def _phase_pairs(events: EventList) -> list[tuple[int, int, int]]:
    """Where each forward pass begins, its backward pass begins, and that ends."""
    return [
        (first, middle, last)
        for (name, first, middle), (following, _, last) in pairwise(events.phase_spans)
        if name == "forward" and following == "backward"
    ]


def block_figures(
    trace: Trace | ModelProfile,
    rounding: int,
    levels: tuple[np.ndarray, np.ndarray] | None = None,
    chain: Chain | None = None,
) -> BlockFigures:
    """Read off a trace what its blocks keep and need: the maximum over the traced micro-batches and steps.

    Args:
        trace: Trace of a whole step.
        rounding: Bytes to which the allocator rounds sizes up.
        levels: Live bytes after every event, where they differ from the trace's own: without and with tensors that
            exist only for a moment. Each has shape (events,).
        chain: Links of blocks, whose figures these are then; by default each block is one, in the order of its number.

    Raises:
        BudgetError: If the links don't run one after the other, once per pass.
    """
    events, num_blocks = trace.events, trace.num_blocks
    if chain is not None:
        link_of = np.full(num_blocks + 1, OUTSIDE)  # the last entry is for events that belong to no block
        for number, members in enumerate(chain):
            link_of[list(members)] = number
        events = _in_turns(events)
        events, num_blocks = replace(events, event_blocks=link_of[events.event_blocks]), len(chain)
    own = events.live_bytes(rounding)
    staying, live = (own, own) if levels is None else levels
    rounded = events.rounded_sizes(rounding)
    made = np.where(events.events > 0, rounded[events.storages], 0)
    kept, peak, traffic = (np.zeros(num_blocks, dtype=np.int64) for _ in range(3))
    head = 0
    inside = np.zeros(len(events), dtype=bool)
    for edges in _passes(events, num_blocks, chain is None):
        forward, backward = edges
        kept_now = np.diff(staying[np.maximum(forward - 1, 0)])
        kept = np.maximum(kept, kept_now)
        before = np.concatenate(([0], np.cumsum(kept_now)))
        for block in range(num_blocks):
            spans = (forward[block], forward[block + 1]), (backward[block + 1], backward[block])
            for first, stop in spans:
                if first == stop:
                    continue  # nothing is allocated here, as in the backward of blocks that get no gradient
                level = int(live[first:stop].max()) - int(before[block])
                peak[block] = max(peak[block], level)
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
    for name, first, stop in events.phase_spans:
        found[first:stop] = name in ("forward", "backward")
    return found


def _passes(events: EventList, num_blocks: int, all_run: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Find where blocks begin, in every forward pass and the backward pass after it.

    Returns:
        For each pass two arrays of length `num_blocks + 1`. Block `i` runs forward from the first array's entry `i` to
        its entry `i + 1`, and backward from the second's entry `i + 1` to its entry `i`.

    Raises:
        BudgetError: If blocks don't run one after the other, once per pass.
    """
    found = []
    for first, middle, last in _phase_pairs(events):
        forward = _starts(events, first, middle, range(num_blocks), all_run)
        backward = _starts(events, middle, last, range(num_blocks - 1, -1, -1), all_run)
        found.append((forward, backward[::-1]))
    if not found:
        raise BudgetError(_NO_PASS)
    return found


def _starts(events: EventList, first: int, stop: int, order: Sequence[int], all_run: bool) -> np.ndarray:
    """Index of each block's first allocation in a phase, and of the end of the last block's run."""
    blocks = np.where(events.events[first:stop] > 0, events.event_blocks[first:stop], -1)
    starts, end = [], 0
    for block in order:
        places = np.flatnonzero(blocks == block)
        if (all_run and not len(places)) or (len(places) and int(places[0]) < end):
            raise BudgetError(
                f"`budget`: block {block} {'is not alone' if len(places) else 'allocates nothing'} in its turn; blocks "
                "must run one after the other, once per pass. Choose `mode` or `choices` instead."
            )
        starts.append(int(places[0]) if len(places) else end)
        end = int(places[-1]) + 1 if len(places) else end
    own = events.event_blocks[first:stop]
    while end < stop - first and own[end] == order[-1]:
        end += 1
    return first + np.array([*starts, end])

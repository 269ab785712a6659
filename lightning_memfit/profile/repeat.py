"""Repeated blocks: trace five of them, and unroll the events to as many as the module has (numpy only).

The events of a block are written relative to their neighbours (this block, the one before, the one after). If the three
middle blocks are the same in that notation, the middle one can be copied: the result is the trace of the whole module,
event for event.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lightning_memfit.profile.events import OUTSIDE, AlignmentError, EventList, canonical

TRACED_BLOCKS = 5
"""First, three alike, last."""

_MIDDLE = 2

Place = tuple[int, int]
"""A storage by `(block, how many storages that block made before it)`."""

Event = tuple[bool, int, int, int, int]
"""Allocation?, offset of the block that made the storage, number there, bytes, category."""


@dataclass(frozen=True)
class _Runs:
    """A trace with every storage named by its place."""

    trace: EventList
    places: list[Place]

    @classmethod
    def of(cls, trace: EventList) -> "_Runs":
        made: dict[int, int] = defaultdict(int)
        places: list[Place] = [(OUTSIDE, 0)] * len(trace.sizes)
        for event, block in zip(trace.events.tolist(), trace.event_blocks.tolist(), strict=True):
            if event > 0:
                places[event - 1] = (block, made[block])
                made[block] += 1
        return cls(trace, places)

    def pattern(self, block: int) -> list[Event]:
        """Events of a block relative to it."""
        trace, pattern = self.trace, []
        for index in np.flatnonzero(trace.event_blocks == block).tolist():
            event = int(trace.events[index])
            storage = abs(event) - 1
            owner, position = self.places[storage]
            if owner == OUTSIDE or abs(owner - block) > 1:
                raise AlignmentError(f"block {block} frees memory that block {owner} made")
            size, category = int(trace.sizes[storage]), int(trace.categories[storage])
            pattern.append((event > 0, owner - block, position, size, category))
        return pattern


def unroll(trace: EventList, num_blocks: int) -> EventList:
    """Extend a trace of `TRACED_BLOCKS` repeated blocks to `num_blocks`.

    Raises:
        AlignmentError: If the middle blocks are not alike, so that unrolling would be a guess.
    """
    runs = _Runs.of(canonical(trace))
    # The first and last block may number their storages differently, so what refers to them isn't compared.
    before, middle, after = (runs.pattern(block) for block in (_MIDDLE - 1, _MIDDLE, _MIDDLE + 1))
    if _without(before, -1) != _without(middle, -1) or _without(after, 1) != _without(middle, 1):
        raise AlignmentError("the blocks don't allocate alike")
    return _Unroller(runs, num_blocks - TRACED_BLOCKS).run()


def _without(pattern: list[Event], neighbour: int) -> list[Event]:
    """A pattern with the storage numbers of one neighbour blanked."""
    return [
        (made, offset, -1 if offset == neighbour else position, size, category)
        for made, offset, position, size, category in pattern
    ]


class _Unroller:
    """Write the events anew with the middle block standing `extra + 1` times."""

    def __init__(self, runs: _Runs, extra: int) -> None:
        self.runs = runs
        self.extra = extra
        self.numbers: dict[Place, int] = {}
        self.origins: list[int] = []
        self.events: list[int] = []
        self.event_blocks: list[int] = []

    def run(self) -> EventList:
        trace = self.runs.trace
        blocks = trace.event_blocks
        edges = np.flatnonzero(np.diff(blocks)) + 1
        starts, stops = [0, *edges.tolist()], [*edges.tolist(), len(blocks)]
        first_events: list[int] = []
        before = 0
        for start, stop in zip(starts, stops, strict=True):
            first_events.append(len(self.events))
            block = int(blocks[start])
            if block == _MIDDLE:
                shifts = range(self.extra + 1)
                for shift in shifts if before < _MIDDLE else reversed(shifts):
                    self._copy(start, stop, block + shift)
            else:
                self._copy(start, stop, self._image(block))
            before = block if block != OUTSIDE else before
        runs_of_phases = [int(np.searchsorted(starts, at, side="right")) - 1 for at, _ in trace.phases]
        phases = tuple(
            (first_events[run] + at - starts[run], name)
            for run, (at, name) in zip(runs_of_phases, trace.phases, strict=True)
        )
        origins = np.array(self.origins, dtype=np.int64)
        return EventList(
            events=np.array(self.events, dtype=np.int64),
            event_blocks=np.array(self.event_blocks, dtype=np.int64),
            sizes=trace.sizes[origins],
            categories=trace.categories[origins],
            sites=trace.sites[origins],
            site_names=trace.site_names,
            phases=phases,
        )

    def _image(self, block: int) -> int:
        return block + self.extra if block > _MIDDLE else block

    def _copy(self, start: int, stop: int, image: int) -> None:
        trace = self.runs.trace
        for event in trace.events[start:stop].tolist():
            storage = abs(event) - 1
            owner, position = self.runs.places[storage]
            if owner != OUTSIDE and image != OUTSIDE:
                owner = image + owner - int(trace.event_blocks[start])
            elif owner != OUTSIDE:
                owner = self._image(owner)
            place = (owner, position)
            if event > 0:
                self.numbers[place] = len(self.origins)
                self.origins.append(storage)
                self.events.append(len(self.origins))
            elif place in self.numbers:
                self.events.append(-(self.numbers.pop(place) + 1))
            else:
                raise AlignmentError(f"block {image} frees memory that block {owner} doesn't make")
            self.event_blocks.append(image)

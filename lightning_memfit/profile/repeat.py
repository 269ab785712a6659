"""Repeated blocks: shorten a module to five of them for a trace, then unroll the events to as many as it has.

`fold_blocks` removes the blocks that a trace may leave out, and `unroll` extends the trace. Work passes through the
blocks in sweeps: upwards in forward and in the optimizer, downwards in backward. The events between a sweep's first of
one block and its first of the next are that block's period; it may hold the end of its neighbour's work. Where the
periods of neighbouring middle blocks are the same, relative to their block, the middle one can be repeated: the result
is the trace of the whole module, event for event.

While a module is set up, techniques change one block after another, as where weights are quantized. What comes and goes
within one block's period then may belong to no block; it is repeated with the period, which begins with it.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lightning_memfit.checkpointing.blocks import BlockGroup, find_blocks
from lightning_memfit.profile.events import OUTSIDE, AlignmentError, EventList, canonical

TRACED_BLOCKS = 5
"""The first, three alike, and the last."""

_MIDDLE = 2

_PASSING = 2
"""In place of an offset: of no block, within one period of the set-up. Offsets of blocks are -1, 0 and 1."""

Place = tuple[int, int]
"""A storage by `(block, how many storages that block made before it)`."""

Event = tuple[bool, int, int, int, int, int]
"""Allocation?, offsets of the event's block and of the block that made the storage, number there, bytes, category."""


@dataclass(frozen=True)
class _Runs:
    """A trace with every storage named by its place."""

    trace: EventList
    places: list[Place]
    lives: list[tuple[int, int]]
    """Events that make and free each storage; the end of the trace where nothing frees it."""

    @classmethod
    def of(cls, trace: EventList) -> "_Runs":
        made: dict[int, int] = defaultdict(int)
        places: list[Place] = [(OUTSIDE, 0)] * len(trace.sizes)
        lives = [(len(trace), len(trace))] * len(trace.sizes)
        for index, (event, block) in enumerate(zip(trace.events.tolist(), trace.event_blocks.tolist(), strict=True)):
            storage = abs(event) - 1
            if event > 0:
                places[storage] = (block, made[block])
                made[block] += 1
                lives[storage] = (index, len(trace))
            else:
                lives[storage] = (lives[storage][0], index)
        return cls(trace, places, lives)

    def pattern(self, block: int, start: int = 0, stop: int | None = None) -> list[Event]:
        """Events of a period relative to its block; without `start` and `stop` all events of the block alone."""
        trace, pattern = self.trace, []
        indices = np.flatnonzero(trace.event_blocks == block).tolist() if stop is None else range(start, stop)
        passing: dict[int, int] = {}
        for index in indices:
            event, at = int(trace.events[index]), int(trace.event_blocks[index])
            storage = abs(event) - 1
            owner, position = self.places[storage]
            size, category = int(trace.sizes[storage]), int(trace.categories[storage])
            if owner == at == OUTSIDE and stop is not None and self._passes(storage, start, stop):
                position = passing.setdefault(storage, len(passing))
                pattern.append((event > 0, _PASSING, _PASSING, position, size, category))
                continue
            if OUTSIDE in (owner, at) or abs(owner - block) > 1:
                raise AlignmentError(
                    f"between the events of block {block}, others happen that belong to no block alone"
                )
            pattern.append((event > 0, at - block, owner - block, position, size, category))
        return pattern

    def _passes(self, storage: int, start: int, stop: int) -> bool:
        """Whether a storage comes and goes within a period of the set-up, in which no work is counted by block."""
        made, freed = self.lives[storage]
        return start <= made and freed < stop <= self.end_of_setup

    @property
    def end_of_setup(self) -> int:
        """Event with which the work begins that is counted by block."""
        return self.trace.phases[0][0] if self.trace.phases else len(self.trace)

    def begin(self, first: int, earliest: int) -> int:
        """Event with which a block's period begins."""
        if first >= self.end_of_setup:
            return first
        begin = first
        for index in range(first - 1, earliest - 1, -1):
            event = int(self.trace.events[index])
            if event > 0 and begin <= self.lives[event - 1][1] < self.end_of_setup:
                begin = index
        return begin


@dataclass(frozen=True)
class _Sweep:
    """A pass through the blocks, with the middle block's period in it if it has one."""

    start: int
    stop: int
    ascending: bool
    period: tuple[int, int] | None
    neighbour: tuple[int, int] | None
    """Period of the block after the middle one."""


def unroll(trace: EventList, num_blocks: int) -> EventList:
    """Extend a trace of `TRACED_BLOCKS` repeated blocks to `num_blocks`."""
    runs = _Runs.of(canonical(trace))
    middle = runs.pattern(_MIDDLE)
    if not all(_alike(middle, runs.pattern(_MIDDLE + step), step) for step in (-1, 1)):
        raise AlignmentError("the blocks don't allocate alike")
    sweeps = _sweeps(runs)
    for sweep in sweeps:
        if sweep.period is None or sweep.neighbour is None:
            continue
        step = 1 if sweep.ascending else -1
        if not _alike(runs.pattern(_MIDDLE, *sweep.period), runs.pattern(_MIDDLE + step, *sweep.neighbour), step):
            raise AlignmentError("the blocks don't allocate in the same order")
    return _Unroller(runs, num_blocks - TRACED_BLOCKS).run(sweeps)


def _alike(middle: list[Event], neighbour: list[Event], step: int) -> bool:
    """Whether two patterns agree; first and last block, `step` further on, may number their storages differently."""

    def blanked(pattern: list[Event]) -> list[Event]:
        return [(*event[:3], -1, *event[4:]) if event[2] == step else event for event in pattern]

    return blanked(middle) == blanked(neighbour)


def _sweeps(runs: _Runs) -> list[_Sweep]:
    """Cut a trace into sweeps, none of which reaches beyond a phase."""
    trace = runs.trace
    blocks = trace.event_blocks.tolist()
    cuts = {at for at, _ in trace.phases}
    sweeps: list[_Sweep] = []
    start, front, previous, ascending, after = 0, OUTSIDE, OUTSIDE, True, 0
    first: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if index in cuts:
            sweeps.append(_sweep(blocks, start, index, ascending, first))
            start, front, first, after = index, OUTSIDE, {}, index
        if block == OUTSIDE:
            continue
        if front == OUTSIDE or abs(block - front) > 1:
            if front != OUTSIDE:
                sweeps.append(_sweep(blocks, start, index, ascending, first))
                start, first = index, {}
            ascending = block == 0 or (block != TRACED_BLOCKS - 1 and previous < block)
        if front == OUTSIDE or not first or block == front + (1 if ascending else -1):
            front = block
            first[block] = runs.begin(index, after)
        previous, after = block, index + 1
    sweeps.append(_sweep(blocks, start, len(blocks), ascending, first))
    return sweeps


def _sweep(blocks: list[int], start: int, stop: int, ascending: bool, first: dict[int, int]) -> _Sweep:
    if _MIDDLE not in blocks[start:stop]:
        return _Sweep(start, stop, ascending, None, None)
    order = (_MIDDLE, _MIDDLE + 1, _MIDDLE + 2) if ascending else (_MIDDLE, _MIDDLE - 1, _MIDDLE - 2)
    if not all(block in first for block in order):
        raise AlignmentError("the step doesn't pass through the blocks in order")
    here, after, end = (first[block] for block in order)
    return _Sweep(start, stop, ascending, (here, after), (after, end))


class _Unroller:
    """Write the events anew with each period of the middle block repeated `extra + 1` times."""

    def __init__(self, runs: _Runs, extra: int) -> None:
        self.runs = runs
        self.extra = extra
        self.numbers: dict[Place, int] = {}
        self.origins: list[int] = []
        self.events: list[int] = []
        self.event_blocks: list[int] = []
        self.written_at: dict[int, int] = {}

    def run(self, sweeps: list[_Sweep]) -> EventList:
        trace = self.runs.trace
        for sweep in sweeps:
            self.written_at[sweep.start] = len(self.events)
            start, stop = sweep.period or (sweep.stop, sweep.stop)
            shifts = range(self.extra + 1) if sweep.ascending else range(self.extra, -1, -1)
            self._copy(sweep.start, start, shifts[0])
            for shift in shifts if start < stop else ():
                self._copy(start, stop, shift, whole=True)
            self._copy(stop, sweep.stop, shifts[-1])
        self.written_at[len(trace.events)] = len(self.events)
        origins = np.array(self.origins, dtype=np.int64)
        return EventList(
            events=np.array(self.events, dtype=np.int64),
            event_blocks=np.array(self.event_blocks, dtype=np.int64),
            sizes=trace.sizes[origins],
            categories=trace.categories[origins],
            sites=trace.sites[origins],
            site_names=trace.site_names,
            phases=tuple((self.written_at[at], name) for at, name in trace.phases),
        )

    def _copy(self, start: int, stop: int, shift: int, whole: bool = False) -> None:
        """Write events with the middle block and those above it moved up by `shift`; with `whole` every block."""
        trace = self.runs.trace
        for index in range(start, stop):
            event, block = int(trace.events[index]), int(trace.event_blocks[index])
            storage = abs(event) - 1
            owner, position = self.runs.places[storage]
            image = self._image(block, shift, whole)
            if owner != OUTSIDE and image != OUTSIDE:
                owner += image - block
            elif owner != OUTSIDE:
                owner = self._image(owner, shift, whole)
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

    def _image(self, block: int, shift: int, whole: bool) -> int:
        if whole and block != OUTSIDE:
            return block + shift
        if block > _MIDDLE:
            return block + self.extra
        return block + shift if block == _MIDDLE else block


# --- shortening a module ----------------------------------------------------------------------------------------------


_MIN_BLOCKS = TRACED_BLOCKS + 2
"""Below this, tracing everything costs no more."""

_Signature = tuple[object, ...]


@dataclass(frozen=True)
class Fold:
    """Which repeated blocks a trace follows."""

    blocks: tuple[torch.nn.Module, ...]
    """Blocks that are traced, in order."""
    num_blocks: int
    """Blocks that the module has."""
    block_class: str
    """Class name of a block; empty where there is no repetition."""


def fold_groups(module: torch.nn.Module, groups: list[BlockGroup], shorten: bool = True) -> Fold:
    """Every block of some groups of a clone; fewer of them where the module has no other group than the one given."""
    found = find_blocks(module)
    if len(groups) == len(found) == 1 and groups[0].names == found[0].names:
        return fold_blocks(module, shorten)
    blocks = tuple(block for group in groups for block in group.modules)
    return Fold(blocks, len(blocks), groups[0].class_name if groups else "")


def fold_blocks(module: torch.nn.Module, shorten: bool = True) -> Fold:
    """Find the largest group of repeated blocks, and keep the first four and the last of it.

    A group is shortened only where its inner blocks agree in class, parameters and settings and no code above them
    counts its blocks, so that tracing some of them tells about all. Nothing of the others is left that could be called.
    """
    groups = find_blocks(module)
    if not groups:
        return Fold((), 0, "")
    group = max(groups, key=lambda candidate: candidate.num_parameters)
    container = module.get_submodule(group.container)
    alike = len({_signature(block, index) for index, block in enumerate(group.modules) if index}) == 1
    counted = any(_numbers_things(type(above)) for above in _modules_above(module, group.container))
    long = len(group.names) >= _MIN_BLOCKS and len(container._modules) == len(group.names)
    blocks = group.modules
    if not (shorten and long and alike and not counted):
        return Fold(blocks, len(blocks), group.class_name)
    for block in blocks[TRACED_BLOCKS - 1 : -1]:
        for child in list(block.modules()):
            _left_out.append(vars(child).copy())
            vars(child).clear()
            torch.nn.Module.__init__(child)
    kept = (*blocks[: TRACED_BLOCKS - 1], blocks[-1])
    container._modules.clear()
    for index, block in enumerate(kept):
        container.add_module(str(index), block)
    return Fold(kept, len(blocks), group.class_name)


_left_out: list[dict[str, object]] = []
"""What blocks held: memory of a device is not this process's to free."""


def _signature(block: torch.nn.Module, index: int) -> _Signature:
    """Every simple attribute that could make one block behave unlike another, except its own index."""
    parts: list[object] = []
    for name, child in block.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(child).items())
            if isinstance(value, (bool, int, float, str, type(None)))
            and not (value == index and not isinstance(value, bool) and "id" in key)
        )
        parts.append((name, type(child).__qualname__, settings))
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        parts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    return tuple(parts)


def _modules_above(module: torch.nn.Module, path: str) -> Iterator[torch.nn.Module]:
    names = path.split(".") if path else []
    return (module.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1))


_TRUSTED = ("torch", "lightning", "transformers", "lightning_memfit")
"""Packages whose models treat a block by its number only where the block's settings say so."""
_COUNTING = {"enumerate", "range", "zip", "len"}


def _numbers_things(kind: type) -> bool:
    """Whether a method of a class that may run in training numbers things, and could treat one block differently.

    A trace of five blocks would never see the effect of `if index == 7`.
    """
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] in _TRUSTED:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return True
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "configure_optimizers"):
                calls = (node.func for node in ast.walk(method) if isinstance(node, ast.Call))
                if any(isinstance(called, ast.Name) and called.id in _COUNTING for called in calls):
                    return True
    return False

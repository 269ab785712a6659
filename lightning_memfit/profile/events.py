"""`EventList`: every allocation and free of a traced step, and the arithmetic on it (numpy only)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lightning_memfit.memory import Category, MemoryBreakdown

CATEGORIES: tuple[Category, ...] = tuple(Category)
_MOST_BYTES = 1 << 62
"""Sums of all storages below this can't overflow, not even with every size rounded up."""

OUTSIDE = -1
"""Block number of events that belong to no repeated block."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class EventList:
    """Allocations and frees in the order they happened.

    Storages are numbered in the order of allocation. `events[i]` is `s + 1` where storage `s` is allocated and
    `-(s + 1)` where it is freed. All arrays of one kind have the same length.
    """

    events: Integers
    """Shape (events,): signed storage number plus one."""
    event_blocks: Integers
    """Shape (events,): repeated block in whose run the event happened, or `OUTSIDE`."""
    sizes: Integers
    """Shape (storages,): bytes asked for, unrounded."""
    categories: Integers
    """Shape (storages,): index into `CATEGORIES`, the last label a storage had."""
    sites: Integers
    """Shape (storages,): index into `site_names`, where the storage was made."""
    site_names: tuple[str, ...]
    """`module path | operator` of every place that allocates."""
    phases: tuple[tuple[int, str], ...] = field(default=())
    """`(first event, name)` in order: setup, forward, backward, step, each as often as it happened."""
    between: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Allocations outside every block's run that `event_blocks` counts to the block of the tensor they work on, such as
    sums of gradients: ascending indices of events. Empty where a trace was unrolled, or read from a file."""

    def __len__(self) -> int:
        return len(self.events)

    @property
    def storages(self) -> Integers:
        """Storage number of every event, shape (events,)."""
        return np.abs(self.events) - 1

    def rounded_sizes(self, rounding_bytes: int = 1) -> Integers:
        """Bytes of every storage, shape (storages,), rounded up as an allocator does."""
        return -(-self.sizes // rounding_bytes) * rounding_bytes

    def live_bytes(self, rounding_bytes: int = 1) -> Integers:
        """Live bytes after every event, shape (events,); sizes rounded up as an allocator does."""
        return np.cumsum(np.sign(self.events) * self.rounded_sizes(rounding_bytes)[self.storages])

    def alive_at(self, index: int) -> Integers:
        """Numbers of the storages that are alive after event `index`, ascending."""
        count = np.zeros(len(self.sizes), dtype=np.int64)
        np.add.at(count, self.storages[: index + 1], np.sign(self.events[: index + 1]))
        return np.flatnonzero(count)

    def breakdown_at(self, index: int, rounding_bytes: int = 1) -> MemoryBreakdown:
        """Device bytes by category after event `index`."""
        alive = self.alive_at(index)
        rounded = self.rounded_sizes(rounding_bytes)[alive]
        by_category = np.bincount(self.categories[alive], weights=rounded, minlength=len(CATEGORIES)).astype(np.int64)
        return MemoryBreakdown.device({c: int(by_category[i]) for i, c in enumerate(CATEGORIES)})

    def bytes_kept_by_blocks(self) -> int:
        """Bytes of activations that blocks keep from forward to backward."""
        starts = [at for at, name in self.phases if name == "backward"]
        if not starts:
            return 0
        made_in = np.full(len(self.sizes), -1)
        allocations = self.events > 0
        made_in[self.storages[allocations]] = self.event_blocks[allocations]
        alive = self.alive_at(starts[-1] - 1)
        is_kept = (self.categories[alive] == CATEGORIES.index(Category.ACTIVATION)) & (made_in[alive] >= 0)
        return int(self.sizes[alive[is_kept]].sum())

    def bytes_between_blocks(self) -> int:
        """Bytes that blocks hand on in forward, each to the next one: what it allocates last, such as a sum."""
        starts = [at for at, name in self.phases if name == "backward"]
        if not starts:
            return 0
        forward = slice(max(at for at, name in self.phases if name == "forward" and at <= starts[-1]), starts[-1])
        events, blocks = self.events[forward], self.event_blocks[forward]
        last = {block: event for event, block in zip(events, blocks, strict=True) if event > 0 <= block}
        return int(sum(self.sizes[event - 1] for event in last.values()))

    @property
    def phase_spans(self) -> list[tuple[str, int, int]]:
        """Name, first event and end of every phase."""
        ends = [*(at for at, _ in self.phases[1:]), len(self)]
        return [(name, at, end) for (at, name), end in zip(self.phases, ends, strict=False)]

    def phase_at(self, index: int) -> str:
        """Name of the phase in which event `index` happened."""
        name = "setup"
        for first, candidate in self.phases:
            if first > index:
                break
            name = candidate
        return name

    def largest_at(self, index: int, count: int = 5) -> list[tuple[str, Category, int]]:
        """The `count` largest live storages after event `index`: site, category, bytes."""
        alive = self.alive_at(index)
        order = alive[np.argsort(-self.sizes[alive], kind="stable")[:count]]
        return [(self.site_names[self.sites[s]], CATEGORIES[self.categories[s]], int(self.sizes[s])) for s in order]


class AlignmentError(Exception):
    """Two traces, or two blocks of one trace, don't have the same structure."""


def canonical(trace: EventList) -> EventList:
    """Sort every run of consecutive frees by block and storage: their order carries no meaning and may vary.

    A run ends where a phase begins, as storages that a phase frees count in the peak of the phase before it.
    """
    freeing = trace.events < 0
    continues = freeing.copy()
    continues[1:] &= freeing[:-1]
    continues[:1] = False
    continues[[at for at, _ in trace.phases if at < len(trace)]] = False
    order = np.lexsort((-trace.events, trace.event_blocks, np.cumsum(~continues)))
    return replace(trace, events=trace.events[order], event_blocks=trace.event_blocks[order])


def without_setup(trace: EventList) -> EventList:
    """The trace without what comes and goes before its first phase, and without empty storages that are made there."""
    first = trace.phases[0][0] if trace.phases else len(trace)
    storages, allocates = trace.storages[:first], trace.events[:first] > 0
    is_gone = np.zeros(len(trace.sizes), dtype=bool)
    is_gone[storages[~allocates]] = True  # whatever is freed here was made here
    is_gone[storages[allocates]] |= trace.sizes[storages[allocates]] == 0
    return _without(trace, is_gone)


def _without(trace: EventList, is_gone: npt.NDArray[np.bool_]) -> EventList:
    """The trace without some storages, renumbered."""
    kept, stays = ~is_gone[trace.storages], ~is_gone
    numbers, places = np.cumsum(stays), np.concatenate(([0], np.cumsum(kept)))
    return replace(
        trace,
        events=np.sign(trace.events[kept]) * numbers[trace.storages[kept]],
        event_blocks=trace.event_blocks[kept],
        sizes=trace.sizes[stays],
        categories=trace.categories[stays],
        sites=trace.sites[stays],
        phases=tuple((int(places[at]), name) for at, name in trace.phases),
        between=places[trace.between[kept[trace.between]]],
    )


def with_kept(trace: EventList, size_bytes: int, site: str) -> EventList:
    """The trace with one more storage, an activation that is alive from before the first event to the end."""
    return replace(
        trace,
        events=np.concatenate(([1], trace.events + np.sign(trace.events))),
        event_blocks=np.concatenate(([OUTSIDE], trace.event_blocks)),
        sizes=np.concatenate(([size_bytes], trace.sizes)),
        categories=np.concatenate(([CATEGORIES.index(Category.ACTIVATION)], trace.categories)),
        sites=np.concatenate(([len(trace.site_names)], trace.sites)),
        site_names=(*trace.site_names, site),
        phases=tuple((at + 1, name) for at, name in trace.phases),
        between=trace.between + 1,
    )


SCRATCH_SITE = "kernel scratch"
"""Where memory is made that a kernel gives back before it ends; such a storage is freed by the event after its own."""


BOUNDED_SCRATCH_SITE = f"sum of rows: {SCRATCH_SITE}"
"""Scratch memory that grows with the micro-batch up to a bound, most of which small ones reach."""


def _with_equal_scratch(traces: Sequence[EventList]) -> list[EventList]:
    """The traces with as much scratch memory between two other events in all, where one kernel takes another path.

    Of several in a row the largest stands for all, and where one trace has none, it gets one of no bytes.
    """
    counts = [_scratch_counts(trace) for trace in traces]
    if any(len(one) != len(counts[0]) for one in counts):
        return list(traces)
    places = {place for one in counts for place in np.flatnonzero(one != counts[0]).tolist()}
    return [_with_one_scratch(trace, places) for trace in traces]


def is_scratch(trace: EventList) -> npt.NDArray[np.bool_]:
    """Shape (storages,): whether a storage is scratch memory of a kernel."""
    named = np.array([name.endswith(SCRATCH_SITE) for name in trace.site_names], dtype=bool)
    return named[trace.sites]


def _is_scratch(trace: EventList) -> npt.NDArray[np.bool_]:
    """Shape (events,): whether an event is that of scratch memory."""
    return is_scratch(trace)[trace.storages]


def _scratch_counts(trace: EventList) -> Integers:
    """How often scratch memory is allocated before each other event, and after the last."""
    scratch = _is_scratch(trace)
    place = np.cumsum(~scratch)
    return np.bincount(place[scratch & (trace.events > 0)], minlength=int(np.sum(~scratch)) + 1)


def _with_one_scratch(trace: EventList, places: set[int]) -> EventList:
    """The trace with exactly one storage of scratch memory at each of some places, counted in other events."""
    scratch = _is_scratch(trace)
    before = np.cumsum(~scratch)
    largest: dict[int, int] = {}  # storage of the largest by place
    is_gone = np.zeros(len(trace.sizes), dtype=bool)
    for index in np.flatnonzero(scratch & (trace.events > 0)).tolist():
        at, storage = int(before[index]), int(trace.storages[index])
        if at in places:
            is_gone[storage] = True
            if at not in largest or trace.sizes[storage] > trace.sizes[largest[at]]:
                largest[at] = storage
    is_gone[list(largest.values())] = False
    trace = _without(trace, is_gone)
    others = np.append(np.flatnonzero(~_is_scratch(trace)), len(trace))
    return _with_empty_scratch(trace, others[sorted(places - largest.keys())])


def _with_empty_scratch(trace: EventList, at: Integers) -> EventList:
    """The trace with one more storage without bytes before some of its events, at which it is freed as well."""
    new, twice = len(trace.sizes) + 1 + np.arange(len(at)), np.repeat(at, 2)
    events = np.insert(trace.events, twice, np.stack((new, -new), axis=1).ravel())
    order = events[events > 0] - 1  # storages as they are allocated
    numbers = np.argsort(order)
    site = next((i for i, name in enumerate(trace.site_names) if name.endswith(SCRATCH_SITE)), len(trace.site_names))

    def moved(places: Integers) -> Integers:
        return places + 2 * np.searchsorted(at, places)

    return replace(
        trace,
        events=np.sign(events) * (numbers[np.abs(events) - 1] + 1),
        event_blocks=np.insert(trace.event_blocks, twice, np.append(trace.event_blocks, OUTSIDE)[twice]),
        sizes=np.append(trace.sizes, np.zeros_like(at))[order],
        categories=np.append(trace.categories, np.full_like(at, CATEGORIES.index(Category.TEMPORARY)))[order],
        sites=np.append(trace.sites, np.full_like(at, site))[order],
        site_names=trace.site_names if site < len(trace.site_names) else (*trace.site_names, SCRATCH_SITE),
        phases=tuple((int(moved(np.array(first))), name) for first, name in trace.phases),
        between=moved(trace.between),
    )


def fit_slopes(first: EventList, second: EventList, first_size: int, second_size: int) -> tuple[EventList, Floats]:
    """Fit every storage's size as `intercept + slope * micro_batch_size` from traces at two micro-batch sizes.

    A peak is a maximum over moments and therefore not affine in the micro-batch; every single storage is (measured
    error of the replayed peak: 0.0003 % at most over micro-batches 1 to 32). The result is the first trace in canonical
    order, and the slope of each of its storages in bytes per sample.
    """
    first, second = _aligned([first, second], [first_size, second_size])
    slopes = (second.sizes - first.sizes) / (second_size - first_size)
    bounded = _is_bounded(first)
    sizes = np.where(bounded, np.maximum(first.sizes, second.sizes), first.sizes)
    return replace(first, sizes=sizes), np.where(bounded, 0, slopes)


def _aligned(traces: Sequence[EventList], batches: Sequence[int]) -> list[EventList]:
    """Traces at several micro-batch sizes in canonical order, with the same storages."""
    found = list(map(canonical, traces))
    if not all(np.array_equal(one.events, found[0].events) for one in found):
        found = list(map(canonical, _with_equal_scratch(traces)))
    for one, batch in zip(found, batches, strict=True):
        if not np.array_equal(one.events, found[0].events):
            raise AlignmentError(
                f"the step does not allocate in the same order at micro-batch sizes {batches[0]} and {batch} "
                f"({len(found[0])} and {len(one)} events)"
            )
    return found


def _is_bounded(trace: EventList) -> npt.NDArray[np.bool_]:
    """Shape (storages,): whether a storage is scratch memory that doesn't grow with the micro-batch."""
    return np.array([name.endswith(BOUNDED_SCRATCH_SITE) for name in trace.site_names], dtype=bool)[trace.sites]


_MOST_DEGREE = 3
"""A loss over all triplets of a batch."""

_PAGE_BYTES = 4096

_MORE_TRACES = _MOST_DEGREE + 2
"""Traces that show a polynomial of that degree: one more than it needs proves it."""


def fit_sizes(first: EventList, traced: Callable[[int], EventList], first_size: int) -> tuple[EventList, Floats]:
    """Fit every storage's size from as few traces as show it, at micro-batch sizes one after the other.

    Two are enough where storages grow in proportion, as whole rows of a sample each, beside rows that are there anyway.
    One that compares samples with each other, or with such rows, too, grows with the square of the micro-batch or its
    cube. It isn't a whole number of what it grew by, or fewer than one for each sample. Further traces follow then,
    until one more changes nothing. A size that all of these show within a page of a line counts as its upper end.

    `traced` traces the step with so many more samples than the first. The result is the first trace in canonical order,
    and its slopes as `at_size` takes them.

    Raises:
        AlignmentError: If the traces differ in structure, or sizes follow no such curve.
    """
    traces = [first]
    while len(traces) < _MORE_TRACES:
        traces.append(traced(len(traces)))
        aligned = _aligned(traces, range(first_size, first_size + len(traces)))
        events, scratch, bounded = aligned[0], is_scratch(aligned[0]), _is_bounded(aligned[0])
        sizes = np.stack([one.sizes for one in aligned])
        # Differences of first and higher order at the first of equally spaced sizes; shape (orders, storages).
        found = np.stack([np.diff(sizes, order, axis=0)[0] for order in range(1, len(sizes))]).astype(np.float64)
        found[1:, scratch & (found[-1] != 0)] = 0  # kernels work in tiles
        found[:, bounded] = 0
        events = replace(events, sizes=np.where(bounded, sizes.max(axis=0), events.sizes))
        if len(traces) == 2:
            grown = (found[0] > 0) & ~scratch
            rows = events.sizes[grown] / found[0, grown]
            if np.all(rows >= first_size) and not np.any(rows % 1):
                return events, found[0]
        elif not np.any(found[-1]):
            return events, (found[0] if len(traces) == 3 else found[:-1])
    # Kernels that lay out a result themselves (oneDNN's recurrent layers) round it to pages.
    paged, steps = found[-1] != 0, np.arange(len(sizes))[:, None]
    line = (sizes[-1] - sizes[0]) / steps[-1]
    above = sizes - sizes[0] - line * steps
    if np.all(np.abs(above[:, paged]) <= _PAGE_BYTES) and np.all(sizes[:, paged] >= 8 * _PAGE_BYTES):
        raised = np.ceil(sizes[0] + above.max(axis=0)).astype(np.int64)
        found[:, paged] = 0
        found[0, paged] = line[paged]
        return replace(events, sizes=np.where(paged, raised, events.sizes)), found[:-1]
    raise AlignmentError(
        f"tensors grow faster than the micro-batch, and by no rule that the sizes {first_size} to "
        f"{first_size + _MORE_TRACES - 1} show"
    )


def at_size(events: EventList, slopes: Floats, traced_size: int, micro_batch_size: int) -> EventList:
    """Events with the sizes of another micro-batch size.

    Slopes have shape (storages,): bytes per sample. Or shape (orders, storages): differences of first and higher order
    between the sizes at `traced_size` and at those after it, for storages that grow with a power of the size.

    Raises:
        ValueError: If their bytes can't be counted in 64 bits.
    """
    sizes, weight, more = events.sizes.astype(np.float64), 1.0, float(micro_batch_size - traced_size)
    for order, differences in enumerate(np.atleast_2d(slopes)):
        weight *= (more - order) / (order + 1)
        sizes = sizes + weight * differences
    sizes = np.maximum(sizes, 0)
    if not sizes.sum() < _MOST_BYTES:
        raise ValueError(
            f"`micro_batch_size={micro_batch_size}`: the tensors of a step would take more than 4 EiB. Choose a "
            "smaller one."
        )
    return replace(events, sizes=np.rint(sizes).astype(np.int64))

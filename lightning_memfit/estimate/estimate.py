"""`estimate_step`: the peak of a profiled step by category and phase, as allocated and as reserved."""

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_memfit.device.allocator import CachingAllocator
from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.memory.kind import CUDA, DeviceKind
from lightning_memfit.profile.events import CATEGORIES, EventList, Integers
from lightning_memfit.profile.record import ModelProfile

CUDA_ROUNDING = DeviceKind.of(CUDA).rounding_bytes
"""Bytes to which torch's CUDA caching allocator rounds every request."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes by category over the traced steps, thinned to a plottable number of points."""

    events: tuple[int, ...]
    """Event index of every point."""
    categories: tuple[Category, ...]
    live_bytes: tuple[tuple[int, ...], ...]
    """One row per category, one column per point."""
    phases: tuple[tuple[int, str], ...]
    """`(first event, name)`."""


@dataclass(frozen=True)
class LargeTensor:
    """A tensor that is alive at the peak."""

    site: str
    """Module path and operator that made it."""
    category: Category
    size_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Predicted memory of one training step."""

    micro_batch_size: int
    breakdown: MemoryBreakdown
    """Bytes at the device's peak by category, with fragmentation, runtime context and host memory. Fragmentation is all
    that is reserved beyond live tensors and workspaces: cached blocks, and what blocks in use have to spare."""
    phase: str
    """Phase of the peak: forward, backward or step."""
    allocated_bytes: int
    """Peak of `torch.cuda.max_memory_allocated`, which counts whole blocks; on the CPU, of live tensor bytes."""
    reserved_bytes: int
    """Peak of `torch.cuda.max_memory_reserved`; on the CPU the same as allocated."""
    total_bytes: int
    """Memory that the device must have: reserved bytes and the runtime context, which is outside the allocator."""
    workspace_bytes: int = 0
    """Part of the allocated bytes that is workspaces of CUDA's libraries."""
    spare_bytes: int = 0
    """Part of the allocated bytes that nothing uses: a cached block is handed out whole if no more than 1 MiB of it
    would remain."""
    by_phase: dict[str, int] = field(default_factory=dict)
    """Peak of allocated bytes in every phase."""
    largest: tuple[LargeTensor, ...] = ()
    timeline: Timeline | None = None
    assumptions: tuple[str, ...] = ()
    growth_bytes_per_batch: int = 0
    """Bytes that every further batch adds, as the run keeps them; 0 where steps keep nothing."""
    batches: int = 0
    """Batches after which the figures hold, where memory grows; else those that were traced."""
    cautions: tuple[str, ...] = ()
    """What the figures don't cover, in sentences."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of live tensors at the peak, each rounded up as the allocator does."""
        return self.allocated_bytes - self.workspace_bytes - self.spare_bytes

    def beside(self, input_bytes: int) -> "Estimate":
        """The same step with more of the batch on the device all the time."""
        if not input_bytes:
            return self
        return replace(
            self,
            breakdown=self.breakdown + MemoryBreakdown.device({Category.INPUT: input_bytes}),
            allocated_bytes=self.allocated_bytes + input_bytes,
            reserved_bytes=self.reserved_bytes + input_bytes,
            total_bytes=self.total_bytes + input_bytes,
            by_phase={phase: peak + input_bytes for phase, peak in self.by_phase.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON; the timeline is left out."""
        figures = asdict(replace(self, timeline=None, breakdown=MemoryBreakdown()))
        del figures["timeline"]
        largest = [{**tensor, "category": str(tensor["category"])} for tensor in figures["largest"]]
        lists = {"assumptions": list(self.assumptions), "cautions": list(self.cautions)}
        return {**figures, **lists, "breakdown": self.breakdown.to_dict(), "largest": largest}


def estimate_step(
    profile: ModelProfile,
    micro_batch_size: int | None = None,
    runtime: RuntimeMemory | None = None,
    num_largest: int = 5,
) -> Estimate:
    """Predict the peak of a profiled training step.

    Raises:
        ValueError: If the profile doesn't know that micro-batch size.
    """
    events = profile.events_at(micro_batch_size)
    kind = profile.device_kind
    course = _Course.of(events, kind, runtime)
    peak = course.start + int(course.allocated[course.start :].argmax())
    allocated, reserved = int(course.allocated[peak]), course.reserved_bytes
    workspaces = int(course.workspaces[peak])
    tensors = int(course.live[peak]) + workspaces
    context = runtime.context_bytes if runtime is not None else 0
    breakdown = events.breakdown_at(peak, kind.rounding_bytes) + MemoryBreakdown.from_dict(profile.host)
    breakdown += MemoryBreakdown.device(
        {
            Category.TEMPORARY: workspaces,
            Category.FRAGMENTATION: reserved - tensors,
            Category.RUNTIME_CONTEXT: context,
        }
    )
    return Estimate(
        micro_batch_size=micro_batch_size or profile.micro_batch_size,
        breakdown=breakdown,
        phase=events.phase_at(peak),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        total_bytes=reserved + context,
        workspace_bytes=workspaces,
        spare_bytes=allocated - tensors,
        by_phase=_by_phase(events, course.allocated),
        largest=tuple(LargeTensor(*item) for item in events.largest_at(peak, num_largest)),
        timeline=timeline(events, kind.rounding_bytes),
        assumptions=profile.assumptions,
        growth_bytes_per_batch=0 if profile.growth is None else profile.growth.bytes_per_batch,
        batches=profile.traced_batches if profile.growth is None else profile.growth.batches,
        cautions=profile.cautions,
    )


def predict_peak_bytes(
    profile: ModelProfile,
    micro_batch_size: int,
    runtime: RuntimeMemory | None = None,
    rounding_bytes: int | None = None,
) -> int:
    """Bytes of live tensors and workspaces at the peak alone, for searches that ask for thousands of micro-batch sizes.

    It bounds what must be allocated, without what the allocator's blocks have to spare.
    """
    events = profile.events_at(micro_batch_size)
    live = events.live_bytes(rounding_bytes or profile.device_kind.rounding_bytes)
    start = _first_step(events)
    if runtime is not None:
        live = live + _levels(len(events), _workspaces(events, start, runtime))
    return int(live[start:].max())


def predict_total_bytes(profile: ModelProfile, micro_batch_size: int, runtime: RuntimeMemory | None = None) -> int:
    """Memory that the device must have: `Estimate.total_bytes` alone."""
    context = runtime.context_bytes if runtime is not None else 0
    if not profile.device_kind.has_caching_allocator:
        return predict_peak_bytes(profile, micro_batch_size, runtime) + context
    return _Course.of(profile.events_at(micro_batch_size), profile.device_kind, runtime).reserved_bytes + context


def _first_step(events: EventList) -> int:
    """First event after setup, as building the module is not part of a step."""
    return min(events.phases[0][0] if events.phases else 0, max(len(events) - 1, 0))


@dataclass(frozen=True)
class _Course:
    """Levels after every event, each of shape (events,); before `start` those of `allocated` are 0."""

    start: int
    """First event of the first step."""
    live: Integers
    """Live tensors, rounded."""
    workspaces: Integers
    """Workspaces of CUDA's libraries."""
    allocated: Integers
    """What the device's allocator counts as allocated: blocks of both, with what they have to spare."""
    reserved_bytes: int
    """Peak of what it reserves."""

    @staticmethod
    def of(events: EventList, kind: DeviceKind, runtime: RuntimeMemory | None) -> "_Course":
        """Follow a trace."""
        start, live = _first_step(events), events.live_bytes(kind.rounding_bytes)
        made = _workspaces(events, start, runtime) if runtime is not None else []
        workspaces = _levels(len(events), made)
        if not kind.has_caching_allocator:
            allocated = live + workspaces
            return _Course(start, live, workspaces, allocated, int(allocated[start:].max()))
        return _Course(start, live, workspaces, *_replayed(events, start, made))


def _replayed(events: EventList, start: int, workspaces: list[tuple[int, int]]) -> tuple[Integers, int]:
    """Replay events through the caching allocator: storages alive before the first step, then the steps in order.

    Returns:
        Allocated bytes after every event of the steps, and the peak of the reserved bytes.
    """
    allocator = CachingAllocator()
    sizes = events.sizes.tolist()
    alive_at_start = set(events.alive_at(start - 1).tolist()) if start else set()
    for storage in sorted(alive_at_start):
        allocator.malloc(storage, sizes[storage])
    allocated = [0] * len(events)
    made: dict[int, list[int]] = {}
    for at, size_bytes in workspaces:
        made.setdefault(at, []).append(size_bytes)
    for at, event in enumerate(events.events[start:].tolist(), start):
        if event > 0:
            allocator.malloc(event - 1, sizes[event - 1])
        else:
            allocator.free(-event - 1)
        for number, size_bytes in enumerate(made.get(at, ())):
            allocator.malloc(("workspace", at, number), size_bytes)
        allocated[at] = allocator.allocated_bytes
    return np.array(allocated, dtype=np.int64), allocator.peak_reserved_bytes


# --- workspaces of CUDA's libraries -----------------------------------------------------------------------------------


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
"""Operators of `aten` that run cuBLAS."""

_WITH_BIAS = ("addmm",)
"""Those of them that run cuBLASLt, which adds the bias in the same kernel."""


def _workspaces(events: EventList, start: int, runtime: RuntimeMemory) -> list[tuple[int, int]]:
    """`(event, bytes)` of workspaces, which are made by a thread's first product and stay.

    Backward has a thread of its own with a second handle of cuBLAS, and recomputes there what was checkpointed. Where a
    trace shows no product, the workspace counts from the thread's first event, as some operators hide theirs.
    """
    backward = np.zeros(len(events), dtype=bool)
    for name, first, stop in events.phase_spans:
        backward[first:stop] = name == "backward"
    threads = [~backward, backward][: runtime.num_workspaces]
    products, with_bias = (_makes(events, names) for names in (_PRODUCTS, _WITH_BIAS))
    # A weight's gradient has the weight's name: that of a product comes first in the backward of most networks.
    gradients = (events.events > 0) & (events.categories[events.storages] == CATEGORIES.index(Category.GRADIENT))
    made = []
    for of_thread in threads:
        of_thread[:start] = False
        its_own = int(of_thread.argmax()) if of_thread.any() else start
        found = np.flatnonzero(of_thread & (products | gradients))
        made.append((int(found[0]) if len(found) else its_own, runtime.workspace_bytes))
        found = np.flatnonzero(of_thread & with_bias)
        if len(found) and runtime.lt_workspace_bytes:
            made.append((int(found[0]), runtime.lt_workspace_bytes))
    return made


def _makes(events: EventList, operators: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Shape (events,): whether an event allocates the result of one of some operators."""
    named = np.array([_operator(name) in operators for name in events.site_names], dtype=bool)
    found: npt.NDArray[np.bool_] = (events.events > 0) & named[events.sites][events.storages]
    return found


def _operator(site: str) -> str:
    """Name of the operator of `aten` in a site; empty if there is none."""
    namespace, _, name = site.rpartition("| ")[2].strip().partition(".")
    return name.partition(".")[0] if namespace == "aten" else ""


def _levels(count: int, made: list[tuple[int, int]]) -> Integers:
    """Bytes of what was made up to every one of `count` events, shape (count,)."""
    steps = np.zeros(count, dtype=np.int64)
    for at, size_bytes in made:
        steps[at] += size_bytes
    return np.cumsum(steps)


def _by_phase(events: EventList, allocated: Integers) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for name, first, stop in events.phase_spans:
        if stop > first and name != "end":
            peaks[name] = max(peaks.get(name, 0), int(allocated[first:stop].max()))
    return peaks


def timeline(events: EventList, rounding_bytes: int = 1, num_points: int = 800) -> Timeline:
    """Live bytes by category at up to `num_points` moments; every stretch is shown at its highest moment."""
    rounded = events.rounded_sizes(rounding_bytes)
    signed = np.sign(events.events) * rounded[events.storages]
    categories = events.categories[events.storages]
    live = np.cumsum(signed)
    start = _first_step(events)
    edges = np.unique(np.linspace(start, len(events), num_points + 1).astype(np.int64))
    moments = [first + int(live[first:stop].argmax()) for first, stop in pairwise(edges.tolist()) if stop > first]
    present = [i for i in range(len(CATEGORIES)) if np.any(categories == i)]
    rows = [np.cumsum(np.where(categories == i, signed, 0))[moments] for i in present]
    return Timeline(
        events=tuple(moments),
        categories=tuple(CATEGORIES[i] for i in present),
        live_bytes=tuple(tuple(row.tolist()) for row in rows),
        phases=tuple((at, name) for at, name in events.phases),
    )

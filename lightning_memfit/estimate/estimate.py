"""`estimate_step`: the peak of a profiled step by category and phase, as allocated and as reserved."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from lightning_memfit.device.allocator import CachingAllocator
from lightning_memfit.device.runtime import RuntimeMemory
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.memory.kind import CUDA, DeviceKind
from lightning_memfit.profile.events import CATEGORIES, EventList
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
    """Bytes at the device's peak by category, with fragmentation, runtime context and host memory."""
    phase: str
    """Phase of the peak: forward, backward or step."""
    allocated_bytes: int
    """Peak of `torch.cuda.max_memory_allocated`; on the CPU, of live tensor bytes."""
    reserved_bytes: int
    """Peak of `torch.cuda.max_memory_reserved`; on the CPU the same as allocated."""
    total_bytes: int
    """Memory that the device must have: reserved bytes and the runtime context, which is outside the allocator."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain figures, ready for JSON; the timeline is left out."""
        return {
            "micro_batch_size": self.micro_batch_size,
            "phase": self.phase,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "total_bytes": self.total_bytes,
            "breakdown": self.breakdown.to_dict(),
            "by_phase": dict(self.by_phase),
            "largest": [
                {"site": t.site, "category": str(t.category), "size_bytes": t.size_bytes} for t in self.largest
            ],
            "assumptions": list(self.assumptions),
            "growth_bytes_per_batch": self.growth_bytes_per_batch,
            "batches": self.batches,
            "cautions": list(self.cautions),
        }


def estimate_step(
    profile: ModelProfile,
    micro_batch_size: int | None = None,
    runtime: RuntimeMemory | None = None,
    num_largest: int = 5,
) -> Estimate:
    """Predict the peak of a profiled training step.

    Args:
        profile: From `profile_module` or `measure_step`.
        micro_batch_size: Samples per micro-batch; the profiled size by default.
        runtime: Memory outside the trace on a CUDA device; None for the CPU.
        num_largest: How many of the largest tensors at the peak to list.

    Raises:
        ValueError: If the profile doesn't know that micro-batch size.
    """
    events = profile.events_at(micro_batch_size)
    kind = profile.device_kind
    live = events.live_bytes(kind.rounding_bytes)
    start = _first_step(events)
    peak = start + int(live[start:].argmax())
    breakdown = events.breakdown_at(peak, kind.rounding_bytes)
    workspace = runtime.allocated_bytes if runtime is not None else 0
    allocated = int(live[peak]) + workspace
    reserved = _reserved(events, start, workspace) if kind.has_caching_allocator else allocated
    context = runtime.context_bytes if runtime is not None else 0
    breakdown += MemoryBreakdown.from_dict(profile.host)
    breakdown += MemoryBreakdown.device(
        {
            Category.TEMPORARY: workspace,
            Category.FRAGMENTATION: reserved - allocated,
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
        by_phase=_by_phase(events, live, workspace),
        largest=tuple(LargeTensor(*item) for item in events.largest_at(peak, num_largest)),
        timeline=timeline(events, kind.rounding_bytes),
        assumptions=profile.assumptions,
        growth_bytes_per_batch=0 if profile.growth is None else profile.growth.bytes_per_batch,
        batches=profile.traced_batches if profile.growth is None else profile.growth.batches,
        cautions=profile.cautions,
    )


def predict_peak_bytes(profile: ModelProfile, micro_batch_size: int, runtime: RuntimeMemory | None = None) -> int:
    """Allocated bytes at the peak alone, for searches over micro-batch sizes, which ask thousands of times."""
    events = profile.events_at(micro_batch_size)
    live = events.live_bytes(profile.device_kind.rounding_bytes)
    return int(live[_first_step(events) :].max()) + (runtime.allocated_bytes if runtime is not None else 0)


def predict_total_bytes(profile: ModelProfile, micro_batch_size: int, runtime: RuntimeMemory | None = None) -> int:
    """Memory that the device must have: `Estimate.total_bytes` alone."""
    if not profile.device_kind.has_caching_allocator:
        return predict_peak_bytes(profile, micro_batch_size, runtime) + (runtime.context_bytes if runtime else 0)
    events = profile.events_at(micro_batch_size)
    workspace, context = (runtime.allocated_bytes, runtime.context_bytes) if runtime is not None else (0, 0)
    return _reserved(events, _first_step(events), workspace) + context


def _first_step(events: EventList) -> int:
    """First event after setup, as building the module is not part of a step."""
    return min(events.phases[0][0] if events.phases else 0, max(len(events) - 1, 0))


def _reserved(events: EventList, start: int, workspace_bytes: int) -> int:
    """Replay the events through the allocator: storages alive before the first step, then the steps in order."""
    allocator = CachingAllocator()
    if workspace_bytes:
        allocator.malloc("workspace", workspace_bytes)
    sizes = events.sizes.tolist()
    alive_at_start = set(events.alive_at(start - 1).tolist()) if start else set()
    for storage in sorted(alive_at_start):
        allocator.malloc(storage, sizes[storage])
    for event in events.events[start:].tolist():
        if event > 0:
            allocator.malloc(event - 1, sizes[event - 1])
        else:
            allocator.free(-event - 1)
    return allocator.peak_reserved_bytes


def _by_phase(events: EventList, live: np.ndarray, workspace_bytes: int) -> dict[str, int]:
    bounds = [*(at for at, _ in events.phases), len(events)]
    peaks: dict[str, int] = {}
    for (first, name), stop in zip(events.phases, bounds[1:], strict=True):
        if stop > first and name != "end":
            peaks[name] = max(peaks.get(name, 0), int(live[first:stop].max()) + workspace_bytes)
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

"""The largest moment of a run, by tier: what a machine must have free when it starts."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_memfit.memory import MemoryBreakdown, Tier

Moments = Mapping[str, MemoryBreakdown]
"""Bytes that a rank takes at each moment of a run; see `estimate.zero_moments`."""


def host_tiers(on_cpu: bool) -> tuple[Tier, ...]:
    """Tiers that are host memory: pinned and pageable, and the device's where that is the CPU."""
    return (Tier.PINNED_HOST, Tier.HOST, Tier.DEVICE) if on_cpu else (Tier.PINNED_HOST, Tier.HOST)


def host_peak(moments: Moments, on_cpu: bool) -> tuple[str, MemoryBreakdown]:
    """The moment with most host memory: its name, and its bytes."""
    tiers = host_tiers(on_cpu)
    name = max(moments, key=lambda moment: sum(moments[moment].total(tier) for tier in tiers))
    return name, moments[name]


def host_peak_bytes(moments: Moments, on_cpu: bool) -> int:
    """The most host memory that a rank takes."""
    _, peak = host_peak(moments, on_cpu)
    return sum(peak.total(tier) for tier in host_tiers(on_cpu))


def device_peak_bytes(moments: Moments) -> int:
    """The most device memory that a rank's tensors take, without what an allocator adds."""
    return max(moment.total(Tier.DEVICE) for moment in moments.values())


def largest_parts(breakdown: MemoryBreakdown, tiers: tuple[Tier, ...], number: int = 3) -> list[tuple[str, int]]:
    """What most bytes of these tiers are for: `(tier and category, bytes)`, the largest first."""
    parts = [(f"{tier} {category}".replace("_", " "), size) for tier, category, size in breakdown if tier in tiers]
    return sorted(parts, key=lambda part: -part[1])[:number]

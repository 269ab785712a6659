"""`Cost`: the work that a technique adds to training, in the units that a time model multiplies by a device's rates."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """Work that is added; negative if a technique saves it. Only `host_seconds` is already time."""

    flops: float = 0.0
    """FLOPs of matrix products on the device."""
    device_bytes: float = 0.0
    """Bytes read from and written to the device's memory."""
    host_link_bytes: float = 0.0
    """Bytes moved between device and pinned host memory, both directions together."""
    disk_bytes: float = 0.0
    """Bytes read from and written to disk."""
    host_seconds: float = 0.0
    """Seconds that one core of the CPU computes, on a core with AVX-512 (`techniques/core/step_cost.py`)."""
    kernels: float = 0.0
    """Number of kernels launched."""
    interconnect_bytes: float = 0.0
    """Bytes that each device sends to others."""
    host_bytes: float = 0.0
    """Bytes read from and written to host memory while the CPU computes."""
    staged_bytes: float = 0.0
    """Bytes read from and written to the device's memory around an exchange, which no trace of one process shows."""
    disk_written_bytes: float = 0.0
    """The part of `disk_bytes` that is written."""

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Work)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(getattr(self, field.name) * factor for field in fields(Work)))


@dataclass(frozen=True)
class Cost:
    """What a technique adds to the plain run of the same module."""

    micro_batch: Work = Work()
    """Work added to every forward and backward pass."""
    step: Work = Work()
    """Work added to every optimizer step."""
    overlap: bool = False
    """Whether `host_link_bytes` of micro-batches move while the device computes."""
    once_seconds: float = 0.0
    """Seconds before the first step, for compiling."""
    matmul_rate: str = ""
    """Rate in the device catalogue at which fp32 matrix products run instead of `float32`."""
    fused_share: float = 0.0
    """Share of the traffic of operators that don't multiply, and of their launches, that compiling saves."""
    last_micro_batch: Work = Work()
    """Work added only to the last micro-batch of a step: exchanging gradients as they are completed."""

    def __add__(self, other: Cost) -> Cost:
        moving = [cost for cost in (self, other) if cost.moves]
        return Cost(
            self.micro_batch + other.micro_batch,
            self.step + other.step,
            # Traffic of two techniques is hidden only if both hide theirs; a technique without traffic doesn't count.
            bool(moving) and all(cost.overlap for cost in moving),
            self.once_seconds + other.once_seconds,
            self.matmul_rate or other.matmul_rate,
            max(self.fused_share, other.fused_share),
            self.last_micro_batch + other.last_micro_batch,
        )

    @property
    def moves(self) -> bool:
        """Whether anything goes over the host link."""
        return bool(self.micro_batch.host_link_bytes or self.step.host_link_bytes)

"""`Cost`: the work that a technique adds to training, in the units a time model multiplies with a device's rates."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """Work that is added; negative where a technique saves it. None of it is time yet but `host_seconds`."""

    flops: float = 0.0
    """Matrix products on the device."""
    device_bytes: float = 0.0
    """Read from and written to the device's memory."""
    host_link_bytes: float = 0.0
    """Moved between device and pinned host memory, both directions together."""
    disk_bytes: float = 0.0
    """Read from and written to disk."""
    host_seconds: float = 0.0
    """Computed by one core of the CPU, as measured on one with AVX-512 (`techniques/step_cost.py`)."""
    kernels: float = 0.0
    """Kernels launched."""
    interconnect_bytes: float = 0.0
    """Sent by each device to others."""
    host_bytes: float = 0.0
    """Read from and written to host memory while the CPU computes."""
    staged_bytes: float = 0.0
    """Read from and written to the device's memory around an exchange, which no trace of one process shows."""
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
    """To every forward and backward pass."""
    step: Work = Work()
    """To every optimizer step."""
    overlap: bool = False
    """Whether `host_link_bytes` of micro-batches move while the device computes."""
    once_seconds: float = 0.0
    """Before the first step: compiling."""
    matmul_rate: str = ""
    """Rate in the device catalogue at which fp32 matrix products run instead of `float32`."""
    last_micro_batch: Work = Work()
    """To the last micro-batch of a step alone: gradients that are exchanged when they are complete."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.micro_batch + other.micro_batch,
            self.step + other.step,
            # Traffic of two techniques hides only if both hide theirs; one without traffic has no say.
            _hides(self, other),
            self.once_seconds + other.once_seconds,
            self.matmul_rate or other.matmul_rate,
            self.last_micro_batch + other.last_micro_batch,
        )

    @property
    def moves(self) -> bool:
        """Whether anything goes over the host link."""
        return bool(self.micro_batch.host_link_bytes or self.step.host_link_bytes)


def _hides(first: Cost, second: Cost) -> bool:
    moving = [cost for cost in (first, second) if cost.moves]
    return bool(moving) and all(cost.overlap for cost in moving)

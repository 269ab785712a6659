"""What a training step moves between memory and disk, how long that takes at least, and how it wears the drive."""

from __future__ import annotations

from dataclasses import dataclass

_STATE_BYTES = 4
"""Master weights, gradients and optimizer states are fp32 on disk, whatever the dtype of the weights."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per optimizer step."""

    read_bytes: int
    written_bytes: int

    def seconds(self, read_bytes_per_s: float, write_bytes_per_s: float) -> float:
        """Time of one step's transfers at a drive's rates, one after the other: a lower bound on the step.

        Pipelining can hide computation behind the transfers, but not the other way round.
        """
        return self.read_bytes / read_bytes_per_s + self.written_bytes / write_bytes_per_s

    def written_per_day(self, seconds_per_step: float) -> float:
        """Bytes written in a day of training without a pause."""
        return self.written_bytes * 86400 / seconds_per_step

    def days_of_endurance(self, terabytes_written: float, seconds_per_step: float) -> float:
        """Days of training until a drive's rated endurance is used up.

        Args:
            terabytes_written: TBW of the data sheet, in decimal terabytes.
            seconds_per_step: Time of the whole step.
        """
        return terabytes_written * 1e12 / self.written_per_day(seconds_per_step)


def step_traffic(
    swapped_states: int,
    swapped_parameters: int,
    itemsize: int = 2,
    num_states: int = 2,
    micro_batches: int = 1,
    recomputes: bool = False,
) -> Traffic:
    """Count what DeepSpeed 0.19 reads and writes.

    A step reads master weights, gradient and states (4 bytes each) and writes master weights and states back; the
    gradient was written after the backward pass. Parameters are read for every forward and every backward pass, once
    more if activations are recomputed, and written once. With Adam, bf16 and everything on disk, that is 20 bytes read
    and 18 written per parameter. A tied weight is read once more, which is not counted.

    Args:
        swapped_states: Elements of this machine's parameters whose optimizer states are on disk.
        swapped_parameters: Elements of the parameters that are on disk themselves.
        itemsize: Bytes per element of the weights.
        num_states: State tensors of the optimizer, 2 for Adam.
        micro_batches: Micro-batches per optimizer step.
        recomputes: Whether activation checkpointing runs forward passes again.
    """
    stepped = (1 + num_states) * _STATE_BYTES
    passes = 3 if recomputes else 2
    return Traffic(
        read_bytes=swapped_states * (stepped + _STATE_BYTES) + swapped_parameters * itemsize * passes * micro_batches,
        written_bytes=swapped_states * (stepped + _STATE_BYTES) + swapped_parameters * itemsize,
    )

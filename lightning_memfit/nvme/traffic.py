"""What a training step moves between memory and disk."""

from dataclasses import dataclass

_STATE_BYTES = 4
"""Master weights, gradients and optimizer states are fp32 on disk, whatever the dtype of the weights."""


@dataclass(frozen=True)
class Traffic:
    """Bytes per optimizer step."""

    read_bytes: int
    written_bytes: int


def step_traffic(swapped_states: int, swapped_parameters: int, itemsize: int = 2, micro_batches: int = 1) -> Traffic:
    """Count what DeepSpeed 0.19 reads and writes.

    A step of Adam reads master weights, gradient and two states (4 bytes each) and writes master weights and states
    back; the gradient was written after the backward pass. Parameters are read for every forward and every backward
    pass, and written once. With bf16 and everything on disk, that is 20 bytes read and 18 written per parameter. A tied
    weight is read once more, which is not counted.

    Args:
        swapped_states: Elements of this machine's parameters whose optimizer states are on disk.
        swapped_parameters: Elements of the parameters that are on disk themselves.
        itemsize: Bytes per element of the weights.
        micro_batches: Micro-batches per optimizer step.
    """
    stepped = 4 * _STATE_BYTES
    return Traffic(
        read_bytes=swapped_states * stepped + swapped_parameters * itemsize * 2 * micro_batches,
        written_bytes=swapped_states * stepped + swapped_parameters * itemsize,
    )

"""Count the processes of a run that see different samples."""

from typing import Any


def ranks_together(trainer: Any) -> int:
    """Number of neighbouring ranks that compute one model on one batch together: 1 without tensor parallelism."""
    return int(getattr(trainer.strategy, "tensor_parallel_size", 1))


def num_replicas(trainer: Any) -> int:
    """Number of ranks, or of groups of ranks that compute together, which have different samples."""
    return int(trainer.world_size) // ranks_together(trainer)

"""Count the processes of a run that see different samples."""

from typing import Any


def ranks_together(trainer: Any) -> int:
    """Number of neighbouring ranks that compute one model on one batch together: 1 without tensor parallelism."""
    strategy = trainer.strategy
    # Lightning's `ModelParallelStrategy` has no public name for it, and by default takes the devices of a machine.
    size = getattr(strategy, "tensor_parallel_size", getattr(strategy, "_tensor_parallel_size", 1))
    return int(strategy.num_processes if size == "auto" else size)


def num_replicas(trainer: Any) -> int:
    """Number of ranks, or of groups of ranks that compute together, which have different samples."""
    return int(trainer.world_size) // ranks_together(trainer)

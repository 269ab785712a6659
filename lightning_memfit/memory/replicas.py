"""How many processes of a run see samples of their own."""

from typing import Any


def ranks_together(trainer: Any) -> int:
    """Neighbouring ranks that compute one model on one batch together: 1 without tensor parallelism."""
    return int(getattr(trainer.strategy, "tensor_parallel_size", 1))


def num_replicas(trainer: Any) -> int:
    """Ranks, or groups of ranks that compute together, each of which has samples of its own."""
    return int(trainer.world_size) // ranks_together(trainer)

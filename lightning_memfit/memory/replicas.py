"""Count the processes of a run that see different samples, and note which loop sums their gradients."""

from typing import Any
from weakref import WeakSet

from torch.nn.parallel import DistributedDataParallel

_summed_by_loop: "WeakSet[DistributedDataParallel]" = WeakSet()


def sum_by_loop(wrapped: DistributedDataParallel) -> None:
    """Note that the loop sums a module's gradients itself, over ranks that may train different weights.

    DDP then synchronizes nothing, in forward neither. Its own flags don't tell: it clears them after passes without
    gradients and with `no_sync` as well.
    """
    wrapped.require_forward_param_sync = False
    _summed_by_loop.add(wrapped)


def is_summed_by_loop(wrapped: DistributedDataParallel) -> bool:
    """Whether `sum_by_loop` was said of a wrapped module."""
    return wrapped in _summed_by_loop


def ranks_together(trainer: Any) -> int:
    """Number of neighbouring ranks that compute on one batch together: 1 without tensor or sequence parallelism."""
    strategy = trainer.strategy
    # Lightning's `ModelParallelStrategy` has no public name for it, and by default takes the devices of a machine.
    size = getattr(strategy, "tensor_parallel_size", getattr(strategy, "_tensor_parallel_size", 1))
    size = strategy.num_processes if size == "auto" else size
    return int(size) * int(getattr(strategy, "sequence_parallel_size", 1))


def num_replicas(trainer: Any) -> int:
    """Number of ranks, or of groups of ranks that compute together, which have different samples."""
    return int(trainer.world_size) // ranks_together(trainer)

"""Strategies for more than one device, and for models beyond one: importing this registers them by name."""

from lightning_memfit.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_memfit.strategies.checkpoints import read_folders_in_load_from_checkpoint
from lightning_memfit.strategies.data_parallel import DataParallelStrategy
from lightning_memfit.strategies.fully_sharded import FullyShardedStrategy
from lightning_memfit.strategies.registry import register
from lightning_memfit.strategies.zero import ZeroStrategy
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy

register()
read_folders_in_load_from_checkpoint()

__all__ = [
    "AtomicCheckpointIO",
    "DataParallelStrategy",
    "FullyShardedStrategy",
    "ZeroInfinityStrategy",
    "ZeroStrategy",
]

"""Strategies for more than one device, and for models beyond one: importing this registers them by name.

Each is imported on first use, so that ZeRO doesn't load what shards by torch, nor the other way round.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_memfit.strategies.checkpoint_io import AtomicCheckpointIO, read_folders_in_load_from_checkpoint
from lightning_memfit.strategies.registry import register

if TYPE_CHECKING:
    from lightning_memfit.strategies.data_parallel import DataParallelStrategy as DataParallelStrategy
    from lightning_memfit.strategies.fully_sharded import FullyShardedStrategy as FullyShardedStrategy
    from lightning_memfit.strategies.zero import ZeroStrategy as ZeroStrategy
    from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy as ZeroInfinityStrategy

_MODULES = {
    "DataParallelStrategy": "data_parallel",
    "FullyShardedStrategy": "fully_sharded",
    "ZeroInfinityStrategy": "zero_infinity",
    "ZeroStrategy": "zero",
}

__all__ = ["AtomicCheckpointIO", "register", *_MODULES]

if not TYPE_CHECKING:  # a type checker would take every name that it doesn't know for `object`

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


register()
read_folders_in_load_from_checkpoint()

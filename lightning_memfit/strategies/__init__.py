"""Strategies for more than one device, and for models beyond one: importing this registers them by name."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_memfit.strategies.data_parallel import DataParallelStrategy
from lightning_memfit.strategies.fully_sharded import FullyShardedStrategy
from lightning_memfit.strategies.zero import ZeroStrategy
from lightning_memfit.strategies.zero_infinity import ZeroInfinityStrategy

__all__ = ["DataParallelStrategy", "FullyShardedStrategy", "ZeroInfinityStrategy", "ZeroStrategy"]


def register() -> None:
    """Make the strategies known to `Trainer(strategy=...)` by name. Safe to call twice."""
    for stage, what in ((1, "optimizer states"), (2, "and gradients"), (3, "and parameters")):
        StrategyRegistry.register(
            f"memfit_zero_{stage}", ZeroStrategy, f"ZeRO-{stage}: shard {what}", override=True, stage=stage
        )
    StrategyRegistry.register(
        "memfit_zero_offload",
        ZeroStrategy,
        "ZeRO-2 with optimizer states and step on the host",
        override=True,
        stage=2,
        offload_optimizer=True,
    )
    StrategyRegistry.register("memfit_ddp", DataParallelStrategy, "a whole model on every device", override=True)
    StrategyRegistry.register("memfit_fsdp2", FullyShardedStrategy, "FSDP2, block by block", override=True)
    StrategyRegistry.register(
        "memfit_zero_infinity", ZeroInfinityStrategy, "ZeRO-3 with all states on an NVMe drive", override=True
    )


register()

"""By what the ranks of a run agree, according to its strategy."""

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import FSDPModule

from lightning_memfit.memory.replicas import ranks_together
from lightning_memfit.reliability.consensus import Apart, RankConsensus
from lightning_memfit.reliability.upstream.deepspeed import shards_weights


def consensus_for(trainer: Trainer, is_evaluation: bool = False) -> RankConsensus:
    """Return what the ranks of a run agree by, once the strategy has set the module up; all ranks call this together.

    Args:
        trainer: The trainer.
        is_evaluation: Whether it is for evaluation alone, in which ranks agree only if they communicate in each batch.
    """
    strategy, module, world_size = trainer.strategy, trainer.lightning_module, trainer.world_size
    is_zero = isinstance(strategy, DeepSpeedStrategy)
    is_sharded = any(isinstance(child, FSDPModule) for child in module.modules())
    if is_zero and is_evaluation and not shards_weights(trainer):
        return RankConsensus(1)
    if is_zero or is_sharded:
        # Most runs have one device, or DDP.
        from lightning_memfit.fitting.recovery.lockstep import Alone, Lockstep, Unrepeatable
        from lightning_memfit.fitting.upstream.torch import FORGETS_PASSES

        if is_zero:
            return Unrepeatable(1 if is_evaluation else world_size, module)
        if world_size == 1:
            return Alone(1, module)
        if FORGETS_PASSES and _ranks_together(strategy) in (1, ranks_together(trainer)):
            return Lockstep(world_size, module)
    is_plain = world_size == 1 or isinstance(strategy, DDPStrategy)
    world_size = 1 if is_evaluation else world_size
    return RankConsensus(world_size) if is_plain else Apart(world_size, module)


def _ranks_together(strategy: Strategy) -> int:
    """Ranks that compute one model together, and communicate as they do so."""
    if not isinstance(strategy, ModelParallelStrategy):
        return 1
    return int(strategy.device_mesh["tensor_parallel"].size())

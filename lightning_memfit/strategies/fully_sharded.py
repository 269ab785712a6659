"""`FullyShardedStrategy`: FSDP2 for any module, block by block, after everything that changes the blocks."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_memfit.checkpointing.blocks import find_blocks, select_blocks


class FullyShardedStrategy(ModelParallelStrategy):
    """Shard parameters, gradients and optimizer states with torch's FSDP2; a block is gathered while it computes.

    Lightning's strategy leaves the sharding to the module's `configure_model`. Here it follows by itself, after
    `configure_model` and whatever techniques changed there: checkpointing lies inside a sharded block, so that the
    recomputation finds the block gathered. A module that has sharded itself is left as it is.

    Args:
        sharding_size: Ranks that one copy of the model is divided among (hybrid sharding): the copies' gradients are
            averaged. Chosen as the ranks of one machine, gathering stays within machines. By default all ranks.
        reshard_after_forward: False keeps blocks gathered until their backward: more memory, less communication.
        blocks: Class name or dotted names of what is sharded as a unit; by default repeated blocks are found.
        save_distributed_checkpoint: A checkpoint is a folder of shards; False gathers it into one file on rank 0.
        process_group_backend: Backend of `torch.distributed`; by default nccl on CUDA, gloo on the CPU.
        timeout: How long a collective waits.
    """

    strategy_name = "memfit_fsdp2"

    def __init__(
        self,
        sharding_size: int | None = None,
        reshard_after_forward: bool = True,
        blocks: str | Sequence[str] | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sharding_size = sharding_size
        self.reshard_after_forward = reshard_after_forward
        self.blocks = blocks

    def setup_environment(self) -> None:
        """Start communication; all ranks are data parallel."""
        ranks = self.num_processes * self.num_nodes
        if self.sharding_size is not None and (self.sharding_size < 1 or ranks % self.sharding_size):
            raise MisconfigurationException(
                f"`sharding_size={self.sharding_size}` must divide the {ranks} ranks of the run."
            )
        self._data_parallel_size = ranks
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then as Lightning does."""
        module = self.lightning_module
        assert module is not None
        if not any(isinstance(child, FSDPModule) for child in module.modules()):
            self._shard(module)
        super().setup(trainer)

    def _shard(self, module: nn.Module) -> None:
        groups = find_blocks(module) if self.blocks is None else select_blocks(module, self.blocks)
        mesh = self._mesh()
        for block in chain.from_iterable(group.modules for group in groups):
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        fully_shard(module, mesh=mesh)
        units = ", ".join(f"{len(group.modules)} x {group.class_name}" for group in groups) or "the module as a whole"
        rank_zero_info(f"{type(self).__name__}: sharded {units} over mesh {tuple(mesh.shape)}.")

    def _mesh(self) -> DeviceMesh:
        if self.sharding_size in (None, self.world_size):
            return self.device_mesh["data_parallel"]
        shape = (self.world_size // self.sharding_size, self.sharding_size)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))

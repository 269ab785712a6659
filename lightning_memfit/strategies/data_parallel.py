"""`DataParallelStrategy`: Lightning's DDP with settings that avoid wasting memory."""

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_memfit.strategies.checkpoints import consolidated, is_sharded
from lightning_memfit.strategies.launched import check_num_nodes


class DataParallelStrategy(DDPStrategy):
    """A whole copy of the model on every device; gradients are averaged while they are computed.

    Gradients are views of the communication buckets, which saves one copy of all gradients over Lightning's default.

    Args:
        gradient_as_bucket_view: Keep gradients inside the buckets.
        static_graph: Tell DDP that the same parameters take part in every step, which it can use; needed for
            reentrant checkpointing.
        find_unused_parameters: Search the graph in every step for parameters that take no part.
        bucket_cap_mb: Size of a bucket in MiB.
        options: Further arguments of `DDPStrategy`.
    """

    strategy_name = "memfit_ddp"

    def __init__(
        self,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        **options: Any,
    ) -> None:
        super().__init__(
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb=bucket_cap_mb,
            **options,
        )

    @override
    def _configure_launcher(self) -> None:
        check_num_nodes(self.cluster_environment, self.num_processes, self.num_nodes)
        super()._configure_launcher()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file; for evaluation, also a sharded strategy's folder, whose weights are put together in host memory.

        Raises:
            MisconfigurationException: If training is to go on from such a folder, whose optimizer states are in shards.
        """
        if not is_sharded(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            raise MisconfigurationException(
                f"`ckpt_path={str(checkpoint_path)!r}` is a folder that a sharded strategy wrote, and "
                f"`{self.strategy_name}` can't go on with its optimizer states. Resume with the strategy that wrote "
                "it; or start a new optimizer from the weights, which "
                "`lightning_memfit.strategies.checkpoints.consolidated` reads and `memfit export` writes for a "
                "model's `pretrained`."
            )
        return consolidated(checkpoint_path)

"""`DataParallelStrategy`: Lightning's DDP with settings that avoid wasting memory."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy


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

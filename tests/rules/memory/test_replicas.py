from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_memfit.memory.replicas import num_replicas, ranks_together
from lightning_memfit.strategies import FullyShardedStrategy


def four_ranks_of_two_machines(strategy: Any) -> Any:
    strategy._num_nodes, strategy.parallel_devices = 2, [None, None]
    return SimpleNamespace(strategy=strategy, world_size=4)


@pytest.mark.parametrize(
    ("strategy", "together"),
    [
        (DDPStrategy(), 1),
        (FullyShardedStrategy(), 1),
        (FullyShardedStrategy(tensor_parallel_size=4), 4),
        (ModelParallelStrategy(), 2),  # by default the devices of a machine
        (ModelParallelStrategy(tensor_parallel_size=1), 1),
        (ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=4), 4),
    ],
)
def test_ranks_that_compute_on_one_batch_together_are_one(strategy: Any, together: int) -> None:
    trainer = four_ranks_of_two_machines(strategy)
    assert (ranks_together(trainer), num_replicas(trainer)) == (together, 4 // together)

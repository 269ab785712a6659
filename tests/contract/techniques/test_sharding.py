"""Traffic of strategies, in bytes that a rank sends and gets."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_memfit.memory.parameters import ParameterInfo
from lightning_memfit.techniques.core.sharding import Sharding

PROFILE: Any = SimpleNamespace(device="cuda", parameters=(ParameterInfo("weight", 1000, 4, shape=(1000,)),))


@pytest.mark.parametrize(
    ("stage", "each_micro_batch", "last_one", "after"),
    [
        (0, 0, 2, 0),
        # A run of DeepSpeed 0.19.8 on 2 ranks, stage 2, two micro-batches in a step, 524,288 bytes of gradients:
        # `all_reduce` of 1,048,576 bytes, which counts twice, and `all_gather` of 524,288.
        (1, 0, 2, 1),
        (2, 2, 0, 1),
        (3, 3, 0, 0),
    ],
)
def test_what_a_ring_of_four_ranks_moves(stage: int, each_micro_batch: int, last_one: int, after: int) -> None:
    cost = Sharding(stage, deepspeed=stage > 0).cost(PROFILE, 4, "bf16-mixed")
    unit = 1000 * (4 if stage == 0 else 2) * 3 / 4
    parts = (cost.micro_batch, cost.last_micro_batch, cost.step)
    assert [part.interconnect_bytes / unit for part in parts] == [each_micro_batch, last_one, after]

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_memfit.reliability.upstream.deepspeed import ZeroEngine, held_weight


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({}, False), ({"swap_optimizer": True}, True), ({"params_in_nvme_and_cpu": True}, True)],
)
def test_what_is_on_disk_is_known(attributes: dict[str, bool], expected: bool) -> None:
    assert ZeroEngine(SimpleNamespace(optimizer=SimpleNamespace(**attributes))).is_on_disk is expected


def test_a_shard_is_what_a_rank_holds() -> None:
    parameter = nn.Parameter(torch.empty(0))
    assert held_weight(parameter) is parameter
    parameter.ds_tensor = torch.ones(3)
    assert held_weight(parameter) is parameter.ds_tensor

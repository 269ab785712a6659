from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memfit.device.host import probe_host
from lightning_memfit.memory import MIB
from lightning_memfit.strategies import host_check
from lightning_memfit.strategies.host_check import require_host_memory

ZERO_2 = {"stage": 2, "reduce_bucket_size": 2**20}
OFFLOADED = ZERO_2 | {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


@pytest.fixture
def model() -> nn.Module:
    """16 million parameters: in bf16 with Adam 14 bytes of each stay, and up to 8 come on top."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))


def require(model: nn.Module, zero: dict, make: type = torch.optim.AdamW, ranks: int = 1, on_cpu: bool = True) -> None:
    require_host_memory(model, make(model.parameters(), lr=1e-3), zero, "bf16-true", ranks, ranks, on_cpu)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(probe_host(), available_bytes=200 * MIB)
    monkeypatch.setattr(host_check, "probe_host", lambda: free)


@pytest.mark.usefixtures("small_machine")
def test_refused_with_what_is_needed_and_the_fix(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"MiB needed by 1 rank in the moment 'update'") as caught:
        require(model, ZERO_2)
    found = str(caught.value)
    assert "264.00 MiB free" in found  # 200 of the machine, and 64 that the fp32 weights take now
    assert "192.00 MiB device optimizer state" in found
    assert "`memfit_zero_infinity`" in found


@pytest.mark.usefixtures("small_machine")
def test_offloading_counts_on_a_gpu_too(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="host optimizer state"):
        require(model, OFFLOADED, on_cpu=False)
    require(model, ZERO_2, on_cpu=False)  # nothing of it is host memory


@pytest.mark.usefixtures("small_machine")
def test_optimizers_whose_states_are_unknown_are_let_through(model: nn.Module) -> None:
    require(model, ZERO_2, torch.optim.SGD)
    require_host_memory(model, None, ZERO_2, "bf16-true", 1, 1, True)


def test_let_through_where_there_is_room(model: nn.Module) -> None:
    require(model, ZERO_2)
    require(model, OFFLOADED, ranks=2)

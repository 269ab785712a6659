"""What is held, by category and tier, every storage once."""

import inspect

import pytest
import torch
from torch import nn

from lightning_memfit.measure.resident_tensors import held_bytes
from lightning_memfit.memory import Category, Tier
from lightning_memfit.memory.host import keep_on_host
from lightning_memfit.optim.host_master import HostMaster

CPU = torch.device("cpu")


def trained(module: nn.Module, **options) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters(), **options)
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_buffers_gradients_and_states() -> None:
    module = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, affine=False).eval())
    optimizer = trained(module)
    assert held_bytes(module, [optimizer], CPU).by_category() == {
        Category.PARAMETER: 128,
        Category.BUFFER: 2 * 16 + 8,  # mean, variance, number of batches
        Category.GRADIENT: 128,
        Category.OPTIMIZER_STATE: 2 * 128 + 4,  # a step of one element
    }


def test_what_stands_for_host_memory_is_on_the_host() -> None:
    module = nn.Linear(8, 4, bias=False)
    optimizer = trained(module)
    for value in optimizer.state[module.weight].values():
        keep_on_host(value, Category.OPTIMIZER_STATE)
    held = held_bytes(module, [optimizer], CPU)
    assert held.total(Tier.DEVICE) == 2 * 128
    assert held.by_category(Tier.HOST) == {Category.OPTIMIZER_STATE: 2 * 128 + 4}


def test_masters_gradients_states_and_values_of_frozen_weights_are_on_the_host() -> None:
    """Neither the module nor its optimizer has them between steps."""
    module = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    module[1].weight.requires_grad_(False)
    exact = {parameter: parameter.detach().clone() for parameter in module.parameters()}
    optimizer = torch.optim.Adam([module.bfloat16()[0].weight])
    masters = HostMaster(optimizer, exact)
    del exact
    before = held_bytes(module, [optimizer], CPU)
    assert before.by_category(Tier.HOST) == {Category.PARAMETER: 128 + 32}
    module(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    held = held_bytes(module, [optimizer], CPU)
    assert held.by_category() == {Category.PARAMETER: 64 + 16}
    expected = {Category.PARAMETER: 128 + 32, Category.GRADIENT: 128, Category.OPTIMIZER_STATE: 2 * 128 + 4}
    assert held.by_category(Tier.HOST) == expected
    assert held_bytes(nn.Linear(8, 4), [], CPU).total(Tier.HOST) == 0  # of another module
    masters.remove()
    del masters
    held = held_bytes(module, [optimizer], CPU)
    assert held.by_category(Tier.HOST) == {Category.OPTIMIZER_STATE: 2 * 128 + 4}


def test_weights_that_wait_beside_quantized_ones_are_on_the_host() -> None:
    module = nn.Linear(8, 4, bias=False)
    waiting = torch.zeros(32)
    keep_on_host(waiting, Category.PARAMETER, module.weight)
    assert held_bytes(module, [], CPU).by_category(Tier.HOST) == {Category.PARAMETER: 128}


def test_copies_of_a_stage_that_empties_its_groups_count() -> None:
    """As DeepSpeed's stage 3 does between steps."""
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    assert "self.fp32_partitioned_groups_flat" in inspect.getsource(stage3), "DeepSpeed renamed what is read"
    module = nn.Linear(8, 4, bias=False)

    class Wrapper:
        optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1)
        fp32_partitioned_groups_flat = (torch.zeros(32),)

    held = held_bytes(module, [Wrapper()], CPU).by_category()
    assert held == {Category.PARAMETER: 128, Category.OPTIMIZER_STATE: 128}


def test_shards_of_emptied_parameters_count() -> None:
    module = nn.Linear(8, 4, bias=False)
    module.weight.ds_tensor = torch.zeros(16)  # half of it, as DeepSpeed's stage 3 has it on two ranks
    module.weight.data = torch.empty(0)
    assert held_bytes(module, [], CPU).by_category() == {Category.PARAMETER: 64}

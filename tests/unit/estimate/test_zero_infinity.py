from functools import cache

import pytest
import torch

from lightning_memfit.estimate.states import model_states
from lightning_memfit.estimate.zero_infinity import checkpoint_bytes, zero_infinity_states
from lightning_memfit.memory import GIB, Category, Tier
from lightning_memfit.nvme.sizing import AioSettings, InfinitySizes, infinity_sizes
from lightning_memfit.profile.record import ParameterInfo
from lightning_memfit.profile.step import parameter_table


@cache
def gpt2_xl() -> tuple[ParameterInfo, ...]:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return parameter_table(GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25)).bfloat16())


def sizes_of(parameters: tuple[ParameterInfo, ...], world_size: int = 1, itemsize: int = 2) -> InfinitySizes:
    distinct = [parameter for parameter in parameters if not parameter.shared_with]
    groups = [[p.numel for p in distinct if p.dims > 1], [p.numel for p in distinct if p.dims == 1]]
    return infinity_sizes(groups, world_size, itemsize)


@pytest.mark.parametrize(("itemsize", "per_parameter"), [(2, 18), (4, 20)])
def test_disk_takes_eighteen_bytes_per_parameter_in_bf16_and_twenty_in_fp32(itemsize: int, per_parameter: int) -> None:
    parameters = gpt2_xl()
    total = sum(p.numel for p in parameters if not p.shared_with)
    untied = tuple(p for p in parameters if not p.shared_with)
    states = zero_infinity_states(untied, sizes_of(parameters, itemsize=itemsize))
    assert states.total(Tier.DISK) / total == pytest.approx(per_parameter, rel=2e-3)
    assert checkpoint_bytes(sizes_of(parameters)) / total == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize("world_size", [1, 4])
def test_agrees_with_the_papers_bytes_where_they_say_something(world_size: int) -> None:
    parameters = gpt2_xl()
    total = sum(p.numel for p in parameters if not p.shared_with)
    untied = tuple(p for p in parameters if not p.shared_with)
    ours = zero_infinity_states(untied, sizes_of(parameters, world_size), world_size)
    paper = model_states(total, "half-master", "adamw", 3, world_size, "nvme", "nvme")
    for category in (Category.PARAMETER, Category.OPTIMIZER_STATE):
        everywhere = sum(ours.get(category, tier) for tier in Tier)
        assert everywhere == pytest.approx(paper.get(category, Tier.DISK), rel=1e-3)
        assert ours.get(category, Tier.DISK) > 0.99 * everywhere


def test_beside_deepspeeds_own_estimator() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as theirs

    parameters = gpt2_xl()
    total = sum(p.numel for p in parameters if not p.shared_with)
    cpu_bytes, gpu_bytes, _ = theirs(total, 50257 * 1600, 1, 1, True, True, True, additional_buffer_factor=1.0)
    ours = zero_infinity_states(tuple(p for p in parameters if not p.shared_with), sizes_of(parameters))
    below = sum(ours.total(tier) for tier in Tier if tier is not Tier.DEVICE)
    assert cpu_bytes == 18 * total
    # Theirs knows no disk, no buffers between the tiers, and no second, half-precision copy of the gradients.
    buffers = ours.total(Tier.PINNED_HOST) + 2 * total
    assert below - buffers == pytest.approx(cpu_bytes, rel=3e-3)
    # A whole largest parameter and its gradient; ours adds the small parameters that stay there.
    assert ours.total(Tier.DEVICE) == pytest.approx(gpu_bytes, rel=1e-2)


def test_gpt2_xl_leaves_little_for_the_host_but_the_gradients() -> None:
    parameters = gpt2_xl()
    states = zero_infinity_states(parameters, sizes_of(parameters))
    assert states.get(Category.GRADIENT, Tier.HOST) / GIB == pytest.approx(2.9, abs=0.1)
    assert states.total(Tier.HOST) + states.total(Tier.PINNED_HOST) < 5.1 * GIB


def test_what_is_too_small_stays_in_memory() -> None:
    table = (ParameterInfo("w", 2**18, 2, shape=(2**9, 2**9)), ParameterInfo("b", 8, 2, shape=(8,)))
    sizes = infinity_sizes([[2**18], [8]], itemsize=2)
    states = zero_infinity_states(table, sizes)
    assert states.by_category(Tier.DISK) == {
        Category.OPTIMIZER_STATE: 3 * 2**20,  # exactly 1 MiB each in fp32
        Category.GRADIENT: 2**20,
    }
    assert states.get(Category.PARAMETER, Tier.HOST) == 2**19  # half a MiB in bf16
    assert states.get(Category.PARAMETER, Tier.DEVICE) == 16
    larger_blocks = infinity_sizes([[2**18], [8]], itemsize=2, aio=AioSettings(block_size=2**21))
    assert zero_infinity_states(table, larger_blocks).total(Tier.DISK) == 0


def test_either_alone() -> None:
    parameters = gpt2_xl()
    sizes = sizes_of(parameters)
    optimizer = zero_infinity_states(parameters, sizes, offload_parameters=False)
    weights = zero_infinity_states(parameters, sizes, offload_optimizer=False)
    assert optimizer.get(Category.PARAMETER, Tier.DISK) == 0
    assert optimizer.get(Category.PARAMETER, Tier.DEVICE) > 3e9
    assert weights.by_category(Tier.DISK).keys() == {Category.PARAMETER}
    assert weights.get(Category.OPTIMIZER_STATE, Tier.DEVICE) > 18e9  # nobody asked to take it off the device
    assert weights.get(Category.GRADIENT, Tier.HOST) == 0
    assert optimizer.total(Tier.PINNED_HOST) == sizes.optimizer_buffer_bytes
    assert weights.total(Tier.PINNED_HOST) == sizes.param_buffer_bytes


def test_frozen_weights_have_no_states_and_of_tied_ones_only_a_file_stays() -> None:
    table = (
        ParameterInfo("frozen", 2**20, 2, trainable=False, shape=(2**20,)),
        ParameterInfo("trained", 2**20, 2, shape=(2**20,)),
        ParameterInfo("tied", 2**20, 2, shared_with="trained", shape=(2**20,)),
    )
    states = zero_infinity_states(table, infinity_sizes([[2**20]], itemsize=2))
    assert states.get(Category.PARAMETER, Tier.DISK) == 3 * 2 * 2**20
    assert states.get(Category.OPTIMIZER_STATE, Tier.DISK) == 3 * 4 * 2**20
    assert states.get(Category.GRADIENT, Tier.DISK) == 4 * 2**20

from functools import cache

import pytest
import torch

from lightning_memfit.estimate.deepspeed_sizes import (
    AioSettings,
    choose_sub_group_size,
    infinity_sizes,
    sub_groups,
    zero_sizes,
)
from lightning_memfit.memory import MIB


@cache
def gpt2_xl() -> tuple[dict[str, tuple[int, ...]], tuple[tuple[int, ...], ...]]:
    """Shapes, and elements by parameter group with and without weight decay, in the order of the module."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    numels = [parameter.numel() for parameter in model.parameters()]
    dims = [parameter.dim() for parameter in model.parameters()]
    decayed = tuple(n for n, d in zip(numels, dims, strict=True) if d > 1)
    return shapes, (decayed, tuple(n for n, d in zip(numels, dims, strict=True) if d == 1))


def test_gpt2_xl_pins_a_tenth_of_what_the_defaults_pin() -> None:
    _, groups = gpt2_xl()
    total, embedding = sum(map(sum, groups)), 50257 * 1600
    assert total == 1_557_611_200
    sizes = infinity_sizes(groups, itemsize=2)
    assert sizes.largest_sub_group == embedding  # nothing can make it smaller
    assert len(sizes.sub_groups) == 23
    assert sum(sizes.sub_groups) == total
    assert sizes.param_buffer_size == embedding
    # the default: one sub-group for each parameter group
    default = 4 * 4 * sum(groups[0])
    assert default == pytest.approx(24.9e9, rel=0.01)
    assert sizes.optimizer_buffer_bytes == pytest.approx(default / 19.4, rel=0.01)
    assert sizes.optimizer_buffer_bytes + sizes.param_buffer_bytes == pytest.approx(2.25e9, rel=0.01)


@pytest.mark.parametrize("world_size", [1, 3, 8, 64])
def test_sub_groups_never_exceed_the_largest_parameter_or_the_useful_size(world_size: int) -> None:
    _, groups = gpt2_xl()
    partitions = [[-(-n // world_size) for n in group] for group in groups]
    size = choose_sub_group_size(partitions)
    largest = max(sum(sub) for group in partitions for sub in sub_groups(group, size))
    assert largest <= max(max(map(max, partitions)), 1 << 25)
    # the next larger choice would not do, unless everything is one sub-group already
    bigger = max(sum(sub) for group in partitions for sub in sub_groups(group, 2 * size))
    assert bigger > largest or len(sub_groups(partitions[0], size)) == 1


def test_sub_groups_agree_with_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    from types import SimpleNamespace

    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    _, groups = gpt2_xl()
    size = choose_sub_group_size(groups)
    for group in groups:
        fake = [SimpleNamespace(numel=n, partition_numel=lambda n=n: n) for n in group]
        theirs = DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups(SimpleNamespace(sub_group_size=size), fake)
        assert [[p.numel for p in sub] for sub in theirs] == sub_groups(group, size)


def test_config_is_what_deepspeed_reads() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    from deepspeed.runtime.zero.config import get_zero_config

    config = infinity_sizes([[MIB]], aio=AioSettings(128 << 10, 32, 2)).config("/somewhere")
    zero = get_zero_config(config)
    assert str(zero.offload_param.nvme_path) == "/somewhere"
    assert zero.offload_optimizer.device == "nvme"
    assert (zero.sub_group_size, zero.prefetch_bucket_size, zero.max_reuse_distance) == (1 << 25, 0, 0)
    aio = get_aio_config(config)
    assert (aio["block_size"], aio["queue_depth"], aio["intra_op_parallelism"]) == (128 << 10, 32, 2)
    assert "offload_param" not in infinity_sizes([[MIB]]).config("/x", parameters=False)["zero_optimization"]


# --- states in memory ---

XL_TOTAL, XL_LARGEST = 1_557_611_200, 50257 * 1600
XL_SIZES = [XL_LARGEST] * 19 + [XL_TOTAL - 19 * XL_LARGEST]


def test_sizes_follow_the_model():
    section = zero_sizes({"stage": 3}, XL_SIZES, world_size=2)
    assert section["reduce_bucket_size"] == section["allgather_bucket_size"] == XL_LARGEST
    assert section["sub_group_size"] == -(-XL_TOTAL // 32)
    assert section["stage3_max_live_parameters"] == XL_TOTAL // 4
    assert section["stage3_prefetch_bucket_size"] <= section["stage3_max_live_parameters"] // 2


def test_sizes_stay_within_bounds():
    huge = zero_sizes({"stage": 3}, [10**9] * 1000, world_size=1)
    assert huge["reduce_bucket_size"] == 200_000_000
    assert huge["sub_group_size"] == 100_000_000
    tiny = zero_sizes({"stage": 3}, [10] * 10, world_size=1)
    assert min(tiny[name] for name in ("reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters")) == 2**20


def test_buckets_are_even_as_deepspeed_aligns_them() -> None:
    sizes = zero_sizes({"stage": 1}, [1_505_503, 1_505_503, 988_994], world_size=2)
    assert sizes["allgather_bucket_size"] == sizes["reduce_bucket_size"] == 1_505_504

import pytest
import torch
from torch import nn

from lightning_memfit.strategies.zero_sizes import ModelSizes, sized

GPT2_XL = ModelSizes(total=1_557_611_200, largest=50257 * 1600)


def test_partitioned_parameters_count_in_full():
    whole, partitioned = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(0))
    partitioned.ds_numel = 100
    assert ModelSizes.of([whole, partitioned]) == ModelSizes(total=112, largest=100)
    with pytest.raises(ValueError, match="no parameters"):
        ModelSizes.of([])


def test_sizes_follow_the_model():
    section = sized({"stage": 3}, GPT2_XL, world_size=2)
    assert section["reduce_bucket_size"] == section["allgather_bucket_size"] == GPT2_XL.largest
    assert section["sub_group_size"] == -(-GPT2_XL.total // 32)
    assert section["stage3_max_live_parameters"] == GPT2_XL.total // 4
    assert section["stage3_prefetch_bucket_size"] <= section["stage3_max_live_parameters"] // 2


def test_sizes_stay_within_bounds():
    huge = sized({"stage": 3}, ModelSizes(total=10**12, largest=10**9), world_size=1)
    assert huge["reduce_bucket_size"] == 200_000_000
    assert huge["sub_group_size"] == 100_000_000
    tiny = sized({"stage": 3}, ModelSizes(total=100, largest=10), world_size=1)
    assert min(tiny[name] for name in ("reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters")) == 2**20


def test_what_was_named_stays():
    assert sized({"stage": 3, "sub_group_size": 5}, GPT2_XL, 1)["sub_group_size"] == 5
    assert "sub_group_size" not in sized({"stage": 2}, GPT2_XL, 1)

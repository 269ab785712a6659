import pytest

from lightning_memfit.estimate.sharding import largest_block_bytes, with_offload, with_sharding
from lightning_memfit.estimate.variants import steady_step
from lightning_memfit.memory import Category, Tier
from lightning_memfit.profile.record import ParameterInfo
from tests.unit.estimate.steps import GRADIENT, SAMPLE, SCRATCH, STATE, WEIGHT, step_profile


def forward(variant):
    return variant.phases["forward"].by_category()


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "states"), [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)]
)
def test_stages_divide_what_they_should(stage, weights, gradients, states):
    found = forward(with_sharding(steady_step(step_profile()), stage, 8))
    gathered = {Category.COMMUNICATION: 3 * WEIGHT} if stage == 3 else {}
    assert found == {
        Category.PARAMETER: WEIGHT // weights,
        Category.GRADIENT: GRADIENT // gradients,
        Category.OPTIMIZER_STATE: STATE // states,
        Category.ACTIVATION: 4 * SAMPLE,
        **gathered,
    }


def test_one_rank_is_the_plain_run():
    variant = steady_step(step_profile())
    assert with_sharding(variant, 3, 1) == variant


def test_buckets_are_counted():
    assert forward(with_sharding(steady_step(step_profile()), 2, 2, bucket_bytes=123))[Category.COMMUNICATION] == 123


def test_offload_moves_bytes_and_loses_none():
    sharded = with_sharding(steady_step(step_profile()), 3, 2)
    moved = with_offload(sharded, optimizer="nvme", parameters="cpu")
    found = moved.phases["forward"]
    assert found.by_category(Tier.DISK) == {Category.OPTIMIZER_STATE: STATE // 2}
    assert found.by_category(Tier.HOST) == {Category.PARAMETER: WEIGHT // 2, Category.GRADIENT: GRADIENT // 2}
    assert sum(found.total(tier) for tier in Tier) == sharded.phases["forward"].total()


def test_offloaded_optimizer_steps_on_the_host():
    variant = steady_step(step_profile())
    assert variant.phases["step"].get(Category.TEMPORARY) == SCRATCH
    assert with_offload(variant, optimizer="cpu").phases["step"].by_category() == {Category.PARAMETER: WEIGHT}


def test_blocks_are_gathered_as_one():
    parameters = (
        ParameterInfo("h.0.a.weight", 10, 4),
        ParameterInfo("h.0.b.weight", 20, 4),
        ParameterInfo("h.1.a.weight", 10, 4),
        ParameterInfo("wte", 25, 4),
        ParameterInfo("head", 100, 4, shared_with="wte"),
    )
    assert largest_block_bytes(parameters) == 120


def test_mistakes_are_named():
    variant = steady_step(step_profile())
    with pytest.raises(ValueError, match="zero_stage=4"):
        with_sharding(variant, 4, 2)
    with pytest.raises(ValueError, match="world_size=0"):
        with_sharding(variant, 1, 0)
    with pytest.raises(ValueError, match="needs stage 3"):
        with_offload(variant, parameters="cpu")
    with pytest.raises(ValueError, match="optimizer='tape'"):
        with_offload(variant, optimizer="tape")

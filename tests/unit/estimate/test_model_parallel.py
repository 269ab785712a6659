from dataclasses import replace

import pytest

from lightning_memfit.estimate.model_parallel import (
    with_expert_parallelism,
    with_pipeline_parallelism,
    with_tensor_parallelism,
)
from lightning_memfit.estimate.sharding import with_sharding
from lightning_memfit.estimate.variants import Variant, steady_step
from lightning_memfit.memory import Category, MemoryBreakdown
from lightning_memfit.profile.record import ParameterInfo
from tests.unit.estimate.steps import GRADIENT, SAMPLE, SCRATCH, STATE, WEIGHT, step_profile


def forward(variant):
    return variant.phases["forward"].by_category()


def test_ranks_that_compute_together_divide_matrices():
    divided = with_tensor_parallelism(steady_step(step_profile()), 4)
    assert forward(divided) == {
        Category.PARAMETER: WEIGHT // 4,
        Category.GRADIENT: GRADIENT // 4,
        Category.OPTIMIZER_STATE: STATE // 4,
        Category.ACTIVATION: 4 * SAMPLE,
        Category.COMMUNICATION: 2 * WEIGHT,  # outside of all blocks: gathered to be used
    }
    assert divided.phases["step"].get(Category.TEMPORARY) == SCRATCH // 4
    assert divided.parameters[0].numel == WEIGHT // 16


def test_the_other_ranks_shard_what_is_left():
    both = with_sharding(with_tensor_parallelism(steady_step(step_profile()), 4), 3, 2)
    assert forward(both)[Category.PARAMETER] == WEIGHT // 8
    assert forward(both)[Category.COMMUNICATION] == 2 * WEIGHT + 3 * WEIGHT // 4


def test_norms_and_biases_stay_whole():
    variant = steady_step(step_profile())
    bias = ParameterInfo("layer.bias", WEIGHT // 4, 4, dims=1, shape=(WEIGHT // 4,))
    odd = ParameterInfo("odd.weight", 15 * WEIGHT // 4, 4, dims=2, shape=(3, 5))
    with_both = replace(variant, parameters=(*variant.parameters, bias, odd))
    found = [p.numel for p in with_tensor_parallelism(with_both, 2).parameters]
    assert found == [WEIGHT // 8, WEIGHT // 4, 15 * WEIGHT // 4]


def test_alone_nothing_is_divided():
    variant = steady_step(step_profile())
    assert with_tensor_parallelism(variant, 1) == variant
    with pytest.raises(ValueError, match="`size=0` must be at least 1"):
        with_tensor_parallelism(variant, 0)


BLOCKS, WIDTH = 8, 1000
"""Blocks of 1000 elements each, and 3000 outside of them; AdamW in float32."""


def in_blocks() -> Variant:
    blocks = (ParameterInfo(f"h.{i}.weight", WIDTH, 4) for i in range(BLOCKS))
    parameters = (ParameterInfo("wte.weight", 3 * WIDTH, 4), *blocks)
    weights = 4 * (BLOCKS + 3) * WIDTH
    kept = {Category.PARAMETER: weights, Category.GRADIENT: weights, Category.OPTIMIZER_STATE: 2 * weights}
    forward = MemoryBreakdown.device({**kept, Category.ACTIVATION: 80_000})
    step = MemoryBreakdown.device({**kept, Category.TEMPORARY: weights})
    return Variant({"forward": forward, "step": step}, parameters, "cpu")


@pytest.mark.parametrize(("num_micro_batches", "alive"), [(1, 20_000), (2, 40_000), (4, 80_000), (64, 80_000)])
def test_first_stage_keeps_its_blocks_and_a_micro_batch_for_each_stage(num_micro_batches: int, alive: int) -> None:
    staged = with_pipeline_parallelism(in_blocks(), 4, num_micro_batches)
    weights = 4 * (BLOCKS // 4 + 3) * WIDTH
    kept = {Category.PARAMETER: weights, Category.GRADIENT: weights, Category.OPTIMIZER_STATE: 2 * weights}
    assert forward(staged) == {**kept, Category.ACTIVATION: alive}
    assert staged.phases["step"].by_category() == {**kept, Category.TEMPORARY: weights}


def test_stages_take_whole_blocks() -> None:
    staged = with_pipeline_parallelism(in_blocks(), 3, 8)
    assert forward(staged)[Category.PARAMETER] == 4 * (3 + 3) * WIDTH
    assert forward(staged)[Category.ACTIVATION] == 3 / 8 * 3 * 80_000


def test_experts_are_divided_and_nothing_else() -> None:
    variant = in_blocks()
    renamed = tuple(
        replace(p, name=p.name.replace("weight", "mlp.experts.up")) if p.name.startswith("h.") else p
        for p in variant.parameters
    )
    divided = with_expert_parallelism(replace(variant, parameters=renamed), 4)
    assert forward(divided)[Category.PARAMETER] == 4 * (BLOCKS // 4 + 3) * WIDTH
    assert forward(divided)[Category.ACTIVATION] == 80_000


def test_mistakes_in_pipelines_and_experts_are_named() -> None:
    with pytest.raises(ValueError, match="`num_stages=9`: there are 8 blocks"):
        with_pipeline_parallelism(in_blocks(), 9, 8)
    with pytest.raises(ValueError, match="`num_micro_batches=0`"):
        with_pipeline_parallelism(in_blocks(), 2, 0)
    with pytest.raises(ValueError, match="no experts to divide"):
        with_expert_parallelism(in_blocks(), 2)
    assert with_expert_parallelism(in_blocks(), 1) == with_pipeline_parallelism(in_blocks(), 1, 4) == in_blocks()

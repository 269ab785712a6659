"""A plan for several devices says of each what `memfit estimate` says of the same setting."""

import pytest
import torch

from lightning_memfit import CausalLM
from lightning_memfit.estimate.report import build_report
from lightning_memfit.estimate.target import named_target
from lightning_memfit.planner.make import make_plan
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.workload import Devices, Workload, facts_of
from lightning_memfit.profile.build import profile_module, resize_batch
from lightning_memfit.profile.ranks import Ranks
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy
from lightning_memfit.techniques.core.registry import find_technique

CONFIG = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
SAMPLES = 4
STRATEGIES = {"ddp": DataParallelStrategy, "fsdp2": FullyShardedStrategy, "zero_2": None}


@pytest.mark.nightly
@pytest.mark.nightly_cases("fsdp2-2-24GiB", "zero_2-2-24GiB")
@pytest.mark.parametrize(
    ("strategy", "count", "device"), [("ddp", 8, "A100 80GB"), ("fsdp2", 2, "24GiB"), ("zero_2", 2, "24GiB")]
)
def test_a_plan_and_an_estimate_of_it_agree(strategy: str, count: int, device: str) -> None:
    target, ids = named_target(device), torch.randint(0, 512, (SAMPLES, 64))
    module, batch = CausalLM(config=CONFIG), {"input_ids": ids, "labels": ids}
    options, sharding = StepOptions("32-true"), find_technique(strategy).sharding
    assert sharding is not None
    division = sharding.division(strategy, count, count)
    workload = Workload(
        module,
        batch,
        options,
        SAMPLES * count,
        target,
        rates_of(target),
        facts_of(module, target, options),
        allow=frozenset({"exact"}),
        devices=Devices(count),
        division=division,
    )
    plan = make_plan(workload)
    setting = plan.setting
    assert setting is not None
    assert setting.world_size == count
    assert setting.has(strategy)
    made = STRATEGIES[strategy]
    profile = profile_module(
        module,
        resize_batch(batch, SAMPLES, setting.micro_batch_size or SAMPLES),
        StepOptions(setting.precision, min(2, setting.accumulate_grad_batches)),
        Emulation(target.kind, target.capability),
        setting.without_sizes().traced_callbacks(),
        ranks=None if made is None else Ranks(made, count),
    )
    found = build_report(profile, target, division=division).estimate
    assert plan.needed_bytes == pytest.approx(found.total_bytes, rel=0.01)
    assert plan.peak_bytes == pytest.approx(found.allocated_bytes, rel=0.01)

import itertools

import numpy as np
import pytest
import torch

from lightning_memfit.device.runtime import runtime_memory
from lightning_memfit.estimate.block_figures import BudgetError
from lightning_memfit.estimate.checkpointing_budget import cpu_rate, device_rate
from lightning_memfit.estimate.estimate import predict_total_bytes
from lightning_memfit.profile.build import measure_step
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.checkpointing_budget import make_planner
from tests.contract.checkpointing.models import gpt2
from tests.helpers.modules import LanguageModel


def tokens(size, length):
    ids = torch.randint(0, 64, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def images():
    return {"pixel_values": torch.zeros(16, 3, 32, 32), "labels": torch.zeros(16, dtype=torch.long)}


def build_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": 12, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=4)).train()


CASES = {
    "gpt2": (lambda: gpt2(n_layer=6, n_embd=48, n_positions=64).train(), lambda: tokens(8, 64)),
    "vit": (build_vit, images),
}


def peak_of(profile):
    return int(profile.events.live_bytes()[profile.events.phases[0][0] :].max())


@pytest.mark.nightly_cases("gpt2", "vit")
@pytest.mark.parametrize("name", CASES)
def test_executed_peak_is_within_ten_budgets(name):
    build, batch = CASES[name][0], CASES[name][1]()
    module = LanguageModel(build())
    planner = make_planner(
        module,
        batch,
        StepOptions(),
        Emulation("cpu"),
        cpu_rate(torch.float32),
        ActivationCheckpointing,
        rounding_bytes=1,
    )
    assert planner.minimum_bytes < 0.6 * planner.plain_peak_bytes
    seconds, measured = [], {}
    for budget in np.linspace(planner.minimum_bytes, planner.plain_peak_bytes, 10).astype(int).tolist():
        plan = planner.predict(budget)
        if plan.choices not in measured:
            callback = ActivationCheckpointing(choices=plan.choices)
            measured[plan.choices] = peak_of(measure_step(module, batch, callbacks=(callback,)))
        assert measured[plan.choices] <= budget
        assert plan.peak_bytes == pytest.approx(measured[plan.choices], rel=0.005)
        seconds.append(plan.seconds)
    assert all(b <= a for a, b in itertools.pairwise(seconds))
    assert seconds[-1] == 0


@pytest.fixture(scope="module")
def small():
    """Figures of an emulated CUDA device, with offloading, for mixed plans of few blocks."""
    with torch.device("meta"):
        module = LanguageModel(gpt2(n_layer=8, n_embd=256, n_positions=256).train())
    return make_planner(
        module,
        tokens(8, 256),
        StepOptions("bf16-mixed"),
        Emulation("cuda"),
        device_rate("A100 80GB", torch.bfloat16),
        ActivationCheckpointing,
    )


@pytest.mark.nightly
def test_plans_with_offloaded_blocks_are_never_above_their_prediction(small):
    frontier, reserve = small._frontiers[-1]
    plans = [("offload", "none") * 4, ("none", "offload") * 4, ("full", "offload", "offload", "none") * 2]
    plans += [("offload_inputs", "none") * 4, ("offload_inputs", "full", "offload", "none") * 2]
    for choices in plans:
        traced = int(small._live(small._trace_plan(choices).events).max())
        assert traced <= frontier.problem.peak_bytes(choices) + reserve


@pytest.mark.nightly
def test_plan_is_verified_by_a_trace_and_holds_with_the_caching_allocator(small):
    runtime = runtime_memory((8, 0))

    def measure(events):
        return predict_total_bytes(ModelProfile(name="", events=events, micro_batch_size=1), 1, runtime)

    overhead = runtime.context_bytes + runtime.allocated_bytes
    budget = overhead + (small.minimum_bytes + small.plain_peak_bytes) // 2
    plan, trace = small.plan(budget, overhead, measure)
    assert plan.peak_bytes == measure(trace.events) <= budget
    assert 0 < plan.seconds < small.plain_seconds


def test_tightens_where_the_trace_needs_more_than_predicted(small):
    budget = small.plain_peak_bytes
    assert set(small.plan(budget)[0].choices) == {"none"}
    asked = []

    def measure(events):
        asked.append(int(small._live(events).max()))
        return asked[-1] + (small.plain_peak_bytes - small.minimum_bytes) // 3

    plan, _ = small.plan(budget, measure=measure)
    assert len(asked) == 2
    assert plan.peak_bytes <= budget
    assert set(plan.choices) != {"none"}


def test_shares_of_the_activations(small):
    assert small.share_bytes(1.0) == small.plain_peak_bytes
    half = small.plain_peak_bytes - small.plain_activation_bytes / 2
    assert small.share_bytes(0.5) == pytest.approx(half, abs=1)
    assert small.share_bytes(0.0) >= small.floor_bytes


@pytest.mark.nightly
def test_out_of_reach_names_the_least(small):
    with pytest.raises(BudgetError, match=r"least that any plan needs, [0-9.]+ MiB"):
        small.plan(small.minimum_bytes // 2)
    with pytest.raises(BudgetError, match="8-bit optimizer"):
        small.plan(small.plain_peak_bytes, measure=lambda events: 2 * small.plain_peak_bytes)


def test_inputs_in_host_memory_leave_the_device(small):
    """Of 8 blocks' inputs of 8 x 256 x 256 numbers in bfloat16 or float32; time is that of `full`, copies aside."""
    frontier, _ = small._frontiers[-1]
    for block in frontier.problem.blocks[1:]:  # the first one's are made outside of blocks
        options = {option.choice: option for option in block}
        recomputed, moved = options["full"], options["offload_inputs"]
        assert recomputed.kept_bytes - moved.kept_bytes >= 8 * 256 * 256 * 2
        assert recomputed.seconds < moved.seconds < 1.5 * recomputed.seconds

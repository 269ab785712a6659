from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_memfit.estimate.estimate import predict_peak_bytes
from lightning_memfit.estimate.steady_state import released_gradients_of, released_levels
from lightning_memfit.estimate.target import host_target
from lightning_memfit.memory import Category
from lightning_memfit.models import CausalLM
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting

from .made import Recorder

SIZE = 4
GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 2, "vocab_size": 900, "n_positions": 16}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 2,
    "vocab_size": 900,
    "max_position_embeddings": 16,
}


def levels(*values: int) -> np.ndarray:
    return np.array(values) * 10_000


def test_every_size_of_gradient_takes_what_its_step_takes_at_most() -> None:
    passing = levels(5, 7, 9, 7, 5, 6, 9, 5, 7, 8, 5)
    assert released_gradients_of(passing) == ((10_000, 40_000), (20_000, 40_000))


def test_the_gradient_of_the_loss_is_no_gradient_of_a_parameter() -> None:
    assert released_gradients_of(levels(5, 7, 5) + np.array([0, 8, 8])) == ((20_008, 20_008),)


def test_gradients_that_are_kept_have_no_transients() -> None:
    assert released_gradients_of(levels(5, 7, 9)) == ()


def test_gradients_count_until_another_operator_runs_and_their_steps_before_it() -> None:
    record = Recorder()
    record.phase("backward")
    activation = record.make(100, Category.ACTIVATION)
    record.make(20, Category.GRADIENT)  # with its bias, of one operator
    record.make(4, Category.GRADIENT)
    record.free(activation)
    record.make(3, Category.TEMPORARY)
    record.make(7, Category.GRADIENT)
    record.phase("end")
    without, found = released_levels(record.profile(parameters=()).events, 1, ((4, 6), (20, 50)))
    assert without.tolist() == [100, 100, 100, 0, 3, 3]
    # 7 bytes: the step of the next larger one
    assert found.tolist() == [100, 100 + 20, 100 + 24, 24 + 30, 3, 3 + 7 + 43]


@pytest.mark.parametrize(("site", "expected"), [("lm_head | aten.mm.default", [20, 25, 50]), ("other", [50, 5, 0])])
def test_the_gradient_of_an_input_belongs_to_the_same_operator(site: str, expected: list[int]) -> None:
    record = Recorder()
    record.phase("backward")
    record.make(20, Category.GRADIENT)
    record.free(record.make(5, Category.TEMPORARY))
    events = record.profile(parameters=()).events
    events = replace(events, sites=np.array([0, 1]), site_names=("somewhere", site))
    assert released_levels(events, 1, ((20, 50),))[1].tolist() == expected


@pytest.fixture(scope="module", params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def search(request: pytest.FixtureRequest) -> Search:
    module, target, options = CausalLM(config=request.param), host_target(1 << 34), StepOptions("32-true", 1)
    ids = torch.zeros(2, 16, dtype=torch.long)
    batch, facts = {"input_ids": ids, "labels": ids.clone()}, facts_of(module, target, options)
    return Search(TraceStore(Workload(module, batch, options, SIZE, target, rates_of(target), facts)))


@pytest.mark.nightly_cases("gpt2-optimizer_8bit", "gpt2--None", "gpt2-fused_adamw-full", "llama-")
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        pytest.param("", None),
        ("fused_adamw", "full"),
        pytest.param("optimizer_8bit", "selective"),
    ],
)
def test_a_plan_with_released_gradients_needs_what_its_own_trace_needs(
    search: Search, optimizer: str, mode: str | None
) -> None:
    setting = Setting(micro_batch_size=SIZE).choose("gradient_release")
    setting = setting.choose(optimizer) if optimizer else setting
    if mode is not None:
        options = {"keep": ["matmul", "attention"]} if mode == "selective" else {}
        setting = setting.choose("activation_checkpointing", mode=mode, **options)
    exact = predict_peak_bytes(search.store.exactly(setting), SIZE)
    assert search.solver.solve_uniform(setting).peak_bytes == pytest.approx(exact, rel=0.01)

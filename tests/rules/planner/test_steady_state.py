import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.estimate.steady_state import SteadyState
from lightning_memfit.estimate.target import named_target
from lightning_memfit.memory import MemoryBreakdown, Tier
from lightning_memfit.models import CausalLM
from lightning_memfit.planner import trace_store
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.trace_store import TraceStore, only_stepping
from lightning_memfit.planner.workload import Workload, facts_of
from lightning_memfit.profile.callbacks import acting_callbacks
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import TraceError
from lightning_memfit.techniques.core.setting import Setting
from tests.rules.planner.made import made_step

GPT2 = {"model_type": "gpt2", "n_layer": 9, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 16}


def store() -> TraceStore:
    module, target, options = CausalLM(config=GPT2), named_target("12GiB"), StepOptions("32-true", 1, 1.0)
    ids = torch.zeros(2, 16, dtype=torch.long)
    facts = facts_of(module, target, options)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return TraceStore(Workload(module, batch, options, 2, target, rates_of(target), facts))


def test_gradients_that_stay_are_not_released_although_backward_ends_lower_than_it_began() -> None:
    plain = made_step(4, kept=100.0, extra=20.0, states=8, scratch=0)
    assert SteadyState.of(plain, 1).released_gradients == ()


@pytest.mark.nightly
@pytest.mark.parametrize("technique", ["", "optimizer_8bit"])
def test_blocks_that_are_left_out_add_what_the_others_do(technique: str) -> None:
    traces = store()
    setting = Setting().choose(technique) if technique else Setting()
    few, more, whole = (SteadyState.of(traces._stepping(setting, number), 512) for number in (3, 5, None))
    assert few.kept_bytes < more.kept_bytes < whole.kept_bytes
    assert few.extended(more, 3, 5, 9) == whole


def test_callbacks_that_keep_something_are_part_of_steps_alone() -> None:
    """Copies of a module lose their Trainer: plans with another optimizer had no room for averages of weights."""
    module, average = CausalLM(config=GPT2), EMAWeightAveraging()
    module.trainer = pl.Trainer(callbacks=[average], accelerator="cpu", logger=False, enable_checkpointing=False)
    assert acting_callbacks(only_stepping(module)) == (average,)


class Remembering(pl.LightningModule):
    """Keeps what its first step has made."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.table: torch.Tensor | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(1 << 16)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_what_steps_leave_for_each_other_stays_whoever_steps() -> None:
    """A trace of the optimizer's steps alone doesn't show it, and it was taken off the peak."""
    module, target, options = Remembering(), named_target("12GiB"), StepOptions("32-true", 1)
    facts = facts_of(module, target, options)
    search = Search(TraceStore(Workload(module, torch.zeros(2, 16), options, 2, target, rates_of(target), facts)))
    setting = Setting(micro_batch_size=2).choose("fused_adamw")
    exact = estimate_step(search.store.exactly(setting), 2).tensor_bytes
    assert exact <= search.solver.models.of(setting).peak_bytes(2) < exact + 4096


def test_paged_states_take_host_memory_of_either_width() -> None:
    """Of 32-bit ones only those too small to be paged were counted: plans of GPT-2 XL had 8 MiB instead of 12 GiB."""
    module, target, options = Remembering(400), named_target("12GiB"), StepOptions("32-true", 1)
    facts = facts_of(module, target, options)
    search = Search(TraceStore(Workload(module, torch.zeros(2, 400), options, 2, target, rates_of(target), facts)))
    for name in ("paged_optimizer", "paged_optimizer_8bit"):
        setting = Setting(micro_batch_size=2).choose(name)
        planned = search.solver.models.of(setting).off_device().total(Tier.HOST)
        exact = MemoryBreakdown.from_dict(search.store.exactly(setting).host).total(Tier.HOST)
        assert 160_000 < exact <= planned < 1.05 * exact


def test_only_a_copy_loses_blocks() -> None:
    module = CausalLM(config=GPT2)
    alike = copy.deepcopy(only_stepping(module, 3))
    with torch.device("meta"):
        alike.configure_model()
        module.configure_model()
    assert len(alike.model.transformer.h) == 3
    assert len(module.model.transformer.h) == 9
    assert type(module) is CausalLM


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["h.7.attn.c_attn", "h.8.attn.c_attn"]},  # not in the first few
        {"target_modules": ["h.0.attn.c_attn", "h.8.attn.c_attn"]},  # not all in the first few
        {"train": ["model.transformer.h.8"]},
    ],
)
def test_adapters_of_blocks_by_number_are_traced_with_all_blocks(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_store, "_LARGEST_CHUNK", 1)
    traces = store()
    setting = Setting().choose("lora", **options)
    assert traces.stepping(setting, 512) == SteadyState.of(traces._stepping(setting, None), 512)


@pytest.mark.nightly
def test_blocks_that_do_not_step_alone_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_store, "_LARGEST_CHUNK", 1)
    traces, profile, asked = store(), trace_store.profile_module, []

    def fail(module: object, *args: Any, **settings: Any) -> Any:
        asked.append(getattr(module, "memfit_num_blocks", None))
        if asked[-1] == 5:
            raise TraceError("it misses the last block")
        return profile(module, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(trace_store, "profile_module", fail)
    assert traces.stepping(Setting(), 512) == traces.stepping(Setting(), 512)
    assert asked.count(5) == 1


def test_what_cannot_be_traced_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(*_: object, **__: object) -> None:
        asked.append(1)
        raise TraceError("it reads the clock")

    monkeypatch.setattr(trace_store, "profile_module", fail)
    traces = store()
    for _ in range(3):
        with pytest.raises(TraceError, match="it reads the clock"):
            traces.passes(Setting(), "full")
    assert len(asked) == 1
    with pytest.raises(TraceError):
        traces.passes(Setting(), "none")
    assert len(asked) == 2

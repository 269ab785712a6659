"""The page on adding things is followed: its code runs, and what it adds is known everywhere without another change."""

import copy
import re
import sys
from pathlib import Path
from types import ModuleType

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from lightning_memfit import strategies
from lightning_memfit.estimate.architectures import NamedRun
from lightning_memfit.estimate.named_model import optimizer_factory
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.optim.exchange import exchange
from lightning_memfit.optim.optimizers import OPTIMIZERS, find_optimizer
from lightning_memfit.planner.candidates import candidates
from lightning_memfit.planner.memory import standing_bytes, stored_as
from lightning_memfit.planner.workload import DEFAULT_ALLOW, Devices
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.trace import Emulation
from lightning_memfit.strategies.registry import NAMES
from lightning_memfit.techniques.core.facts import Facts
from lightning_memfit.techniques.core.registry import find_technique, register, register_optimizer
from lightning_memfit.techniques.core.setting import Setting
from tests.rules.planner.made import MadeTraceStore, made_workload

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "how_to_add.md").read_text()
BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
FACTS = Facts("cpu", optimizers=("AdamW",))


def run(block: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a block of the page is, importable for as long as the test runs."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(BLOCKS[block], f"how_to_add.md, {block}", "exec"), module.__dict__)
    return module


class Words(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5000, 32), nn.Linear(32, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.embedding(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def planned(names: set[str], **changes: object) -> set[str]:
    """Names of the techniques in the settings that a plan considers."""
    workload = made_workload(1000, DEFAULT_ALLOW | names, **changes)
    kept, _ = candidates(workload)
    return {choice.name for setting in kept for choice in setting.chosen}


def test_a_technique(monkeypatch):
    module = run("technique", "lightning_memfit.techniques.freeze_embeddings", monkeypatch)
    assert "freeze_embeddings" not in planned({"lora"})
    take_off = register(module.TECHNIQUE)
    try:
        setting = Setting().choose("freeze_embeddings")
        assert setting.validate(FACTS) == []
        assert "zero_2" in Setting(world_size=2).choose("zero_3").choose("freeze_embeddings").validate(Facts())[-1]
        assert Setting.from_dict(setting.to_dict()) == setting
        assert setting.overlay() == module.TECHNIQUE.config()
        assert "freeze_embeddings" in planned({"lora"})
        assert "freeze_embeddings" not in planned(set())  # which nobody allowed
        words, batch = Words(), torch.zeros(2, 4, dtype=torch.long)
        before = copy.deepcopy(words.state_dict())
        plain, frozen = (
            profile_module(words, batch, emulation=Emulation("cpu"), callbacks=callbacks)
            for callbacks in ((), setting.traced_callbacks())
        )
        assert _peak(plain) - _peak(frozen) >= 2 * 4 * words.embedding.weight.numel()  # two states at least
        assert all(torch.equal(value, before[name]) for name, value in words.state_dict().items())
    finally:
        take_off()
    with pytest.raises(ValueError, match="not known"):
        find_technique("freeze_embeddings")


def _peak(profile) -> int:
    return int(profile.events.live_bytes(1).max())


def test_an_optimizer(monkeypatch):
    record = run("optimizer", "how_to_add_optimizer", monkeypatch).NADAM
    take_off = register_optimizer(record)
    try:
        words = Words()
        made = exchange(words.configure_optimizers(), "torch.NAdam")
        assert type(made) is torch.optim.NAdam
        assert made.param_groups[0]["weight_decay"] == 0.01
        assert made.param_groups[0]["decoupled_weight_decay"]
        words.training_step(torch.zeros(2, 4, dtype=torch.long), 0).backward()
        made.step()
        kept = sum(v.nbytes for state in made.state.values() for v in state.values() if v.dim())
        assert find_optimizer("nadam").states.total_bytes(parameter_table(words)) == kept
        assert NamedRun("gpt2", optimizer="nadam").optimizer == "nadam"
        assert type(optimizer_factory("nadam")(words)) is torch.optim.NAdam
        setting = Setting().choose("nadam")
        assert setting.validate(FACTS) == []
        assert [callback.name for callback in setting.callbacks()] == ["torch.NAdam"]
        assert "nadam" in planned({"optimizer"})
        profile = MadeTraceStore(made_workload(1000)).plain()
        given = profile.optimizer, stored_as(profile.parameters, 4)
        assert standing_bytes(setting, *given) == standing_bytes(Setting(), *given)
        assert setting.cost(profile) == Setting().cost(profile)  # as large states as AdamW's
    finally:
        take_off()
    assert "nadam" not in OPTIMIZERS
    with pytest.raises(ValueError, match="not known"):
        find_technique("nadam")


def test_a_strategy(monkeypatch):
    module = run("strategy", "lightning_memfit.strategies.half_exchange", monkeypatch)
    record = run("record", "how_to_add_record", monkeypatch).HALF_EXCHANGE
    take_off = register(record)
    try:
        setting = Setting(world_size=2).choose("half_exchange")
        assert setting.validate(Facts()) == []
        assert setting.run(Facts()).strategy == "DDPStrategy"
        class_path = "lightning_memfit.strategies.half_exchange.HalfExchangeStrategy"
        assert setting.overlay()["trainer"]["strategy"] == {"class_path": class_path}
        profile = MadeTraceStore(made_workload(1000)).plain()
        assert setting.cost(profile) == Setting(world_size=2).choose("ddp").cost(profile)
        assert "half_exchange" in planned(set(), devices=Devices(2), strategies=True)
        monkeypatch.setitem(NAMES, "half_exchange", ("half_exchange.HalfExchangeStrategy", {}))
        strategies.register()
        made = StrategyRegistry.get("memfit_half_exchange")
        assert type(made) is module.HalfExchangeStrategy
        assert isinstance(made, DDPStrategy)
    finally:
        take_off()
        StrategyRegistry.remove("memfit_half_exchange")

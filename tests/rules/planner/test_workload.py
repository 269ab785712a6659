from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.estimate.target import host_target
from lightning_memfit.memory import GIB
from lightning_memfit.planner.rates import rates_of
from lightning_memfit.planner.search import Search
from lightning_memfit.planner.trace_store import TraceStore
from lightning_memfit.planner.workload import Workload, facts_of, parse_device_count
from lightning_memfit.profile.cache import ProfileCache
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.techniques.core.setting import Setting
from tests.rules.planner.made import made_workload


def test_batches_of_a_loader_that_stays_are_cut_evenly_and_wait_on_the_device() -> None:
    free = made_workload(900, samples_per_step=8)
    assert free.sizes() == (1, 2, 4, 8)
    assert free.waiting_bytes(Setting(1, 8)) == 0
    cut = replace(free, loader_batch=2)
    assert cut.sizes() == (1, 2)
    assert cut.waiting_bytes(Setting(1, 8)) == 16 * 8  # one sample of 16 int64 tokens
    assert cut.waiting_bytes(Setting(2, 4)) == 0


class ReadsWhatItBuilds(pl.LightningModule):
    """Asks for values of its weights while it is built, which neither meta nor fake tensors have."""

    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(8, 8)
        if self.layer.weight.std() > 1:
            torch.nn.init.normal_(self.layer.weight, std=0.02)
        self.scale = self.layer.weight.abs().max().item()
        self.means = self.layer.weight.detach().mean(0).tolist()
        self.first = float(self.layer.weight.detach().numpy()[0, 0])
        self.head = torch.nn.Linear(8, 4)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.layer(batch) * self.scale).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class ReadsWhenMade(ReadsWhatItBuilds):
    """Builds in `__init__`, where weights are real."""

    def __init__(self) -> None:
        super().__init__()
        ReadsWhatItBuilds.configure_model(self)

    def configure_model(self) -> None:
        pass


def test_facts_are_read_of_modules_that_read_values_of_weights() -> None:
    module, made = ReadsWhatItBuilds(), ReadsWhenMade()
    target = host_target(GIB)
    facts = facts_of(module, target, StepOptions())
    assert not list(module.parameters())
    assert facts == facts_of(made, target, StepOptions())
    assert made.layer.weight.device.type == "cpu"
    assert facts.hugging_face is False  # known, so that it was built


class Penalized(ReadsWhenMade):
    """Its optimizer has a penalty in one of two groups, as deeptab 2.1.0 has in its only one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": [self.layer.bias, self.head.bias], "weight_decay": 0.0}, {"params": [self.layer.weight]}]
        return torch.optim.Adam(groups, lr=1e-3, weight_decay=1e-2)


def test_plans_know_parameter_groups(tmp_path: Path) -> None:
    """A plan took `fused_adamw`, which the run then refused: Adam's penalty is no decoupled decay."""
    module, target, batch = Penalized(), host_target(GIB), torch.zeros(4, 8)
    facts = facts_of(module, target, StepOptions())
    for _ in range(2):  # the second time from the cache
        workload = Workload(module, batch, StepOptions(), 4, target, rates_of(target), facts)
        known = Search(TraceStore(workload, ProfileCache(tmp_path))).workload.facts
        (said,) = Setting().choose("fused_adamw").validate(known)
        assert "`weight_decay=0.01`" in said
    assert [group["weight_decay"] for _, group in known.groups] == [0.0, 1e-2]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("8x A100 80GB", (8, "A100 80GB")),
        ("2x24GiB", (2, "24GiB")),
        ("2 X RTX 3090", (2, "RTX 3090")),
        ("RTX 3060", (None, "RTX 3060")),
        ("12GiB", (None, "12GiB")),
    ],
)
def test_a_name_may_say_how_many(name: str, found: tuple[int | None, str]) -> None:
    assert parse_device_count(name) == found


def test_none_is_no_number_of_devices() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        parse_device_count("0x 24GiB")

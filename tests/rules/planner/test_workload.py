from dataclasses import replace

import lightning.pytorch as pl
import torch

from lightning_memfit.estimate.target import host_target
from lightning_memfit.memory import GIB
from lightning_memfit.planner.workload import facts_of
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

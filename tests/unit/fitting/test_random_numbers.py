"""Every callback that promises an exact resumption keeps the state of the generators of random numbers."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit import MicroBatching, Preemption, WholeSteps
from tests.helpers.trainers import quiet_trainer


class Noisy(LightningModule):
    """Draws from every generator in each step; its data are always the same."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean() * (1 + random.random() + float(np.random.rand()))  # noqa: NPY002
        self.seen.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def losses(callbacks, max_steps, folder, seed, path=None):
    seed_everything(seed, verbose=False)
    module = Noisy()
    trainer = quiet_trainer(*callbacks, max_steps=max_steps, default_root_dir=folder)
    trainer.fit(module, DataLoader(torch.ones(24, 4), batch_size=4), ckpt_path=path)
    return trainer, module.seen


CASES = {
    "MicroBatching": lambda: [MicroBatching(micro_batch_size=4)],
    "Preemption": lambda: [Preemption()],
    "WholeSteps": lambda: [WholeSteps()],
    "all": lambda: [MicroBatching(micro_batch_size=4), WholeSteps(), Preemption()],
}


@pytest.mark.parametrize("name", CASES)
def test_noise_goes_on_as_if_nothing_had_ended(tmp_path, name):
    _, whole = losses(CASES[name](), 4, tmp_path, 0)
    trainer, _ = losses(CASES[name](), 2, tmp_path, 0)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["memfit_random"]
    assert len(states) == 1
    _, resumed = losses(CASES[name](), 4, tmp_path, 7, tmp_path / "two.ckpt")
    assert resumed == whole[2:]

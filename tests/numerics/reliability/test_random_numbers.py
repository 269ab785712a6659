"""Every callback that promises an exact resumption keeps the state of the generators of random numbers."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit import MicroBatching, Preemption, WholeSteps
from lightning_memfit.memory.collectives import of_every_rank
from lightning_memfit.memory.generators import random_state, set_random_state
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


def losses(callbacks, max_steps, folder, seed, path=None, **options):
    seed_everything(seed, verbose=False)
    module = Noisy()
    trainer = quiet_trainer(*callbacks, max_steps=max_steps, default_root_dir=folder, **options)
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


@pytest.mark.parametrize("step", [2, 3, 6])
def test_noise_goes_on_in_the_next_epoch(tmp_path, step):
    """From checkpoints of an epoch's last batch, too; a loader takes a number when an epoch begins."""
    saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    options = {"limit_train_batches": 3, "enable_checkpointing": True}
    _, whole = losses([MicroBatching(micro_batch_size=4), saves], 8, tmp_path, 0, **options)
    path = tmp_path / f"step={step}.ckpt"
    _, resumed = losses([MicroBatching(micro_batch_size=4)], 8, tmp_path, 7, path, **options)
    assert resumed == whole[step:]


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_a_run_leaves_unused_is_not_that_of_the_next(tmp_path, name):
    trainer, _ = losses(CASES[name](), 2, tmp_path, 0)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    callbacks = CASES[name]()
    losses(callbacks, 2, tmp_path, 3, tmp_path / "two.ckpt")  # has ended before it begins
    assert losses(callbacks, 2, tmp_path, 5)[1] == losses(CASES[name](), 2, tmp_path, 5)[1]


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64"])
def test_a_generator_that_replaces_numpys_goes_on(tmp_path, kind):
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(3))
        state = random_state(torch.device("cpu"))
        torch.save(state, tmp_path / "state.pt")
        expected = np.random.rand(3)  # noqa: NPY002
        set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu"))
        assert (np.random.rand(3) == expected).all()  # noqa: NPY002
    finally:
        np.random.set_bit_generator(own)
    with pytest.raises(ValueError, match=f"random numbers of `numpy.random.{kind}`"):
        set_random_state(state, torch.device("cpu"))


def test_what_every_rank_adds_is_this_ranks_once_the_others_have_ended():
    """As after a run under `ddp_fork`, whose ranks were other processes."""
    trainer = SimpleNamespace(world_size=2, state=SimpleNamespace(status="finished", stage=None), strategy=None)
    assert of_every_rank(trainer, 3) == [3]

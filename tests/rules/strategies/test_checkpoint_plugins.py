"""Strategies go on from what they have saved by any `CheckpointIO`, and as `on_load_checkpoint` has changed it."""

import io
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from typing_extensions import override

from lightning_memfit.strategies.data_parallel import DataParallelStrategy
from lightning_memfit.strategies.fully_sharded import FullyShardedStrategy
from lightning_memfit.strategies.integrity import CheckpointError
from tests.helpers.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def as_before():
    """Lightning's launcher writes ranks into the environment, where later tests would take them for a launcher's."""
    with patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Backwards(TorchCheckpointIO):
    """Turns the bytes of a file around, as one that encrypts would."""

    @override
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        file = io.BytesIO()
        torch.save(checkpoint, file)
        Path(path).write_bytes(file.getvalue()[::-1])

    @override
    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(io.BytesIO(Path(path).read_bytes()[::-1]), weights_only=True)


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.forgets = False

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint):
        if self.forgets:
            checkpoint["optimizer_states"] = []

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 2))


def fitted(epochs, path=None, plugins=(), module=None, strategy=DataParallelStrategy, **options):
    module = Small() if module is None else module
    made = strategy(process_group_backend="gloo", **options)
    trainer = quiet_trainer(strategy=made, max_epochs=epochs, plugins=list(plugins))
    trainer.fit(module, ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize("kind", ["remote", "own", "wrapped", "async"])
def test_a_run_goes_on_from_what_its_plugin_has_saved(tmp_path, kind):
    path = f"file://{tmp_path / 'a.ckpt'}" if kind == "remote" else str(tmp_path / "a.ckpt")

    def plugins():
        made = {"own": Backwards, "wrapped": lambda: AsyncCheckpointIO(Backwards()), "async": AsyncCheckpointIO}
        return [made[kind]()] if kind in made else []

    whole, _ = fitted(2)
    _, trainer = fitted(1, plugins=plugins())
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint_io.teardown()
    module, trainer = fitted(2, path, plugins())
    assert float(trainer.optimizers[0].state[module.layer.weight]["step"]) == 4
    assert torch.equal(module.layer.weight, whole.layer.weight)


def test_no_folder_is_made_of_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, trainer = fitted(1, strategy=FullyShardedStrategy)
    with pytest.raises(CheckpointError, match="mounted"):
        trainer.save_checkpoint("memory://bucket/a.ckpt")
    assert not (tmp_path / "memory:").exists()


def test_a_damaged_file_is_found_whatever_has_written_it(tmp_path):
    path = tmp_path / "a.ckpt"
    module, trainer = fitted(1)
    trainer.save_checkpoint(path)
    written = bytearray(path.read_bytes())
    written[written.index(module.layer.weight.detach().numpy().tobytes())] ^= 1
    path.write_bytes(written)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        fitted(2, path, [AsyncCheckpointIO()])


def test_a_hook_may_start_a_new_optimizer(tmp_path):
    _, trainer = fitted(1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Small()
    module.forgets = True
    module, trainer = fitted(2, tmp_path / "a.ckpt", module=module)
    assert trainer.optimizers[0].state[module.layer.weight]["step"] == 2

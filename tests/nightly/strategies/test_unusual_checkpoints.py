"""Checkpoints of modules and optimizers that keep more than dense tensors in usual places."""

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_memfit.strategies import DataParallelStrategy, FullyShardedStrategy
from tests.helpers.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def as_before():
    """Lightning's launcher writes ranks into the environment, where later tests would take them for a launcher's."""
    with patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class _Tempered(LightningModule):
    """Learns a temperature beside itself, as agents of reinforcement learning do, and keeps a dict in its state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.alpha = [torch.zeros(1, requires_grad=True)]  # no parameter of the module
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def training_step(self, batch, index):
        self.seen += 1
        return (self.layer(batch) * self.alpha[0].exp()).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam([*self.layer.parameters(), *self.alpha], lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(2, 2))


def test_ddp_resumes_a_module_with_a_tensor_beside_it_and_a_dict_in_its_state(tmp_path):
    def fitted(epochs, path=None):
        module = _Tempered()
        trainer = quiet_trainer(strategy=DataParallelStrategy(process_group_backend="gloo"), max_epochs=epochs)
        trainer.fit(module, ckpt_path=path)
        return module, trainer

    _, trainer = fitted(1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module, trainer = fitted(2, tmp_path / "a.ckpt")
    assert module.seen == 4
    assert trainer.optimizers[0].state[module.alpha[0]]["step"] == 4


class _WithEmptyGroup(_Tempered):
    """One of its optimizer's groups has no parameters, as that of biases in a network without any."""

    def configure_optimizers(self):
        groups = [{"params": self.layer.parameters()}, {"params": [], "lr": 0.7}]
        return torch.optim.AdamW(groups, lr=0.1)


def test_divided_modules_have_a_group_without_parameters(tmp_path):
    def fitted(epochs, path=None):
        strategy = FullyShardedStrategy(process_group_backend="gloo")
        trainer = quiet_trainer(strategy=strategy, max_epochs=epochs)
        trainer.fit(_WithEmptyGroup(), ckpt_path=path)
        return trainer

    fitted(1).save_checkpoint(tmp_path / "a.ckpt")
    resumed = fitted(2, tmp_path / "a.ckpt")
    assert resumed.optimizers[0].param_groups[1]["lr"] == 0.7
    assert resumed.global_step == 4


@pytest.mark.parametrize("stage_3", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("saved", "message"),
    [({"other": torch.ones(2, 2)}, "has no"), ({"weight": torch.ones(4), "bias": torch.ones(2)}, "'weight' of shape")],
)
def test_zero_evaluates_no_other_module_s_weights(stage_3, strict, saved, message):
    from lightning_memfit.strategies import zero

    taken = []
    module = nn.Linear(2, 2)
    module.strict_loading, module.trainer = strict, SimpleNamespace(state=SimpleNamespace(fn="validate"))
    strategy = SimpleNamespace(
        lightning_module=module,
        broadcast=lambda path: path,
        checkpoint_io=SimpleNamespace(load_checkpoint=lambda *_, **__: {"state_dict": saved}),
        zero_stage_3=stage_3,
        _restore_zero_state=lambda whole, strict: taken.append(whole),
    )
    if not strict and "other" in saved:  # which is what the user asked for
        zero.ZeroStrategy.load_checkpoint(strategy, "a.ckpt")
        return
    with pytest.raises(ValueError, match=message):
        zero.ZeroStrategy.load_checkpoint(strategy, "a.ckpt")
    assert not taken

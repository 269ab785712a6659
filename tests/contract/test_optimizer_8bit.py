import subprocess
import sys

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.runs import LanguageModel, fit


def scheduled(module):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2, fused=True)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module():
    return LanguageModel(scheduled)


def test_manual_optimization_with_two_optimizers():
    class Manual(LanguageModel):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                scheduler.step()

        def configure_optimizers(self):
            head = torch.optim.SGD(self.model.transformer.wte.parameters(), lr=0.1, momentum=0.9)
            body = torch.optim.AdamW(self.model.transformer.h.parameters(), lr=1e-2)
            return [head, body], [lr_scheduler.ExponentialLR(o, 0.5) for o in (head, body)]

    ours = fit([Optimizer8bit()], Manual)
    assert [type(o).__name__ for o in ours.seen["trainer"].optimizers] == ["SGD8bit", "AdamW8bit"]
    assert [o.param_groups[0]["lr"] for o in ours.seen["trainer"].optimizers] == [0.1 * 0.5**2, 1e-2 * 0.5**2]
    assert all(len(o.state) > 0 for o in ours.seen["trainer"].optimizers)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="bits=32"):
        Optimizer8bit(bits=32)
    with pytest.raises(ValueError, match="min_8bit_size=-1"):
        Optimizer8bit(min_8bit_size=-1)


@pytest.mark.nightly
def test_first_import_under_fake_tensors_makes_no_fake_maps():
    program = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from lightning_memfit.optim.eight_bit import to_bitsandbytes
assert "bitsandbytes" not in sys.modules
with FakeTensorMode():
    to_bitsandbytes(torch.optim.AdamW([torch.nn.Parameter(torch.empty(64, 64))]))
weight = torch.nn.Parameter(torch.ones(64, 64))
optimizer = to_bitsandbytes(torch.optim.AdamW([weight], lr=0.1))
weight.grad = torch.ones(64, 64)
optimizer.step()
assert 0.8 < weight.mean().item() < 0.95
"""
    subprocess.run([sys.executable, "-c", program], check=True)

import copy
import subprocess
import sys

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.runs import LanguageModel, assert_same_weights, fit, loader, trainer


def scheduled(module):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2, fused=True)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module():
    return LanguageModel(scheduled)


def test_trains_with_groups_and_schedule_kept_and_leaves_the_module_as_it_was():
    plain, ours = fit(module=module), fit([Optimizer8bit()], module=module)
    (optimizer,) = ours.seen["trainer"].optimizers
    (reference,) = plain.seen["trainer"].optimizers
    assert type(optimizer).__name__ == "AdamW8bit"
    for group, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert (group["lr"], group["weight_decay"]) == (expected["lr"], expected["weight_decay"])
    assert "configure_optimizers" not in vars(ours)
    assert vars(ours).keys() == vars(plain).keys()
    assert torch.equal(ours.losses[0], plain.losses[0])
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=1e-2, atol=0)
    assert not torch.equal(ours.losses[-1], plain.losses[-1])


@pytest.mark.parametrize("keep", [True, False])
def test_embeddings_and_small_tensors(keep):
    ours = fit([Optimizer8bit(keep_32bit_embeddings=keep, min_8bit_size=2048)])
    (optimizer,) = ours.seen["trainer"].optimizers
    model = ours.model
    expected = torch.float32 if keep else torch.uint8
    assert optimizer.state[model.lm_head.weight]["state1"].dtype is expected  # tied to the embedding
    assert optimizer.state[model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype is torch.uint8
    assert optimizer.state[model.transformer.ln_f.weight]["state1"].dtype is torch.float32


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_resume_is_bitwise(tmp_path, precision):
    def plain():
        return LanguageModel(scheduled, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)

    path = tmp_path / "half.ckpt"
    epochs = {"max_steps": -1, "limit_train_batches": 2, "precision": precision}
    straight = fit([Optimizer8bit()], plain, max_epochs=3, **epochs)
    first = fit([Optimizer8bit()], plain, max_epochs=1, **epochs)
    first.seen["trainer"].save_checkpoint(path)
    resumed = fit([Optimizer8bit()], plain, ckpt_path=path, max_epochs=3, **epochs)
    assert torch.equal(torch.stack(resumed.losses), torch.stack(straight.losses[2:]))
    assert_same_weights(resumed, straight)


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


def test_an_unused_callback_can_be_copied_and_used_again():
    callback = Optimizer8bit()
    first = fit([copy.deepcopy(callback)])
    second = fit([callback])
    third = fit([callback])
    assert_same_weights(first, second)
    assert_same_weights(first, third)


def test_evaluation_is_left_alone():
    model = LanguageModel()
    (metrics,) = trainer([Optimizer8bit()]).validate(model, loader(), verbose=False)
    assert metrics["val_loss"] > 0


def test_wrong_arguments():
    with pytest.raises(ValueError, match="bits=32"):
        Optimizer8bit(bits=32)
    with pytest.raises(ValueError, match="min_8bit_size=-1"):
        Optimizer8bit(min_8bit_size=-1)


def test_bitsandbytes_is_asked_for_when_it_is_needed(monkeypatch):
    monkeypatch.setattr("lightning_memfit.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        Optimizer8bit()


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

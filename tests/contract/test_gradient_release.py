import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.gradient_release import GradientRelease
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.runs import LanguageModel, assert_same_weights, fit, loader, trainer
from tests.helpers.trainers import quiet_trainer


def scheduled(module, **kwargs):
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **kwargs)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class NoGradients(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert all(p.grad is None for p in pl_module.parameters())
        pl_module.seen["released"] = True


@pytest.mark.parametrize(
    ("callbacks", "kwargs"),
    [
        ([], {}),
        ([], {"precision": "bf16-mixed"}),
        ([], {"precision": "bf16-true"}),
        ([], {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        ([Optimizer8bit()], {}),
        ([ActivationCheckpointing(), Optimizer8bit()], {}),
        ([ActivationCheckpointing("selective", keep=["matmul"])], {"precision": "bf16-mixed"}),
    ],
)
def test_same_run_without_gradients(callbacks, kwargs):
    def module():
        return LanguageModel(scheduled)

    plain = fit(copy.deepcopy(callbacks), module, **kwargs)
    ours = fit([*copy.deepcopy(callbacks), GradientRelease(), NoGradients()], module, **kwargs)
    assert ours.seen["released"]
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)
    assert ours.seen["trainer"].global_step == plain.seen["trainer"].global_step
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())


class Backward(LanguageModel):
    def backward(self, loss):
        loss.backward()


class LooksBefore(LanguageModel):
    def on_before_zero_grad(self, optimizer):
        self.norms = [p.grad.norm() for p in self.parameters()]


class Clips(LanguageModel):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Clips, "configure_gradient_clipping"),
        (Backward, "module's `backward`"),
        (LooksBefore, "on_before_zero_grad"),
    ],
)
def test_modules_that_look_at_gradients_are_refused_with_the_reason(module, message):
    with pytest.raises(ValueError, match=message):
        GradientRelease().setup(trainer(), module(), "fit")


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.transformer.h[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.transformer.h[0], optimizer, lr=0.05)


def trained_only(module):
    return torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


class Switch(pl.Callback):
    """Freezes and unfreezes what the optimizer has."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.model.transformer.h[0].requires_grad_(trainer.global_step in (1, 2, 5))


class Rebuild(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.strategy.setup_optimizers(trainer)
        elif trainer.current_epoch == 2:
            group = trainer.optimizers[0].param_groups[0]
            group.update(lr=0.03, params=group["params"][2:])


@pytest.mark.parametrize("make", [Unfreeze, Switch, Rebuild])
def test_parameters_that_come_and_go_are_stepped_and_clipped(make):
    options = {
        "max_steps": -1,
        "max_epochs": 3,
        "gradient_clip_val": 1e-3,
        "gradient_clip_algorithm": "value",
    }
    plain = fit([make()], lambda: LanguageModel(trained_only), **options)
    ours = fit([GradientRelease(), make()], lambda: LanguageModel(trained_only), **options)
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate_grad_batches": 2}, "since this step, `accumulate_grad_batches=2`"),
        ({"gradient_clip_val": 0.1}, "since this step, `gradient_clip_val=0.1` by norm"),
    ],
)
def test_what_callbacks_schedule_is_refused_before_the_step_it_would_change(change, message):
    class Schedule(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.seen["before"] = copy.deepcopy(pl_module.state_dict())
                for name, value in change.items():
                    setattr(trainer, name, value)

    model = LanguageModel()
    with pytest.raises(ValueError, match=message):
        trainer([GradientRelease(), Schedule()], max_steps=-1, max_epochs=2).fit(model, loader())
    assert all(torch.equal(value, model.seen["before"][name]) for name, value in model.state_dict().items())


class OwnBackward(LanguageModel):
    """Its own gradients are cleared by a plain run."""

    def training_step(self, batch, batch_idx):
        self.model(input_ids=batch, labels=batch).loss.backward()
        return super().training_step(batch, batch_idx)


def test_a_backward_pass_in_training_step_is_refused_before_a_weight_changes():
    model = OwnBackward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="outside of the training loop's own"):
        trainer([GradientRelease()]).fit(model, loader())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class FoundRate(LanguageModel):
    lr = 1e-3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_finders_that_train_before_the_run_clip_as_plainly(tmp_path):
    def losses(callbacks):
        finder = LearningRateFinder(min_lr=1e-2, max_lr=10.0, num_training_steps=4, early_stop_threshold=None)
        clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
        fit([*callbacks, finder], FoundRate, max_steps=1, default_root_dir=tmp_path, **clip)
        return finder.optimal_lr.results["loss"]

    assert losses([GradientRelease()]) == losses([])


class Net(pl.LightningModule):
    """Three layers; `middle(self, h)` may read the weight of the last one, whose gradient is complete first."""

    def __init__(self, middle=lambda self, h: h, make=None, begins=0, width=8):
        super().__init__()
        self.middle, self.make, self.begins = middle, make, begins
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.before = {}

    def training_step(self, batch, batch_idx):
        self.before = copy.deepcopy(self.state_dict())
        hidden = torch.tanh(self.a(batch))
        if batch_idx >= self.begins:
            hidden = self.middle(self, hidden)
        return self.c(torch.tanh(self.b(hidden))).sub(1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.make is None else self.make(self)


def train(make_module, callbacks, num_steps=6, **kwargs):
    pl.seed_everything(0, verbose=False)
    module = make_module()
    batches = torch.randn(num_steps, 4, module.a.in_features, generator=torch.Generator().manual_seed(1))
    quiet_trainer(*callbacks, max_epochs=1, **kwargs).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return module


def test_a_weight_that_backward_reads_after_its_step_ends_the_run_in_words():
    def switch(module, hidden):
        weight = module.c.weight.detach()
        return F.linear(hidden, weight if module.trainer.global_step == 4 else weight.clone())

    def adam(module):
        return torch.optim.AdamW(module.parameters(), lr=1e-2)

    with pytest.raises(RuntimeError, match="go on from a checkpoint"):
        train(lambda: Net(switch, adam, width=96), [Optimizer8bit(), GradientRelease()])

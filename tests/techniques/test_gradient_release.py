import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from torch.optim import lr_scheduler

from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.gradient_release import GradientRelease
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.techniques.runs import LanguageModel, assert_same_weights, fit, trainer


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


class Manual(LanguageModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Clips(LanguageModel):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (LanguageModel, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (LanguageModel, {"gradient_clip_val": 1.0}, "by norm"),
        (LanguageModel, {"strategy": "ddp", "devices": 1}, "DDPStrategy"),
        (Manual, {}, "manual optimization"),
        (Clips, {}, "configure_gradient_clipping"),
    ],
)
def test_conflicts_are_refused_with_the_reason(module, kwargs, message):
    with pytest.raises(ValueError, match=message):
        GradientRelease().setup(trainer(**kwargs), module(), "fit")


def test_loops_that_split_or_repeat_batches_are_refused():
    class SplittingLoop(_AutomaticOptimization):
        pass

    class Install(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.fit_loop.epoch_loop.automatic_optimization = SplittingLoop(trainer)

    with pytest.raises(ValueError, match="SplittingLoop"):
        fit([Install(), GradientRelease()])

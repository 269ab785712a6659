import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from torch.optim import lr_scheduler

from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.gradient_release import GradientRelease
from lightning_memfit.techniques.host_master_weights import HostMasterWeights
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.techniques.runs import LanguageModel, assert_same_weights, fit, trainer

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def scheduled(module, **kwargs):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2, **kwargs)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.8)}}


def module(late=False):
    return LanguageModel(scheduled, late, **NO_DROPOUT)


class Bf16Forward(LanguageModel):
    """Float32 weights and optimizer; every forward pass computes with weights rounded to bfloat16."""

    def training_step(self, batch, batch_idx):
        names = dict(self.model.named_parameters())
        rounded = {name: p.to(torch.bfloat16) for name, p in names.items()}
        torch.set_default_dtype(torch.bfloat16)  # as Lightning does in bf16-true
        try:
            loss = torch.func.functional_call(self.model, rounded, kwargs={"input_ids": batch, "labels": batch}).loss
        finally:
            torch.set_default_dtype(torch.float32)
        self.losses.append(loss.detach().clone())
        return loss


class NoGradients(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        assert all(p.grad is None for p in pl_module.parameters())
        assert all(p.dtype is torch.bfloat16 for p in pl_module.parameters())
        pl_module.seen["none"] = True


@pytest.mark.parametrize("kwargs", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_numbers_of_float32_adamw_over_a_bfloat16_forward(kwargs):
    config = {**NO_DROPOUT, "tie_word_embeddings": False}
    plain = fit(module=lambda: Bf16Forward(partial(scheduled, fused=True), **config), **kwargs)
    ours = fit(
        [HostMasterWeights(), NoGradients()],
        lambda: LanguageModel(scheduled, **config),
        precision="bf16-true",
        **kwargs,
    )
    assert ours.seen["none"]
    assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
    assert_same_weights(ours, plain)


def test_tied_weights():
    """The gradient of a weight that is used twice is added up in bfloat16, as in any bf16-true run."""
    plain = fit(module=lambda: Bf16Forward(scheduled, **NO_DROPOUT))
    ours = fit([HostMasterWeights()], module, precision="bf16-true")
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(plain.losses), rtol=5e-3, atol=0)


def test_the_run_leaves_a_float32_module_as_it_was():
    plain, ours = (
        fit(module=module),
        fit([HostMasterWeights(), ActivationCheckpointing()], module, precision="bf16-true"),
    )
    assert vars(ours).keys() == vars(plain).keys()
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())
    ran = ours.seen["trainer"]
    assert "lightning_module_state_dict" not in vars(ran.strategy)
    assert "convert_module" not in vars(ran.precision_plugin)
    assert [p for group in ran.optimizers[0].param_groups for p in group["params"]] != []
    assert all(p in set(ours.parameters()) for group in ran.optimizers[0].param_groups for p in group["params"])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("during", [False, True])
def test_resume_is_bitwise(tmp_path, late, during):
    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def run(callbacks=(), **kwargs):
        options = {"max_steps": -1, "limit_train_batches": 2, "precision": "bf16-true"}
        return fit([HostMasterWeights(), *callbacks], lambda: module(late), **options, **kwargs)

    straight = run([Save()] if during else [], max_epochs=3)
    path = tmp_path / "0.ckpt"
    if not during:
        run(max_epochs=1).seen["trainer"].save_checkpoint(path)
    weights = torch.load(path, weights_only=False)["state_dict"]
    assert all(value.dtype is torch.float32 for value in weights.values())
    resumed = run(max_epochs=3, ckpt_path=path)
    assert torch.equal(torch.stack(resumed.losses), torch.stack(straight.losses[2:]))
    assert_same_weights(resumed, straight)


def test_checkpoints_load_without_the_callback(tmp_path):
    ours = fit([HostMasterWeights()], module, precision="bf16-true", max_steps=2)
    ours.seen["trainer"].save_checkpoint(tmp_path / "ours.ckpt")
    plain = fit(module=module, ckpt_path=tmp_path / "ours.ckpt", max_steps=3)
    assert len(plain.losses) == 1


class Manual(LanguageModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Looks(LanguageModel):
    def on_after_backward(self):
        pass


@pytest.mark.parametrize(
    ("module", "others", "kwargs", "message"),
    [
        (LanguageModel, [], {"precision": "32-true"}, "precision='bf16-true'"),
        (LanguageModel, [], {"precision": "16-true"}, "loss scaling"),
        (LanguageModel, [], {"strategy": "ddp", "devices": 1}, "DDPStrategy"),
        (LanguageModel, [GradientRelease()], {}, "Leave GradientRelease out"),
        (LanguageModel, [Optimizer8bit()], {}, "Leave Optimizer8bit out"),
        (LanguageModel, [StochasticRounding()], {}, "Leave StochasticRounding out"),
        (Manual, [], {}, "manual optimization"),
        (Looks, [], {}, "on_after_backward"),
    ],
)
def test_conflicts_are_refused_with_the_reason(module, others, kwargs, message):
    callback = HostMasterWeights()
    run = trainer([callback, *copy.deepcopy(others)], **{"precision": "bf16-true", **kwargs})
    with pytest.raises(ValueError, match=message):
        callback.setup(run, module(), "fit")


def test_loops_that_repeat_batches_are_refused():
    class SplittingLoop(_AutomaticOptimization):
        pass

    class Install(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.fit_loop.epoch_loop.automatic_optimization = SplittingLoop(trainer)

    with pytest.raises(ValueError, match="SplittingLoop"):
        fit([Install(), HostMasterWeights()], precision="bf16-true")

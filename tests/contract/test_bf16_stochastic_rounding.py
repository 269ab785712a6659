import bitsandbytes
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import lr_scheduler

from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.models.optimizer import weight_decay_groups
from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.techniques.bf16_stochastic_rounding import StochasticRounding
from lightning_memfit.techniques.optimizer_8bit import Optimizer8bit
from tests.contract.runs import LanguageModel, assert_same_weights, fit

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def scheduled(module):
    optimizer = torch.optim.AdamW(weight_decay_groups(module, 0.1), lr=1e-2)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    schedule = lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module():
    return LanguageModel(scheduled, **NO_DROPOUT)


def test_global_random_state_is_left_alone():
    fit(precision="bf16-true", max_steps=1)
    state = torch.get_rng_state()
    fit([StochasticRounding()], precision="bf16-true", max_steps=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_seeds_round_differently():
    first, second, third = (fit([StochasticRounding(seed=s)], module, precision="bf16-true") for s in (0, 0, 1))
    assert_same_weights(first, second)
    assert not torch.equal(first.model.lm_head.weight, third.model.lm_head.weight)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="chunk_elements=8"):
        StochasticRounding(chunk_elements=8)


@pytest.mark.nightly
def test_a_prediction_before_the_run_keeps_the_order_of_conversions():
    module = fit([Optimizer8bit(), StochasticRounding(), MemoryPrediction()], precision="bf16-true")
    optimizer = module.seen["trainer"].optimizers[0]
    assert isinstance(optimizer.wrapped, bitsandbytes.optim.AdamW8bit)


def test_layers_that_are_unfrozen_later_and_rebuilt_optimizers():
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model.transformer.h[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.transformer.h[0], optimizer, lr=1e-3)
            elif epoch == 2:
                pl_module.trainer.strategy.setup_optimizers(pl_module.trainer)

    def trained(module):
        return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=1e-3)

    def run(callbacks, precision):
        module = lambda: LanguageModel(trained, **NO_DROPOUT)  # noqa: E731
        return fit([*callbacks, Unfreeze()], module, precision=precision, max_steps=-1, max_epochs=3)

    ours, plain = run([StochasticRounding()], "bf16-true"), run([], "32-true")
    assert type(ours.seen["trainer"].optimizers[0]) is Float32Step
    torch.testing.assert_close(torch.stack(ours.losses).float(), torch.stack(plain.losses), rtol=3e-2, atol=0)

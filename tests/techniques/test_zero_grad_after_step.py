import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.fitting.step.callback import MicroBatching
from lightning_memfit.techniques.zero_grad_after_step import ZeroGradAfterStep
from tests.techniques.runs import LanguageModel, assert_same_weights, fit


class Seen(pl.Callback):
    """Whether there are gradients before and after the step, and when the next batch begins its forward pass."""

    def __init__(self) -> None:
        self.before: list[bool] = []
        self.after: list[bool] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.append(any(p.grad is not None for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(any(p.grad is not None for p in pl_module.parameters()))


@pytest.mark.parametrize("callbacks", [[], [MicroBatching(micro_batch_size=1)]], ids=["plain", "micro-batching"])
def test_gradients_are_there_for_the_step_and_gone_after_it(callbacks):
    seen = Seen()
    ours = fit([*callbacks, ZeroGradAfterStep(), seen], LanguageModel, gradient_clip_val=0.5)
    assert all(seen.before)
    assert seen.after
    assert not any(seen.after)
    plain = fit([], LanguageModel, gradient_clip_val=0.5)
    if not callbacks:
        assert torch.equal(torch.stack(ours.losses), torch.stack(plain.losses))
        assert_same_weights(ours, plain)


def test_plain_lightning_keeps_them():
    seen = Seen()
    fit([seen], LanguageModel)
    assert all(seen.after)


def test_accumulated_gradients_stay_until_the_step(capsys):
    seen = Seen()
    ours = fit([ZeroGradAfterStep(), seen], LanguageModel, accumulate_grad_batches=2)
    assert seen.after[:4] == [True, False, True, False]
    assert_same_weights(ours, fit([], LanguageModel, accumulate_grad_batches=2))


def test_hooks_are_gone_after_the_run():
    ours = fit([ZeroGradAfterStep()], LanguageModel)
    [optimizer] = ours.seen["trainer"].optimizers
    assert not optimizer._optimizer_step_post_hooks


class OwnZeroGrad(LanguageModel):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()


def test_refuses_a_module_that_decides_itself():
    with pytest.raises(ValueError, match="ZeroGradAfterStep: the module's own `optimizer_zero_grad`"):
        fit([ZeroGradAfterStep()], OwnZeroGrad)

import lightning.pytorch as pl
import pytest
import torch

from lightning_memfit.fitting.step.callback import MicroBatching
from lightning_memfit.techniques.zero_grad_after_step import ZeroGradAfterStep
from tests.contract.runs import LanguageModel, assert_same_weights, fit


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


def test_accumulated_gradients_stay_until_the_step(capsys):
    seen = Seen()
    ours = fit([ZeroGradAfterStep(), seen], LanguageModel, accumulate_grad_batches=2)
    assert seen.after[:4] == [True, False, True, False]
    assert_same_weights(ours, fit([], LanguageModel, accumulate_grad_batches=2))


@pytest.mark.parametrize("owner", ["module", "callback"])
def test_refuses_code_that_would_find_no_gradients(owner):
    def look(self, *args):
        print([p.grad for p in args[-1].parameters()])

    looks = type("Looks", (pl.Callback if owner == "callback" else LanguageModel,), {"on_before_zero_grad": look})
    module, callbacks = (LanguageModel, [looks()]) if owner == "callback" else (looks, [])
    with pytest.raises(ValueError, match=r"`on_before_zero_grad`.*gradients are gone"):
        fit([ZeroGradAfterStep(), *callbacks], module)

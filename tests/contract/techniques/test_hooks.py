import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback

from lightning_memfit.techniques.core.hooks import gradient_hooks
from lightning_memfit.techniques.core.model_facts import read_facts
from lightning_memfit.techniques.gradient_release import GradientRelease


def norm(module):
    return [p.grad.norm() for p in module.parameters()]


def test_overridden_hooks():
    class Own(GradientRelease):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            norm(pl_module)

    class Looks(pl.LightningModule):
        def on_after_backward(self):
            norm(self)

    class Inherits(Looks):
        def on_after_backward(self):
            return super().on_after_backward()

    assert list(gradient_hooks(pl.LightningModule(), [GradientRelease()])) == []
    for module in (Looks(), Inherits()):
        assert list(gradient_hooks(module, [])) == [("on_after_backward", "the module's `on_after_backward`")]
    theirs = ("on_before_zero_grad", "`on_before_zero_grad` of the callback Own")
    assert list(gradient_hooks(pl.LightningModule(), [Own()])) == [theirs]


class LogsGradientFlow(pl.LightningModule):
    """As pytorch-forecasting's `BaseModel`: its hook looks at gradients if it is asked to, which is off by default."""

    log_gradient_flow = False

    def on_after_backward(self):
        if self.log_gradient_flow:
            norm(self)


class Quiet(LogsGradientFlow):
    def on_after_backward(self):
        """Do nothing."""


class CallsQuiet(Quiet):
    def on_after_backward(self):
        super().on_after_backward()


class OnlyCallsBase(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        super().on_after_backward(trainer, pl_module)


@pytest.mark.parametrize("module", [Quiet(), CallsQuiet()])
def test_hooks_that_do_nothing_are_none(module):
    assert list(gradient_hooks(LogsGradientFlow(), [])) == [("on_after_backward", "the module's `on_after_backward`")]
    empty = LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: None)
    assert list(gradient_hooks(module, [OnlyCallsBase(), empty])) == []
    assert read_facts(module).gradient_hooks == ()
    look = norm  # what a hook calls by a name of the function around it

    class Around(pl.LightningModule):
        def on_after_backward(self):
            look(self)

    assert read_facts(Around()).gradient_hooks[0][0] == "on_after_backward"


def test_an_empty_step_of_the_optimizer_is_no_hook_that_does_nothing():
    class NeverSteps(pl.LightningModule):
        def optimizer_step(self, *args, **kwargs):
            pass

    assert read_facts(NeverSteps()).gradient_hooks[0][0] == "optimizer_step"

"""`ZeroGradAfterStep`: free gradients right after the update, not after the next forward pass."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique


class ZeroGradAfterStep(TechniqueCallback):
    """Set gradients to None as soon as the optimizer has used them. Numbers equal those of the plain run bitwise.

    Lightning's automatic optimization frees gradients between forward and backward. If each step has one backward pass,
    the last gradients and the next activations are therefore alive together. With several passes per step they are
    alive together anyway, and this changes nothing. Hooks before and in the step find gradients, those after it find
    none. `on_before_zero_grad` of the module or of other callbacks is refused.
    """

    rules_traces = True

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change nothing yet: steps are followed when training starts, and not those of finders before it."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Follow steps, and say what will be saved, now that the number of backward passes per step is known."""

        def step(inner: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = inner(optimizer, *args, **kwargs)
            optimizer.zero_grad()
            return result

        self.on_restore(wrap_method(trainer.strategy, "optimizer_step", step))
        if trainer.accumulate_grad_batches == 1:
            self.announce("gradients are freed right after each step")
        else:
            self.announce(f"no memory is saved with accumulate_grad_batches={trainer.accumulate_grad_batches}")


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if gradients can be freed after the step."""
    if not run.facts.automatic_optimization:
        return "with manual optimization gradients are the module's own business. Call `zero_grad` after `step` there."
    if run.strategy.startswith("DeepSpeed"):
        return "DeepSpeed keeps gradients in buffers of its own. Leave it out."
    if run.facts.who_looks("optimizer_zero_grad") is not None:
        return "the module's own `optimizer_zero_grad` decides when gradients go. Remove it, or leave this out."
    who = run.facts.who_looks("on_before_zero_grad")
    if who is not None:
        return f"{who} runs when gradients are gone already. Remove it, or leave this out."
    return run.beside(dict.fromkeys(("GradientRelease", "HostMasterWeights"), "it frees gradients earlier."))


TECHNIQUE = Technique(
    name="zero_grad_after_step",
    kind="zero_grad",
    summary="frees gradients right after the update, where one backward pass makes a step",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.zero_grad_after_step.ZeroGradAfterStep"),),
    unsupported=unsupported,
)

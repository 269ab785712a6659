"""`ZeroGradAfterStep`: free gradients right after the update, not after the next forward pass."""

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique


class ZeroGradAfterStep(TechniqueCallback):
    """Set gradients to None as soon as the optimizer has used them. Numbers equal those of the plain run bitwise.

    Lightning's automatic optimization frees gradients between forward and backward. If each step has one backward pass,
    the last gradients and the next activations are therefore alive together. With several passes per step they are
    alive together anyway, and this changes nothing. `on_before_zero_grad` and hooks after the step find no gradients;
    earlier hooks find them.
    """

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, before anything is loaded."""
        reason = unsupported(run_of(trainer, pl_module))
        if reason is not None:
            raise ValueError(f"ZeroGradAfterStep: {reason}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook the optimizers, now that they have their final form."""
        for optimizer in trainer.optimizers:
            self.on_restore(optimizer.register_step_post_hook(_free).remove)
        if trainer.accumulate_grad_batches == 1:
            self.announce("gradients are freed right after each step")
        else:
            self.announce(f"no memory is saved with accumulate_grad_batches={trainer.accumulate_grad_batches}")


def _free(optimizer: Optimizer, args: object, kwargs: object) -> None:
    optimizer.zero_grad(set_to_none=True)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if gradients can be freed after the step."""
    if not run.facts.automatic_optimization:
        return "with manual optimization gradients are the module's own business. Call `zero_grad` after `step` there."
    if run.strategy.startswith("DeepSpeed"):
        return "DeepSpeed keeps gradients in buffers of its own. Leave it out."
    for name in ("GradientRelease", "HostMasterWeights"):
        if run.has(name):
            return f"{name} frees gradients earlier. Leave one of the two out."
    if "optimizer_zero_grad" in run.facts.overridden:
        return "the module's own `optimizer_zero_grad` decides when gradients go. Remove it, or leave this out."
    return None


TECHNIQUE = Technique(
    name="zero_grad_after_step",
    kind="zero_grad",
    summary="frees gradients right after the update, where one backward pass makes a step",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.zero_grad_after_step.ZeroGradAfterStep"),),
    unsupported=unsupported,
)

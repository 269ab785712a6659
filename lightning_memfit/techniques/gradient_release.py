"""`GradientRelease`: step during backward, so that gradients are never all alive."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memfit.optim import gradient_release
from lightning_memfit.techniques.base import TechniqueCallback
from lightning_memfit.techniques.wrapping import wrap_method

_SEES_GRADIENTS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step", "optimizer_step")


class GradientRelease(TechniqueCallback):
    """Step each parameter as soon as its gradient is complete, and free the gradient: exact, and a model's size less.

    Needs one backward pass per optimizer step, since a gradient is used up at once: accumulation, clipping by norm,
    loss scaling, several devices and manual optimization are refused. Clipping by value works. Schedulers,
    checkpoints, 8-bit, `foreach` and `fused` optimizers work unchanged.
    """

    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, before anything is loaded."""
        reason = unsupported(trainer, pl_module)
        if reason is not None:
            raise ValueError(f"GradientRelease: {reason}")
        # Gradients are clipped as they come; Lightning's own clipping afterwards would find none, which torch refuses.
        self.on_restore(wrap_method(pl_module, "configure_gradient_clipping", _leave_out))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook the parameters: now the optimizer has its final form and its states."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        if type(loop) is not _AutomaticOptimization:
            raise ValueError(
                f"GradientRelease: {type(loop).__name__} may run several backward passes per step or repeat one that "
                "ran out of memory, after parameters have been stepped. Leave one of the two out."
            )
        clip_value = trainer.gradient_clip_val
        released = gradient_release.GradientRelease(trainer.optimizers[0], float(clip_value) if clip_value else None)
        self.on_restore(released.remove)
        self.announce(f"{released.num_parameters} parameters are stepped during backward")


def _leave_out(inner: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing in place of a hook."""


def unsupported(trainer: Any, pl_module: Any) -> str | None:
    """Reason and fix, or None where gradients can be released."""
    if not pl_module.automatic_optimization:
        return "with manual optimization a backward pass is not known to be a whole step. Use automatic optimization."
    if trainer.accumulate_grad_batches != 1:
        return (
            f"`accumulate_grad_batches={trainer.accumulate_grad_batches}` adds up gradients that would be gone. "
            "Set it to 1 (a larger batch, or a smaller learning rate), or leave GradientRelease out."
        )
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
        return (
            f"`gradient_clip_val={trainer.gradient_clip_val}` by norm needs all gradients before the first step. "
            "Set gradient_clip_algorithm='value', or leave one of the two out."
        )
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return (
            f"{type(trainer.strategy).__name__} reduces gradients across devices after they are accumulated, and "
            "parameters would step before. Use one device, or leave GradientRelease out."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "loss scaling (16-mixed) needs all gradients to look for overflow. Use bf16-mixed."
    overridden = [name for name in _SEES_GRADIENTS if is_overridden(name, pl_module)]
    if overridden:
        return (
            f"the module's `{overridden[0]}` runs when gradients are gone already. Remove it, or leave GradientRelease "
            "out."
        )
    return None

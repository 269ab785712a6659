"""`GradientRelease`: step during backward, so that gradients are never all alive at once."""

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_memfit.memory.parameters import trained
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim import gradient_release
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class GradientRelease(TechniqueCallback):
    """Step each parameter as soon as its gradient is complete, and free the gradient: exact, and saves a model's size.

    Needs one backward pass per optimizer step, since a gradient is used up at once: accumulation, clipping by norm,
    loss scaling, several devices, manual optimization, and hooks and callbacks that look at gradients are refused.
    Clipping by value works, and so do parameters that are frozen, unfrozen or given to the optimizer during training.
    Schedulers, checkpoints, 8-bit, `foreach` and `fused` optimizers, and those of torchao, work unchanged.
    """

    rules_traces = True

    def __init__(self) -> None:
        super().__init__()
        self._released: gradient_release.GradientRelease | None = None

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the backward pass, and leave clipping by Lightning out where gradients are released."""
        self.on_restore(self._stop)

        def clip(inner: Any, *args: Any, **kwargs: Any) -> None:
            # Those that are released are clipped as they arrive; Lightning's own clipping would find none, which torch
            # refuses. Finders of learning rates and batch sizes train before the run starts, and release none.
            if self._released is None:
                inner(*args, **kwargs)

        self.on_restore(wrap_method(pl_module, "configure_gradient_clipping", clip))
        allowed = _what_decides(trainer)

        def backward(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if _what_decides(trainer) != allowed:  # a callback may schedule them
                reason = unsupported(run_of(trainer, pl_module))
                if reason is not None:
                    raise ValueError(f"GradientRelease: since this step, {reason}")
            if self._released is None:
                return inner(*args, **kwargs)
            with self._released.backward():
                return inner(*args, **kwargs)

        self.on_restore(wrap_method(trainer.strategy, "backward", backward))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook the parameters, now that the optimizer has its final form and its states."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization

        def run(inner: Any, *args: Any, **kwargs: Any) -> Any:
            self._follow(trainer)
            return inner(*args, **kwargs)

        self.on_restore(wrap_method(loop, "run", run))
        self._follow(trainer)
        if self._released is not None:
            self.announce(f"{self._released.num_parameters} parameters are stepped during backward")

    def _follow(self, trainer: pl.Trainer) -> None:
        """Follow what was done to the optimizer since the last batch."""
        optimizer = trainer.optimizers[0]
        clip_value = float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None
        if self._released is not None and self._released.optimizer is optimizer:
            self._released.clip_value = clip_value
            self._released.refresh()
            return
        self._stop()
        if optimizer.param_groups:  # Lightning's stand-in for no optimizer has none
            self._released = gradient_release.GradientRelease(optimizer, clip_value)
            self._released.is_open = False

    def _stop(self) -> None:
        if self._released is not None:
            self._released.remove()
            self._released = None


def _what_decides(trainer: pl.Trainer) -> tuple[Any, ...]:
    return trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.gradient_clip_algorithm


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if gradients can be released."""
    facts = run.facts
    if not facts.automatic_optimization:
        return "with manual optimization a backward pass is not known to be a whole step. Use automatic optimization."
    if run.accumulate_grad_batches != 1:
        return (
            f"`accumulate_grad_batches={run.accumulate_grad_batches}` adds up gradients that would be gone. "
            "Set it to 1 (a larger batch, or a smaller learning rate), or leave GradientRelease out."
        )
    if facts.gradient_clip_val and facts.gradient_clip_algorithm == "norm":
        return (
            f"`gradient_clip_val={facts.gradient_clip_val}` by norm needs all gradients, and the first are freed "
            "before. Clip by value (gradient_clip_algorithm='value'), take an optimizer that bounds its own updates "
            "(torch.optim.Adafactor), or leave one of the two out."
        )
    if run.strategy != "SingleDeviceStrategy":
        why = f"{run.strategy} reduces gradients across devices, and parameters would step before"
        return f"{why}. Use one device, or leave GradientRelease out."
    if run.precision == "16-mixed":
        return "loss scaling (16-mixed) needs all gradients to look for overflow. Use bf16-mixed."
    if len(facts.optimizers) > 1:
        return f"it releases gradients to one optimizer, and the module has {len(facts.optimizers)}. Leave it out."
    own_backward = facts.why_not_own_backward("GradientRelease")
    if own_backward is not None:
        return own_backward
    if facts.gradient_hooks:
        who = facts.gradient_hooks[0][1]
        others = "" if who.startswith("the module's") else ", or leave out the callback that has it if it is not yours"
        return (
            f"{who} runs when gradients are gone already. Remove it, override it by one that does nothing{others}, or "
            "leave GradientRelease out."
        )
    return None


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    """Every parameter is stepped separately, so that batched kernels have nothing to batch."""
    return Cost(step=Work(kernels=_KERNELS_PER_STEP * len(trained(profile.parameters))))


_KERNELS_PER_STEP = 12

TECHNIQUE = Technique(
    name="gradient_release",
    kind="gradient",
    summary="steps each parameter during backward and frees its gradient at once",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.gradient_release.GradientRelease"),),
    unsupported=unsupported,
    frees_gradients=True,
    cost=_cost,
)

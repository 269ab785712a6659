"""`ZeroGradAfterStep`: free gradients right after the update, not after the next forward pass."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.steps import OutermostStep
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.hooks import BEFORE_ZERO_GRAD, BETWEEN_STEPS
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique


class ZeroGradAfterStep(TechniqueCallback):
    """Set gradients to None as soon as the optimizer has used them. Numbers equal those of the plain run bitwise.

    Lightning's automatic optimization frees gradients between forward and backward. If each step has one backward pass,
    the last gradients and the next activations are therefore alive together. With several passes per step they are
    alive together anyway, and this changes nothing. Hooks before the step find gradients. `on_before_zero_grad` of the
    module or of other callbacks, and hooks between steps that read gradients, would find none and are refused.
    """

    rules_traces = True

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[Any] = []
        self._has_freed = False
        self._step = OutermostStep()
        self._stepped: list[Optimizer] | None = None

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change nothing yet: the optimizers are hooked when training starts."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what will be saved, now that the number of backward passes per step is known."""
        self.on_restore(self._take_off)
        self.on_restore(wrap_method(trainer.strategy, "optimizer_step", self._run_step))
        if trainer.accumulate_grad_batches == 1:
            self.announce("gradients are freed right after each step")
        else:
            self.announce(f"no memory is saved with accumulate_grad_batches={trainer.accumulate_grad_batches}")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook the optimizers as they are now, after all other hooks of their steps."""
        self._take_off()
        self._has_freed = False
        self._step = OutermostStep()
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._begin))
            self._handles.append(optimizer.register_step_post_hook(self._end))

    def _run_step(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Free gradients when all layers around the optimizer's step have ended, which may read them."""
        stepped: list[Any] = []
        self._stepped = stepped
        try:
            result = inner(*args, **kwargs)
        finally:
            self._stepped = None
        for optimizer in dict.fromkeys(stepped):
            self._free(optimizer)
        return result

    def _begin(self, *_: object) -> None:
        self._step.begin()

    def _end(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._step.end():
            return
        if self._stepped is None:  # a step that goes past Lightning's
            self._free(optimizer)
        else:
            self._stepped.append(optimizer)

    def _free(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._has_freed and all(parameter.grad is None for parameter in parameters):
            raise RuntimeError(
                "ZeroGradAfterStep: the optimizer was stepped twice with the gradients of one backward pass. The first "
                "step has freed them. Step once, or leave ZeroGradAfterStep out."
            )
        self._has_freed = any(parameter.grad is not None for parameter in parameters)
        optimizer.zero_grad(set_to_none=True)

    def _take_off(self) -> None:
        while self._handles:
            self._handles.pop().remove()


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
    who = run.facts.who_looks(*BEFORE_ZERO_GRAD, *BETWEEN_STEPS)
    if who is not None:
        return f"{who} runs when gradients are gone already. Remove it, or leave this out."
    return None


TECHNIQUE = Technique(
    name="zero_grad_after_step",
    kind="zero_grad",
    summary="frees gradients right after the update, where one backward pass makes a step",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.zero_grad_after_step.ZeroGradAfterStep"),),
    unsupported=unsupported,
)

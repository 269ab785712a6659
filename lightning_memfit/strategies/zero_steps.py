"""`StepsUnderZero`: a step clips by what `clip_gradients` was told, and trains what trained when training began.

DeepSpeed clips within its step, by a value that it is given when it starts, and steps the weights that had
`requires_grad` then, whether or not they have it still.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn

from lightning_memfit.memory.wrapping import wrap_method


class StepsUnderZero:
    """Looks at backward passes and steps of an engine.

    Args:
        engine: DeepSpeed's engine; its `step` is wrapped, and the `zero_grad` of its module.
        precision: The Trainer's precision, whose `clip_gradients` is.
        frozen: Weights of the optimizer that are frozen, by name.
        trained: Weights that the engine steps, by name.
        groups: Number of the optimizer's group of each.
        always_clips: Whether steps clip by the engine's own value when nothing is asked for.
        before_step: Called before every step.

    Raises:
        MisconfigurationException: Later, for what can't be done.
    """

    def __init__(
        self,
        engine: Any,
        precision: Precision,
        frozen: Mapping[str, nn.Parameter],
        trained: Mapping[str, nn.Parameter],
        groups: Mapping[str, int],
        always_clips: bool,
        before_step: Callable[[], None],
    ) -> None:
        self._zero = engine.optimizer
        self._frozen = dict(frozen)
        self._trained = dict(trained)
        self._groups = dict(groups)
        self._resting: set[str] | None = None
        """Of these, which were frozen in every backward pass since the last step; None if there was no pass."""
        self._num_groups = len(self._zero.optimizer.param_groups)
        self._always = float(self._zero.clip_grad) if always_clips else 0.0
        self._asked: float | None = None
        self._before_step = before_step
        self._undo = [
            wrap_method(engine, "step", self._step),
            wrap_method(engine.module, "zero_grad", self._zero_grad),
            wrap_method(precision, "clip_gradients", self._clip),
        ]

    def begin_pass(self) -> None:
        """Check what a backward pass would silently leave out.

        Raises:
            MisconfigurationException: If a weight was unfrozen, or gradients are asked to be clipped before the pass.
        """
        unfrozen = next((name for name, one in self._frozen.items() if one.requires_grad), None)
        if unfrozen is not None:
            raise MisconfigurationException(
                f"`{unfrozen}` was frozen when training began, and has been unfrozen: DeepSpeed would not train it. "
                "Unfreeze it before `fit` and let its optimizer group have `lr=0` for as long as it shall stay, start "
                "another `fit` from these weights, or train with `strategy=memfit_fsdp2`."
            )
        if len(self._zero.optimizer.param_groups) != self._num_groups:
            raise MisconfigurationException(
                "A group was added to the optimizer after training began: DeepSpeed would not train it. Give "
                "`configure_optimizers` all groups, or train with `strategy=memfit_fsdp2`."
            )
        if self._asked is not None:
            raise MisconfigurationException(
                "`clip_gradients` comes before a backward pass, and DeepSpeed clips within the step, the gradients of "
                "all passes together. Call it after the last pass before `optimizer.step()`, or train with `strategy="
                "memfit_fsdp2`."
            )
        resting = {name for name, one in self._trained.items() if not one.requires_grad}
        self._resting = resting if self._resting is None else self._resting & resting

    def detach(self) -> None:
        """Look no more."""
        while self._undo:
            self._undo.pop()()

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        resting, self._resting = self._resting or set(), None
        name = next((name for name in self._trained if name in resting and self._moves(name)), None)
        if name is not None:
            raise MisconfigurationException(
                f"`{name}` was trained when training began, and has been frozen: DeepSpeed would go on to change it, "
                "by momentum and weight decay. Leave it unfrozen and set `lr` of its optimizer group to 0 instead, "
                "freeze it before another `fit` from these weights, or train with `strategy=memfit_ddp`."
            )
        self._before_step()
        asked, self._asked = self._asked, None
        limits = [one for one in (asked, self._always) if one]
        self._zero.clip_grad = min(limits, default=0.0)
        try:
            return step(*args, **kwargs)
        finally:
            self._zero.clip_grad = self._always

    def _moves(self, name: str) -> bool:
        """Whether a step may change a weight without a gradient: momentum and weight decay go by the rate."""
        number = self._groups.get(name)
        return number is None or float(self._zero.optimizer.param_groups[number]["lr"]) != 0

    def _zero_grad(self, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
        """Clear the gradients that DeepSpeed keeps, before those of weights that it doesn't step."""
        self._zero.zero_grad(set_to_none)
        zero_grad(set_to_none)

    def _clip(
        self,
        clip: Callable[..., None],
        optimizer: Any,
        clip_val: float | None = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Let the next step clip."""
        if clip_val is None or clip_val <= 0:
            return
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise MisconfigurationException(
                f"`clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm.value!r})`: DeepSpeed clips by the "
                "norm of all gradients only. Use 'norm', or train with `strategy=memfit_fsdp2`."
            )
        self._asked = min(clip_val, self._asked or clip_val)

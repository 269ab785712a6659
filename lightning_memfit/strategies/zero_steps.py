"""`StepsUnderZero`: steps of DeepSpeed clip by what `clip_gradients` was told, and `zero_grad` clears its gradients.

DeepSpeed clips within its step, by a value that it is given when it starts, and keeps gradients in its own buffers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import nn

from lightning_memfit.memory.wrapping import wrap_method


class StepsUnderZero:
    """Wraps an engine's `step`, the `zero_grad` of its module, and the `clip_gradients` of the Trainer's precision.

    Args:
        engine: DeepSpeed's engine.
        precision: The Trainer's precision.
        frozen: Weights of the optimizer that are frozen, by name.
        always_clips: Whether steps clip by the engine's own value when nothing is asked for.

    Raises:
        MisconfigurationException: Later, for clipping by value.
    """

    def __init__(
        self, engine: Any, precision: Precision, frozen: Mapping[str, nn.Parameter], always_clips: bool
    ) -> None:
        self._zero = engine.optimizer
        self._frozen = dict(frozen)
        self._num_groups = len(self._zero.optimizer.param_groups)
        self._always = float(self._zero.clip_grad) if always_clips else 0.0
        self._asked: float | None = None
        self._undo = [
            wrap_method(engine, "step", self._step),
            wrap_method(engine.module, "zero_grad", self._zero_grad),
            wrap_method(precision, "clip_gradients", self._clip),
        ]

    def begin_pass(self) -> None:
        """Check that DeepSpeed trains what the optimizer has: it takes up nothing after training began.

        Raises:
            MisconfigurationException: If a weight was unfrozen, or a group added, as `BackboneFinetuning` does.
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

    def detach(self) -> None:
        """Give the methods back."""
        while self._undo:
            self._undo.pop()()

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked, self._asked = self._asked, None
        self._zero.clip_grad = min((one for one in (asked, self._always) if one), default=0.0)
        try:
            return step(*args, **kwargs)
        finally:
            self._zero.clip_grad = self._always

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

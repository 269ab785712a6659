"""Step each parameter during the backward pass and free its gradient at once (LOMO, Lv et al., 2023, arXiv 2306.09782).

All gradients together, which are as large as the weights, never exist at once. A parameter's gradient is complete when
autograd accumulates it, after every use of the parameter in the graph; from then on nothing in the graph reads the
parameter, so that it may change.
"""

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

_SINGLE_PARAMETER = ("torch.optim.", "bitsandbytes.optim.")
_WHOLE_MODEL = ("LBFGS",)
_KNOWN_ELSEWHERE = ("Lion", "Adafactor")


class GradientRelease:
    """Let backward passes step an optimizer, which keeps its states, groups, hooks and checkpoints.

    One backward pass is one step: gradients cannot be accumulated over several. The optimizer's `step`, called
    afterwards, finds no gradients and does nothing, so that training loops stay as they are.

    Args:
        optimizer: Must step each parameter independently of the others: any of torch (except LBFGS) and bitsandbytes,
            and classes called Lion or Adafactor. `foreach` and `fused` work.
        clip_value: Clip each gradient element to this magnitude before the step.

    Raises:
        ValueError: If the optimizer is of another class, or `clip_value` is not positive.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None = None) -> None:
        refuse_coupled(optimizer)
        if clip_value is not None and clip_value <= 0:
            raise ValueError(f"`clip_value={clip_value}` must be positive.")
        self._optimizer = optimizer
        self._clip_value = clip_value
        self._handles: list[Any] = [optimizer.register_step_pre_hook(self._begin_step)]
        self._stepped: set[int] = set()
        self._is_releasing = False
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    release = partial(self._step_and_release, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(release))

    @property
    def num_parameters(self) -> int:
        """Number of parameters that are stepped during backward; 0 after removal."""
        return max(0, len(self._handles) - 1)

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        while self._handles:
            self._handles.pop().remove()

    def _begin_step(self, *_: Any) -> None:
        if not self._is_releasing:
            self._stepped.clear()

    def _step_and_release(self, index: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "A second backward pass came before `optimizer.step()`, but the first one stepped the parameters "
                "already: gradients that are released cannot be accumulated. Use one backward pass per step."
            )
        self._stepped.add(id(parameter))
        if self._clip_value is not None:
            parameter.grad.clamp_(-self._clip_value, self._clip_value)
        groups = self._optimizer.param_groups
        # Made anew each time: schedules change the group's values between steps.
        self._optimizer.param_groups = [{**groups[index], "params": [parameter]}]
        self._is_releasing = True
        try:
            self._optimizer.step()
        finally:
            self._is_releasing = False
            self._optimizer.param_groups = groups
        parameter.grad = None


def refuse_coupled(optimizer: Optimizer) -> None:
    """Raise a `ValueError` unless it is known that the optimizer steps each parameter independently of the others."""
    cls = type(getattr(optimizer, "wrapped", optimizer))  # inside `Float32Step`, which steps weights with a gradient
    known = cls.__module__.startswith(_SINGLE_PARAMETER) or cls.__name__ in _KNOWN_ELSEWHERE
    if not known or cls.__name__ in _WHOLE_MODEL:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` is not known to step each parameter independently of the others, which "
            "releasing gradients during backward needs. Use an optimizer of torch.optim (but LBFGS) or bitsandbytes, "
            "Lion or Adafactor."
        )

"""Step each parameter during the backward pass and free its gradient at once (LOMO, Lv et al., 2023, arXiv 2306.09782).

All gradients together, which are as large as the weights, never exist at once. A parameter's gradient is complete when
autograd accumulates it, after every use of the parameter in the graph; from then on nothing in the graph reads the
parameter, so that it may change.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from lightning_memfit.optim.steps import refuse_own_step

_SINGLE_PARAMETER = ("torch.optim.", "bitsandbytes.optim.", "torchao.optim.adam")
_WHOLE_MODEL = ("LBFGS",)
_KNOWN_ELSEWHERE = ("Lion", "Adafactor")


class GradientRelease:
    """Let backward passes step an optimizer, which keeps its states, groups, hooks and checkpoints.

    One backward pass is one step: gradients cannot be accumulated over several. The optimizer's `step`, called
    afterwards, finds no gradients and does nothing, so that training loops stay as they are.

    Parameters may be frozen, unfrozen and added to the optimizer at any time. Call `refresh` before the next forward
    pass; otherwise their first gradient is kept until `step`.

    Args:
        optimizer: Must step each parameter independently of the others: any of torch (except LBFGS) and bitsandbytes,
            Adam and AdamW of torchao, and classes called Lion or Adafactor. `foreach` and `fused` work.
        clip_value: Clip each gradient element to this magnitude before the step.

    Raises:
        ValueError: If the optimizer is of another class, has a `step` of its own on the object or hooks that would run
            once per parameter, or `clip_value` is not positive.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None = None) -> None:
        refuse_coupled(optimizer)
        _refuse_hooks(optimizer)
        if clip_value is not None and clip_value <= 0:
            raise ValueError(f"`clip_value={clip_value}` must be positive.")
        self.clip_value = clip_value
        self.is_open = True
        """Whether a backward pass is a step. While it is not, one that reaches a parameter is refused."""
        refuse_own_step(optimizer, "which would run once per parameter, without the gradients of the others")
        self._optimizer = optimizer
        self._handles: dict[torch.Tensor, Any] = {}
        self._groups: dict[torch.Tensor, int] = {}
        self._step_handle: Any = optimizer.register_step_pre_hook(self._begin_step)
        self._stepped: set[int] = set()
        self._is_releasing = False
        self.refresh()

    @property
    def num_parameters(self) -> int:
        """Number of parameters that are stepped during backward; 0 after removal."""
        return len(self._handles)

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether backward passes step this optimizer."""
        return self._optimizer is optimizer

    def refresh(self) -> None:
        """Follow parameters that were unfrozen or given to the optimizer since the last call, and no others."""
        refuse_own_step(self._optimizer, "which would run once per parameter, without the gradients of the others")
        groups = enumerate(self._optimizer.param_groups)
        self._groups = {parameter: index for index, group in groups for parameter in group["params"]}
        for parameter in [parameter for parameter in self._handles if parameter not in self._groups]:
            self._handles.pop(parameter).remove()
        for parameter in self._groups:
            if parameter.requires_grad and parameter not in self._handles:
                handle = parameter.register_post_accumulate_grad_hook(self._step_and_release)
                self._handles[parameter] = handle

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._step_handle.remove()
        while self._handles:
            self._handles.popitem()[1].remove()

    def _begin_step(self, *_: Any) -> None:
        if self._is_releasing:
            return
        self._stepped.clear()
        if self.clip_value is not None:  # gradients that came before their parameter was followed
            for group in self._optimizer.param_groups:
                left = [parameter for parameter in group["params"] if parameter.grad is not None]
                if left:
                    torch.nn.utils.clip_grad_value_(left, self.clip_value)

    def _step_and_release(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if not self.is_open:
            raise RuntimeError(
                "A backward pass ran outside of the training loop's own, such as `loss.backward()` in `training_step`. "
                "Its gradients would step parameters, where a plain run clears or accumulates them. Use "
                "`torch.autograd.grad` there, or leave GradientRelease out."
            )
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "A second backward pass came before `optimizer.step()`, but the first one stepped the parameters "
                "already: gradients that are released cannot be accumulated. Use one backward pass per step."
            )
        self._stepped.add(id(parameter))
        if self.clip_value is not None:
            parameter.grad.clamp_(-self.clip_value, self.clip_value)
        groups = self._optimizer.param_groups
        # Made anew each time: schedules change the group's values between steps.
        self._optimizer.param_groups = [{**groups[self._groups[parameter]], "params": [parameter]}]
        self._is_releasing = True
        try:
            self._optimizer.step()
        finally:
            self._is_releasing = False
            self._optimizer.param_groups = groups
        parameter.grad = None


def _refuse_hooks(optimizer: Optimizer) -> None:
    """Raise a `ValueError` if other code than this package has hooks around the optimizer's step."""
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    for hook in hooks:
        module = getattr(hook, "__module__", None) or ""
        if module.partition(".")[0] != __name__.partition(".")[0]:
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise ValueError(
                f"The optimizer ({type(optimizer).__name__}) has a hook around its step, `{name}`, that would run once "
                "per parameter and find no other gradients. Remove it, or do not release gradients."
            )


def refuse_coupled(optimizer: Optimizer) -> None:
    """Raise a `ValueError` unless it is known that the optimizer steps each parameter independently of the others."""
    cls = type(getattr(optimizer, "wrapped", optimizer))  # inside `Float32Step`, which steps weights with a gradient
    known = cls.__module__.startswith(_SINGLE_PARAMETER) or cls.__name__ in _KNOWN_ELSEWHERE
    if not known or cls.__name__ in _WHOLE_MODEL:
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` is not known to step each parameter independently of the others, which "
            "releasing gradients during backward needs. Use an optimizer of torch.optim (but LBFGS), bitsandbytes or "
            "torchao's Adam, Lion or Adafactor."
        )

"""Step each parameter during the backward pass and free its gradient at once (LOMO, Lv et al., 2023, arXiv 2306.09782).

A parameter's gradient is complete when autograd accumulates it, after every use of the parameter that has a gradient.
Where a use without one (`weight.detach()`) is read later still, torch finds that a saved tensor has changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_memfit.optim.steps import narrowed, refuse_own_step, step_below_hooks

_SINGLE_PARAMETER = ("torch.optim", "bitsandbytes.", "torchao.optim.adam", "transformers.optimization", "lion_pytorch.")
_OWN_STEP = "which would run once per parameter, without the gradients of the others"


class GradientRelease:
    """Let backward passes, run in `backward`, step an optimizer, which keeps its states, groups, hooks and checkpoints.

    One backward pass is one step: gradients cannot be accumulated over several. The optimizer's `step`, called
    afterwards, finds no gradients and does nothing, so that training loops stay as they are.

    Parameters may be frozen, unfrozen and added to the optimizer at any time. Call `refresh` before the next forward
    pass; otherwise their first gradient is kept until `step`.

    Args:
        optimizer: Must step each parameter independently of the others: any of torch (except LBFGS) and bitsandbytes,
            Adam and AdamW of torchao, Adafactor of transformers, Lion of lion-pytorch. `foreach` and `fused` work.
        clip_value: Clip each gradient element to this magnitude before the step.

    Raises:
        ValueError: If the optimizer is of another class, has a `step` of its own on the object or hooks that would see
            parameters of which some have stepped.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None = None) -> None:
        refuse_coupled(optimizer)
        self.clip_value = clip_value
        self.is_open = True
        """Whether a backward pass is a step. While it is not, one that reaches a parameter is refused."""
        self.optimizer = optimizer
        self._handles: dict[Tensor, Any] = {}
        self._groups: dict[Tensor, int] = {}
        """Index of each parameter's group."""
        self._stepped: set[int] = set()
        self.refresh()
        self._step_handle: Any = optimizer.register_step_pre_hook(self._begin_step)

    @property
    def num_parameters(self) -> int:
        """Number of parameters that are stepped during backward; 0 after removal."""
        return len(self._handles)

    def refresh(self) -> None:
        """Follow parameters that were unfrozen or given to the optimizer since the last call, and no others."""
        refuse_own_step(self.optimizer, _OWN_STEP)
        _refuse_hooks(self.optimizer)
        groups = enumerate(self.optimizer.param_groups)
        self._groups = {parameter: index for index, group in groups for parameter in group["params"]}
        for parameter in self._handles.keys() - self._groups.keys():
            self._handles.pop(parameter).remove()
        for parameter in [one for one in self._groups if one.requires_grad and one not in self._handles]:
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._take)

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._step_handle.remove()
        while self._handles:
            self._handles.popitem()[1].remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run one backward pass inside, which is a step."""
        self.is_open = True
        try:
            yield
        except RuntimeError as error:
            if self._stepped and "modified by an inplace operation" in str(error):
                raise RuntimeError(
                    "The backward pass reads a weight after its gradient is complete, when it is stepped. Something "
                    "uses it without a gradient (`weight.detach()`, a layer frozen for one branch), or it shares "
                    "memory with another parameter. Use a copy there (`weight.detach().clone()`), or leave "
                    "GradientRelease out. Some weights have changed in this step: go on from a checkpoint."
                ) from error
            raise
        finally:
            self.is_open = False

    def _begin_step(self, *_: Any) -> None:
        self._stepped.clear()
        if self.clip_value is not None:  # gradients that came before their parameter was followed
            for group in self.optimizer.param_groups:
                left = [parameter for parameter in group["params"] if parameter.grad is not None]
                if left:
                    torch.nn.utils.clip_grad_value_(left, self.clip_value)

    def _take(self, parameter: Tensor) -> None:
        """Step a parameter whose gradient is complete."""
        assert parameter.grad is not None
        if not self.is_open:
            raise RuntimeError(
                "A backward pass ran outside of the training loop's own, such as `loss.backward()` in `training_step`. "
                "Its gradients would step parameters, where a plain run clears or accumulates them. Use "
                "`torch.autograd.grad` there, or leave GradientRelease out."
            )
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "A second gradient of a parameter came before `optimizer.step()`, from a second backward pass or a "
                "reentrant checkpoint (torch.utils.checkpoint) around a layer that is used elsewhere, too: gradients "
                "that are released cannot be accumulated. Use one backward pass per step, and `use_reentrant=False`."
            )
        self._stepped.add(id(parameter))
        if self.clip_value is not None:
            parameter.grad.clamp_(-self.clip_value, self.clip_value)
        # Made anew each time: schedules change the group's values between steps.
        group = {**self.optimizer.param_groups[self._groups[parameter]], "params": [parameter]}
        with narrowed(self.optimizer, [group]):
            step_below_hooks(self.optimizer)
        # Kernels of bitsandbytes write past torch, which then would not notice that saved tensors have changed.
        increment_version(parameter)
        parameter.grad = None


def _refuse_hooks(optimizer: Optimizer) -> None:
    """Raise a `ValueError` if other code than this package has hooks around the optimizer's step."""
    ours = __name__.partition(".")[0]
    for hook in (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()):
        if (getattr(hook, "__module__", None) or "").partition(".")[0] != ours:
            raise ValueError(
                f"The optimizer ({type(optimizer).__name__}) has a hook around its step, "
                f"`{getattr(hook, '__qualname__', type(hook).__name__)}`, that would find parameters stepped already "
                "and no gradients. Remove it, or do not release gradients."
            )


def refuse_coupled(optimizer: Optimizer, what: str = "releasing gradients during backward") -> None:
    """Raise a `ValueError` unless it is known that the optimizer steps each parameter independently of the others."""
    cls = type(getattr(optimizer, "wrapped", optimizer))  # inside `Float32Step`, which steps those with a gradient
    if not cls.__module__.startswith(_SINGLE_PARAMETER) or cls.__name__ == "LBFGS":
        raise ValueError(
            f"`{cls.__module__}.{cls.__name__}` is not known to step each parameter independently of the others, which "
            f"{what} needs. Use an optimizer of torch.optim (but LBFGS) or bitsandbytes, torchao's Adam, transformers' "
            "Adafactor or lion-pytorch's Lion."
        )

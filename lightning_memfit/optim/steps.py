"""What optimizers that step others have in common: closures, hooks, and gradients that can't be stepped."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class OwnHook:
    """A hook that belongs to what an optimizer is at the moment, and goes when it is converted to something else."""

    @staticmethod
    def is_one(hook: Any) -> bool:
        """Whether a hook, or the object whose method it is, is such a one."""
        return isinstance(getattr(hook, "__self__", hook), OwnHook)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Run the closure that a step was given, with gradients, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def step_below_hooks(optimizer: Optimizer, cls: type[Optimizer] | None = None) -> None:
    """Run a class's step without the hooks that torch adds to it: they belong to the step as a whole.

    Written for torch 2.9-2.13, whose hooks are a layer with `__wrapped__` that is marked as `hooked`.

    Args:
        optimizer: The optimizer to step.
        cls: A class that it is derived from, whose step is to run; its own by default.
    """
    step: Any = (cls or type(optimizer)).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def refuse_sparse(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise a `ValueError` if a gradient isn't dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"{name} can't step the sparse gradient of a parameter of shape {tuple(parameter.shape)}. Make its "
                "embedding with `sparse=False`, or leave the optimizer as the module makes it."
            )

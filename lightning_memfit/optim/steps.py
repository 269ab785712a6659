"""What optimizers that step others have in common: closures, hooks, and gradients that can't be stepped."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
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


def copied_whole(optimizer: Any, memo: dict[int, Any], shared: Collection[str] = ()) -> Any:
    """A deep copy with all attributes, of which torch's own way leaves out those that other libraries need."""
    cls: Any = type(optimizer)
    memo[id(optimizer)] = copied = cls.__new__(cls)
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's layer, which would step the original
            copied.__dict__[name] = value if name in shared else copy.deepcopy(value, memo)
    return copied


def step_below_hooks(optimizer: Optimizer, cls: type[Optimizer] | None = None) -> None:
    """Run a class's step without the hooks that torch adds to it: they belong to the step as a whole.

    Written for torch 2.11-2.13, whose hooks are a layer with `__wrapped__` that is marked as `hooked`.
    """
    step: Any = (cls or type(optimizer)).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def narrowed(optimizer: Any, groups: list[dict[str, Any]], states: Any = None) -> Iterator[None]:
    """Give an optimizer other groups for a step of some of its parameters, or of stand-ins for them."""
    initialize(optimizer)
    stepped = getattr(optimizer, "wrapped", optimizer)
    whole = stepped.param_groups, stepped.state
    stepped.param_groups = groups
    if states is not None:
        stepped.state = states
    try:
        yield
    finally:
        stepped.param_groups, stepped.state = whole


def initialize(optimizer: Any) -> None:
    """Prepare an optimizer of bitsandbytes (0.50) for steps of some of its parameters, as a first step does for all.

    Raises:
        ValueError: If bitsandbytes is told something of single parameters, which it finds by their places.
    """
    stepped = getattr(optimizer, "wrapped", optimizer)
    if getattr(stepped, "initialized", True):
        return
    if stepped.mng.pid2config or stepped.mng.index2config or stepped.mng.module_weight_config_triple:
        raise ValueError(
            "bitsandbytes' `override_config` and `StableEmbedding` don't reach an optimizer that steps parameters by "
            "themselves. Leave them out (`keep_32bit_embeddings` of Optimizer8bit does the same), or leave "
            "GradientRelease and StochasticRounding out."
        )
    stepped.to_gpu()
    stepped.initialized = True


def refuse_wide(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise a `ValueError` for a dtype of which a class that computes in float32 would lose a part."""
    for parameter in parameters:
        if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} computes in float32, which a {parameter.dtype} parameter of shape {tuple(parameter.shape)} is "
                "not made for. Leave the optimizer as the module makes it, or use float32, float16 or bfloat16 weights."
            )


def refuse_sparse(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise a `ValueError` if a gradient isn't dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"{name} can't step the sparse gradient of a parameter of shape {tuple(parameter.shape)}. Make its "
                "embedding with `sparse=False`, or leave the optimizer as the module makes it."
            )


def refuse_own_step(optimizer: Optimizer, why: str) -> None:
    """Raise a `ValueError` if someone has put a `step` on the object; the layer of torch's schedulers is none."""
    step: Any = vars(optimizer).get("step")
    is_layer = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    if step is not None and not is_layer:
        raise ValueError(
            f"This {type(optimizer).__name__} has a `step` that was put on the object, {why}. Leave it out "
            "(`register_step_pre_hook` and `register_step_post_hook` may do), or leave the technique out."
        )

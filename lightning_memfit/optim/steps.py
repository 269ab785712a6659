"""What optimizers that step others have in common: closures, hooks, and gradients that can't be stepped."""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType
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

    Written for torch 2.11-2.13, whose hooks are a layer with `__wrapped__` that is marked as `hooked`.

    Args:
        optimizer: The optimizer to step.
        cls: A class that it is derived from, whose step is to run; its own by default.
    """
    step: Any = (cls or type(optimizer)).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


@contextmanager
def narrowed(
    optimizer: Any, groups: list[dict[str, Any]], places: Mapping[Tensor, tuple[int, int]], states: Any = None
) -> Iterator[None]:
    """Give an optimizer other groups for a step of some of its parameters, or of stand-ins for them.

    bitsandbytes finds what a user has set for one parameter (`override_config`, `StableEmbedding`) by the place and the
    identity of that parameter. It is asked about the parameter's own place and groups here.

    Written for bitsandbytes 0.50: `get_config`, and `check_overrides`, `to_gpu` and `initialized` of `take_overrides`.

    Args:
        optimizer: The optimizer; its groups, and those of the one that it wraps, are `groups` inside.
        groups: Parameters that step, with the hyper-parameters of their groups.
        places: For each of them, index of the group and index within it of the parameter whose place it takes.
        states: States by what is in `groups`; the optimizer's own by default.
    """
    take_overrides(optimizer)
    stepped = getattr(optimizer, "wrapped", optimizer)
    attributes = vars(stepped)
    whole = {name: attributes[name] for name in ("param_groups", "state", "get_config") if name in attributes}
    if hasattr(stepped, "get_config"):
        asked = stepped.get_config

        def get_config(_: int, index: int, group: dict[str, Any]) -> Any:
            gindex, pindex = places[group["params"][index]]
            own = whole["param_groups"]
            inside, stepped.param_groups = stepped.param_groups, own
            try:
                return asked(gindex, pindex, {**group, "params": own[gindex]["params"]})
            finally:
                stepped.param_groups = inside

        stepped.get_config = get_config
    stepped.param_groups = groups
    if states is not None:
        stepped.state = states
    try:
        yield
    finally:
        attributes.pop("get_config", None)
        attributes.update(whole)


# --- what an optimizer of unknown origin computes ---------------------------------------------------------------------


TRIAL_RATE = 0.1
"""Learning rate of a trial; that of a schedule may begin at zero."""


class Trial:
    """Steps of an optimizer on small weights, as it is configured, which leave it and what it steps as they are.

    A class may keep in attributes what its groups don't show: a rate that weight decay is divided by, a count of steps.
    For use outside of modes, in which tensors may have no values.

    Args:
        optimizer: The optimizer.
        options: Hyper-parameters of one of its groups.
    """

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        self._optimizer = optimizer
        self._options = {**options, "lr": TRIAL_RATE}
        # Whatever torch's defaults are.
        normal = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        draw = [[normal(shape) for shape in ((3, 5), (4,))] for _ in range(4)]
        self.start, self.gradients = draw[0], draw[1:]

    def stepped(self, apart: bool = False) -> list[Tensor] | None:
        """Weights after a step for each of the gradients; None if the optimizer needs more than weights to step.

        Args:
            apart: Step each weight by itself, in a group of its own that is made anew each time.
        """
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            weights = [torch.nn.Parameter(weight.clone()) for weight in self.start]
            copied, options = self._copy(), {name: _own_copy(value) for name, value in self._options.items()}
            copied.param_groups = [{**options, "params": weights}]
            try:
                for gradients in self.gradients:
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight.grad = gradient.clone()
                    for weight in weights if apart else weights[:1]:
                        if apart:
                            copied.param_groups = [{**options, "params": [weight]}]
                        step_below_hooks(copied)
            except Exception:
                return None
            return [weight.detach() for weight in weights]

    def _copy(self) -> Any:
        """The optimizer without states and hooks; tensors and containers that it keeps are its own."""
        copied: Any = object.__new__(type(self._optimizer))
        for name, value in vars(self._optimizer).items():
            if name not in ("step", "param_groups", "state"):
                is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                vars(copied)[name] = OrderedDict() if is_hooks else _own_copy(value)
        copied.state = defaultdict(dict)
        return copied


def _own_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def take_overrides(optimizer: Any) -> None:
    """Let an optimizer of bitsandbytes look for overrides of its parameters, as its first step does in its groups."""
    stepped = getattr(optimizer, "wrapped", optimizer)
    if getattr(stepped, "initialized", True) is False:
        stepped.check_overrides()
        stepped.to_gpu()
        stepped.initialized = True


def refuse_sparse(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise a `ValueError` if a gradient isn't dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise ValueError(
                f"{name} can't step the sparse gradient of a parameter of shape {tuple(parameter.shape)}. Make its "
                "embedding with `sparse=False`, or leave the optimizer as the module makes it."
            )


class OutermostStep:
    """Tell an optimizer's own step from those of its base classes, which it calls with `super().step()`.

    Torch runs the hooks of a step in each class of which an instance was ever made, so that the hooks of one object may
    run once or twice in a step, whatever else the process has done before.
    """

    def __init__(self) -> None:
        self._frame: Any = None

    def begin(self) -> bool:
        """Return whether the step that runs the calling hook, registered before it, lies in no other."""
        step = frame = _caller()
        while frame is not None and self._frame is not None:
            if frame is self._frame:
                return False
            frame = frame.f_back
        self._frame = step  # one that is no longer running has failed
        return True

    def end(self) -> bool:
        """Return whether the step that runs the calling hook, registered after it, is that one."""
        if _caller() is not self._frame:
            return False
        self._frame = None
        return True


def _caller() -> FrameType | None:
    """The frame that runs the hook that asks: past this function, the method it calls, and the hook itself."""
    frame = inspect.currentframe()
    for _ in range(3):
        frame = None if frame is None else frame.f_back
    return frame


def refuse_own_step(optimizer: Optimizer, why: str) -> None:
    """Raise a `ValueError` if someone has put a `step` on the object; the layer of torch's schedulers is none.

    Args:
        optimizer: The optimizer.
        why: What would go wrong, to end the first sentence.
    """
    step: Any = vars(optimizer).get("step")
    if step is None:
        return
    if hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step:
        return
    raise ValueError(
        f"This {type(optimizer).__name__} has a `step` that was put on the object, {why}. Leave it out "
        "(`register_step_pre_hook` and `register_step_post_hook` may do), or leave the technique out."
    )

"""Who looks at gradients: hooks of the module and of callbacks that are not the package's own.

A technique that frees or moves gradients asks this before a run, so that nobody is given a gradient of zero.
"""

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memfit.memory.wrapping import Layered

BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
BEFORE_ZERO_GRAD = ("on_before_zero_grad",)
BETWEEN_STEPS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_end",
)
"""Hooks that run while a plain run has the last step's gradients, and that are seldom there for them."""

_PACKAGE = __name__.partition(".")[0]
_MOST_FUNCTIONS = 200


def who_overrides(module: Any, callbacks: Iterable[Any], *hooks: str) -> str | None:
    """Name the first of the hooks that the module or a callback overrides; None if none does.

    The package's own callbacks don't count, as they look at no gradient in these hooks, and neither do hooks that do
    nothing (`does_nothing`).
    """
    return next((who for _, who, _ in _overrides(module, callbacks, hooks)), None)


def gradient_hooks(module: Any, callbacks: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    """Hooks that look at gradients, by name, with words that say whose they are.

    Those before the step and before gradients are cleared are there for nothing else. Of those between steps the code
    is read, and that of the functions and methods it names, for an attribute `grad`; not what those call in torch.
    """
    callbacks = list(callbacks)
    there = [(hook, who) for hook, who, _ in _overrides(module, callbacks, (*BEFORE_STEP, *BEFORE_ZERO_GRAD))]
    between = _overrides(module, callbacks, BETWEEN_STEPS)
    return (*there, *((hook, who) for hook, who, function in between if _reads_gradients(function)))


def _overrides(module: Any, callbacks: Iterable[Any], hooks: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    callbacks = list(callbacks)
    for hook in hooks:
        if is_own_hook(hook, module):
            yield hook, f"the module's `{hook}`", getattr(module, hook)
        for callback in callbacks:
            is_theirs = is_overridden(hook, callback, parent=pl.Callback) and not _is_own(callback, hook)
            if is_theirs and not does_nothing(callback, hook):
                yield hook, f"`{hook}` of the callback {type(callback).__name__}", getattr(callback, hook)


def is_own_hook(hook: str, module: Any) -> bool:
    """Whether a module has a hook of its own, which Lightning leaves empty, that does something."""
    is_theirs = isinstance(module, pl.LightningModule) and is_overridden(hook, module) and not is_ours(hook, module)
    return is_theirs and not does_nothing(module, hook)


def does_nothing(owner: Any, hook: str) -> bool:
    """Whether a hook that Lightning leaves empty is empty here, too, or does no more than call that of its base class.

    It then names nothing, and what names nothing can neither read a gradient nor call what does.
    """
    for holder in (owner, *type(owner).__mro__):
        function = vars(holder).get(hook)
        if function is None:
            continue
        if not isinstance(function, FunctionType) or not set(function.__code__.co_freevars) <= {"__class__"}:
            return False
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        if not names <= {"super", hook}:
            return False
        if not names:
            break
    return True


def is_ours(hook: str, module: Any) -> bool:
    """Whether a module's hook is only a technique's layer around Lightning's own (`memory.wrapping`)."""
    is_layered = isinstance(vars(module).get(hook), Layered)
    return is_layered and getattr(type(module), hook) is getattr(pl.LightningModule, hook)


def _is_own(callback: pl.Callback, hook: str) -> bool:
    """Whether the package itself defines a callback's hook."""
    if hook in vars(callback):
        return isinstance(vars(callback)[hook], Layered)
    return is_of_package(callback, hook)


def is_of_package(callback: pl.Callback, hook: str) -> bool:
    """Whether the class that gives a callback a hook is one of the package's."""
    owner = next(cls for cls in type(callback).__mro__ if hook in vars(cls))
    return owner.__module__.partition(".")[0] == _PACKAGE


def _reads_gradients(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None)
    waiting: list[Any] = [getattr(hook, "__func__", hook)]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        for code in _codes(function.__code__):
            if _reads_grad_attribute(code):
                return True
            for name in code.co_names:
                named = function.__globals__.get(name)
                if owner is not None and named is None:
                    named = getattr(type(owner), name, None)
                if getattr(named, "__module__", None) is not None and not _is_of_torch(named):
                    waiting.append(named)
    return False


def _is_of_torch(function: Any) -> bool:
    module = function.__module__
    # Lightning's own methods are the same in a plain run; `grad_norm` is there to be called by hooks.
    return module.split(".")[0] == "torch" or (
        module.startswith("lightning.") and not module.startswith("lightning.pytorch.utilities.grads")
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _reads_grad_attribute(code: CodeType) -> bool:
    before = ""
    for instruction in dis.get_instructions(code):
        is_attribute = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if is_attribute and instruction.argval == "grad" and before not in ("autograd", "func"):
            return True
        before = instruction.argval if isinstance(instruction.argval, str) else ""
    return False

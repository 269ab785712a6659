"""Who looks at gradients: hooks of the module and of callbacks that are not the package's own.

A technique that frees or moves gradients asks this before a run, so that nobody is given a gradient of zero.
"""

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memfit.memory.wrapping import Layered

_LOOKING = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_DOING = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
"""Methods of a module in place of what Lightning does with gradients. One that does nothing counts, too."""

_PACKAGE = __name__.partition(".")[0]


def gradient_hooks(module: Any, callbacks: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Hooks of a module and of callbacks that look at gradients, by name, with words that say whose they are.

    Hooks after the step may find none, which they must expect in plain runs, too: of parameters that had none in this
    batch. The package's own callbacks don't count, as they look at no gradient there, and neither do hooks that do
    nothing (`does_nothing`).
    """
    for hook in (*_DOING, *_LOOKING) if isinstance(module, pl.LightningModule) else ():
        is_theirs = is_overridden(hook, module) and not _is_layer(hook, module)
        if is_theirs and (hook in _DOING or not does_nothing(module, hook)):
            yield hook, f"the module's `{hook}`"
    for callback in callbacks:
        for hook in _LOOKING:
            is_theirs = is_overridden(hook, callback, parent=pl.Callback) and not _is_own(callback, hook)
            if is_theirs and not does_nothing(callback, hook):
                yield hook, f"`{hook}` of the callback {type(callback).__name__}"


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


def _is_layer(hook: str, module: Any) -> bool:
    """Whether a module's hook is only a technique's layer around Lightning's own (`memory.wrapping`)."""
    is_layered = isinstance(vars(module).get(hook), Layered)
    return is_layered and getattr(type(module), hook) is getattr(pl.LightningModule, hook)


def _is_own(callback: pl.Callback, hook: str) -> bool:
    """Whether the package itself defines a callback's hook."""
    if hook in vars(callback):
        return isinstance(vars(callback)[hook], Layered)
    owner = next(cls for cls in type(callback).__mro__ if hook in vars(cls))
    return owner.__module__.partition(".")[0] == _PACKAGE


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)

"""Who looks at gradients: hooks of the module and of callbacks that are not the package's own.

A technique that frees or moves gradients asks this before a run, so that nobody is given a gradient of zero.
"""

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

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


def who_overrides(trainer: pl.Trainer, pl_module: pl.LightningModule, *hooks: str) -> str | None:
    """Name the first of the hooks that the module or a callback overrides; None if none does.

    The package's own callbacks don't count, as they look at no gradient in these hooks.
    """
    return next((who for who, _ in _overrides(trainer, pl_module, hooks)), None)


def who_reads_gradients(trainer: pl.Trainer, pl_module: pl.LightningModule, *hooks: str) -> str | None:
    """Name the first of the hooks that is overridden by code that reads an attribute `grad`; None if none does.

    The code of the hook is read, and that of the functions and methods it names; not what those call in torch.
    """
    return next((who for who, function in _overrides(trainer, pl_module, hooks) if _reads_gradients(function)), None)


def _overrides(trainer: pl.Trainer, pl_module: pl.LightningModule, hooks: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for hook in hooks:
        if is_overridden(hook, pl_module):
            yield f"the module's `{hook}`", getattr(pl_module, hook)
        for callback in callbacks:
            if is_overridden(hook, callback, parent=pl.Callback) and not _is_own(callback, hook):
                yield f"`{hook}` of the callback {type(callback).__name__}", getattr(callback, hook)


def _is_own(callback: pl.Callback, hook: str) -> bool:
    """Whether the package itself defines a callback's hook."""
    if hook in vars(callback):
        return hasattr(vars(callback)[hook], "_memfit_layers")
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

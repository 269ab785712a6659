"""Which callbacks of a Trainer are part of its steps, so that a trace needs copies of them.

A callback that averages weights, or keeps outputs, needs memory as the module does. One that shows progress, saves
checkpoints or watches learning rates doesn't. What a callback's class overrides tells: hooks that a step calls, and of
libraries' classes only those hooks that take hold of the module, its outputs or its optimizer. What it really does
shows when it runs; one that can't run in a trial step, as it would write a file, is left out and named
(`CallbackError`).
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch

from lightning_memfit.profile.culprit import definition_of, is_of_this_package, owner_of
from lightning_memfit.profile.fake import tensors_in
from lightning_memfit.profile.seal import RefusedError

_START = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")

_ASKED_OF_LIBRARIES = ("setup", "on_train_start", "on_train_epoch_start")
"""Hooks at the start in which a library's callback may change a module. In `on_fit_start` others sum it up."""

_STEP = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)

_NUMBER_AT = {"on_train_batch_start": 3, "on_train_batch_end": 4}
"""Which argument of a hook is the number of its batch."""

_NEGLIGIBLE_BYTES = 4096

_HARMLESS_CALLS = ("type", "id", "isinstance", "hasattr", "print")


class CallbackError(BaseException):
    """A callback can't run in a trial step, which has to do without it.

    Not an `Exception`, so that no attempt to run the step in another way is made with it.

    Args:
        callback: The copy that was run.
        error: What it raised.
    """

    def __init__(self, callback: Any, error: BaseException) -> None:
        what = str(error) if isinstance(error, RefusedError) else f"it ends in {type(error).__name__}: {error}"
        name = type(callback).__name__
        super().__init__(f"{name} acts in a step, but is not in the figures, as it can't run in a trial step: {what}")
        self.kind = type(callback)
        """Its class, by which it is told from others."""


def acting_callbacks(module: Any) -> tuple[Any, ...]:
    """The callbacks, of the Trainer that a module belongs to, that are part of its steps; this package's left out."""
    callbacks = getattr(getattr(module, "_trainer", None), "callbacks", None) or ()
    return tuple(callback for callback in callbacks if not is_own(callback) and acts_in_step(callback))


def is_own(callback: Any) -> bool:
    """Whether a callback is of this package, which passes those that change a step by itself."""
    return any(is_of_this_package(kind) for kind in type(callback).__mro__)


def acts_in_step(callback: Any) -> bool:
    """Whether a callback may do something in a step that needs memory."""
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar

    if isinstance(callback, (Checkpoint, ProgressBar)):  # what they are for is known by their base class
        return False
    if any(_is_users(place) for name in (*_START, *_STEP) for place, _ in _defining(callback, name)):
        return True
    hooks = [hook for name in (*_ASKED_OF_LIBRARIES, *_STEP) for _, hook in _defining(callback, name)]
    return any(_takes_hold(callback, hook, set()) for hook in hooks) or (bool(hooks) and _holds_tensors(callback))


def runs_at_epoch_start(callback: Any) -> bool:
    """Whether a callback has a hook that runs at the start of every epoch."""
    return any(True for _ in _defining(callback, "on_train_epoch_start"))


def _holds_tensors(callback: Any) -> bool:
    """Whether a callback holds more than a few numbers."""
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

    run = (Trainer, LightningModule, LightningDataModule)
    held = {name: value for name, value in vars(callback).items() if not isinstance(value, run)}
    try:
        return sum(tensor.nbytes for tensor in tensors_in(held)) > _NEGLIGIBLE_BYTES
    except Exception:  # what can't be copied shows when the callback is
        return True


def leave_out_other_hooks(
    callback: Any, watched: Callable[[], AbstractContextManager[object]], numbered: Callable[[int], int]
) -> None:
    """Let a copy of a callback act at the start of training and in its steps only, and say which errors are its own.

    Args:
        callback: The copy.
        watched: Makes a context for every call of its hooks.
        numbered: Gives the number of a batch as its hooks shall see it.
    """
    from lightning.pytorch import Callback

    for name in (name for name in vars(Callback) if name.startswith(("on_", "setup", "teardown"))):
        if name not in (*_START, *_STEP):
            object.__setattr__(callback, name, _do_nothing)
        elif any(True for _ in _defining(callback, name)):
            place = _NUMBER_AT.get(name)
            object.__setattr__(callback, name, _guarded(callback, getattr(callback, name), watched, place, numbered))


def _guarded(
    callback: Any,
    hook: Callable[..., Any],
    watched: Callable[[], AbstractContextManager[object]],
    place: int | None,
    numbered: Callable[[int], int],
) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if place is not None and len(args) > place:
            args = (*args[:place], numbered(args[place]), *args[place + 1 :])
        try:
            with watched():
                return hook(*args, **kwargs)
        except (Exception, RefusedError) as error:
            raise CallbackError(callback, error) from error

    return call


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook by nothing."""


def _defining(callback: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """A hook's functions and where each is: the callback's own, then those of its classes up to Lightning's base.

    `LambdaCallback` sets its hooks on the callback.
    """
    from lightning.pytorch import Callback

    if name in vars(callback):
        hook = vars(callback)[name]
        function = getattr(hook, "__func__", hook)
        yield function, function
    for kind in type(callback).__mro__:
        if name in vars(kind) and not issubclass(Callback, kind):
            yield kind, vars(kind)[name]


def _is_users(place: Any) -> bool:
    """Whether a class or function is the user's; so is what has no source."""
    try:
        return owner_of(inspect.getfile(place), place.__module__ == "__main__") == "user"
    except (TypeError, OSError):
        return True


def _takes_hold(callback: Any, function: Any, read: set[Any]) -> bool:
    """Whether a hook of a library's uses the module, or what a step makes, beyond asking for Lightning's own values."""
    if function in read:
        return False
    read.add(function)
    tree = _tree(function)
    if tree is None:
        return True
    arguments = [one.arg for one in (*tree.args.args, *tree.args.kwonlyargs)]
    held = {name for name in arguments[1:] if name not in ("trainer", "stage", "batch_idx", "dataloader_idx")}
    own = arguments[0] if arguments else ""
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            method = _own_method(node.func, own, callback)
            if method is not None and any(isinstance(one, ast.Name) and one.id in held for one in values):
                if _takes_hold(callback, method, read):
                    return True
                passed |= set(map(id, values))
            elif isinstance(node.func, ast.Name) and node.func.id in _HARMLESS_CALLS:
                passed |= set(map(id, values))
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
                passed |= set(map(id, values)) if _is_super(node.func.value) else set()
    passed |= {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Attribute) and _asks_lightning(one)}
    return any(isinstance(node, ast.Name) and node.id in held and id(node) not in passed for node in ast.walk(tree))


def _own_method(called: ast.expr, own: str, callback: Any) -> Any:
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == own:
        found = inspect.getattr_static(type(callback), called.attr, None)
        return getattr(found, "__func__", found)
    return None


def _is_super(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "super"


def _asks_lightning(node: ast.Attribute) -> bool:
    """Whether it reads an attribute of a module that plain modules don't have."""
    return isinstance(node.ctx, ast.Load) and node.attr not in dir(torch.nn.Module)


def _tree(function: Any) -> ast.FunctionDef | None:
    function = inspect.unwrap(function) if callable(function) else function
    found = definition_of(function) if isinstance(function, FunctionType) else None
    return found if isinstance(found, ast.FunctionDef) else None

"""Notice, at run time, code that reads gradients while a technique has taken them away."""

import inspect
from collections.abc import Callable, Iterator
from itertools import count
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memfit.memory.wrapping import own_attribute, wrap_method
from lightning_memfit.techniques.core.facts import is_compiled
from lightning_memfit.techniques.core.hooks import is_of_package

_READ: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SERVED = frozenset(
    {
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_start",
        "on_exception",
        "on_save_checkpoint",
        "on_load_checkpoint",
    }
)
"""Hooks where the technique has gradients or refuses the hook as a whole, and those outside of training steps."""
_TRANSFERS = ("transfer_batch_to_device", "lr_scheduler_step")


class RefuseReads(TorchFunctionMode):
    """Refuse to read `.grad` of the module's parameters while their gradients are gone.

    Torch tells a function mode of every read of `Tensor.grad`, whoever reads it: `getattr`, a helper in another module
    or `clip_grad_norm_` alike. What torch itself reads elsewhere, to clear, move or copy a parameter, is let through.

    Args:
        parameters: The parameters, by id.
        is_absent: Whether gradients are gone now, though a plain run has them.
        where: Words for the code that runs.
        message: What else to say: whose doing it is, and the fix.
    """

    def __init__(self, parameters: set[int], is_absent: Callable[[], bool], where: str, message: str) -> None:
        super().__init__()
        self._parameters = parameters
        self._is_absent = is_absent
        self._where = where
        self._message = message

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func == _READ
            and id(args[0]) in self._parameters
            and self._is_absent()
            and _is_users(inspect.currentframe())
        ):
            raise RuntimeError(f"{self._message} {self._where} read the `.grad` of a parameter.")
        return func(*args, **(kwargs or {}))


def _is_users(frame: Any) -> bool:
    """Whether code reads a gradient to use it, rather than to clear, move or copy a parameter."""
    frame = frame.f_back  # of `__torch_function__`
    name = frame.f_globals.get("__name__", "")
    if name.startswith("torch.nn.utils."):  # `clip_grad_norm_` and others, which see what their caller sees
        return True
    return name.partition(".")[0] not in ("torch", __name__.partition(".")[0])


def refuse_late_reads(
    trainer: pl.Trainer, module: pl.LightningModule, is_absent: Callable[[], bool], message: str
) -> Iterator[Callable[[], None]]:
    """Refuse reads of gradients in hooks between steps, in schedulers, and in steps of the module.

    To be called in `on_train_start`. Hooks that are not overridden cost nothing. The others are watched in their first,
    second, fourth, eighth call and so on: one that reads gradients in calls between these alone is not found.

    Yields:
        Functions that undo one change each.
    """

    def watch(where: str, runs_model: bool = False) -> Callable[..., Any]:
        calls = count(1)

        def layer(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            is_watched = call & (call - 1) == 0
            # What is compiled would be compiled once more in a function mode.
            if not is_watched or (runs_model and is_compiled(module)):
                return inner(*args, **kwargs)
            with RefuseReads({id(parameter) for parameter in module.parameters()}, is_absent, where, message):
                return inner(*args, **kwargs)

        return layer

    for name in (*_hooks_of(pl.LightningModule), *_TRANSFERS):
        # Schedulers may read gradients in functions that they were given.
        if name == "lr_scheduler_step" or is_overridden(name, module):
            yield wrap_method(module, name, watch(f"The module's `{name}`"))
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for name in _hooks_of(pl.Callback):
            if _is_theirs(callback, name):
                yield wrap_method(callback, name, watch(f"`{name}` of the callback {type(callback).__name__}"))
    for name in ("training_step", "validation_step"):
        yield wrap_method(trainer.strategy, name, watch(f"The module's `{name}`", runs_model=True))


def _hooks_of(cls: type) -> list[str]:
    defined = (name for name in dir(cls) if name.startswith("on_") and name not in _SERVED)
    return [name for name in defined if isinstance(getattr(cls, name), FunctionType)]  # `on_gpu` is none


def _is_theirs(callback: pl.Callback, name: str) -> bool:
    if own_attribute(callback, name) is not None:
        return True
    return getattr(type(callback), name) is not getattr(pl.Callback, name) and not is_of_package(callback, name)

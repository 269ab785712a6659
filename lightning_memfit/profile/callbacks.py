"""Which callbacks of a Trainer are part of its steps, so that a trace runs with them.

A callback that averages weights, or keeps outputs, needs memory as the module does. One that shows progress, saves
checkpoints or watches learning rates doesn't. One that can't run in a trace, as it would write a file, is left out from
there on and named.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from lightning_memfit.profile.culprit import is_of_this_package
from lightning_memfit.profile.process import RefusedError, is_closed

START_HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")

_HOOKS = (
    *START_HOOKS,
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad"),
)

_IDLE = (
    *("Checkpoint", "ProgressBar", "ModelSummary", "EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor"),
    *("ThroughputMonitor", "Timer", "BatchSizeFinder", "LearningRateFinder", "OnExceptionCheckpoint"),
)
"""Lightning's classes of callbacks that take no part in a step's memory."""


def acting_callbacks(module: Any) -> tuple[Any, ...]:
    """The callbacks, of the Trainer that a module belongs to, that are part of its steps; this package's left out."""
    callbacks = getattr(getattr(module, "_trainer", None), "callbacks", None) or ()
    return tuple(callback for callback in callbacks if not is_own(callback) and acts_in_step(callback))


def is_own(callback: Any) -> bool:
    """Whether a callback is of this package, which passes those that change a step by itself."""
    return any(is_of_this_package(kind) for kind in type(callback).__mro__)


def acts_in_step(callback: Any) -> bool:
    """Whether a callback may do something in a step that needs memory: it has a hook of one, and isn't known not to."""
    from lightning.pytorch import callbacks

    is_idle = isinstance(callback, tuple(getattr(callbacks, name) for name in _IDLE))
    return not is_idle and any(_defines(callback, name) for name in _HOOKS)


def _defines(callback: Any, name: str) -> bool:
    """Whether a callback or its class, up to Lightning's base, defines a hook. `LambdaCallback` sets its own."""
    from lightning.pytorch import Callback

    kinds = [kind for kind in type(callback).__mro__ if not issubclass(Callback, kind)]
    return name in vars(callback) or any(name in vars(kind) for kind in kinds)


def guard_hooks(callback: Any, watched: Callable[[], AbstractContextManager[object]], remarks: list[str]) -> None:
    """Let a callback act at the start of training and in its steps only, and leave it out from where it fails."""
    from lightning.pytorch import Callback

    def call(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = is_closed.set(True)
        try:
            with watched():
                return hook(*args, **kwargs)
        except (Exception, RefusedError) as error:
            what = str(error) if isinstance(error, RefusedError) else f"it ends in {type(error).__name__}: {error}"
            words = "acts in a step, and is in the figures up to where it can't run in a trial step only"
            remarks.append(f"{type(callback).__name__} {words}: {what}")
            for name in _HOOKS:
                object.__setattr__(callback, name, do_nothing)
        finally:
            is_closed.reset(before)

    for name in (name for name in vars(Callback) if name.startswith(("on_", "setup", "teardown"))):
        if name not in _HOOKS:
            object.__setattr__(callback, name, do_nothing)
        elif _defines(callback, name):
            object.__setattr__(callback, name, partial(call, getattr(callback, name)))


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a hook by nothing."""

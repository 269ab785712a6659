"""Base classes of the techniques' callbacks and precision plugins.

Either refuses, by the rule of its technique, a run that it does not go with, before anything changes. Whatever it
changes, it undoes when the run ends or fails.
"""

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_memfit.memory.wrapping import code_below, wrap_method
from lightning_memfit.techniques.core.facts import Options, Run, arguments_of, run_of


class Refusal(MisconfigurationException, ValueError):
    """A technique does not go with the rest of a run; nothing has changed yet."""


class Reversible:
    """What changes how a run trains, and removes itself when the run ends or fails."""

    in_trace = False
    """Whether this is a copy in a trace. What is traced for another device has been checked for that one."""
    rules_traces = False
    """Whether the rule holds in a trace too: it reads nothing that a trace for another device lacks."""

    def __init__(self) -> None:
        super().__init__()
        self._undo: list[Callable[[], object]] = []

    @classmethod
    def refusal(cls, run: Run, options: Options) -> str | None:
        """Reason and fix, or None if a run that has this callback can have it with these arguments, by name.

        The rule is the function `unsupported` in the file of the class, beside the technique's record, which names it:
        what `Setting.validate` says of a setting is what the run says, in the same words.
        """
        modules = [sys.modules[base.__module__] for base in cls.__mro__]  # that of a subclass need not have a rule
        rule = next((module.unsupported for module in modules if hasattr(module, "unsupported")), None)
        found: str | None = None if rule is None else rule(run, options)
        return found

    @abstractmethod
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap or hook what the technique changes, and register how to undo it with `on_restore`."""

    def on_restore(self, undo: Callable[[], object]) -> None:
        """Register a function that undoes one change; these are called in reverse order."""
        self._undo.append(undo)

    def when_complete(self, pl_module: pl.LightningModule, change: Callable[[], object]) -> None:
        """Register what to do once the module has all its layers, before checkpoints are loaded and the strategy acts.

        That is after its `configure_model`, or after `setup` where it has none of its own. `change` may be called
        twice: `WeightAveraging` calls `configure_model`, if there is one, before it copies the module.
        """

        def configure(inner: Callable[[], Any]) -> None:
            inner()
            change()

        unwrap = wrap_method(pl_module, "configure_model", configure)
        self.on_restore(unwrap)
        if code_below(pl_module, "configure_model") is not pl.LightningModule.configure_model.__code__:
            return

        def complete(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            # Around a `configure_model` Lightning enters contexts for making layers, in which classes of torch are
            # replaced, or which refuse the run (BitsandbytesPrecision). Without techniques it would not.
            unwrap()
            change()

        self.on_restore(wrap_method(pl_module, "setup", complete))

    def restore(self) -> None:
        """Undo every change, also where undoing another one fails. Safe to call twice."""
        with ExitStack() as stack:
            for undo in self._undo:
                stack.callback(undo)
            self._undo = []

    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply the technique to a run that trains."""
        if self.rules_traces or not self.in_trace:
            self.refuse_unsupported(run_of(trainer, pl_module))
        self.apply(trainer, pl_module)

    def refuse_unsupported(self, run: Run) -> None:
        """Raise a `Refusal` if the run can't have this callback."""
        reason = self.refusal(run, arguments_of(self))
        if reason is not None:
            raise Refusal(f"{type(self).__name__}: {reason}")

    def announce(self, message: str) -> None:
        """Report in one line, on rank zero, what was done."""
        rank_zero_info(f"{type(self).__name__}: {message}")


class ReversibleCallback(Reversible, pl.Callback):
    """A callback that is applied in `setup`."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the technique to a run that trains."""
        self.restore()
        if stage == "fit":
            self.begin(trainer, pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the module."""
        self.restore()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module: Lightning calls no `teardown` hook after an exception.

        If that fails, it is told as a warning: an error here would hide the one that ended the run, and nobody behind
        this callback would hear of it.
        """
        try:
            self.restore()
        except Exception as error:
            warnings.warn(
                f"{type(self).__name__}: the module is not what it was before the run, as {type(error).__name__} came "
                f"in between: {error}",
                stacklevel=2,
            )


class TechniqueCallback(ReversibleCallback):
    """A reversible callback that changes what a training step allocates.

    To predict a run's memory, `copy.deepcopy(callback)` of an unused callback is applied to a fake clone of the module.
    A technique therefore keeps nothing of a module outside a run, and applying it reads no tensor's values.
    """

    @property
    def depends_on_depth(self) -> bool:
        """Whether equal blocks are treated differently by position, so that a trace of some can't represent all."""
        return False

    @contextmanager
    def taken_off(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        """Remove this technique from the module for a while; only before the model is configured."""
        applied = bool(self._undo)
        self.restore()
        try:
            yield
        finally:
            if applied:
                self.apply(trainer, pl_module)


def describe(counts: dict[Any, int]) -> str:
    """Format `{"GPT2Block": 12}` as `12 x GPT2Block`."""
    return ", ".join(f"{count} x {name}" for name, count in counts.items())

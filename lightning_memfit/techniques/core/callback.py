"""Base classes of the techniques' callbacks: whatever a callback changes, it undoes when the run ends or fails."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override


class ReversibleCallback(pl.Callback):
    """A callback that changes how a run trains, and removes itself when the run ends or fails."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    @abstractmethod
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap or hook what the technique changes, and register how to undo it with `on_restore`."""

    def on_restore(self, undo: Callable[[], object]) -> None:
        """Register a function that undoes one change; these are called in reverse order."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Undo every change. Safe to call twice."""
        while self._undo:
            self._undo.pop()()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the technique to a run that trains."""
        self.restore()
        if stage == "fit":
            self.apply(trainer, pl_module)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore the module."""
        self.restore()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore the module: Lightning calls no `teardown` hook after an exception."""
        self.restore()

    def announce(self, message: str) -> None:
        """Report in one line, on rank zero, what was done."""
        rank_zero_info(f"{type(self).__name__}: {message}")


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

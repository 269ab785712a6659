"""Bases of the techniques' callbacks: what one changes it takes back when the run ends or fails."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override


class ReversibleCallback(pl.Callback):
    """A callback that changes how a run trains, and takes itself off when the run ends or fails."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    @abstractmethod
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap or hook what the technique changes, and register how to undo it with `on_restore`."""

    def on_restore(self, undo: Callable[[], object]) -> None:
        """Register what takes one change back; called in reverse order."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Take every change back. Safe to call twice."""
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
        """Say in one line, on rank zero, what was done."""
        rank_zero_info(f"{type(self).__name__}: {message}")


class TechniqueCallback(ReversibleCallback):
    """A reversible callback that changes what a training step allocates.

    Whoever predicts a run's memory applies `copy.deepcopy(callback)` of an unused callback to a fake clone of the
    module. Therefore a technique keeps nothing of a module outside a run, and applying it reads no tensor's values.
    """

    @property
    def depends_on_depth(self) -> bool:
        """Whether equal blocks are treated unequally by their place, so that some can't stand for all in a trace."""
        return False

    @contextmanager
    def taken_off(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Iterator[None]:
        """Have the module without this technique for a while; only before the model is configured."""
        applied = bool(self._undo)
        self.restore()
        try:
            yield
        finally:
            if applied:
                self.apply(trainer, pl_module)


def describe(counts: dict[Any, int]) -> str:
    """`{"GPT2Block": 12}` as `12 x GPT2Block`."""
    return ", ".join(f"{count} x {name}" for name, count in counts.items())

"""`KeepsRandomNumbers`: what callbacks share that promise a run which goes on exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_memfit.memory.collectives import of_every_rank
from lightning_memfit.memory.generators import random_state, set_random_state
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.reliability.upstream.lightning import begins_an_epoch, repeats_validation

_KEY = "memfit_random"
"""Of the generators' states in a checkpoint, by rank."""


class KeepsRandomNumbers(Callback):
    """Keep the state of the generators of random numbers in checkpoints; Lightning's alone hold none.

    Dropout then goes on with the same numbers, on as many ranks as before. Python's, NumPy's and torch's generators are
    kept, the latter for the CPU and for the rank's device. Of several such callbacks of a Trainer the first one acts.
    """

    def __init__(self) -> None:
        self._random: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        self._layers: list[Callable[[], None]] = []

    def follow_random_numbers(self, trainer: Trainer, stage: str) -> None:
        """Put layers around where a run goes on; subclasses call it in `setup`."""
        self.leave_random_numbers()
        self._random = self._before_validation = None  # a run that never began may have left its own
        if stage != "fit" or not self._acts(trainer):
            return
        loop = trainer.fit_loop
        self._layers += [
            wrap_method(loop, "setup_data", partial(self._go_on, trainer, False)),
            wrap_method(loop, "on_advance_start", partial(self._go_on, trainer, True)),
            wrap_method(loop.epoch_loop.val_loop, "reset", partial(self._begin_validation, trainer)),
        ]

    def leave_random_numbers(self) -> None:
        """Take the layers off."""
        while self._layers:
            self._layers.pop()()

    def _acts(self, trainer: Trainer) -> bool:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        return next((one for one in callbacks if isinstance(one, KeepsRandomNumbers)), None) is self

    def _begin_validation(self, trainer: Trainer, reset: Callable[[], None]) -> None:
        """Keep the state with which a run that validates anew goes on; a loader takes a number when it begins."""
        self._before_validation = random_state(trainer.strategy.root_device)
        reset()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the state of every rank's generators."""
        if self._acts(trainer):
            mine = self._before_validation if repeats_validation(trainer) else None
            mine = mine or random_state(trainer.strategy.root_device)
            checkpoint[_KEY] = of_every_rank(trainer, mine)

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take this rank's state, if there are as many ranks as before."""
        states = checkpoint.get(_KEY)
        if self._acts(trainer) and isinstance(states, list) and len(states) == trainer.world_size:
            self._random = states[trainer.global_rank]

    def _go_on(self, trainer: Trainer, within: bool, inner: Callable[[], None]) -> None:
        """Set the generators where the run left them: within an epoch after its data are there, else before."""
        if self._random is not None and (within or begins_an_epoch(trainer)):
            set_random_state(self._random, trainer.strategy.root_device)
            self._random = None
        inner()

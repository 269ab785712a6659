"""`NonFiniteGuard`: steps with gradients that are no numbers are left out, and after several in a row the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory.attach import hide_idle_hooks


class NonFiniteError(RuntimeError):
    """Training ended as gradients were no finite numbers any more, several steps in a row."""


class NonFiniteGuard(Callback):
    """Leave out steps whose gradients are NaN or infinite, and end the run after several of them in a row.

    Such a gradient makes every weight that it reaches NaN, for good. The step is left out on all ranks, whichever of
    them has it, and the first parameter with one, in the module's order, is named. Weights and optimizer states stay as
    they were, so that checkpoints hold finite ones. The check is one norm of the gradients per step.

    With `precision: 16-mixed` the loss scaler leaves such steps out itself while it finds its scale: the run ends ten
    of them later. ZeRO is refused: DeepSpeed keeps the gradients.

    Args:
        patience: Steps in a row after which the run ends.
        dirpath: Folder for a checkpoint of that moment. Null: none is saved.

    Attributes:
        skipped: Numbers of the steps that were left out.

    Raises:
        ValueError: If the number is below 1.
        MisconfigurationException: If the strategy is ZeRO.
    """

    def __init__(self, patience: int = 5, dirpath: str | None = None) -> None:
        if patience < 1:
            raise ValueError(f"`patience={patience}` must be at least 1.")
        self.patience = patience
        self.dirpath = dirpath
        self.skipped: list[int] = []
        self._in_a_row = 0
        hide_idle_hooks(self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what has no gradients to look at before its step."""
        self.skipped, self._in_a_row = [], 0
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise MisconfigurationException(
                "`NonFiniteGuard` doesn't see the gradients of ZeRO, which DeepSpeed keeps."
            )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradients away if one of them is not finite, so that the optimizer changes nothing."""
        named = [(name, p) for name, p in pl_module.named_parameters() if p.grad is not None]
        is_finite = _all_finite([p.grad for _, p in named])
        if trainer.world_size > 1:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        if is_finite:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.skipped.append(trainer.global_step)
        first = next((name for name, p in named if not _all_finite([p.grad])), "one of another rank")
        words = f"step {trainer.global_step}: gradients are not finite, first in parameter order `{first}`"
        rank_zero_warn(f"NonFiniteGuard: {words}; the step is left out ({self._in_a_row} in a row).")
        for _, parameter in named:
            parameter.grad = None
        limit = self.patience + (10 if getattr(trainer.precision_plugin, "scaler", None) is not None else 0)
        if self._in_a_row >= limit:
            saved = ""
            if self.dirpath is not None:
                path = Path(self.dirpath) / f"non-finite-step={trainer.global_step}.ckpt"
                trainer.save_checkpoint(path)
                saved = f" Weights and states of the last good step are in {path}."
            raise NonFiniteError(
                f"{words}, {self._in_a_row} steps in a row. Lower the learning rate, clip gradients or look at the "
                f"data.{saved}"
            )


def _all_finite(gradients: list[Any]) -> bool:
    """Whether all elements of this rank's part of some gradients are finite."""
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    local = [g.coalesce().values() if g.is_sparse else g for g in local]
    local = [g for g in local if g.is_floating_point() and g.numel()]
    if not local:
        return True
    return bool(torch.nn.utils.get_total_norm(local, float("inf")).isfinite())

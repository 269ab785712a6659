"""`NonFiniteGuard`: steps with gradients that are no numbers are left out, and after several in a row the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.fitting.recovery.whole_steps import checkpoint_folder, unused_checkpoint
from lightning_memfit.fitting.upstream.deepspeed import ZeroEngine, engine_of
from lightning_memfit.memory.attach import hide_idle_hooks


class NonFiniteError(RuntimeError):
    """Training ended as gradients were no finite numbers any more, several steps in a row."""


class NonFiniteGuard(Callback):
    """Leave out steps whose gradients are NaN or infinite, and end the run after several of them in a row.

    Such a gradient makes every weight that it reaches NaN, for good. The step is left out on all ranks, whichever of
    them has it, and the first parameter with one, in the module's order, is named. Weights and optimizer states stay as
    they were, so that checkpoints hold finite ones. The check is one norm of the gradients per step. ZeRO makes it
    itself, as DeepSpeed keeps the gradients, and no parameter can be named.

    A scaler of losses (`precision: 16-mixed`) leaves such steps out itself while it finds its scale: the run ends ten
    of them later, twenty under ZeRO. Where gradients are gone before the step (`GradientRelease`, `HostMasterWeights`)
    no step can be left out: losses are looked at instead, and the run ends after several that are not finite.

    `memfit fit` adds it. To have none there, write it with `patience: null`.

    Args:
        patience: Steps in a row after which the run ends. Null: never, and nothing is looked at.
        dirpath: Folder for a checkpoint of that moment, which replaces none that is there. Null: that of the first
            `ModelCheckpoint`, else `checkpoints` in the run's.

    Attributes:
        skipped: Numbers of the steps that were left out.

    Raises:
        ValueError: If the number is below 1.
    """

    def __init__(self, patience: int | None = 5, dirpath: str | None = None) -> None:
        if patience is not None and patience < 1:
            raise ValueError(f"`patience={patience}` must be at least 1, or null for none.")
        self.patience = patience
        self.dirpath = dirpath
        self.skipped: list[int] = []
        self._in_a_row = 0
        self._words = ""
        self._engine: ZeroEngine | None = None
        self._is_blind = False
        hide_idle_hooks(self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let DeepSpeed look for such gradients, if it has them."""
        self.skipped, self._in_a_row, self._is_blind, self._engine = [], 0, False, None
        if self.patience is not None and pl_module.automatic_optimization:
            self._engine = engine_of(trainer)
        if self._engine is not None:
            self._engine.leave_out_non_finite_steps()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradients away if one of them is not finite, so that the optimizer changes nothing."""
        if self.patience is None or self._engine is not None:
            return
        named = [(name, p) for name, p in pl_module.named_parameters() if p.grad is not None]
        self._watch_losses(not named)
        is_finite = _all_finite([p.grad for _, p in named])
        if trainer.world_size > 1:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        if is_finite:
            self._in_a_row = 0 if named else self._in_a_row
            return
        first = next((name for name, p in named if not _all_finite([p.grad])), "one of another rank")
        self._note(trainer.global_step, f"gradients are not finite, first in parameter order `{first}`")
        for _, parameter in named:
            parameter.grad = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See what DeepSpeed did with the step, and end the run if it was one too many."""
        if self.patience is None or trainer.fit_loop._should_accumulate():
            return
        if self._engine is not None:
            if not self._engine.left_out_step:
                self._in_a_row = 0
                return
            self._note(trainer.global_step - 1, "gradients are not finite")
        elif self._is_blind and isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
            if bool(outputs["loss"].isfinite().all()):
                self._in_a_row = 0
                return
            self._in_a_row += 1
            self._words = f"step {trainer.global_step - 1}: the loss is not finite"
        if self._in_a_row and self._in_a_row >= self._limit(trainer):
            self._end(trainer)

    def _note(self, step: int, words: str) -> None:
        self._in_a_row += 1
        self.skipped.append(step)
        self._words = f"step {step}: {words}"
        rank_zero_warn(f"NonFiniteGuard: {self._words}; the step is left out ({self._in_a_row} in a row).")

    def _watch_losses(self, are_gone: bool) -> None:
        if are_gone and not self._is_blind:
            rank_zero_info("NonFiniteGuard: gradients are gone before the step, so losses are watched instead.")
        self._is_blind = are_gone

    def _limit(self, trainer: Trainer) -> int:
        assert self.patience is not None
        if self._engine is not None:
            return self.patience + (20 if trainer.precision_plugin.precision.startswith("16") else 0)
        return self.patience + (10 if getattr(trainer.precision_plugin, "scaler", None) is not None else 0)

    def _end(self, trainer: Trainer) -> None:
        saved = ""
        if not self._is_blind:  # else the weights are not finite either
            folder = checkpoint_folder(trainer, self.dirpath)
            path = unused_checkpoint(trainer, folder / f"non-finite-step={self.skipped[-1]}.ckpt")
            trainer.save_checkpoint(path)
            saved = f" Weights and states of the last good step are in {path}."
        raise NonFiniteError(
            f"{self._words}, {self._in_a_row} steps in a row. Lower the learning rate, clip gradients or look at the "
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

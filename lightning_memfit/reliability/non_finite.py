"""`NonFiniteGuard`: steps with gradients that are no numbers are left out, and after several in a row the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory.attach import hide_idle_hooks
from lightning_memfit.reliability.buffers import BufferCopies
from lightning_memfit.reliability.upstream.deepspeed import ZeroEngine, engine_of
from lightning_memfit.reliability.whole_steps import check_folder, checkpoint_folder, unused_checkpoint


class NonFiniteError(RuntimeError):
    """Training ended as gradients were no finite numbers any more, several steps in a row."""


class NonFiniteGuard(Callback):
    """Leave out steps whose gradients are NaN or infinite, and end the run after several of them in a row.

    Such a gradient makes every weight that it reaches NaN, for good. The step is left out on all ranks, whichever of
    them has it, and the first parameter with one, in the module's order, is named. Weights and optimizer states stay as
    they were, so that checkpoints hold finite ones. The check is one norm of the gradients per step. ZeRO makes it
    itself, as DeepSpeed keeps the gradients, and no parameter can be named.

    If the step's forward has made a buffer NaN or infinite, such as the running statistics of a batch norm, all buffers
    up to 1 MiB are put back as they were before the step, before all batches of its accumulation window. Copies of them
    stay on their device for that; a larger one that is spoilt is named. Buffers that stay finite keep what the step
    wrote, and so does all else that `training_step` changes, such as attributes and metrics. Every rank puts back its
    own.

    In manual optimization with several optimizers a step concerns the parameters of its own optimizer alone: their
    gradients count and are taken away, and `patience` counts the steps of each. An optimizer that steps other tensors
    than the module's parameters is taken to step all of these.

    A scaler of losses (`precision: 16-mixed`) leaves such steps out itself while it finds its scale: the run ends ten
    of them later, twenty under ZeRO. Where gradients are gone before the step (`GradientRelease`, `HostMasterWeights`)
    no step can be left out: losses are looked at instead, and the run ends after several that are not finite.

    `memfit fit` adds it. To have none there, write it with `patience: null`.

    Args:
        patience: Steps of one optimizer in a row after which the run ends. Null: never, and nothing is looked at.
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
        self._in_a_row: dict[int, int] = {}
        self._words: dict[int, str] = {}
        self._known: set[int] = set()
        """The module's parameters, by id, when they were last looked at."""
        self._buffers: BufferCopies | None = None
        self._begins = True
        self._engine: ZeroEngine | None = None
        self._is_blind = False
        hide_idle_hooks(self)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that a checkpoint can be written, while it is not needed yet."""
        if self.patience is not None:
            check_folder(trainer, "NonFiniteGuard(dirpath=...)", self.dirpath)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let DeepSpeed look for such gradients, if it has them."""
        self.skipped, self._in_a_row, self._words, self._is_blind, self._engine = [], {}, {}, False, None
        self._buffers, self._begins, self._known = BufferCopies(pl_module), True, set()
        if self.patience is not None and pl_module.automatic_optimization:
            self._engine = engine_of(trainer)
        if self._engine is not None:
            self._engine.leave_out_non_finite_steps()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy buffers before the first batch of a step."""
        if self._begins and self._buffers is not None and self.patience is not None:
            self._buffers.take()
        self._begins = False

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Let the optimizer change nothing if a gradient is not finite."""
        if self.patience is None or self._engine is not None:
            return
        self._begins = True
        parameters = [p for p in self._stepped_by(optimizer, pl_module) if p.grad is not None]
        self._watch_losses(not parameters and (self._is_blind or all(p.grad is None for p in pl_module.parameters())))
        is_finite = _all_finite([p.grad for p in parameters])
        if trainer.world_size > 1:
            is_finite = trainer.strategy.reduce_boolean_decision(is_finite)
        if is_finite:
            if parameters:
                self._in_a_row[id(optimizer)] = 0
            if self._buffers is not None and not pl_module.automatic_optimization:
                self._buffers.take()  # other optimizers may step in this batch
            return
        broken = {id(p) for p in parameters if not _all_finite([p.grad])}
        first = next((name for name, p in pl_module.named_parameters() if id(p) in broken), "one of another rank")
        words = f"gradients are not finite, first in parameter order `{first}`"
        self._note(id(optimizer), trainer.global_step, words)
        if not _leave_to_scaler(getattr(trainer.precision_plugin, "scaler", None), optimizer, parameters):
            for parameter in parameters:
                parameter.grad = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See what DeepSpeed did with the step, and end the run if it was one too many."""
        if self.patience is None or trainer.fit_loop._should_accumulate():
            return
        if self._engine is not None:
            self._begins = True
            if not self._engine.left_out_step:
                self._in_a_row.clear()
                return
            self._note(0, trainer.global_step - 1, "gradients are not finite")
        elif self._is_blind and isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), torch.Tensor):
            if bool(outputs["loss"].isfinite().all()):
                self._in_a_row.clear()
                return
            self._in_a_row[0] = self._in_a_row.get(0, 0) + 1
            self._words[0] = f"step {trainer.global_step - 1}: the loss is not finite"
        worst = max(self._in_a_row, key=self._in_a_row.__getitem__, default=0)
        if self._in_a_row.get(worst) and self._in_a_row[worst] >= self._limit(trainer):
            self._end(trainer, worst)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the copies."""
        self._buffers = None

    def _stepped_by(self, optimizer: Optimizer, module: LightningModule) -> list[torch.nn.Parameter]:
        """The module's parameters that an optimizer steps; all, if it steps others (masters elsewhere)."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids = set(map(id, stepped))
        if not ids <= self._known:
            self._known = {id(parameter) for parameter in module.parameters()}
        return stepped if ids <= self._known else list(module.parameters())

    def _note(self, optimizer: int, step: int, words: str) -> None:
        """Count a step that is left out, put buffers back that it has spoilt, and say so."""
        self._in_a_row[optimizer] = self._in_a_row.get(optimizer, 0) + 1
        self.skipped.append(step)
        self._words[optimizer] = f"step {step}: {words}"
        is_broken, lost = (False, []) if self._buffers is None else self._buffers.put_back()
        more = " Buffers that it made NaN or infinite are put back." if is_broken else ""
        if lost:
            more += f" It also made these buffers so, of which there is no copy: {', '.join(lost)}."
        rank_zero_warn(
            f"NonFiniteGuard: {self._words[optimizer]}; the step is left out ({self._in_a_row[optimizer]} in a row)."
            f"{more}"
        )

    def _watch_losses(self, are_gone: bool) -> None:
        if are_gone and not self._is_blind:
            rank_zero_info("NonFiniteGuard: gradients are gone before the step, so losses are watched instead.")
        self._is_blind = are_gone

    def _limit(self, trainer: Trainer) -> int:
        assert self.patience is not None
        if self._engine is not None:
            return self.patience + (20 if trainer.precision_plugin.precision.startswith("16") else 0)
        return self.patience + (10 if getattr(trainer.precision_plugin, "scaler", None) is not None else 0)

    def _end(self, trainer: Trainer, optimizer: int) -> None:
        saved = ""
        if not self._is_blind:  # else the weights are not finite either
            folder = checkpoint_folder(trainer, self.dirpath)
            path = unused_checkpoint(trainer, folder, f"non-finite-step={self.skipped[-1]}")
            trainer.save_checkpoint(path)
            saved = f" Weights and states of the last good step are in {path}."
        raise NonFiniteError(
            f"{self._words[optimizer]}, {self._in_a_row[optimizer]} steps in a row. Lower the learning rate, clip "
            f"gradients or look at the data.{saved}"
        )


def _leave_to_scaler(scaler: Any, optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> bool:
    """Let a scaler leave a step out that has not looked at the gradients yet; return whether it will.

    Optimizers that unscale by themselves (fused ones) are looked at within the scaler's `step`, which asserts that it
    finds gradients. Where only another rank's are not finite, this rank's scaler finds one, too.
    """
    if scaler is None or not scaler.is_enabled() or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    seen = scaler._per_optimizer_states.get(id(optimizer))  # what the user's own code has unscaled is there
    if not parameters or (seen is not None and seen["stage"] is not OptState.READY):
        return False
    if _all_finite([parameter.grad for parameter in parameters]):
        parameters[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
    return True


def _all_finite(gradients: list[Any]) -> bool:
    """Whether all elements of this rank's part of some gradients are finite."""
    local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    local = [g.coalesce().values() if g.is_sparse else g for g in local]
    local = [g for g in local if g.is_floating_point() and g.numel()]
    if not local:
        return True
    return bool(torch.nn.utils.get_total_norm(local, float("inf")).isfinite())

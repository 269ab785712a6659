"""Train a row with Lightning's Trainer and a module as its users write one."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks.peers.loops import ByHand
from benchmarks.peers.peer import Options, Peer
from benchmarks.peers.task import Task
from benchmarks.peers.watch import Watch
from lightning_memfit.memory.attach import TrainerAttachment


class HandWritten(LightningModule):
    """A Hugging Face model with its own loss."""

    def __init__(self, task: Task, by_hand: ByHand) -> None:
        super().__init__()
        self._task, self._by_hand = task, by_hand
        self.model: Any = None

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self.model = self._by_hand.prepare(self._task.network())

    @override
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return self._by_hand.make_optimizer(self.model, self._task)


class _Watching(Callback):
    """Passes Lightning's loop to a `Watch`, as `MemoryMonitor` and `RunObserver` observe this package's runs."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._step = 0
        self._attachment: TrainerAttachment | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.follow(pl_module, trainer.optimizers[0])
        self._attachment = TrainerAttachment(self._watch.ledger, trainer.strategy)

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._watch.clock.batch_starts()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._watch.clock.batch_ends(batch, outputs["loss"])
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._attachment is not None and self._step == self._watch.clock.warmup_steps:
            self._attachment.detach()
            self._attachment = None
        self._watch.step_ends()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.ends()


def train(task: Task, options: Options, watch: Watch) -> None:
    """Train with `lightning.pytorch.Trainer`."""
    by_hand = ByHand.read("lightning", options)
    task.import_model_code()
    loader = task.loader
    watch.starts()
    trainer = Trainer(callbacks=[_Watching(watch)], **task.settings["trainer"])
    trainer.fit(HandWritten(task, by_hand), loader)


PEER = Peer((), "lightning", train)

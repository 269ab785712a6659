"""`RunTimeline`: memory by category over the first two steps of a real run, as one page."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.estimate.report import build_report
from lightning_memfit.estimate.target import Target, device_target, host_target
from lightning_memfit.estimate.timeline import render
from lightning_memfit.measure.throughput import count_samples
from lightning_memfit.memory.attach import TrainerAttachment
from lightning_memfit.memory.conversion import parameter_table
from lightning_memfit.memory.kind import DeviceKind, index_of
from lightning_memfit.profile.build import sequence_length
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.recorder import EventRecorder

_STEPS = 2
_END = "end"


class RunTimeline(Callback):
    """Record every allocation of a run's first two optimizer steps and draw them as `memfit estimate --timeline` does.

    The first process of a run writes one HTML page that loads nothing: parameters, gradients, optimizer states,
    activations and the rest over both steps, the peak, and the device's capacity. Tracking every operator slows down
    these two steps, but not later ones. Compiled modules run uncompiled during them.

    Args:
        path: HTML file to write; it must not exist yet.

    Raises:
        ValueError: If the file exists when the run starts.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._recorder: EventRecorder | None = None
        self._attachment: TrainerAttachment | None = None
        self._first_step = 0
        self._batch: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to overwrite a page."""
        if stage == "fit" and self.path.exists():
            raise ValueError(f"`path={self.path}` exists already. Name another file: none is overwritten.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin recording, in the first process."""
        if not trainer.is_global_zero:
            return
        self._first_step = trainer.global_step
        recorder = EventRecorder(python_kernels=DeviceKind.of(trainer.strategy.root_device).is_host)
        recorder.track_module(pl_module)
        for optimizer in trainer.optimizers:
            recorder.track_optimizer(optimizer)
        self._recorder = recorder
        self._attachment = TrainerAttachment(recorder, trainer.strategy)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that the forward begins."""
        self._batch = batch if self._recorder is not None else None
        self._phase("forward")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note that the backward begins."""
        self._phase("backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note that the optimizer's step begins."""
        self._phase("step")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw the page after the second step."""
        if self._recorder is not None and trainer.global_step - self._first_step >= _STEPS:
            self._draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the run was too short."""
        if self._recorder is not None:
            rank_zero_warn(f"RunTimeline: no page, for the run had fewer than {_STEPS} optimizer steps.")
            self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the recorder off the strategy."""
        self._stop()

    def _phase(self, name: str) -> None:
        if self._recorder is not None:
            self._recorder.phase(name)

    def _stop(self) -> None:
        if self._attachment is not None and self._recorder is not None:
            self._attachment.detach()
            self._recorder.close()
        self._attachment = self._recorder = self._batch = None

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        recorder, batch = self._recorder, self._batch
        assert recorder is not None
        recorder.phase(_END)
        profile = ModelProfile(
            name=type(pl_module).__name__,
            events=recorder.result(),
            micro_batch_size=count_samples(batch) or 1,
            parameters=parameter_table(pl_module),
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            device=trainer.strategy.root_device.type,
            optimizer=" + ".join(recorder.optimizers),
            sequence_length=sequence_length(batch),
            only_this_size="it was measured, not traced",
            measured=True,
        )
        self._stop()
        page = render(build_report(profile, _target(trainer)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("x", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:  # no reason to end a run that trains
            rank_zero_warn(f"RunTimeline: no page, for {str(self.path)!r} can't be written: {error.strerror}.")
            return
        rank_zero_info(f"RunTimeline: memory over the first {_STEPS} steps drawn in {self.path}")


def _target(trainer: Trainer) -> Target:
    device = trainer.strategy.root_device
    limits = [callback.limit_bytes for callback in trainer.callbacks if isinstance(callback, MemoryLimit)]  # type: ignore[attr-defined]
    if DeviceKind.of(device).has_own_memory:
        return device_target(index_of(device), limits, is_running=True)
    return host_target(min(limits) if limits else None)

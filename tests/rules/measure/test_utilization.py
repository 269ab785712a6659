"""Model FLOPs of a module whose FLOPs can be counted by hand."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_memfit import MemoryMonitor, MicroBatching
from lightning_memfit.measure.data_wait import DataWaitMonitor
from lightning_memfit.measure.utilization import FlopsMonitor
from tests.helpers.trainers import quiet_trainer

SIZE, WIDTH = 4, 32
FORWARD = 2 * SIZE * (WIDTH * WIDTH) * 2  # two square layers, a multiplication and an addition each


class Layers(pl.LightningModule):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = checkpoint(self.net, batch, use_reentrant=False) if self.recompute else self.net(batch)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Layers):
    """Does everything in its training step."""

    def __init__(self, recompute: bool = False, with_closure: bool = False) -> None:
        super().__init__(recompute)
        self.automatic_optimization = False
        self.with_closure = with_closure

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if self.with_closure:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.step()


class Penalized(Layers):
    """Has a penalty on the gradient of its inputs, which takes a backward in the forward."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        batch = batch.requires_grad_()
        loss = super().training_step(batch, batch_idx)
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + gradient.square().sum()


class Memory(pl.loggers.CSVLogger):
    """Keeps what is logged."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self.seen: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen |= metrics
        super().log_metrics(metrics, step)


def fit(
    folder: Any, *callbacks: pl.Callback, recompute: bool = False, extra_logger: Any = None
) -> tuple[Memory, pl.Trainer]:
    logger = Memory(folder)
    loggers = [logger, *([extra_logger] if extra_logger is not None else [])]
    trainer = quiet_trainer(*callbacks, max_steps=8, log_every_n_steps=2, logger=loggers)
    trainer.fit(Layers(recompute), DataLoader(torch.randn(SIZE * 5, WIDTH), SIZE))
    return logger, trainer


def test_flops_are_three_forwards_over_the_time(tmp_path):
    monitor = FlopsMonitor(peak_flops=1e12)
    logger, trainer = fit(tmp_path, monitor)
    assert monitor._flops_per_sample == 3 * FORWARD / SIZE
    assert monitor.flops_per_second is not None
    assert monitor.flops_per_second == pytest.approx(3 * FORWARD / monitor._throughput.seconds_per_step)
    assert monitor.mfu == pytest.approx(monitor.flops_per_second / 1e12)
    assert logger.seen["throughput/mfu"] > 0
    assert logger.seen["throughput/model_tflops_per_second"] > 0
    assert "training_step" not in vars(trainer.strategy)


@pytest.mark.parametrize("make", [Manual, lambda: Manual(recompute=True), lambda: Manual(with_closure=True), Penalized])
def test_only_the_forward_of_a_training_step_is_counted(make):
    monitor = FlopsMonitor(peak_flops=1e12)
    loader = DataLoader(torch.randn(SIZE * 3, WIDTH), SIZE)
    quiet_trainer(monitor, max_steps=3, logger=False).fit(make(), loader)
    assert monitor._flops_per_sample == 3 * FORWARD / SIZE


def test_a_micro_batch_counts_for_its_own_samples():
    """Its FLOPs were divided by the samples of the whole batch, which never ran: the MFU was half of what it is."""

    class Large(Layers):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if len(batch) > SIZE // 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    monitor = FlopsMonitor(peak_flops=1e12)
    loader = DataLoader(torch.randn(SIZE * 3, WIDTH), SIZE)
    quiet_trainer(monitor, MicroBatching(), max_steps=3, logger=False).fit(Large(), loader)
    assert monitor._flops_per_sample == 3 * FORWARD / SIZE


@pytest.mark.parametrize("first", [True, False])
def test_recomputation_counts_for_nothing_and_other_wrappers_are_no_trouble(tmp_path, first):
    monitor, memory = FlopsMonitor(peak_flops=1e12), MemoryMonitor(tracked_steps=2)
    both = [monitor, memory] if first else [memory, monitor]
    _, trainer = fit(tmp_path, *both, recompute=True)
    assert monitor._flops_per_sample == 3 * FORWARD / SIZE
    assert "training_step" not in vars(trainer.strategy)


def test_data_wait_is_a_share_of_the_time(tmp_path):
    monitor = DataWaitMonitor()
    logger, _ = fit(tmp_path, monitor)
    assert monitor.fraction is not None
    assert 0 < monitor.fraction < 1
    assert 0 < logger.seen["throughput/data_wait_fraction"] < 1

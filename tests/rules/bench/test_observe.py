"""Step times, losses and predictions of a small real fit."""

import gc
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_memfit.bench.observe import (
    PredictRun,
    RunObserver,
    bucket_bytes,
)
from lightning_memfit.data import RandomTokens
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation
from tests.helpers.trainers import fit, quiet_trainer


class Bag(pl.LightningModule):
    """Scores the mean embedding of a sample; its loss is the number of the micro-batch."""

    def __init__(self, traceable: bool = True) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.traceable = traceable
        self.count = 0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        score = self.embedding(batch["input_ids"]).mean()
        if not self.traceable and score > 0:  # allocates or not, depending on a float
            score = score + torch.zeros(10_000).sum()
        self.count += 1
        return score * 0 + self.count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(accumulate_grad_batches: int = 2) -> dict[str, Any]:
    loader = RandomTokens(12, 6, batch_size=3, vocab_size=50)
    return {"loader": loader, "max_steps": 5, "accumulate_grad_batches": accumulate_grad_batches}


def test_steps_after_the_warm_up_are_timed_and_losses_are_means_over_micro_batches():
    times = RunObserver(warmup_steps=2)
    fit(Bag(), times, **run())
    speed = times.clock.speed(num_replicas=2)
    assert speed is not None
    assert speed.timed_steps == 3
    assert 0 < speed.step_seconds_q05 <= speed.step_seconds_median <= speed.step_seconds_q95
    assert speed.samples_per_second == pytest.approx(2 * 2 * 3 / speed.step_seconds_median)
    assert speed.tokens_per_second == pytest.approx(2 * 2 * 3 * 6 / speed.step_seconds_median)
    assert 0 < speed.data_wait_fraction < 1
    assert times.clock.losses == (1.5, 9.5)  # micro-batches 1 and 2, 9 and 10


def test_the_prediction_is_for_the_monitor_too():
    predict, monitor = PredictRun(), MemoryMonitor(tracked_steps=2)
    fit(Bag(), predict, monitor, **run(accumulate_grad_batches=1))
    assert predict.reason == ""
    assert monitor.report is not None
    assert monitor.report.measured_peak_bytes
    assert predict.prediction is not None
    assert predict.prediction.allocated_bytes == pytest.approx(monitor.report.measured_peak_bytes, rel=0.05)
    assert sum(predict.prediction.by_category.values()) == predict.prediction.allocated_bytes


@pytest.mark.parametrize("view", [False, True])
def test_buckets_of_ddp_are_one_copy_of_the_gradients(tmp_path, view):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 3))
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=view)
        wrapped(torch.zeros(2, 10)).sum().backward()
        wrapped(torch.zeros(2, 10)).sum().backward()
        copied = 0 if view else sum(4 * p.numel() for p in module.parameters())
        assert bucket_bytes(wrapped) == copied
        # Its reducer must not be the last to let go of the process group: that would wait, with the interpreter's lock
        # held, for threads that want it.
        del wrapped
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert bucket_bytes(module) == 0


class Divided(DeepSpeedStrategy):
    """A strategy of DeepSpeed as the prediction sees it before the run, without DeepSpeed."""

    def __init__(self) -> None:
        self.config = {"zero_optimization": {"stage": 2}}
        self.cluster_environment = None


def test_what_deepspeed_keeps_is_predicted(monkeypatch):
    """The first process traces alone: a collective there would wait for the others for ever."""

    def traced(trainer: Any, module: Any, batch: Any, precision: str) -> ModelProfile:
        assert not torch.distributed.is_initialized()
        assert precision == "bf16-true"  # DeepSpeed's own half precision, not autocast
        return profile_module(module, batch, StepOptions("bf16-true"), Emulation("cpu"))

    predict, module = PredictRun(), Bag()
    facts = {"world_size": 2, "num_nodes": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 1}
    trainer: Any = SimpleNamespace(strategy=Divided(), is_global_zero=True, callbacks=[predict], **facts)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name, stub in (
        ("first_batch", lambda trainer: {"input_ids": torch.zeros(3, 6, dtype=torch.long)}),
        ("runtime_of", lambda trainer: None),
        ("profile_fit", traced),
    ):
        monkeypatch.setattr(f"lightning_memfit.bench.observe.{name}", stub)
    predict.setup(trainer, module, "fit")
    assert predict.reason == ""
    assert predict.prediction is not None
    elements = module.embedding.weight.numel()
    assert predict.prediction.by_category["parameter"] == 2 * elements
    assert predict.prediction.by_category["optimizer_state"] == 4 * elements / 2  # masters; SGD has no states
    assert sum(predict.prediction.by_category.values()) == predict.prediction.allocated_bytes


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_what_is_divided_in_unknown_ways_is_not_predicted(strategy, monkeypatch):
    predict = PredictRun()
    trainer = quiet_trainer(callbacks=[predict])
    monkeypatch.setattr(type(trainer), "strategy", property(lambda self: strategy()))
    predict.setup(trainer, Bag(), "fit")
    assert predict.prediction is None
    assert "divides the model" in predict.reason

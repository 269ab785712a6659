"""Fails when a private name of torch, torchmetrics or Lightning that `fitting` reads has moved.

What `fitting.step.loop` extends has its own test in `test_loop.py`.
"""

import inspect

import torch
from lightning.pytorch.core import LightningModule
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchmetrics import SumMetric

from tests.helpers.fitting import Tagger
from tests.helpers.trainers import fit, quiet_trainer


def test_dispatch_modes_are_disabled_and_come_back() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Counting():
        tensor.clone()
        assert Counting.calls == 1
        with _disable_current_modes():
            tensor.clone()
        assert Counting.calls == 1
        tensor.clone()
        assert Counting.calls == 2


def test_names_of_torch() -> None:
    tensor = torch.zeros(1)
    before = tensor._version
    tensor.add_(1.0)
    assert tensor._version == before + 1
    torch._foreach_mul_([tensor], 3.0)
    assert tensor.item() == 3.0
    assert tensor._version == before + 2
    norm = nn.BatchNorm1d(2)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert set(norm._buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert norm._forward_hooks is not None
    assert norm._forward_hooks_with_kwargs is not None


def test_names_of_torchmetrics() -> None:
    metric = SumMetric()
    assert list(metric._defaults) == ["sum_value"]
    metric(2.0)
    assert metric._update_count == 1
    assert metric._forward_cache == 2.0
    assert metric.compute() == metric._computed == 2.0
    assert metric._to_sync


def test_names_of_lightning() -> None:
    trainer = quiet_trainer(max_epochs=1)
    assert trainer.fit_loop._data_source.is_module is not None
    assert callable(trainer.fit_loop._should_accumulate)
    assert trainer.fit_loop.epoch_loop._results.log is not None
    assert trainer._results is None
    assert DDPStrategy()._ddp_comm_hook is None
    assert list(inspect.signature(_block_parallel_sync_behavior).parameters) == ["strategy", "block"]
    for name in ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"):
        assert list(inspect.signature(getattr(call, name)).parameters)[:2] == ["trainer", "hook_name"]
    assert "batch" in inspect.signature(LightningModule._on_before_batch_transfer).parameters


def test_the_running_hooks_name_is_where_log_looks_for_it() -> None:
    names: list[str | None] = []

    class Asking(Tagger):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            names.append(self._current_fx_name)
            return super().training_step(batch, batch_idx)  # type: ignore[arg-type]

    fit(Asking(), max_steps=1, max_epochs=-1)
    assert names == ["training_step"]


def test_hooks_that_are_not_callable_are_skipped() -> None:
    """What `memory.attach` relies on."""
    assert "if callable(fn)" in inspect.getsource(call._call_callback_hooks)


def test_logged_tensors_are_copies() -> None:
    """What `StepLogs.record` relies on: the next micro-batch may change a logged tensor in place."""

    class Reusing(Tagger):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)  # type: ignore[arg-type]
            values = torch.zeros(1)
            self.log("value", values)
            logged = self.trainer._results["training_step.value"].value
            values.add_(1.0)
            assert float(logged) == 0.0
            assert not logged.requires_grad
            return loss

    fit(Reusing(), max_steps=1, max_epochs=-1)

"""Fails when a private name of torch, torchmetrics or Lightning that `fitting` reads has moved.

What `fitting.step.loop` extends has its own test in `test_loop.py`.
"""

import inspect
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lightning.pytorch.core import LightningModule
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchmetrics import SumMetric

from lightning_memfit.fitting.upstream.torch import FORGETS_PASSES, forget_pass
from tests.helpers.fitting import Tagger
from tests.helpers.ranks import run_ranks
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


class Breaking(nn.Module):
    """A layer in which a pass is broken off, in forward or in backward."""

    breaks = ""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        if self.breaks == "forward":
            raise MemoryError
        if self.breaks == "backward":
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, gradient: Tensor) -> None:
        raise MemoryError


def gradients_after_broken_passes() -> float:
    """The largest difference of gradients from those of a module that is not sharded."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(*(Breaking() for _ in range(4)), nn.Linear(4, 1))
    data = torch.randn(6, 4)
    module(data).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    for block in module[:4]:
        fully_shard(block)
    fully_shard(module)
    forget_pass(module)  # before the first one, as where the first batch finds no room on the device
    found = [0.0]
    for place in (0, 1, 3):
        for where in ("forward", "backward"):
            module[place].breaks = where
            with suppress(MemoryError):
                module(data).square().mean().backward()
                raise AssertionError("not broken off")
            module[place].breaks = ""
            forget_pass(module)
            module.zero_grad()
            for scale in (1.0, 2.0):  # two passes, the second one on top of the first
                module(data).square().mean().backward()
                for parameter, gradient in zip(module.parameters(), expected, strict=True):
                    found.append(float((parameter.grad.full_tensor() - scale * gradient).abs().max()))
            module.zero_grad()
    return max(found)


@pytest.mark.skipif(not FORGETS_PASSES, reason="FSDP2 forgets passes from torch 2.13 on")
def test_fsdp2_forgets_a_pass_that_was_broken_off(tmp_path: Path) -> None:
    (only,) = run_ranks(gradients_after_broken_passes, 1, tmp_path, seconds=30)
    assert not only.error, only.output[-5000:]
    assert only.result < 1e-6

"""What tells a preempted run whether it may end in a validation: samples of its weights, and schedulers that wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memfit import Preemption
from lightning_memfit.reliability.preemption import _samples
from lightning_memfit.reliability.upstream.lightning import a_plateau_waits_for_a_step, step_plateau_schedulers


class Quantized(TwoTensor):
    """A weight that has no operation of its own, as quantized ones have few."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        return cls(args[0].a, args[0].b)


def with_weight(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def are_trained(module: nn.Module, before: list[Tensor]) -> bool:
    preemption = Preemption()
    preemption._trained = before
    return preemption._are_trained(module)


@pytest.mark.parametrize(
    "module",
    [with_weight(Quantized(torch.ones(4), torch.ones(4))), nn.LazyLinear(3), nn.ReLU()],
    ids=["wrapper", "lazy", "none"],
)
def test_weights_without_plain_values_count_as_trained(module: nn.Module) -> None:
    assert are_trained(module, _samples(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_any_kind_of_number_are_told_apart(dtype: torch.dtype) -> None:
    module = with_weight(torch.ones(1000).to(dtype))
    before = _samples(module)
    assert are_trained(module, before)
    module.weight.zero_()
    assert not are_trained(module, before)


def test_samples_keep_no_copy_of_a_weight() -> None:
    module = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        samples = _samples(module)
        assert sum(one.untyped_storage().nbytes() for one in samples) < 8192
        assert are_trained(module, samples)
        module.weight.mul_(2)
        assert not are_trained(module, samples)


# --- schedulers on a plateau ------------------------------------------------------------------------------------------


def trainer_with(frequencies: dict[str, int], batch_idx: int, logged: set[str], is_automatic: bool = True) -> Any:
    configs = [
        SimpleNamespace(reduce_on_plateau=True, interval="step", monitor=monitor, frequency=frequency)
        for monitor, frequency in frequencies.items()
    ]
    stepped: list[str] = []
    loop = SimpleNamespace(
        batch_idx=batch_idx,
        _results=SimpleNamespace(metrics=lambda on_step: {"callback": dict.fromkeys(logged)}),
        update_lr_schedulers=lambda interval, update_plateau_schedulers: stepped.append(interval),
    )
    return SimpleNamespace(
        lr_scheduler_configs=configs,
        callback_metrics=dict.fromkeys(logged),
        lightning_module=SimpleNamespace(automatic_optimization=is_automatic),
        fit_loop=SimpleNamespace(epoch_loop=loop),
        stepped=stepped,
    )


@pytest.mark.parametrize(("batch_idx", "waits"), [(1, False), (2, True), (3, False), (5, True)])
def test_schedulers_that_are_not_due_are_not_waited_for(batch_idx: int, waits: bool) -> None:
    assert a_plateau_waits_for_a_step(trainer_with({"loss": 3}, batch_idx, {"loss"})) is waits


def test_schedulers_stepped_by_hand_are_not_waited_for() -> None:
    assert not a_plateau_waits_for_a_step(trainer_with({"loss": 1}, 0, {"loss"}, is_automatic=False))


def test_unknown_metrics_of_schedulers_that_are_not_due_hold_up_no_other() -> None:
    trainer = trainer_with({"loss": 1, "rare": 100}, 0, {"loss"})
    step_plateau_schedulers(trainer, "step")
    assert trainer.stepped == ["step"]

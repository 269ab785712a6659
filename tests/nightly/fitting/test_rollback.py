# ruff: noqa: NPY002  (the global generator is what is tested)
import copy
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torchmetrics.aggregation import MeanMetric

from lightning_memfit.fitting.recovery.guard import OptimizerSnapshot
from lightning_memfit.fitting.recovery.rollback import RandomState, Rollback, TrainingSnapshot

CPU = torch.device("cpu")


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.metric = MeanMetric()
        self.calls = 0
        self.history = [1, {"a": [torch.zeros(2)]}]
        self.plain = torch.ones(2)
        self.array = numpy.ones(2)
        self.cyclic = [self.history]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        self.history[1]["a"][0] += 1
        self.history.append(self.calls)
        self.plain *= 2
        self.array += 1
        self.extra = "new"
        out = self.norm(self.layer(nn.functional.dropout(x)))
        self.metric.update(out.detach())
        return out.square().mean()


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.randn(4, 3) + random.random() + numpy.random.rand()).backward()
    optimizer.step()


def state_of(module: Module, optimizer: torch.optim.Optimizer) -> list[object]:
    values = [p.clone() for p in module.parameters()] + [b.clone() for b in module.buffers()]
    values += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    values += [module.calls, copy.deepcopy(module.history), module.plain.clone(), module.array.copy()]
    values += [module.metric._update_count, module.metric.mean_value.clone(), hasattr(module, "extra"), module.training]
    values += [copy.deepcopy(optimizer.state_dict()), random.random(), numpy.random.rand(), torch.rand(1)]
    return values


def assert_same(one: object, other: object) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{one} != {other}: {m}")


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_training_snapshot_restores_bitwise(steps_before: int, make: object) -> None:
    results = []
    for tries in (0, 3):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        module = Module()
        optimizer = make(module.parameters())  # type: ignore[operator]
        for _ in range(steps_before):
            step(module, optimizer)
        snapshots = [OptimizerSnapshot(optimizer), TrainingSnapshot(module, CPU)]
        for _ in range(tries):
            optimizer.param_groups[0]["lr"] = 7.0
            step(module, optimizer)
            module.eval()
            module.layer.weight.requires_grad_(False)
        for snapshot in snapshots if tries else ():
            snapshot.restore()
        assert module.layer.weight.requires_grad
        step(module, optimizer)
        results.append(state_of(module, optimizer))
    for plain, tried in zip(*results, strict=True):
        if isinstance(plain, (torch.Tensor, numpy.ndarray)):
            assert_same(plain, tried)
        else:
            assert str(plain) == str(tried)


def test_optimizer_snapshot_keeps_identities() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    average = optimizer.state[module.weight]["exp_avg"]
    weight, value = module.weight, module.weight.detach().clone()
    snapshot = OptimizerSnapshot(optimizer)
    optimizer.step()
    snapshot.restore()
    assert module.weight is weight
    assert torch.equal(module.weight, value)
    assert optimizer.state[module.weight]["exp_avg"] is average


class Devices:
    """A stand-in for `torch.cuda` with two devices, of which the second is the current one."""

    def __init__(self) -> None:
        self.states = [torch.tensor([10]), torch.tensor([20])]

    def get_rng_state(self, device: torch.device | None = None) -> torch.Tensor:
        return self.states[1 if device is None else device.index or 0].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | None = None) -> None:
        self.states[1 if device is None else device.index or 0] = state


def test_the_state_is_that_of_the_runs_device_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    saved = RandomState(torch.device("cuda", 0))
    devices.states = [torch.tensor([11]), torch.tensor([21])]
    saved.restore()
    assert devices.states == [torch.tensor([10]), torch.tensor([21])]


def test_devices_whose_functions_take_no_index_are_asked_without(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_rng_state=lambda: torch.tensor([1]), set_rng_state=lambda state: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    RandomState(torch.device("mps", 0)).restore()


def test_gradients_of_layers_that_came_later_are_cleared() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    state = Rollback(module, CPU)
    module.append(nn.Linear(2, 2))
    module[0].bias.grad = module[1].bias.grad = torch.zeros(2)
    state.remember_zeros()
    module(torch.ones(1, 2)).sum().backward()
    assert all(one.grad is not None for one in module.parameters())
    state.clear_gradients()
    for layer in module:
        assert layer.weight.grad is None
        assert layer.bias.grad is not None
        assert not layer.bias.grad.any()

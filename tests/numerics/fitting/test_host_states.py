"""Optimizer states that wait in host memory between steps, and copies of tensors of every kind."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memfit.device.limit import SimulatedDevice
from lightning_memfit.fitting.recovery import guard as guard_module
from lightning_memfit.fitting.recovery.guard import StepGuard
from lightning_memfit.fitting.recovery.host_states import (
    HostStates,
    absent_bytes,
    fetch_states,
    reason_to_stay,
)
from lightning_memfit.fitting.recovery.step_state import held, places_of, put_back
from lightning_memfit.memory import host_copy
from lightning_memfit.memory.host import is_on_host
from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.kind import DeviceKind

PLENTY = 1 << 30
SIDE = 256
STATE_BYTES = SIDE * SIDE * 4


def bitsandbytes_adam(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "Adagrad": torch.optim.Adagrad,
    "AdamW8bit": bitsandbytes_adam,
}


def made(make: Callable[[Any], torch.optim.Optimizer], num_steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
    optimizer = make(module.parameters())
    for seed in range(num_steps):
        step(module, optimizer, seed)
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()
    optimizer.step()


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_bitwise_those_with_states_on_the_device(name: str) -> None:
    plain, plain_optimizer = made(OPTIMIZERS[name])
    module, optimizer = made(OPTIMIZERS[name])
    before = tensors(optimizer)
    assert reason_to_stay(optimizer, PLENTY) is None
    states = HostStates(optimizer, PLENTY)
    for seed in (1, 2, 3):
        assert any(is_on_host(state) for state in tensors(optimizer))
        step(module, optimizer, seed)
        step(plain, plain_optimizer, seed)
    states.stop()
    step(module, optimizer, 4)
    step(plain, plain_optimizer, 4)
    assert all(one is other for one, other in zip(tensors(optimizer), before, strict=True))
    pairs = [*zip(module.parameters(), plain.parameters(), strict=True)]
    pairs += zip(tensors(optimizer), tensors(plain_optimizer), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not any(is_on_host(state) for state in tensors(optimizer))
    assert absent_bytes(optimizer) == 0


def test_a_device_holds_the_states_in_the_step_only() -> None:
    module, optimizer = made(torch.optim.AdamW)
    device = SimulatedDevice("1GiB")
    device.track_module(module)
    device.track_optimizer(optimizer)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(device.live_bytes))
    full = device.live_bytes
    with device:
        states = HostStates(optimizer, PLENTY)
        assert states.size_bytes == 4 * STATE_BYTES  # of the biases' states none is large enough to leave
        assert device.live_bytes == full - 4 * STATE_BYTES
        assert absent_bytes(optimizer) == 4 * STATE_BYTES
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert device.live_bytes == seen[0] - 4 * STATE_BYTES
        states.stop()
        assert device.live_bytes == seen[0]
        optimizer.step()
        assert device.live_bytes == seen[1] == seen[0]


def test_state_dicts_are_complete_and_loaded_in_between() -> None:
    module, optimizer = made(torch.optim.AdamW)
    other, other_optimizer = made(torch.optim.AdamW, num_steps=3)
    expected = copy.deepcopy(optimizer.state_dict())
    HostStates(optimizer, PLENTY)
    found = optimizer.state_dict()
    for index, state in expected["state"].items():
        assert all(torch.equal(value, found["state"][index][key]) for key, value in state.items())
    optimizer.load_state_dict(copy.deepcopy(other_optimizer.state_dict()))
    module.load_state_dict(other.state_dict())
    for seed in (7, 8):
        step(module, optimizer, seed)
        step(other, other_optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_running_out_while_they_come_back_is_repeated_by_the_guard() -> None:
    """Room for all states, but not beside something that is freed when the step is tried again."""
    module, optimizer = made(torch.optim.AdamW)
    plain, plain_optimizer = made(torch.optim.AdamW)
    step(plain, plain_optimizer, 1)
    HostStates(optimizer, PLENTY)
    optimizer.zero_grad()
    x = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(1))
    device = SimulatedDevice(11 * STATE_BYTES)
    device.track_module(module)
    guard = StepGuard()
    with device, guard(optimizer):
        module(x).square().mean().backward()
        filling = [torch.zeros(4 * SIDE, SIDE)]
        optimizer.register_step_pre_hook(lambda *_: filling.clear() if guard.num_retries else None)
        # Hooks run in the order they were registered: make room before the states are asked for.
        optimizer._optimizer_step_pre_hooks.move_to_end(next(iter(optimizer._optimizer_step_pre_hooks)))
        optimizer.step(lambda: None)
    assert guard.num_retries >= 1
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_running_out_as_they_come_back_after_the_closure_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = made(torch.optim.AdamW)
    plain, plain_optimizer = made(torch.optim.AdamW)
    step(plain, plain_optimizer, 1)
    HostStates(optimizer, PLENTY)
    optimizer.zero_grad()
    module(torch.randn(4, SIDE, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    errors = [torch.OutOfMemoryError("CUDA out of memory.")]

    def fetch_once_there_is_room(optimizer: torch.optim.Optimizer) -> None:
        if errors:
            raise errors.pop()
        fetch_states(optimizer)

    monkeypatch.setattr(guard_module, "fetch_states", fetch_once_there_is_room)
    guard = StepGuard()
    with guard(optimizer):
        optimizer.step(lambda: None)
    assert guard.num_retries == 1
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_what_finds_no_room_now_is_fetched_by_the_next_step() -> None:
    module, optimizer = made(torch.optim.AdamW)
    plain, plain_optimizer = made(torch.optim.AdamW)
    with SimulatedDevice(5 * STATE_BYTES // 2):
        HostStates(optimizer, PLENTY).stop()
    assert absent_bytes(optimizer) == 2 * STATE_BYTES
    states = HostStates(optimizer, PLENTY)  # memory ran out again before there was a step
    assert states.size_bytes == absent_bytes(optimizer) == 4 * STATE_BYTES
    with SimulatedDevice(1):
        states.stop()
    assert reason_to_stay(optimizer, PLENTY) is None
    for seed in (1, 2):
        step(module, optimizer, seed)
        step(plain, plain_optimizer, seed)
        assert absent_bytes(optimizer) == 0
    assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


class Memory:
    """A device with room for gradients, but not for states as well."""

    limit_bytes, live_bytes, peak_bytes = 6 * STATE_BYTES, STATE_BYTES, 0

    def reset_peak(self) -> None:
        """Nothing to start."""


class Wrapping(torch.optim.SGD):
    """Its states are of a kind of their own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["moment"] = TwoTensor(torch.zeros_like(parameter), torch.zeros_like(parameter))


def paged(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.is_paged = True  # type: ignore[attr-defined]
    return optimizer


def sharded(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.consolidate_state_dict = lambda: None  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    ("make", "num_steps", "free_bytes", "reason"),
    [
        (torch.optim.LBFGS, 0, PLENTY, "LBFGS runs forward and backward within its step"),
        (paged, 1, PLENTY, "AdamW pages them between device and host by itself"),
        (sharded, 1, PLENTY, "AdamW divides them among ranks"),
        (Wrapping, 1, PLENTY, "Wrapping has no plain states of 64 KiB or more on the device"),
        (torch.optim.AdamW, 0, PLENTY, "AdamW has no plain states of 64 KiB or more on the device"),
        (torch.optim.SGD, 1, PLENTY, "SGD has no plain states of 64 KiB or more on the device"),
        (torch.optim.Adafactor, 1, PLENTY, "Adafactor has no plain states of 64 KiB or more on the device"),
        (torch.optim.AdamW, 1, 1 << 19, "they take 1.00 MiB, and 512.00 KiB of host memory are free for them"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_reasons_to_stay(make: Any, num_steps: int, free_bytes: int, reason: str) -> None:
    _, optimizer = made(make, num_steps)
    assert reason_to_stay(optimizer, free_bytes) == reason


def test_a_captured_step_keeps_its_states_where_they_are() -> None:
    _, optimizer = made(torch.optim.AdamW)
    optimizer.param_groups[0]["capturable"] = True
    assert "capturable=True" in str(reason_to_stay(optimizer, PLENTY))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_states_leave_for_pinned_memory_and_come_back() -> None:
    results = []
    for away in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(module.parameters())
        for seed in range(4):
            optimizer.zero_grad()
            module(torch.randn(4, 1024, device="cuda")).square().mean().backward()
            if away and seed == 1:
                before = torch.cuda.memory_allocated()
                states = HostStates(optimizer, PLENTY)
                assert before - torch.cuda.memory_allocated() == 2 << 22
                assert optimizer.state[module.weight]["exp_avg"].is_pinned()
            if away and seed == 3:
                states.stop()
            optimizer.step()
        assert optimizer.state[module.weight]["exp_avg"].is_cuda
        results.append([*module.parameters(), optimizer.state[module.weight]["exp_avg_sq"]])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# --- copies -----------------------------------------------------------------------------------------------------------


def test_a_copy_is_written_back():
    tensor = torch.arange(4.0)
    copy = HostCopy(tensor)
    tensor.zero_()
    copy.restore(tensor)
    assert tensor.tolist() == [0, 1, 2, 3]
    assert copy.moved_to(torch.device("cpu")).data_ptr() != tensor.data_ptr()


@pytest.fixture
def num_waits(monkeypatch):
    """Tensors seem to be on a device with its own memory, and copies to the host are counted."""
    waits = []
    monkeypatch.setattr(host_copy, "DeviceKind", SimpleNamespace(of=lambda device: DeviceKind.of("cuda")))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: waits.append(tensor) or tensor.clone())
    return lambda: len(waits)


def trained_norms():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1 << 15), nn.BatchNorm1d(1 << 15))
    module(torch.randn(8, 4)).sum().backward()
    return module


def test_what_steps_change_is_copied_without_waiting_if_it_is_small(num_waits):
    module = trained_norms()
    large = [buffer for buffer in module.buffers() if buffer.nbytes >= 1 << 16]
    before = [buffer.clone() for buffer in module.buffers()]
    saved = held(place for name, place in places_of(module).items() if "running" in name or "num_batches" in name)
    assert num_waits() == len(large) == 2
    module(torch.randn(8, 4))
    put_back(saved)
    assert all(torch.equal(now, then) for now, then in zip(module.buffers(), before, strict=True))
    again = HostCopy(module[1].running_mean, small_may_stay=True).moved_to(torch.device("cpu"))
    assert again.data_ptr() != module[1].running_mean.data_ptr()
    assert torch.equal(again, before[0])


def test_a_small_copy_goes_to_the_host_if_the_device_is_full(num_waits, monkeypatch):
    tensor, clone = torch.arange(4.0), torch.Tensor.clone

    def refuse(tensor):
        monkeypatch.setattr(torch.Tensor, "clone", clone)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    copied = HostCopy(tensor, small_may_stay=True)
    assert num_waits() == 1
    copied.restore(tensor.zero_())
    assert tensor.tolist() == [0, 1, 2, 3]


@pytest.fixture
def wrapper():
    return TwoTensor(torch.arange(4.0), torch.arange(4.0) + 10)


def test_the_tensors_inside_a_wrapper_are_copied_without_its_own_clone(wrapper, monkeypatch):
    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", None)
    copy = HostCopy(wrapper)
    wrapper.a.zero_()
    wrapper.b.zero_()
    copy.restore(wrapper)
    assert wrapper.a.tolist() == [0, 1, 2, 3]
    assert wrapper.b.tolist() == [10, 11, 12, 13]


def test_a_wrapper_is_made_anew(wrapper):
    moved = HostCopy(wrapper).moved_to(torch.device("cpu"))
    assert isinstance(moved, TwoTensor)
    assert torch.equal(moved.b, wrapper.b)
    assert moved.b.data_ptr() != wrapper.b.data_ptr()

from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn

from lightning_memfit.device.limit import SimulatedDevice
from lightning_memfit.fitting.recovery.guard import StepGuard
from lightning_memfit.fitting.size.device_memory import CudaMemory
from lightning_memfit.optim.eight_bit import to_bitsandbytes
from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.optim.rounding import Stochastic
from tests.helpers.fitting import TwiceSGD, out_of_memory


class FullMemory:
    """A device without free memory."""

    limit_bytes = live_bytes = peak_bytes = 100

    def reset_peak(self) -> None:
        """Nothing to start."""


def trained(fail_at: set[int], guard: StepGuard | None, after: bool, steps: int = 5) -> list[torch.Tensor]:
    """Weights after some steps of AdamW, which fails before or after it has changed them."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in fail_at:
            raise out_of_memory()

    (optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook)(fail)
    for index in range(steps):
        optimizer.zero_grad()
        module(torch.full((1, 4), float(index))).square().mean().backward()
        if guard is None:
            optimizer.step()
        else:
            with guard(optimizer):
                optimizer.step(lambda: None)
    assert "step" not in vars(optimizer)
    return [parameter.detach() for parameter in module.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fail_at", [{1}, {4}, {1, 3, 5}])
def test_a_step_that_changed_nothing_is_repeated(fail_at: set[int]) -> None:
    guard = StepGuard(None)
    assert equal(trained(fail_at, guard, after=False), trained(set(), None, after=False))
    assert guard.num_retries == len(fail_at)


@pytest.mark.parametrize("fail_at", [{1}, {3}, {1, 3, 5}])
def test_half_a_step_is_taken_back_where_memory_is_tight(fail_at: set[int]) -> None:
    guard = StepGuard(FullMemory())
    assert equal(trained(fail_at, guard, after=True), trained(set(), None, after=True))
    assert guard.num_retries == len(fail_at)


def test_half_a_step_without_a_copy_is_an_error() -> None:
    assert equal(trained({1}, StepGuard(None), after=True), trained(set(), None, after=True))
    with pytest.raises(RuntimeError, match="Resume from the last checkpoint"):
        trained({3}, StepGuard(None), after=True)


def test_errors_within_the_closure_and_other_errors_pass() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)

    def fail() -> None:
        raise KeyError("closure")

    with pytest.raises(KeyError, match="closure"), StepGuard(None)(optimizer):
        optimizer.step(fail)
    assert "step" not in vars(optimizer)


def test_a_real_shortage_is_survived_tensor_by_tensor() -> None:
    """`foreach` needs temporaries of all tensors at once; the retry those of one."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    weights_bytes = sum(parameter.nbytes for parameter in module.parameters())
    device = SimulatedDevice(round(4.5 * weights_bytes))  # weights, gradients, two states and half of the temporaries
    device.track_module(module)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
        device.track(parameter.grad, next(iter(device.live_by_category)))
    guard = StepGuard(device)
    with device, guard(optimizer):
        optimizer.step(lambda: None)
    assert guard.num_retries == 1
    assert optimizer.param_groups[0]["foreach"] is True


@pytest.mark.parametrize("after", [False, True])
def test_a_retry_that_fails_is_repeated(after: bool) -> None:
    guard = StepGuard(FullMemory())
    assert equal(trained({2, 3, 4}, guard, after), trained(set(), None, after))
    assert guard.num_retries == 3


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_never_fits_leaves_weights_and_states_as_they_were(after: bool) -> None:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = [tensor.clone() for tensor in (*module.parameters(), *optimizer.state[module.weight].values())]

    def fail(*_: Any) -> None:
        raise out_of_memory()

    (optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook)(fail)
    with pytest.raises(torch.OutOfMemoryError, match="4 times in a row"), StepGuard(FullMemory())(optimizer):
        optimizer.step(lambda: None)
    assert equal([*module.parameters(), *optimizer.state[module.weight].values()], before)


def test_a_trial_step_is_not_the_first_step() -> None:
    """The first real step makes the states, whatever a trial inside its closure did before."""
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise out_of_memory()

    guard = StepGuard(None)

    def closure() -> None:
        with guard.trial():
            for _ in range(2):
                optimizer.step()

    optimizer.register_step_post_hook(fail)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with guard(optimizer):
        optimizer.step(closure)
    assert guard.num_retries == 1


def test_steps_of_a_gradient_scaler_are_copied_as_seldom_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls `step` without a closure: weights and states of every step would go to the host."""
    copies: list[Any] = []
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", copies.append)
    guard, scaler = StepGuard(None), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(module(torch.ones(1, 4)).square().mean()).backward()
        with guard(optimizer):
            scaler.step(optimizer)
        scaler.update()
    assert copies == [optimizer]


def test_without_room_for_a_copy_the_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(optimizer: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", no_room)
    with pytest.warns(UserWarning, match="no room for a copy"):
        assert equal(trained(set(), StepGuard(FullMemory()), after=False), trained(set(), None, after=False))
    with pytest.raises(torch.OutOfMemoryError, match="Resume from the last checkpoint"):
        trained({3}, StepGuard(FullMemory()), after=True)


class Lookahead(torch.optim.SGD):
    """Moves weights before it asks for gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.mul_(0.9)
        loss = closure()
        super().step()
        return loss


def closure_steps(kind: Any, guard: StepGuard | None, fails: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    optimizer = kind(module.parameters(), lr=0.1)
    calls = 0

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = module(torch.full((1, 4), 0.5)).square().mean()
        loss.backward()
        if fails is not None:
            fails(calls)
        return loss

    for _ in range(4):
        before = [p.detach().clone() for p in module.parameters()]
        try:
            if guard is None:
                optimizer.step(closure)
            else:
                with guard(optimizer):
                    optimizer.step(closure)
        except RuntimeError:
            assert equal(before, list(module.parameters()))
            raise
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", [TwiceSGD, Lookahead, torch.optim.LBFGS, torch.optim.SGD])
def test_every_call_of_the_closure_computes_at_the_weights_of_that_moment(kind: Any) -> None:
    assert equal(closure_steps(kind, StepGuard(FullMemory())), closure_steps(kind, None))
    assert equal(closure_steps(kind, StepGuard(None)), closure_steps(kind, None))


def test_a_closure_that_fails_at_other_weights_leaves_those_before_the_step() -> None:
    def fail(calls: int) -> None:
        if calls == 4:
            raise RuntimeError("in the second call of the second step")

    with pytest.raises(RuntimeError, match="second call"):
        closure_steps(TwiceSGD, StepGuard(FullMemory()), fail)


def test_a_step_that_has_called_its_closure_twice_is_not_repeated() -> None:
    class Failing(TwiceSGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError, match="closure more than once, which can't be repeated; weights and"):
        closure_steps(Failing, StepGuard(FullMemory()))


class PastTorch:
    """Stands in for a kernel of bitsandbytes on CUDA, which writes to tensors without torch's knowledge.

    Args:
        fail_at: Calls, counted from 1, in which memory runs out before anything is written.
    """

    def __init__(self, fail_at: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.calls = 0
        self.fail_at = fail_at

    def __call__(self, _: str, gradient: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, *__: Any, **k: Any):
        """Take one from every weight, and count in the state."""
        self.calls += 1
        if self.calls in self.fail_at:
            raise out_of_memory()
        weight.detach().numpy()[...] -= 1
        state.numpy()[...] += 1


def past_torch(monkeypatch: pytest.MonkeyPatch, fail_at: set[int]) -> None:
    kernel = PastTorch(fail_at)
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        monkeypatch.setattr(f"bitsandbytes.functional.{name}", kernel)


def of_the_user(parameters: list[nn.Parameter]) -> Any:
    return bitsandbytes.optim.AdamW8bit(parameters)


def converted(parameters: list[nn.Parameter]) -> Any:
    return to_bitsandbytes(torch.optim.AdamW(parameters))


def stepped_past_torch(kind: Any, guard: StepGuard, num_steps: int) -> tuple[list[float], list[float]]:
    """Weights, which begin at zero, and numbers in the states after steps of 8 and of 32 bits."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (4096, 16)]
    optimizer = kind(parameters)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            with guard(optimizer):
                optimizer.step(lambda: None)
        except torch.OutOfMemoryError:
            assert [p[0].item() for p in parameters] == [-num_steps, 1 - num_steps]  # the first once, not twice
            raise
    states = [optimizer.state[parameter]["state1"].view(-1)[0].item() for parameter in parameters]
    return [parameter[0].item() for parameter in parameters], states


@pytest.mark.parametrize("kind", [of_the_user, converted])
def test_a_step_past_torch_is_not_taken_twice(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    past_torch(monkeypatch, {6})  # the second parameter in the third step
    with pytest.raises(torch.OutOfMemoryError, match="Resume from the last checkpoint"):
        stepped_past_torch(kind, StepGuard(None), 3)


@pytest.mark.parametrize("kind", [of_the_user, converted])
def test_a_step_past_torch_is_taken_back_with_a_copy(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    past_torch(monkeypatch, {2, 8})
    guard = StepGuard(FullMemory())
    assert stepped_past_torch(kind, guard, 3) == ([-3, -3], [3, 3])
    assert guard.num_retries == 2


def test_a_converted_optimizer_that_fails_before_its_kernel_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    past_torch(monkeypatch, set())
    calls = 0

    def failing(parameters: list[nn.Parameter]) -> Any:
        optimizer = converted(parameters)
        config = optimizer.get_config

        def get_config(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 7:  # the first of the third step: two steps of two parameters, whose states ask as well
                raise out_of_memory()
            return config(*args)

        optimizer.get_config = get_config
        return optimizer

    guard = StepGuard(None)
    assert stepped_past_torch(failing, guard, 3) == ([-3, -3], [3, 3])
    assert guard.num_retries == 1


def test_states_past_torch_under_weights_of_torch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Float32Step` writes weights by torch, but bitsandbytes its states; a chunk that fails has changed them alone."""
    past_torch(monkeypatch, {6})
    parameters = [nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer, guard = Float32Step(of_the_user(parameters), Stochastic()), StepGuard(None)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with guard(optimizer):
            optimizer.step(lambda: None)

    step()
    step()
    with pytest.raises(torch.OutOfMemoryError, match="Resume from the last checkpoint"):
        step()
    assert guard.num_retries == 0


def test_the_first_step_of_a_second_optimizer_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", copies.append)
    guard = StepGuard(None)
    optimizers = [torch.optim.AdamW([nn.Parameter(torch.ones(2))]) for _ in range(2)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
            with guard(optimizer):
                optimizer.step(lambda: None)
    assert copies == optimizers


@pytest.mark.parametrize(("fraction", "num_copies"), [(1.0, 1), (0.1, 3)])
def test_paged_states_on_the_card_leave_it_under_pressure(
    fraction: float, num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver counts them as used, for which every step was copied; a fraction that is used up is another matter."""
    past_torch(monkeypatch, set())
    for name, value in {
        "mem_get_info": (100, 40960),
        "get_per_process_memory_fraction": fraction,
        "memory_reserved": 4096,
        "memory_allocated": 4096,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    copies: list[Any] = []
    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", copies.append)
    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard._STEPS_BETWEEN_CHECKS", 1)
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer, guard = bitsandbytes.optim.AdamW([parameter]), StepGuard(CudaMemory(torch.device("cpu")))
    optimizer.prefetch_state = lambda _: None
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        with guard(optimizer):
            optimizer.step(lambda: None)
        for key in ("state1", "state2"):
            optimizer.state[parameter][key].is_paged = True
        optimizer.is_paged = True
    assert len(copies) == num_copies

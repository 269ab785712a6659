from typing import Any

import pytest
import torch
from torch import nn

from lightning_memfit.device.limit import SimulatedDevice
from lightning_memfit.fitting.recovery.guard import StepGuard
from tests.helpers.fitting import TwiceSGD, out_of_memory


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
    with device, StepGuard()(optimizer), pytest.warns(UserWarning, match="tensor by tensor"):
        optimizer.step(lambda: None)
    assert optimizer.param_groups[0]["foreach"] is True


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
    with pytest.raises(torch.OutOfMemoryError, match="twice"), StepGuard()(optimizer):
        optimizer.step(lambda: None)
    assert equal([*module.parameters(), *optimizer.state[module.weight].values()], before)


def test_without_room_for_a_copy_the_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(optimizer: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", no_room)
    with pytest.warns(UserWarning, match="no room for a copy"):
        assert equal(trained(set(), StepGuard(), after=False), trained(set(), None, after=False))
    with pytest.raises(torch.OutOfMemoryError, match="Resume from the last checkpoint"):
        trained({1}, StepGuard(), after=True)


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
    assert equal(closure_steps(kind, StepGuard()), closure_steps(kind, None))
    assert equal(closure_steps(kind, StepGuard()), closure_steps(kind, None))


def test_a_closure_that_fails_at_other_weights_leaves_those_before_the_step() -> None:
    def fail(calls: int) -> None:
        if calls == 2:
            raise RuntimeError("in the second call of the first step")

    with pytest.raises(RuntimeError, match="second call"):
        closure_steps(TwiceSGD, StepGuard(), fail)


def test_a_step_that_has_called_its_closure_twice_is_not_repeated() -> None:
    class Failing(TwiceSGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step(closure)
            raise out_of_memory()

    with pytest.raises(torch.OutOfMemoryError, match="closure more than once: weights and states are those before"):
        closure_steps(Failing, StepGuard())


def test_the_first_step_of_a_second_optimizer_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    monkeypatch.setattr("lightning_memfit.fitting.recovery.guard.OptimizerSnapshot", copies.append)
    guard = StepGuard()
    optimizers = [torch.optim.AdamW([nn.Parameter(torch.ones(2))]) for _ in range(2)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
            with guard(optimizer):
                optimizer.step(lambda: None)
    assert copies == optimizers

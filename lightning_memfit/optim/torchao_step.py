"""Stepping torchao's optimizers beside the modes that follow memory.

Written for torchao 0.18, whose `step` compiles one function per parameter shape with `fullgraph=True`; torch refuses
that within a dispatch mode. `tests/techniques/test_contract.py` fails when the names move.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Moments, and whether they have a sign."""


@functools.cache
def outside_modes(cls: type[Optimizer]) -> type[Optimizer]:
    """A class of the same name whose step runs outside of dispatch modes; its closure runs within.

    Ledgers see the states after the step that made them, and nothing of what a compiled step holds for a moment. On
    fake tensors nothing is compiled: the states are made, and no more.

    Args:
        cls: One of torchao's, with states from `_new_buffer`.
    """

    class Outside(cls):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            if any(isinstance(parameter, FakeTensor) for parameter in trained):
                for parameter in trained:
                    self._make_states(parameter)
            else:
                with _disable_current_modes():
                    _without_hooks(cls.step)(self)
            return loss

        def state_dict(self) -> dict[str, Any]:
            """States in plain tensors: Lightning's loading can't restore wrappers of tensors."""
            saved: dict[str, Any] = super().state_dict()
            states = saved["state"].items()
            return {**saved, "state": {index: {k: _apart(v) for k, v in state.items()} for index, state in states}}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Take states in plain tensors, or torchao's own."""
            states = state_dict["state"].items()
            made = {index: {k: _together(v, cls.__module__) for k, v in state.items()} for index, state in states}
            super().load_state_dict({**state_dict, "state": made})

        @torch.no_grad()
        def _make_states(self, parameter: torch.Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state.update({name: self._new_buffer(parameter, signed) for name, signed in _STATES.items()})

    Outside.__name__, Outside.__qualname__, Outside.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Outside


def _apart(value: Any) -> Any:
    if not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return {"class": type(value).__name__, "parts": parts, "context": context}


def _together(value: Any, module: str) -> Any:
    if not isinstance(value, dict):
        return value
    kind = getattr(import_module(module), value["class"])
    return kind.__tensor_unflatten__(value["parts"], value["context"])


def _without_hooks(step: Any) -> Any:
    """A class's step; torch wraps it with hooks once an optimizer of that class is made, and those run for ours."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step

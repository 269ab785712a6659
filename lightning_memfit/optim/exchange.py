"""`exchange`: build an optimizer of another class over the same groups, with hyper-parameters carried over or given.

A hyper-parameter that can't be carried over is refused unless it is dropped explicitly. torchao's optimizers compile
their step, which torch refuses within a dispatch mode: `outside_modes` makes subclasses that step outside the modes
that follow memory.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_memfit.optim.optimizers import KERNELS, OptimizerClass, class_named, class_of

# --- torchao's optimizers under dispatch modes ------------------------------------------------------------------------

# Written for torchao 0.18, whose `step` compiles one function per parameter shape with `fullgraph=True`;
# `tests/techniques/test_contract.py` fails when the names move.
_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Whether each moment has a sign."""


@functools.cache
def outside_modes(cls: type[Optimizer]) -> type[Optimizer]:
    """Make a class of the same name whose step runs outside dispatch modes; its closure runs inside.

    Ledgers see the states after the step that made them, but not the temporary tensors of a compiled step. On fake
    tensors nothing is compiled: the step only makes the states.

    Args:
        cls: An optimizer class of torchao, which makes its states in `_new_buffer`.
    """

    class Outside(cls):  # type: ignore[misc, valid-type]
        @override
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

        @override
        def state_dict(self) -> dict[str, Any]:
            """Return states in plain tensors, as Lightning's loading can't restore tensor subclasses."""
            saved: dict[str, Any] = super().state_dict()
            states = saved["state"].items()
            return {**saved, "state": {index: {k: _apart(v) for k, v in state.items()} for index, state in states}}

        @override
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Load states in plain tensors, or torchao's own."""
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
    """A class's step without the hooks that torch adds when an optimizer of it is made: our step runs them already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# --- exchanging -------------------------------------------------------------------------------------------------------

_MUST_BE_OFF = ("capturable", "differentiable")


def exchange(
    optimizer: Optimizer, name: str, options: Mapping[str, Any] | None = None, drop: Collection[str] = ()
) -> Optimizer:
    """Build an optimizer of another class over the same parameters and groups.

    Groups keep their order, learning rates and extra keys. A hyper-parameter carries over if it means the same in both
    classes. If it means something else in the new class (Lion's `betas`, Adafactor's `eps`), it must be given in
    `options`. If the new class does not know it, and it differs from its default, it must be listed in `drop`.
    Hyper-parameters that only the new class knows get their defaults.

    Args:
        optimizer: An optimizer that has not stepped.
        name: Name of the new class in `optimizer_classes`, such as `torch.Adafactor`.
        options: Hyper-parameters and kernel choices of the new optimizer, for every group.
        drop: Hyper-parameters of the old optimizer to give up.

    Returns:
        The new optimizer, without states.

    Raises:
        ValueError: If a hyper-parameter is neither carried over nor given nor dropped, or is not known.
    """
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    source, target = class_of(optimizer), class_named(name)
    if optimizer.state:
        raise ValueError(f"`optimizer` ({type(optimizer).__name__}) has states already. Exchange it before it steps.")
    cls = outside_modes(target.load()) if target.package == "torchao" else target.load()
    known = set(target.meanings) | target.settings
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"`options.{unknown[0]}` is not known to {name}. Known are {', '.join(sorted(known))}.")
    defaults = _defaults(type(optimizer))
    groups = [_translated(group, source, target, name, options, drop, defaults) for group in optimizer.param_groups]
    settings = {key: value for key, value in options.items() if key in target.settings}
    built: Optimizer = cls(groups, **target.fixed, **settings)
    return built


def _translated(
    group: Mapping[str, Any],
    source: OptimizerClass,
    target: OptimizerClass,
    name: str,
    options: Mapping[str, Any],
    drop: Collection[str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    for switch in _MUST_BE_OFF:
        if group.get(switch):
            raise ValueError(f"`{switch}=True` cannot be carried over to {name}. Leave it off.")
    meanings = dict(source.meanings)
    if group.get("decoupled_weight_decay"):
        meanings["weight_decay"] = "decoupled decay"
    of_meaning = {meaning: key for key, meaning in meanings.items() if key in group}
    translated: dict[str, Any] = {}
    carried = set()
    for key, meaning in target.meanings.items():
        if key in options:
            translated[key] = options[key]
        elif meaning in of_meaning:
            carried.add(of_meaning[meaning])
            translated[key] = group[of_meaning[meaning]]
        elif key == "weight_decay" and not group.get(key, 0):
            translated[key] = 0.0  # no decay is no decay of either kind
        elif key in group and key in meanings:
            raise ValueError(
                f"`{key}={group[key]!r}` is {meanings[key]} now, but {meaning} in {name}. Give `options.{key}`."
            )
    for key in meanings.keys() & group.keys() - carried - set(options) - set(drop):
        if group[key] != defaults.get(key) and not (key == "weight_decay" and not group[key]):
            raise ValueError(
                f"`{key}={group[key]!r}` ({meanings[key]}) has no counterpart in {name}. List it in `drop` to give it "
                "up, or keep the optimizer."
            )
    old = {*source.meanings, *source.fixed, *target.meanings, *KERNELS, *_MUST_BE_OFF, "decoupled_weight_decay"}
    extra = {key: value for key, value in group.items() if key not in old}
    return {**extra, **translated}


def _defaults(cls: type) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()}

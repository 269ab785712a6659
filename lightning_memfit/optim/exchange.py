"""`exchange`: build an optimizer of another class over the same groups, with hyper-parameters carried over or given.

torchao's optimizers compile their step, which torch refuses within a dispatch mode: `outside_modes` makes subclasses
that step outside the modes that follow memory.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_memfit.optim.eight_bit import guard, guarded
from lightning_memfit.optim.optimizers import KERNELS, OptimizerClass, class_named, class_of
from lightning_memfit.optim.states import Resume, StateDict, has_gaps
from lightning_memfit.optim.steps import copied_whole, refuse_sparse, refuse_wide, run_closure, step_below_hooks

# Written for torchao 0.18, whose `step` compiles one function per parameter shape with `fullgraph=True`;
# `tests/contract/test_contract.py` fails when the names move.
_STATES = {"exp_avg": True, "exp_avg_sq": False}
"""Whether each moment has a sign."""


@functools.cache
def outside_modes(cls: type[Optimizer]) -> type[Optimizer]:
    """Make a class of the same name whose step runs outside dispatch modes; its closure runs inside.

    On fake tensors nothing is compiled: the step only makes the states. Learning rates that were set to numbers, which
    torchao refuses, become tensors again.
    """

    class Outside(cls):  # type: ignore[misc, valid-type]
        @override
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = run_closure(closure)
            trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            refuse_sparse(type(self).__name__, trained)
            refuse_wide(type(self).__name__, trained)
            for group in self.param_groups:
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
            if any(isinstance(parameter, FakeTensor) for parameter in trained):
                for parameter in (one for one in trained if not self.state[one]):
                    moments = {name: self._new_buffer(parameter.detach(), sign) for name, sign in _STATES.items()}
                    self.state[parameter].update(step=torch.tensor(0.0), **moments)
            else:
                with _disable_current_modes():
                    step_below_hooks(self, cls)
            return loss

        @override
        def state_dict(self) -> dict[str, Any]:
            """Return states in plain tensors."""
            return _with_states(super().state_dict(), _apart)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return copied_whole(self, memo)

    Outside.__name__, Outside.__qualname__, Outside.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Outside


class _ResumeTorchao(Resume):
    """Loads states of the same class of torchao."""

    @override
    def adapt(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        return super().adapt(optimizer, _with_states(state_dict, _together))


def _with_states(state_dict: StateDict, change: Callable[[Any], Any]) -> StateDict:
    states = state_dict["state"].items()
    return {**state_dict, "state": {index: {k: change(v) for k, v in state.items()} for index, state in states}}


def _apart(value: Any) -> Any:
    """Take a tensor subclass of torchao apart into plain tensors, as Lightning's loading can't restore subclasses."""
    if not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return {"class": type(value).__name__, "parts": parts, "context": context}


def _together(value: Any) -> Any:
    """Make the tensor subclass that `_apart` took apart."""
    if not (isinstance(value, dict) and "parts" in value):
        return value
    kind = getattr(import_module("torchao.optim.adam"), value["class"])
    return kind.__tensor_unflatten__(value["parts"], value["context"])


_MUST_BE_OFF = ("capturable", "differentiable")
_STEPPING: dict[str, Any] = {"torchao": outside_modes, "bitsandbytes": guarded}


def exchange(
    optimizer: Optimizer,
    name: str,
    options: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    technique: str = "exchange",
) -> Optimizer:
    """Build an optimizer of another class over the same parameters and groups.

    A hyper-parameter carries over if it means the same in both classes. If it means something else in the new class
    (Lion's `betas`, Adafactor's `eps`), it must be given in `options`. If the new class does not know it, and it
    differs from its default, it must be listed in `drop`. States go on within a family (`states.MOMENTS`).

    Raises:
        ValueError: If a hyper-parameter is neither carried over nor given nor dropped, or is not known, or a
            parameter's dtype is not one that the new class steps.
    """
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    source, target = class_of(optimizer), class_named(name)
    family = "" if target.package == "torchao" else target.family  # its states mean nothing to other classes
    known = set(target.meanings) | target.settings
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"`options.{unknown[0]}` is not known to {name}. Known are {', '.join(sorted(known))}.")
    groups = [_translated(group, source, target, options, drop) for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if target.package != "torch":
            refuse_wide(name, group["params"])
        if options.get("fused") and any(map(has_gaps, group["params"])):
            raise ValueError(
                f"Parameter group {index} holds a view with gaps between its elements, and `options.fused=True` would "
                "step what lies between as well. Use `nn.Parameter(view.clone())`, or leave `fused` out."
            )
    # Groups that are added later get the module's hyper-parameters, as they would without the exchange.
    later = _translated(optimizer.defaults, source, target, options, drop)
    settings = {key: value for key, value in options.items() if key in target.settings}
    cls: Any = target.load()
    if target.package in _STEPPING:
        cls = _STEPPING[target.package](cls)
    built: Optimizer = cls([dict(group) for group in groups], **target.fixed, **settings)
    if target.package == "bitsandbytes":
        guard(built, optimizer, target, name, technique)
    else:
        kind = _ResumeTorchao if target.package == "torchao" else Resume
        kind(family, name, technique).attach(built, optimizer)
    built.defaults.update(later)
    if optimizer.state:
        built.load_state_dict(optimizer.state_dict())
    return built


def untranslatable(
    source: str, group: Mapping[str, Any], name: str, options: Mapping[str, Any], drop: Collection[str]
) -> str | None:
    """Why a group of the class `source` can't be exchanged, in the words of `exchange`; None if it can."""
    try:
        _translated(group, class_named(source), class_named(name), options, drop)
    except ValueError as error:
        return str(error)
    return None


def _translated(
    group: Mapping[str, Any],
    source: OptimizerClass,
    target: OptimizerClass,
    options: Mapping[str, Any],
    drop: Collection[str],
) -> dict[str, Any]:
    name, defaults = target.name, inspect.signature(source.load()).parameters
    for switch in filter(group.get, _MUST_BE_OFF):
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
        if (key not in defaults or group[key] != defaults[key].default) and not (
            key == "weight_decay" and not group[key]
        ):
            raise ValueError(
                f"`{key}={group[key]!r}` ({meanings[key]}) has no counterpart in {name}. List it in `drop` to give it "
                "up, or keep the optimizer."
            )
    old = {*source.meanings, *source.fixed, *target.meanings, *KERNELS, *_MUST_BE_OFF, "decoupled_weight_decay"}
    extra = {key: value for key, value in group.items() if key not in old}
    return {**extra, **translated}

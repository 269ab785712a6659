"""Save what a step changes and restore it bitwise.

`Rollback` goes back to the start of an effective batch whose attempt failed; it is used in every step and saves only
what forward and backward change. `TrainingSnapshot` is for passes of a check: after `restore`, training continues
exactly as it would have without them.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memfit.fitting.recovery.step_state import (
    Place,
    Saved,
    changed_since,
    copies_frozen_weights,
    held,
    hidden_metrics,
    is_look,
    places_of,
    put_back,
    remove_new,
    sampled_weights,
    trained_places,
)
from lightning_memfit.memory.generators import NUMPY, PYTHON, TORCH
from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.reliability.upstream.deepspeed import held_weight

_SEED = 0x5EED_C4EC
_HOST_GENERATORS = (PYTHON, NUMPY, TORCH)


class RandomState:
    """The states of Python's, NumPy's and torch's generators, and of the accelerator's."""

    __slots__ = ("_accelerator", "_device", "_host")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [generator.state() for generator in _HOST_GENERATORS]
        self._accelerator: Tensor | None = None
        if device.type != "cpu":
            self._accelerator = torch.get_device_module(device).get_rng_state(*_of_one(device))

    def restore(self) -> None:
        """Set all generators back."""
        for generator, state in zip(_HOST_GENERATORS, self._host, strict=True):
            generator.restore(state)
        if self._accelerator is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, *_of_one(self._device))


def _of_one(device: torch.device) -> tuple[torch.device, ...]:
    """What names a device to its type's functions: without it, it is the current one, which user code may change."""
    return (device,) if DeviceKind.of(device).has_own_generator else ()  # "mps" has one device, and no such argument


class RollbackPoint:
    """What a module was before a batch, but for weights in training and gradients."""

    __slots__ = ("_hook_name", "_metrics", "_module", "_of_metrics", "random", "state")

    def __init__(self, module: nn.Module, device: torch.device, metrics: "MetricStates", state: Saved) -> None:
        self.random = RandomState(device)
        self.state = state
        self._module: Any = module
        self._metrics, self._of_metrics = metrics, metrics.save()
        # The hook that was running, which Lightning leaves behind when a hook raises.
        self._hook_name = getattr(module, "_current_fx_name", None)

    def load(self) -> None:
        """Go back to it."""
        self._module._current_fx_name = self._hook_name
        self.random.restore()
        self.load_metrics()
        put_back(self.state)

    def load_metrics(self) -> None:
        """Put the states of metrics back."""
        self._metrics.load(self._of_metrics)


class TrainingSnapshot:
    """All state of a module in training that passes which are undone may change.

    Weights in training, gradients, what `step_state` lists, metrics, random generators and training flags.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        parameters = list(module.parameters())
        self._parameters = [(held_weight(p), HostCopy(held_weight(p))) for p in parameters if p.requires_grad]
        self._flags = [(p, p.requires_grad) for p in parameters]
        self._gradients = [(p, p.grad, None if p.grad is None else HostCopy(p.grad)) for p in parameters]
        self._modes = [(child, child.training) for child in module.modules()]
        state = held(places_of(module).values(), copies_frozen_weights(module))
        self._start = RollbackPoint(module, device, MetricStates(module), state)

    def restore(self) -> None:
        """Put everything back."""
        self.restore_weights()
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)
        for parameter, grad, grad_copy in self._gradients:
            parameter.grad = grad
            if grad is not None and grad_copy is not None:
                grad_copy.restore(grad)
        remove_new(self._start.state, places_of(self._module))
        self._start.load()
        for child, mode in self._modes:
            child.training = mode

    def restore_weights(self) -> None:
        """Put the weights in training back."""
        for parameter, copy in self._parameters:
            copy.restore(parameter)

    def restore_metrics(self) -> None:
        """Put the states of metrics back."""
        self._start.load_metrics()

    def restore_random(self) -> None:
        """Let the generators of Python and NumPy draw again what they drew, and torch's from a seed of our own."""
        self._start.random.restore()
        torch.default_generator.manual_seed(_SEED)

    @property
    def is_seeded_anew(self) -> bool:
        """Whether torch's generator has got another seed since `restore_random`."""
        return torch.default_generator.initial_seed() != _SEED


class MetricStates:
    """States of the torchmetrics objects that a module holds, which `training_step` updates."""

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._metrics += [metric for _, metric in hidden_metrics(module)]

    def save(self) -> list[dict[str, Any]]:
        """Return copies of all states."""
        return [_metric_state(metric) for metric in self._metrics]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Restore copies, which stay usable."""
        for metric, state in zip(self._metrics, states, strict=True):
            for name, value in state.items():
                object.__setattr__(metric, name, _copy(value))


_METRIC_INTERNALS = frozenset(vars(nn.Module())) | {
    *("update", "compute", "_update_signature", "_defaults", "_persistent", "_reductions")
}
_IMMUTABLE = frozenset((type(None), bool, int, float, str, torch.device, torch.dtype))


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Return the registered states, counters and caches, and what a wrapper or the user's own metric keeps besides."""
    return {
        name: value if type(value) in _IMMUTABLE else _copy(value)
        for name, value in vars(metric).items()
        if name not in _METRIC_INTERNALS
    }


def _copy(value: Any) -> Any:
    """Copy a state without the graph that it may hold; tensors in lists are appended but never written to."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [item.detach() if isinstance(item, Tensor) else item for item in value]
    return value.copy() if isinstance(value, (dict, set, deque)) else value


class Rollback:
    """Saves what forward and backward of a module in training change, and restores it.

    What steps have been seen to change is saved before each of them, so that most modules have nothing to save. At
    steps 1, 2, 4 ... 64 everything is saved and compared with what the step has made of it.

    Attributes:
        watched: Places that are saved before every step, by name.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._metrics = MetricStates(module)
        self._device = device
        self._left: dict[nn.Parameter, HostCopy | None] = {}
        self._weights: dict[str, Tensor] = {}
        self._writes_weights = False
        self._num_saves = 0
        self._looked: Saved | None = None
        self.watched: dict[str, Place] = {}

    def save(self) -> RollbackPoint:
        """Save the state before a loader batch. Gradients need no copy: an effective batch starts without any."""
        if self._looked is not None:
            self.watched |= changed_since(self._looked, self._module)
            self._looked = None
        self._num_saves += 1
        trained = list(trained_places(self._module)) if self._writes_weights else []
        state: Saved = {}
        if is_look(self._num_saves):
            self._weights = sampled_weights(self._module)
            self._looked = held(places_of(self._module).values(), copies_frozen_weights(self._module))
            state = self._looked | held(trained)
        elif self.watched or trained:
            state = held([*self.watched.values(), *trained])
        return RollbackPoint(self._module, self._device, self._metrics, state)

    def look_at_weights(self) -> None:
        """Find out, before the optimizer steps, whether the step has written to weights in training."""
        if self._weights:
            now = sampled_weights(self._module)
            self._writes_weights |= any(not one.equal(now[name]) for name, one in self._weights.items() if name in now)
            self._weights = {}

    def remember_zeros(self, may_hold: bool = False) -> None:
        """Remember which gradients `zero_grad` left instead of None: zeros, unless the user's own decides.

        Args:
            may_hold: Whether gradients may be left that are no zeros, of which copies are made in host memory: a module
                may add up those of several batches itself.
        """
        left = [(p, p.grad) for p in self._module.parameters() if p.grad is not None]
        self._left = {p: HostCopy(grad) if may_hold and _holds_values(grad) else None for p, grad in left}

    def clear_gradients(self) -> None:
        """Set the gradients to what `zero_grad` made of them."""
        for parameter in self._module.parameters():
            if parameter.grad is None or parameter not in self._left:
                parameter.grad = None
            elif (copy := self._left[parameter]) is None:
                parameter.grad.zero_()
            else:
                copy.restore(parameter.grad)


def _holds_values(gradient: Tensor) -> bool:
    return gradient.layout is not torch.strided or bool(gradient.any())

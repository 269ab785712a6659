"""What a training step may change besides weights in training and gradients: one short list, and how it is put back.

It is buffers and frozen parameters, and attributes of modules that are numbers, texts, tensors, arrays, generators of
random numbers, or lists, dicts, sets, deques and tuples of these. Objects of other classes, iterators, files and
globals are not put back when a batch is repeated; metrics, the global generators and weights that a step was seen to
write are (`rollback`).
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric, MetricCollection

from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.state import Held, is_random_source
from lightning_memfit.reliability.upstream.deepspeed import held_weight

MISSING: Any = object()
MODULE_INTERNALS = frozenset(vars(nn.Module())) | {
    *("_trainer", "_fabric", "_log_hyperparams", "_metric_attributes", "_current_fx_name", "_fabric_optimizers"),
    *("_param_requires_grad_state", "_hparams", "forward"),
    "_original_parameters",  # by which DeepSpeed's stage 3 keeps the dict of parameters that it has replaced
}
_LAST_LOOK = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None), numpy.generic, numpy.ndarray, Tensor)
_CONTAINERS = (list, dict, set, deque, tuple)
_MAX_DEPTH = 4
_MAX_ITEMS = 1000
_LARGE = 1 << 22
_host_copy = partial(HostCopy, small_may_stay=True)


def is_look(number: int) -> bool:
    """Whether everything is compared at the step of a number: at steps 1, 2, 4 ... 64."""
    return number <= _LAST_LOOK and not number & (number - 1)


@dataclass(frozen=True)
class Place:
    """Where a value is kept: a key of a dict of buffers, parameters or attributes, and its name in the module."""

    name: str
    owner: dict[str, Any]
    key: str

    def read(self) -> Any:
        """Return the value, or `MISSING`."""
        return self.owner.get(self.key, MISSING)

    def write(self, value: Any) -> None:
        """Put a value there, or remove what is there if it is `MISSING`."""
        if value is MISSING:
            self.owner.pop(self.key, None)
        elif self.read() is not value:
            self.owner[self.key] = value


Saved = dict[str, tuple[Place, Held | None]]
"""Values by the names of their places; None where there was none."""


def places_of(module: nn.Module) -> dict[str, Place]:
    """Return every place of a module that a step may change, by name; metrics and weights in training apart."""
    found: dict[str, Place] = {}
    metrics = {child for child in module.modules() if isinstance(child, (Metric, MetricCollection))}
    inside = {child for metric in metrics for child in metric.modules()}
    for path, child in module.named_modules():
        if child in inside:
            continue
        prefix = f"{path}." if path else ""
        for key, parameter in child._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                found[prefix + key] = Place(prefix + key, child._parameters, key)
        for key in child._buffers:
            found[prefix + key] = Place(prefix + key, child._buffers, key)
        if isinstance(child, torch.jit.ScriptModule):
            continue
        for key, value in vars(child).items():
            is_state = isinstance(value, (*_PLAIN, *_CONTAINERS)) or is_random_source(value)
            if is_state and key not in MODULE_INTERNALS and not key.startswith("ds_"):
                found[prefix + key] = Place(prefix + key, vars(child), key)
    return found


def held(places: Iterable[Place], copies_frozen: bool = True) -> Saved:
    """Save what is at some places now."""
    found: Saved = {}
    for place in places:
        value = place.read()
        copies = copies_frozen or not isinstance(value, nn.Parameter)
        found[place.name] = (place, None if value is MISSING else Held(value, copies, copy=_host_copy))
    return found


def put_back(saved: Saved, names: Iterable[str] | None = None) -> None:
    """Put values back, all or those of some names."""
    for place, value in saved.values() if names is None else [saved[name] for name in names if name in saved]:
        place.write(MISSING if value is None else value.restored())


def remove_new(saved: Saved, places: dict[str, Place]) -> None:
    """Remove what has come since all places that there were have been saved."""
    for name, place in places.items():
        if name not in saved:
            place.write(MISSING)


def changed_since(saved: Saved, module: nn.Module) -> dict[str, Place]:
    """Return the places that hold something else than what was saved of all of them."""
    found = {name: place for name, place in places_of(module).items() if name not in saved}
    for name, (place, value) in saved.items():
        current = place.read()
        is_same = current is MISSING if value is None else current is not MISSING and value.is_now(current)
        if not is_same:
            found[name] = place
    return found


def copies_frozen_weights(module: nn.Module) -> bool:
    """Whether copies of frozen weights are worth their memory: not where they are most of them, as below adapters."""
    sizes = {True: 0, False: 0}
    for parameter in module.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    return sizes[False] <= sizes[True]


def trained_places(module: nn.Module) -> Iterator[Place]:
    """Yield the places of parameters in training."""
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                yield Place(f"{path}.{key}", child._parameters, key)


class PartStates:
    """Puts together what the micro-batches of a batch write on the module.

    Every micro-batch starts from what the batch started from. Afterwards floating values are the mean over samples, and
    anything else is what the last micro-batch left. Lists and generators of random numbers go on from one micro-batch
    to the next. `places` are those to which steps write, and `saved` what was there before the batch.
    """

    def __init__(self, places: dict[str, Place], saved: Saved) -> None:
        # What is there and was not saved is an object, such as the state that layers of bitsandbytes make and keep.
        there = {name: place for name, place in places.items() if name in saved or place.read() is MISSING}
        start = {name: saved.get(name, (place, None)) for name, place in there.items()}
        self._saved = {name: one for name, one in start.items() if not _goes_on(one[0].read())}
        self._numbers: dict[str, list[float]] = {}
        self._sums: dict[str, tuple[int, Any]] = {}
        self._sizes: list[int] = []

    def before_next(self) -> None:
        """Put back what the next micro-batch starts from."""
        put_back(self._saved)

    def add(self, size: int) -> None:
        """Take what a micro-batch of so many samples has written."""
        self._sizes.append(size)
        for name, (place, _) in self._saved.items():
            value = place.read()
            if isinstance(value, float):
                self._numbers.setdefault(name, []).append(value)
            elif _is_averaged(value):
                count, total = self._sums.get(name, (0, None))
                if total is None or total.shape == value.shape:
                    value = value.detach() * size
                    self._sums[name] = (count + 1, value if total is None else total + value)

    def finish(self) -> None:
        """Leave on the module what the batch leaves of it."""
        num_samples = sum(self._sizes)
        for name, numbers in self._numbers.items():
            if len(numbers) == len(self._sizes) and len(set(numbers)) > 1:  # else a mean would be rounded
                mean = sum(value * size for value, size in zip(numbers, self._sizes, strict=True)) / num_samples
                self._saved[name][0].write(mean)
        for name, (count, total) in self._sums.items():
            place = self._saved[name][0]
            now = place.read()
            if count < len(self._sizes) or now.shape != total.shape:
                continue
            if now.grad_fn is None:
                with torch.no_grad():
                    now.copy_(total / num_samples)
            else:
                place.write(total / num_samples)


def _goes_on(value: Any) -> bool:
    """Whether micro-batches go on with what the one before has left."""
    keeps_items = isinstance(value, dict) and any(isinstance(item, list) for item in value.values())
    return keeps_items or isinstance(value, list) or is_random_source(value)


def _is_averaged(value: Any) -> bool:
    """Whether the mean over samples is to stay; a frozen weight, such as a teacher's, follows what is trained."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_floating_point()


# --- metrics that are no parts of the module ----------------------------------------------------------------------


def hidden_metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Metrics in lists, dicts and objects that a module holds, which are no parts of it, with where they are."""
    return ((name, child) for name, child in _hidden_modules(module) if isinstance(child, Metric))


def metric_collections(module: nn.Module) -> list[MetricCollection]:
    """Collections of metrics that a module holds, as parts of it or hidden like `hidden_metrics`."""
    hidden = (child for _, child in _hidden_modules(module))
    return [child for child in (*module.modules(), *hidden) if isinstance(child, MetricCollection)]


def _hidden_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen = {id(child) for child in module.modules()}
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in MODULE_INTERNALS and not isinstance(child, Metric):
                yield from _modules_in(value, f"{path}.{key}".lstrip("."), seen)


def _modules_in(value: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen or depth >= _MAX_DEPTH:
        return
    if isinstance(value, nn.Module):
        named = [(path, child) for path, child in value.named_modules() if id(child) not in seen]
        seen.update(id(child) for _, child in named)
        yield from ((f"{name}.{path}".rstrip("."), child) for path, child in named)
        return
    held = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value if isinstance(value, dict) else None
    if held is None and type(value).__module__.partition(".")[0] not in _LIBRARIES:
        held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and len(held) <= _MAX_ITEMS:
        seen.add(id(value))
        for key, item in held.items():
            yield from _modules_in(item, f"{name}.{key}", seen, depth + 1)


_LIBRARIES = sys.stdlib_module_names - {"types"} | {"torch", "torchmetrics", "lightning", "lightning_memfit", "numpy"}


# --- comparing values -------------------------------------------------------------------------------------------------


def reading_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value that `alike` compares: tensors on the host, samples of large ones."""
    if isinstance(value, Tensor):
        with _disable_current_modes():  # what keeps count of a device's memory is not to count these
            values = value.detach()
            if values.layout != torch.strided or type(values) not in (Tensor, nn.Parameter, nn.Buffer):
                return type(value).__name__
            if values.numel() > _LARGE:
                values = values.reshape(-1)[:: values.numel() // 4096]
            return values.to("cpu", copy=True)
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else value.tolist()
    if isinstance(value, _PLAIN) or value is MISSING:
        return value
    if isinstance(value, _CONTAINERS) and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {key: reading_of(item, depth + 1) for key, item in value.items()}
        return sorted(map(repr, value)) if isinstance(value, set) else [reading_of(one, depth + 1) for one in value]
    return len(value) if isinstance(value, _CONTAINERS) else type(value).__qualname__


def alike(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two readings are the same up to a relative rounding error."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        scale = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
        return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-300) or (one != one and other != other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[key], tolerance) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def sampled_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return samples of the parameters in training, which show whether a step has written to them."""
    with _disable_current_modes():
        return {
            name: weight.detach().reshape(-1)[:: max(1, weight.numel() // 1024)].to("cpu", copy=True)
            for name, parameter, weight in ((name, p, held_weight(p)) for name, p in module.named_parameters())
            if parameter.requires_grad and type(weight.data) is Tensor
        }

"""`StepState`: what a training step changes on a module besides gradients and metrics, found by looking.

Buffers, frozen parameters (the teacher of a distillation), attributes of modules and of plain objects that they hold,
random generators of their own, and iterators that they draw from. The first steps are saved whole and compared; later
ones save only what has changed before, so that the usual module, on which nothing changes, costs next to nothing.
"""

import argparse
import io
import math
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection

from lightning_memfit.fitting.recovery.drawn import Mark, notes_of, replayed, without_notes
from lightning_memfit.memory.host_copy import HostCopy
from lightning_memfit.memory.state import (
    is_random_source,
    random_source_state,
    restore_dict,
    set_random_source_state,
)
from lightning_memfit.reliability.upstream.deepspeed import held_weight

MAX_ITEMS = 1000
"""Longer containers (a data set kept on the module) are taken as they are."""
MAX_DEPTH = 4
MODULE_INTERNALS = frozenset(vars(nn.Module())) | {
    *("_trainer", "_fabric", "_log_hyperparams", "_metric_attributes"),
    "_original_parameters",  # by which DeepSpeed's stage 3 keeps the dict of parameters that it has replaced
}
_NOT_STATE = frozenset({"_current_fx_name", "_fabric_optimizers", "_param_requires_grad_state", "_hparams"})
_MAX_SLOTS = 20_000
_FIRST_LOOKS = 8
_STEPS_BETWEEN_LOOKS = 64
_LARGE = 1 << 22
_SMALL = 64
_ROUNDING = 1e-3
"""Relative, between what micro-batches of other sizes compute alike."""
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Optimizer, Dataset, DataLoader)
_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *(
        "lightning_memfit",
        "transformers",
        "tokenizers",
        "datasets",
        "peft",
        "deepspeed",
        "bitsandbytes",
        "wandb",
        "numpy",
    ),
}
_OF_THREADS = frozenset(
    {"_multiprocessing", "_queue", "_thread", "concurrent", "multiprocessing", "queue", "threading"}
)
_PLAIN = (types.SimpleNamespace, argparse.Namespace)
_PLAIN_VALUES = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True)
class Slot:
    """A place where a value is kept: a key of a dict that belongs to a module, or an attribute of an object in there.

    Steps may replace such an object by another, so that it is looked up anew each time.

    Attributes:
        name: What the place is called.
        owner: Dict of a module.
        key: Key of it.
        inner: Names of attributes, from the value of that key to the value that is meant.
        holders: The dict, key and value of every object on the way there, as they were when the slot was saved.
    """

    name: str
    owner: dict[str, Any]
    key: str
    inner: tuple[str, ...] = ()
    holders: tuple[tuple[dict[str, Any], str, Any], ...] = ()

    def read(self) -> Any:
        """Return the value, or `MISSING`."""
        if not self.inner:
            return self.owner.get(self.key, MISSING)
        owner, key = self.place()
        return owner.get(key, MISSING)

    def place(self) -> tuple[dict[str, Any], str]:
        """Return the dict and the key where the value is now; those of the first object on the way that is missing."""
        owner, key = self.owner, self.key
        for name in self.inner:
            attributes = getattr(owner.get(key), "__dict__", None)
            if not isinstance(attributes, dict):
                return {}, key
            owner, key = attributes, name
        return owner, key

    def saved(self) -> "Slot":
        """Return the slot with the objects on the way to its value."""
        owner, key, holders = self.owner, self.key, []
        for name in self.inner:
            held = owner.get(key, MISSING)
            holders.append((owner, key, held))
            attributes = getattr(held, "__dict__", None)
            if not isinstance(attributes, dict):
                break
            owner, key = attributes, name
        return replace(self, holders=tuple(holders)) if holders else self

    def write(self, value: Any) -> None:
        """Put a value there, or remove what is there if it is `MISSING`, after the saved objects on the way."""
        for owner, key, held in self.holders:
            _put(owner, key, held)
        _put(*self.place(), value)

    def exchange(self, value: Any) -> None:
        """Put another value in the place of the one that is there."""
        if value is not self.read():
            _put(*self.place(), value)


def _put(owner: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        owner.pop(key, None)
    elif key not in owner or owner[key] is not value:
        owner[key] = value


MISSING: Any = object()


def find_slots(module: nn.Module) -> dict[str, Slot]:
    """Return every place of a module that a step might change, by its name; metrics and trained parameters apart."""
    found: dict[str, Slot] = {}
    seen: set[int] = set()
    metrics = (child for child in module.modules() if isinstance(child, (Metric, MetricCollection)))
    own = {id(child) for metric in metrics for child in metric.modules()}
    for path, child in module.named_modules():
        if id(child) in own:
            continue
        prefix = f"{path}." if path else ""
        for key in child._buffers:
            found[f"{prefix}{key}"] = Slot(f"{prefix}{key}", child._buffers, key)
        for key, parameter in child._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                found[f"{prefix}{key}"] = Slot(f"{prefix}{key}", child._parameters, key)
        attributes = {k: v for k, v in vars(child).items() if k not in MODULE_INTERNALS and k not in _NOT_STATE}
        for key, value in attributes.items():
            _add(found, seen, Slot(f"{prefix}{key}", vars(child), key), value)
        if len(found) > _MAX_SLOTS:
            break
    for slot in callback_slots(module):
        found.setdefault(slot.name, slot)
    return found


def callback_slots(module: nn.Module) -> Iterator[Slot]:
    """Attributes of the Trainer's callbacks that are iterators, or containers of some."""
    for callback in getattr(vars(module).get("_trainer"), "callbacks", ()):
        kind = type(callback)
        if _is_of_library(kind):
            continue
        for key, value in vars(callback).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if _is_drawn_from(value) or any(map(_is_drawn_from, items)):
                yield Slot(f"{kind.__name__}.{key}", vars(callback), key)


def hidden_metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Metrics in lists, dicts and plain objects that a module holds, which are no parts of it, with where they are."""
    return ((name, child) for name, child in _hidden_modules(module) if isinstance(child, Metric))


def metric_collections(module: nn.Module) -> list[MetricCollection]:
    """Collections of metrics that a module holds, as parts of it or hidden like `hidden_metrics`."""
    hidden = (child for _, child in _hidden_modules(module))
    return [child for child in (*module.modules(), *hidden) if isinstance(child, MetricCollection)]


def _hidden_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    seen = {id(child) for child in module.modules()}
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if key not in MODULE_INTERNALS and key not in _NOT_STATE and not isinstance(child, Metric):
                yield from _modules_in(value, f"{path}.{key}".lstrip("."), seen)


def _modules_in(value: Any, name: str, seen: set[int], depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    if id(value) in seen or depth >= MAX_DEPTH:
        return
    if isinstance(value, nn.Module):
        named = [(path, child) for path, child in value.named_modules() if id(child) not in seen]
        seen.update(id(child) for _, child in named)
        yield from ((f"{name}.{path}".rstrip("."), child) for path, child in named)
        return
    held = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value if isinstance(value, dict) else None
    held = _inside(value) if held is None else held
    if held is not None and len(held) <= MAX_ITEMS:
        seen.add(id(value))
        for key, item in held.items():
            yield from _modules_in(item, f"{name}.{key}", seen, depth + 1)


def _add(found: dict[str, Slot], seen: set[int], slot: Slot, value: Any) -> None:
    inner = _inside(value) if len(slot.inner) < MAX_DEPTH and not _is_iterator(value) else None
    if inner is None or len(inner) > MAX_ITEMS:
        found[slot.name] = slot
    elif id(value) not in seen:
        seen.add(id(value))
        for key, item in inner.items():
            if isinstance(key, str):
                _add(found, seen, replace(slot, name=f"{slot.name}.{key}", inner=(*slot.inner, key)), item)


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _inside(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object that a user wrote; None for everything else."""
    kind = type(value)
    if isinstance(value, (*_OPAQUE, Tensor)):
        return None
    if _is_of_library(kind) and kind not in _PLAIN:
        return None
    if is_random_source(value) or isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


# --- copies of values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RandomContent:
    state: Any


@dataclass(frozen=True)
class _FilePlace:
    position: int


@dataclass(frozen=True)
class _Enclosed:
    cells: list[tuple[types.CellType, Any, Any]]


def content_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of what a value holds, to put it back later; None where the value itself is all there is."""
    if isinstance(value, Tensor):
        return HostCopy(value, small_may_stay=True)
    if is_random_source(value):
        return _RandomContent(random_source_state(value))
    if (notes := notes_of(value)) is not None:
        return notes.mark()
    if isinstance(value, io.IOBase):
        position = _position(value)
        return None if position is None else _FilePlace(position)
    if isinstance(value, types.FunctionType):
        cells = list(_cells_with_iterators(value))
        return _Enclosed([(cell, item, content_of(item, depth + 1)) for cell, item in cells]) if cells else None
    if isinstance(value, (list, tuple, set, frozenset, deque, dict)):
        walk = content_of if len(value) <= MAX_ITEMS and depth < MAX_DEPTH else _nothing
        if isinstance(value, dict):
            return [(key, item, walk(item, depth + 1)) for key, item in value.items()]
        return [(item, walk(item, depth + 1)) for item in value]
    if isinstance(value, numpy.ndarray):
        return value.copy()
    inner = _inside(value) if depth < MAX_DEPTH else None
    if inner is not None and len(inner) <= MAX_ITEMS:
        return _ObjectContent([(key, item, content_of(item, depth + 1)) for key, item in inner.items()])
    return None


@dataclass(frozen=True)
class _ObjectContent:
    items: list[tuple[str, Any, Any]]


def _nothing(value: Any, depth: int) -> None:
    return None


def with_content(value: Any, content: Any) -> Any:
    """Put back into a value what it held, and return it."""
    if content is None:
        return value
    if isinstance(content, HostCopy):
        if not content.equals(value):  # writing would count as a change of the tensor, which a batch may share
            content.restore(value)
    elif isinstance(content, _RandomContent):
        set_random_source_state(value, content.state)
    elif isinstance(content, Mark):
        content.go_back()
    elif isinstance(content, _FilePlace):
        value.seek(content.position)
    elif isinstance(content, _Enclosed):
        for cell, item, inner in content.cells:
            cell.cell_contents = with_content(item, inner)
    elif isinstance(content, _ObjectContent):
        restore_dict(value.__dict__, {key: with_content(item, inner) for key, item, inner in content.items})
    elif isinstance(value, dict):
        restore_dict(value, {key: with_content(item, inner) for key, item, inner in content})
    elif isinstance(value, (tuple, frozenset)):
        for item, inner in content:
            with_content(item, inner)
    elif isinstance(value, list):
        value[:] = [with_content(item, inner) for item, inner in content]
    elif isinstance(content, list):  # set, deque
        value.clear()
        extend = value.update if isinstance(value, set) else value.extend
        extend([with_content(item, inner) for item, inner in content])
    else:
        value[...] = content
    return value


def with_notes(value: Any, name: str, depth: int = 0) -> Any:
    """Let the iterators in a value note what is drawn from them, so that `content_of` can mark where they are.

    Args:
        value: What a module holds.
        name: Where, for messages.
        depth: How deep it lies in a container.

    Returns:
        The value; if it is an iterator, or a tuple with one, what stands in for it.
    """
    return _exchanged(value, lambda one: replayed(one, name) if _is_iterator(one) else one, depth)


def release_iterators(module: nn.Module) -> None:
    """Put the iterators of a module back in place of what notes their draws, unless items wait to be given again."""
    for slot in find_slots(module).values():
        slot.exchange(_exchanged(slot.read(), without_notes))


def _exchanged(value: Any, exchange: Callable[[Any], Any], depth: int = 0) -> Any:
    if value is None or isinstance(value, (Tensor, str, int, float)):
        return value
    found = exchange(value)
    if found is not value or notes_of(value) is not None or depth >= MAX_DEPTH:
        return found
    if isinstance(value, types.FunctionType):
        for cell, item in _cells_with_iterators(value):
            cell.cell_contents = exchange(item)
    elif isinstance(value, tuple):
        items = [_exchanged(item, exchange, depth + 1) for item in value[:MAX_ITEMS]]
        if any(new is not old for new, old in zip(items, value, strict=False)):
            items += value[MAX_ITEMS:]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
    else:
        inner = value if isinstance(value, (dict, list, deque)) else _inside(value)
        if inner is None or len(inner) > MAX_ITEMS:
            return value
        for key, item in list(inner.items() if isinstance(inner, dict) else enumerate(inner)):
            if (new := _exchanged(item, exchange, depth + 1)) is not item:
                inner[key] = new
    return value


def _is_iterator(value: Any) -> bool:
    """Whether items can only be drawn from an object; plain ones of the user's are put back by their attributes."""
    if not hasattr(type(value), "__next__") or notes_of(value) is not None:
        return False
    if isinstance(value, io.IOBase):
        return _is_read(value) and _position(value) is None
    inner = _inside(value)
    return inner is None or any(type(item).__module__.partition(".")[0] in _OF_THREADS for item in inner.values())


def _is_drawn_from(value: Any) -> bool:
    return notes_of(value) is not None or _is_iterator(value)


def _cells_with_iterators(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    for cell in function.__closure__ or ():
        try:
            item = cell.cell_contents
        except ValueError:  # it is empty
            continue
        if _is_drawn_from(item):
            yield cell, item


def _is_read(file: Any) -> bool:
    return not file.closed and file.readable() and not file.writable()


def _position(file: Any) -> int | None:
    """Where a file is read; None if that can't be put back, as while its lines are iterated over."""
    try:
        return int(file.tell()) if _is_read(file) and file.seekable() else None
    except (OSError, ValueError):
        return None


def reading_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value that `alike` compares: tensors on the host, samples of large ones."""
    with _disable_current_modes():  # what keeps count of a device's memory is not to count these
        return _reading_of(value, depth)


def _reading_of(value: Any, depth: int) -> Any:
    if isinstance(value, Tensor):
        values = value.detach()
        if values.layout != torch.strided or type(values) not in (Tensor, nn.Parameter, nn.Buffer):
            return type(value).__name__
        if values.numel() > _LARGE:
            values = values.reshape(-1)[:: values.numel() // 4096]
        return values.to("cpu", copy=True)
    if is_random_source(value):
        return _reading_of(random_source_state(value), depth + 1)
    if (notes := notes_of(value)) is not None:
        return f"item {notes.at}"  # in words, as iterators can't be averaged
    if isinstance(value, io.IOBase):
        return f"{type(value).__name__} at {_position(value)}"
    if isinstance(value, types.FunctionType):
        return [type(value).__name__, *(_reading_of(item, depth + 1) for _, item in _cells_with_iterators(value))]
    if isinstance(value, dict) and len(value) <= MAX_ITEMS and depth < 2 * MAX_DEPTH:
        return {key: _reading_of(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)) and len(value) <= MAX_ITEMS and depth < 2 * MAX_DEPTH:
        return [_reading_of(item, depth + 1) for item in value]
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "fiub" else value.tolist()
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), numpy.generic)) or value is MISSING:
        return value
    if isinstance(value, (set, frozenset)) and len(value) <= MAX_ITEMS:
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
        return len(value)
    return type(value).__qualname__


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


# --- steps ----------------------------------------------------------------------------------------------------------

Saved = dict[str, tuple[Slot, Any, Any]]
"""By name: the slot, its value and the copy of what that held."""


class StepState:
    """Saves what steps change on a module, and puts it back.

    What changes for the first time in a step that fails, between two looks, keeps the change.

    Args:
        module: The module in training.

    Attributes:
        is_looking: Whether this step is one of those in which everything is compared.
        writes_weights: Whether a step has written to parameters in training, which are then copied before each.
        compares: Whether `written` will be asked in this step.
        suspects: Names of small values that have changed between two looks, so that no step has shown how. They are
            compared in every step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.compares = False
        self.suspects: set[str] = set()
        self._before: dict[str, Any] = {}
        self._plain: list[Slot] = []
        self._plain_before: list[Any] = []
        self._watched: dict[str, Slot] = {}
        self._readings: dict[str, Any] | None = {}
        self._num_saves = 0
        self._weights: dict[str, Tensor] = {}
        self.is_looking = False
        self.writes_weights = False
        self._buffers: list[tuple[dict[str, Any], str, Slot]] = []
        self._seen: list[tuple[int, int]] = []

    def save(self) -> Saved:
        """Return copies of what changes; at first of everything."""
        self._num_saves += 1
        number = self._num_saves
        self.is_looking = number <= _FIRST_LOOKS or not number & (number - 1) or not number % _STEPS_BETWEEN_LOOKS
        if self.is_looking:
            return self._look()
        if self._buffers:
            self._look_at_buffers()
        suspects = self.suspects if self.compares else ()
        self._before = {name: reading_of(noted_value(self._watched[name])) for name in suspects}
        self._plain_before = [slot.read() for slot in self._plain]
        plain = zip(self._plain, self._plain_before, strict=True)
        saved: Saved = {slot.name: (slot.saved() if slot.inner else slot, value, None) for slot, value in plain}
        return saved | self.copies() if self._watched or self.writes_weights else saved

    def copies(self) -> Saved:
        """Return copies of what is known to change."""
        return copies_of((*self._watched.values(), *self._weight_slots()))

    @staticmethod
    def load(saved: Saved, names: Iterable[str] | None = None) -> None:
        """Put values back, all or those of some names."""
        for slot, value, content in saved.values() if names is None else (saved[n] for n in names if n in saved):
            slot.write(with_content(value, content))

    def written(self) -> set[str]:
        """Return the names of what has changed since `save`.

        Of everything when looking; else of the suspects, and of numbers and texts that the user's own modules hold.
        """
        if self.is_looking:
            return _changed(find_slots(self._module), self._readings or {})
        plain = zip(self._plain, self._plain_before, strict=True)
        names = {slot.name for slot, old in plain if (now := slot.read()) is not old and now != old}
        return names | _changed({name: self._watched[name] for name in self._before}, self._before)

    def written_weights(self) -> set[str]:
        """Return the names of parameters in training that have changed since `save`, if everything is compared."""
        now = sampled_weights(self._module) if self._weights else {}
        return {
            name for name, old in self._weights.items() if name in now and not alike(old, reading_of(now[name]), 0.0)
        }

    def look_at_weights(self) -> None:
        """Find out, in a step in which everything is compared, whether it has written to parameters in training."""
        if self.written_weights():
            self.writes_weights = True
        self._weights = {}

    def watch(self, slots: Iterable[Slot]) -> None:
        """Save these from now on, also those that are still missing."""
        self._watched.update((slot.name, slot) for slot in slots)

    def _look(self) -> Saved:
        """Find out what has changed since the last look."""
        slots, first = find_slots(self._module), self._num_saves == 1
        self._weights = {name: reading_of(sample) for name, sample in sampled_weights(self._module).items()}
        readings = {name: reading_of(noted_value(slot)) for name, slot in slots.items()}
        if not first and self._readings is not None:
            before = self._readings
            changed = [n for n, now in readings.items() if n not in before or not alike(before[n], now, 0.0)]
            for name in changed:
                self._suspect(slots[name])
        self._readings = readings
        self._plain = _plain_slots(self._module, slots)
        self._buffers = [(*slot.place(), slot) for slot in slots.values() if isinstance(slot.read(), Tensor)]
        self._seen = [_identity(owner.get(key)) for owner, key, _ in self._buffers]
        return copies_of({s.name: s for s in _worth_copying(slots, self._module)}.values()) | self.copies()

    def _weight_slots(self) -> list[Slot]:
        if not self.writes_weights:
            return []
        return [
            Slot(f"{path}.{key}", child._parameters, key)
            for path, child in self._module.named_modules()
            for key, parameter in child._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]

    def _look_at_buffers(self) -> None:
        for index, (owner, key, slot) in enumerate(self._buffers):
            now = _identity(owner.get(key))
            if now != self._seen[index]:
                self._seen[index] = now
                self._suspect(slot)

    def _suspect(self, slot: Slot) -> None:
        if slot.name not in self._watched and is_small(slot.read()):
            self.suspects.add(slot.name)
        self._watched[slot.name] = slot


def _changed(slots: dict[str, Slot], before: dict[str, Any]) -> set[str]:
    values = {name: slot.read() for name, slot in slots.items()}
    return {
        name
        for name, value in values.items()
        if not is_random_source(value) and not (name in before and alike(before[name], reading_of(value), 0.0))
    }


def _plain_slots(module: nn.Module, slots: dict[str, Slot]) -> list[Slot]:
    """Return the places of numbers and texts on modules and in objects that the user wrote, which are cheap to read."""
    own = {id(vars(child)) for child in module.modules() if not _is_of_library(type(child))}
    return [s for s in slots.values() if (s.inner or id(s.owner) in own) and type(s.read()) in _PLAIN_VALUES]


def copies_of(slots: Iterable[Slot]) -> Saved:
    """Return the values of some slots with copies of what they hold; iterators note from now on what is drawn."""
    return {slot.name: (slot.saved(), value, content_of(value)) for slot in slots for value in (noted_value(slot),)}


def noted_value(slot: Slot) -> Any:
    """Return the value of a slot, the iterators in which note from now on what is drawn."""
    value = slot.read()
    found = with_notes(value, slot.name)
    slot.exchange(found)
    return found


def _worth_copying(slots: dict[str, Slot], module: nn.Module) -> list[Slot]:
    """Return all slots; without frozen parameters where they are more than those in training, as below adapters."""
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    return [s for s in slots.values() if frozen <= trained or not isinstance(s.read(), nn.Parameter)]


def _identity(value: Any) -> tuple[int, int]:
    return (id(value), value._version) if isinstance(value, Tensor) and not value.is_inference() else (id(value), 0)


# --- micro-batches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Added:
    """What a step adds to a list, of which it may drop items, at the other end: as a `deque` with `maxlen` does.

    Attributes:
        items: What it adds.
        num_dropped: How many items it drops.
        at_front: Whether it adds at the front.
    """

    items: list[Any]
    num_dropped: int
    at_front: bool = False

    def to(self, old: list[Any]) -> list[Any]:
        """Return a list with these changes."""
        kept = old[: len(old) - self.num_dropped] if self.at_front else old[self.num_dropped :]
        return [*self.items, *kept] if self.at_front else [*kept, *self.items]


def added_alike(old: list[Any], lists: list[list[Any]], same: Callable[[Any, Any], bool]) -> list[Added] | None:
    """Return what was added to a list to make each of several, or None if they weren't made in the same way."""
    at_end = _added(old, lists, same)
    if at_end is not None and at_end[0].num_dropped < max(1, len(old)):
        return at_end
    at_front = _added(old[::-1], [new[::-1] for new in lists], same)
    if at_front is not None and at_front[0].num_dropped < len(old):
        return [Added(added.items[::-1], added.num_dropped, at_front=True) for added in at_front]
    return at_end


def _added(old: list[Any], lists: list[list[Any]], same: Callable[[Any, Any], bool]) -> list[Added] | None:
    dropped = 0  # as many of all, for equal items don't tell where the old ones end
    for new in lists:
        while not _begins_with(new, old, dropped, same):
            dropped += 1
    found = [Added(new[len(old) - dropped :], dropped) for new in lists]
    is_alike = all(_begins_with(new, old, dropped, same) for new in lists)
    return found if is_alike and len({len(added.items) for added in found}) == 1 else None


def _begins_with(new: list[Any], old: list[Any], dropped: int, same: Callable[[Any, Any], bool]) -> bool:
    return len(old) - dropped <= len(new) and all(map(same, islice(old, dropped, None), new))


@dataclass(frozen=True)
class StateRules:
    """How values that a step writes on the module are put together from what its micro-batches write.

    Attributes:
        unproven: Names in `restored` for which other ways do as well while all micro-batches write the same.
        agreed: Other names in `restored` that are read back to see that all write the same: a step that counts batches
            whose loss is low may count them in every part of the first batch, and in some parts of later ones.
        restored: Every micro-batch starts from the value before the step: all write the same (counters, power
            iterations of spectral norm, teachers that follow the weights).
        averaged: As `restored`, and the weighted mean of what micro-batches write stays (running means).
        merged: Lists to which every micro-batch adds what the whole adds once: merged like outputs (losses kept for
            the end of the epoch).
        joined: As `restored`, and the rows that micro-batches write are put together (outputs that a hook keeps).
        carried: Every micro-batch goes on with what the one before left (sums, queues).
    """

    restored: frozenset[str] = frozenset()
    averaged: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    agreed: frozenset[str] = frozenset()

    @staticmethod
    def ways() -> tuple[str, ...]:
        """Return the names of all ways."""
        return tuple(field.name for field in fields(StateRules) if field.name not in ("unproven", "agreed"))

    @property
    def names(self) -> frozenset[str]:
        """All names, which have to be saved before each step."""
        return self.restored | self.averaged | self.merged | self.joined | self.carried


class MicroBatchStates:
    """Puts together what the micro-batches of a step write on the module.

    Args:
        rules: By which rules.
        saved: The values before the step.
    """

    def __init__(self, rules: StateRules, saved: Saved) -> None:
        self._rules = rules
        self._saved = saved
        self._from_start = rules.names - rules.carried
        self._sums: dict[str, Any] = {}
        self._lists: dict[str, list[list[Any]]] = {name: [] for name in rules.merged}
        self._rows: dict[str, list[Any]] = {name: [] for name in rules.joined}
        self._sizes: list[int] = []
        self._weights: list[float] = []
        self._first: dict[str, Any] = {}
        self._disputed: set[str] = set()

    def before_next(self) -> None:
        """Put back what the next micro-batch starts from."""
        StepState.load(self._saved, self._from_start)

    def add(self, size: int, weight: float) -> None:
        """Take what a micro-batch has written, given its number of samples and the weight of its loss."""
        self._sizes.append(size)
        self._weights.append(weight)
        for name in self._rules.averaged & self._saved.keys():
            value = self._saved[name][0].read()
            value = value.detach() * size if isinstance(value, Tensor) else value * size
            self._sums[name] = value + self._sums[name] if name in self._sums else value
        for name, lists in self._lists.items():
            lists.append(list(self._saved[name][0].read()))
        for name, rows in self._rows.items():
            rows.append(self._saved[name][0].read().detach())
        for names, tolerance in ((self._rules.unproven, 1e-9), (self._rules.agreed, _ROUNDING)):
            for name in names & self._saved.keys():
                value = self._saved[name][0].read()
                if isinstance(value, Tensor) and value.numel() > _SMALL:
                    value = value.detach().reshape(-1)[:: value.numel() // _SMALL]
                now = reading_of(value)
                if not alike(self._first.setdefault(name, now), now, tolerance):
                    self._disputed.add(name)

    def finish(self, merge: Callable[[list[Any], list[float], list[int]], Any]) -> set[str]:
        """Leave on the module what the whole batch would have.

        Args:
            merge: Merges values of the micro-batches, given their weights and sizes.

        Returns:
            Names under which micro-batches have written different values where they seemed to write the same, or have
            changed a list in different ways.
        """
        lengthened: dict[str, list[Added]] = {}
        for name, lists in self._lists.items():
            old = [item for item, _ in self._saved[name][2]]
            if (found := added_alike(old, lists, operator.is_)) is None:
                self._disputed.add(name)
            else:
                lengthened[name] = found
        if self._disputed:
            return self._disputed
        for name, total in self._sums.items():
            slot, mean = self._saved[name][0], total / sum(self._sizes)
            value = slot.read()
            if isinstance(value, Tensor):
                value.detach().copy_(mean)
            else:
                _put(*slot.place(), mean)
        for name, found in lengthened.items():
            slot, _, content = self._saved[name]
            columns = zip(*(added.items for added in found), strict=True)
            merged = [merge(list(column), self._weights, self._sizes) for column in columns]
            items = replace(found[0], items=merged).to([item for item, _ in content])
            value = slot.read()
            if isinstance(value, tuple):
                _put(*slot.place(), value._make(items) if hasattr(value, "_make") else tuple(items))
            else:
                value.clear()
                value.extend(items)
        for name, rows in self._rows.items():
            _put(*self._saved[name][0].place(), torch.cat(rows))
        return set()


def is_small(value: Any) -> bool:
    """Whether it costs little to read a value in every micro-batch, from the device if it is there."""
    return value.numel() <= _SMALL if isinstance(value, Tensor) else type(value) in _PLAIN_VALUES


def sampled_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return samples of the parameters in training, which show whether a step has written to them."""
    with _disable_current_modes():
        return _sampled_weights(module)


def _sampled_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: held.detach().reshape(-1)[:: max(1, held.numel() // 1024)]
        for name, parameter, held in ((name, p, held_weight(p)) for name, p in module.named_parameters())
        if parameter.requires_grad and type(held.data) is Tensor
    }

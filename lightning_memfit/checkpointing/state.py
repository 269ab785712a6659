"""What the forward of a block sees and changes besides its arguments, so that it can be run again exactly.

`BlockState` saves it in place: attributes, containers and plain objects they hold, buffers, random generators of
Python, NumPy and the block's own, class attributes, and the globals and closures that the block's code and the hooks
inside it name. Attributes are saved by reference and containers by content. Tensors are copied if they are small, or if
the block is known to write them; `Look` finds those by the operators of the first calls, and copies each just before
it is written.

A recomputation begins in the state that the first run saw and leaves what it found, whatever it changes.
"""

import argparse
import array
import copy
import functools
import math
import operator
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

from lightning_memfit.memory.generators import NUMPY, PYTHON
from lightning_memfit.memory.wrapping import attributes_of

Place = tuple[Any, ...]
"""Where a block keeps a tensor: the number of the module and the keys on the way."""

SMALL_BYTES = 1 << 16
"""Buffers and tensors in attributes up to this size are copied in every call: BatchNorm's statistics, counters."""

_MAX_ITEMS = 1000
_MAX_DEPTH = 4
TENSORS = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_INTERNALS = frozenset(vars(nn.Module())) - {"training"} | {"_trainer", "_fabric", "forward"}
_CONTAINERS = (list, dict, set, deque)
_ARRAYS = (np.ndarray, array.array, bytearray)
_OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.CodeType),
    *(torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.jit.ScriptModule),
)
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | {
    *("torch", "torchvision", "torchaudio", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_memfit", "transformers", "peft", "timm", "deepspeed", "bitsandbytes", "torchao", "numpy", "einops"),
}
_PLAIN = (types.SimpleNamespace, argparse.Namespace, functools.partial, threading.local)


_INERT: set[type] = set()
"""Types of libraries whose objects hold nothing that is followed, as far as they have been met."""

_EMPTY = object()
"""Held by a slot that has no value."""


class InexactRecomputationError(RuntimeError):
    """Recomputing a block would not give what its first run gave; the message says why, and the way out."""

    def __init__(self, block: str, found: str) -> None:
        super().__init__(
            f"Activation checkpointing of {block} would not be exact: {found} Leave the block as it is: name the "
            "others in `blocks`, or give it 'none' or 'offload' in `choices`."
        )


# --- where a block keeps state ----------------------------------------------------------------------------------------


class StatePlaces:
    """Where the code of some modules can keep state: looked up anew in each call, apart from what code names.

    Args:
        modules: What is run together.

    Attributes:
        is_gathered: Whether ZeRO-3 gathers weights while they run, by operators that come or don't.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(child for module in modules for child in module.modules()))
        own = (p for module in self.modules for p in module._parameters.values() if p is not None)
        self.is_gathered = any(map(_is_put_away, own))
        self.inside = set(map(id, self.modules))
        self.globals: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self.cells: list[types.CellType] = []
        self.classes: list[tuple[type, tuple[str, ...]]] = []
        self.objects: list[Any] = []
        self._known: set[int] = set()
        for kind in dict.fromkeys(base for module in self.modules for base in type(module).__mro__):
            if not _is_library(kind.__module__):
                self._add_class(kind)
        for number, module in enumerate(self.modules):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for hook in hooks.values():
                    if number or len(modules) > 1:  # hooks of the block itself run once
                        self._add_callable(hook)

    def _add_class(self, kind: type) -> None:
        names = []
        for name, value in list(vars(kind).items()):
            function = getattr(value, "__func__", value)
            function = getattr(function, "fget", function) if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                self._add_function(function)
            elif not name.startswith("__") and _may_change(value):
                names.append(name)
        if names:
            self.classes.append((kind, tuple(names)))

    def _add_callable(self, called: Any) -> None:
        if isinstance(called, functools.partial):
            self._add_callable(called.func)
            self.objects.extend([*called.args, *called.keywords.values()])
        elif isinstance(called, types.MethodType):
            self.objects.append(called.__self__)
            self._add_callable(called.__func__)
        elif isinstance(called, types.FunctionType):
            self._add_function(called)
        elif not _is_library(type(called).__module__):
            self.objects.append(called)
            self._add_class(type(called))

    def _add_function(self, function: types.FunctionType) -> None:
        function = _unwrapped(function)
        if id(function) in self._known or _is_library(function.__module__):
            return
        self._known.add(id(function))
        names = tuple(n for n in _names(function.__code__) if _may_change(function.__globals__.get(n)))
        if names:
            self.globals.append((function.__globals__, names))
        self.objects.extend(value for value in function.__defaults__ or () if isinstance(value, _CONTAINERS))
        for cell in function.__closure__ or ():
            self.cells.append(cell)
            value = _content(cell)
            if isinstance(value, types.FunctionType):
                self._add_function(value)
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                self._add_function(value)


def _is_put_away(tensor: Tensor) -> bool:
    """Whether DeepSpeed has the values of a tensor, and gives and takes them around its module's forward."""
    return hasattr(tensor, "ds_id")


def _unwrapped(function: types.FunctionType) -> types.FunctionType:
    inner = getattr(function, "__wrapped__", None)
    return inner if isinstance(inner, types.FunctionType) and not function.__closure__ else function


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


def _may_change(value: Any) -> bool:
    """Whether a global or class attribute is data rather than code."""
    if isinstance(value, (*_OPAQUE, nn.Module, property, staticmethod, classmethod)) or callable(value):
        return False
    return type(value) in _SIMPLE - {type(None)} or _holds_something(value)


def _holds_something(value: Any) -> bool:
    kinds = (Tensor, tuple, frozenset, weakref.ref, *_CONTAINERS, *_ARRAYS)
    return isinstance(value, kinds) or is_random_source(value) or _is_plain(value)


def _is_plain(value: Any, of_library: bool = False) -> bool:
    """Whether a value is an object that a user wrote, whose attributes are state."""
    if isinstance(value, (*_OPAQUE, Tensor, nn.Module)) or is_random_source(value):
        return False
    if not of_library and _is_library(type(value).__module__) and not isinstance(value, _PLAIN):
        return False
    return isinstance(attributes_of(value), dict) or any(True for _ in _slots(type(value)))


def _slots(kind: type) -> Iterator[types.MemberDescriptorType]:
    """What reads and sets the attributes that objects of a class have in slots."""
    for base in kind.__mro__:
        if not _is_library(base.__module__):
            yield from (value for value in vars(base).values() if isinstance(value, types.MemberDescriptorType))


# --- contents that are put back ---------------------------------------------------------------------------------------


def is_random_source(value: Any) -> bool:
    """Whether a value is a generator of random numbers of torch, NumPy or Python, which can be put back.

    The system's own (`random.SystemRandom`) can't: where its draws matter, a recomputation returns something else.
    """
    if isinstance(value, random.SystemRandom):
        return False
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def random_source_state(value: Any) -> Any:
    """Return the state of a generator of random numbers."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, np.random.RandomState) else value.getstate()


def set_random_source_state(value: Any, state: Any) -> None:
    """Set a generator of random numbers back."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        value.set_state(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.setstate(state)


def restore_dict(target: dict[Any, Any], values: dict[Any, Any], keep: frozenset[str] = frozenset()) -> None:
    """Make a dict hold exactly some values, without touching those that it holds already."""
    for key in [key for key in target if key not in values and key not in keep]:
        del target[key]
    for key, value in values.items():
        if key not in target or target[key] is not value:
            target[key] = value


# --- the state --------------------------------------------------------------------------------------------------------


class BlockState:
    """The state of a block as it is now.

    Args:
        places: Where to look.
        written: Tensors that the block is known to write, by place; they are copied whatever their size.
        inputs: Objects among the arguments, whose attributes count as state, too.
        also: Further tensors to copy.

    Attributes:
        copies: Tensors that were copied, with their copies, by identity.
        tensors: All tensors that were found, by place.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self,
        places: StatePlaces,
        written: set[Place],
        inputs: Iterable[Any] = (),
        also: Iterable[Tensor] = (),
    ) -> None:
        self._written = written
        self._num_written = len(written)
        self._inputs = list(inputs)
        self._inside = places.inside
        self._dicts: list[tuple[dict[str, Any], dict[str, Any], bool, int]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._slots: list[tuple[Any, types.MemberDescriptorType, Any]] = []
        self._locals: list[tuple[threading.local, dict[str, Any]]] = []
        self._sources: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.tensors: dict[Place, Tensor] = {}
        self._python, self._numpy = PYTHON.state(), NUMPY.state()
        for number, module in enumerate(places.modules):
            self._add_module(module, number)
        self._cells = [(cell, _content(cell)) for cell in places.cells]
        for number, (_, value) in enumerate(self._cells):
            self._add(value, ("cell", number), 0)
        for number, (owner, names) in enumerate(places.globals):
            self._add_dict(owner, names, ("global", number), 0)
        self._classes = [(kind, name, vars(kind).get(name)) for kind, names in places.classes for name in names]
        for kind, name, value in self._classes:
            self._add(value, ("class", kind.__qualname__, name), 0)
        for number, value in enumerate(places.objects):
            self._add(value, ("object", number), 0)
        for number, value in enumerate(self._inputs):
            self._add(value, ("argument", number), 0, of_library=True)
        # As `torch.func.functional_call` puts others in place for one call.
        scripted = torch.jit.ScriptModule
        self._parameters = [(m._parameters, dict(m._parameters)) for m in places.modules if not isinstance(m, scripted)]
        self._need_grad: list[tuple[Tensor, bool]] = []
        self._others: list[Tensor] = []  # parameters that are not followed
        for number, (_, held) in enumerate(self._parameters):
            for name, parameter in held.items():
                if parameter is not None and not _is_put_away(parameter) and id(parameter) not in self._seen:
                    self._add_parameter(parameter, ("parameters", number, name))
        for tensor in also:
            self.copy(tensor)
        self._versions: list[tuple[Tensor, int]] = []

    # --- saving ---

    def devices(self) -> set[torch.device]:
        """Devices on which parts of it lie."""
        return {tensor.device for tensor in (*self.tensors.values(), *self._others)}

    def _add_parameter(self, parameter: Tensor, place: Place) -> None:
        self._seen.add(id(parameter))
        if parameter.is_leaf:
            self._need_grad.append((parameter, parameter.requires_grad))
        if type(parameter) in TENSORS:
            self.tensors[place] = parameter
            if place in self._written:
                self.copy(parameter)
        else:
            self._others.append(parameter)

    def _add_module(self, module: nn.Module, number: Any) -> None:
        self._seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):  # it keeps nothing else in Python
            for name, buffer in module.named_buffers(recurse=False):
                self._add_tensor(buffer, (number, name))
            return
        self._add_dict(module._buffers, None, (number, "buffer"), 0)
        self._add_dict(vars(module), None, number, 0)

    def _add_dict(self, owner: dict[str, Any], names: tuple[str, ...] | None, place: Any, depth: int) -> None:
        if names is None:
            held = {key: value for key, value in owner.items() if key not in _INTERNALS and key[:3] != "ds_"}
        else:
            held = {key: owner[key] for key in names if key in owner}
        self._dicts.append((owner, held, names is None, len(owner)))
        for key, value in held.items():
            if type(value) not in _SIMPLE:
                self._add(value, (place, key), depth)

    def _add(self, value: Any, place: Any, depth: int, of_library: bool = False) -> None:
        if type(value) in _INERT and not of_library:
            return
        if type(value) in TENSORS:
            self._add_tensor(value, place)
        elif type(value) in _SIMPLE or id(value) in self._seen or depth > _MAX_DEPTH:
            return
        elif isinstance(value, (tuple, frozenset, *_CONTAINERS)):
            self._add_container(value, place, depth, of_library)
        elif isinstance(value, nn.Module):
            self._add_hidden_module(value, place)
        elif is_random_source(value):
            self._seen.add(id(value))
            self._sources.append((value, random_source_state(value)))
        elif isinstance(value, _ARRAYS):
            self._seen.add(id(value))
            self._contents.append((value, copy.copy(value)))
        elif isinstance(value, weakref.ref):
            self._add(value(), place, depth, of_library)
        elif _is_plain(value, of_library):
            self._add_object(value, place, depth + 1)
        elif _is_library(type(value).__module__) and value.__class__ is type(value):  # else it stands for another
            _INERT.add(type(value))

    def _add_object(self, value: Any, place: Place, depth: int) -> None:
        self._seen.add(id(value))
        attributes = attributes_of(value)
        if isinstance(value, threading.local):
            self._locals.append((value, dict(value.__dict__)))
            self._add(dict(value.__dict__), place, depth)
        elif isinstance(attributes, dict) and len(attributes) <= _MAX_ITEMS:
            self._add_dict(attributes, None, place, depth)
        for slot in _slots(type(value)):
            held = _in_slot(value, slot)
            self._slots.append((value, slot, held))
            self._add(held, (place, slot.__name__), depth)

    def _add_container(self, value: Any, place: Any, depth: int, of_library: bool) -> None:
        self._seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            self._contents.append((value, dict(value) if isinstance(value, dict) else list(value)))
        if len(value) > _MAX_ITEMS:
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if type(item) not in _SIMPLE:
                self._add(item, (place, repr(key)), depth + 1, of_library)

    def _add_hidden_module(self, module: nn.Module, place: Place) -> None:
        """A module that is no child: a teacher in a list, or the module that holds the block."""
        children = list(module.modules())
        if any(id(child) in self._inside for child in children):
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._add_dict(vars(module), None, place, 1)
            return
        for number, child in enumerate(children):
            if id(child) in self._seen:
                continue
            self._add_module(child, (place, number))
            for name, parameter in child._parameters.items():
                if parameter is not None and type(parameter) in TENSORS:
                    self._add_tensor(parameter, (place, number, name), small=0)

    def _add_tensor(self, tensor: Tensor, place: Place, small: int = SMALL_BYTES) -> None:
        if _is_put_away(tensor):
            return
        self.tensors[place] = tensor
        is_small = tensor.layout is torch.strided and tensor.nbytes <= small
        if place in self._written or (is_small and tensor.grad_fn is None):
            self.copy(tensor)

    def copy(self, tensor: Tensor) -> None:
        """Copy a tensor's values, unless they are copied."""
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, copied(tensor))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_of_forward(
        self,
        block: str,
        inputs: Sequence[tuple[Place, Tensor]],
        held: Sequence[tuple[Place, Tensor]],
        before: dict[Place, int],
    ) -> None:
        """Check that all that the forward wrote has been copied, and note what must not change from here on.

        Args:
            block: What errors call it.
            inputs: Arguments of which there is no copy.
            held: Those that autograd doesn't keep.
            before: Number of writes that each tensor had seen.

        Raises:
            InexactRecomputationError: If a tensor was written that had not been copied.
        """
        for place, tensor in (*self.tensors.items(), *inputs):
            if id(tensor) in self.copies:
                continue
            version = tensor._version
            if before.get(place, version) != version:
                raise InexactRecomputationError(
                    block,
                    f"its forward has now written {_described(tensor)} in place, which it didn't in its first calls.",
                )
        # Autograd watches over the arguments that it keeps.
        self._versions = [
            (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)  # both count alike
            for _, tensor in (*self.tensors.items(), *held)
            if id(tensor) not in self.copies and type(tensor) is not FakeTensor
        ]
        self.tensors = {}
        for saved in (*(saved for _, saved, _, _ in self._dicts), *(saved for _, saved in self._parameters)):
            for key, value in saved.items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    saved[key] = _without_graph(value)
        for _, content in self._contents:
            if isinstance(content, (dict, list)):
                for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        content[key] = _without_graph(value)

    def versions(self) -> dict[Place, int]:
        """Number of writes that each tensor has seen."""
        return {place: tensor._version for place, tensor in self.tensors.items()}

    # --- running again ---

    @contextmanager
    def again(self, block: str, places: StatePlaces) -> Iterator[None]:
        """Put everything back as it was when this was saved; afterwards, as it was before.

        Raises:
            InexactRecomputationError: If a tensor has been written since the forward, and there is no copy of it.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise InexactRecomputationError(
                    block, f"{_described(tensor)} was written in place between its forward and its backward pass."
                )
        if self._is_now():
            now = self
        else:
            now = BlockState(places, self._written, self._inputs, [tensor for tensor, _ in self.copies.values()])
        tensors = [tensor for tensor, _ in now.copies.values()]
        with _unsafe_preserve_version_counter(tuple(tensors)):
            if now is not self:
                self._restore()
            try:
                yield
            finally:
                now._restore()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _is_now(self) -> bool:
        """Whether nothing has changed since this was saved, as far as that takes no more time than to save it anew."""
        return (
            not (self.copies or self._locals or self._sources)
            and len(self._written) == self._num_written
            and all(_still_holds(owner, held, size) for owner, held, _, size in self._dicts)
            and all(_still_holds(owner, held, len(held)) for owner, held in self._parameters)
            and all(_content(cell) is value for cell, value in self._cells)
            and all(vars(kind).get(name) is value for kind, name, value in self._classes)
            and all(_in_slot(value, slot) is held for value, slot, held in self._slots)
            and all(_is_filled(container, content) for container, content in self._contents)
            and all(leaf.requires_grad is requires_grad for leaf, requires_grad in self._need_grad)
            and PYTHON.state() is self._python
            and NUMPY.state() is self._numpy
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _restore(self) -> None:
        for owner, held, whole, size in self._dicts:
            if _still_holds(owner, held, size):
                continue
            kept = (key for key in owner if not whole or key in _INTERNALS or key[:3] == "ds_")
            restore_dict(owner, held, keep=frozenset(kept))
        for cell, value in self._cells:
            if _content(cell) is not value:
                cell.cell_contents = value
        for kind, name, value in self._classes:
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)
        for value, slot, held in self._slots:
            _fill_slot(value, slot, held)
        for local, attributes in self._locals:
            restore_dict(local.__dict__, attributes)  # those of the thread that runs backward
        for owner, parameters in self._parameters:
            for name, parameter in parameters.items():
                if owner.get(name) is not parameter and not _is_freed(parameter):
                    owner[name] = parameter
        for container, content in self._contents:
            _fill(container, content)
        for source, state in self._sources:
            set_random_source_state(source, state)
        for leaf, requires_grad in self._need_grad:
            if leaf.requires_grad is not requires_grad:
                leaf.requires_grad_(requires_grad)
        for tensor, values in self.copies.values():
            tensor.data.copy_(values)
        PYTHON.restore(self._python)
        NUMPY.restore(self._numpy)


def _still_holds(owner: dict[str, Any], held: dict[str, Any], size: int) -> bool:
    """Whether a dict has as many entries as it had, and those that were held."""
    return len(owner) == size and all(map(operator.is_, map(owner.get, held, repeat(_EMPTY)), held.values()))


def _is_filled(container: Any, content: Any) -> bool:
    """Whether a container holds its content, in that order. Arrays are not compared."""
    if isinstance(container, _ARRAYS) or len(container) != len(content):
        return False
    if isinstance(container, dict) and not all(map(operator.is_, container.values(), content.values())):
        return False
    return all(map(operator.is_, container, content))


def _fill(container: Any, content: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = content
    elif isinstance(container, dict):
        if list(container) != list(content) or any(container[key] is not value for key, value in content.items()):
            container.clear()
            container.update(content)
    elif isinstance(container, (list, array.array, bytearray)):
        container[:] = content
    else:
        container.clear()
        extend = container.update if isinstance(container, set) else container.extend
        extend(content)


def _in_slot(value: Any, slot: types.MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not a word to the class, which may have a `__getattr__`
        return _EMPTY


def _fill_slot(value: Any, slot: types.MemberDescriptorType, held: Any) -> None:
    now = _in_slot(value, slot)
    if now is held:
        return
    if held is _EMPTY:
        slot.__delete__(value)
    else:
        slot.__set__(value, held)  # also if the object is frozen


def _is_freed(tensor: Tensor | None) -> bool:
    """Whether a strategy that divides weights has freed these, which it gathers anew."""
    if tensor is None or type(tensor) not in TENSORS:
        return False
    return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def copied(tensor: Tensor) -> Tensor:
    """A tensor's values now; made without gradients, as whoever watches a step for reads is not to take it for one."""
    with torch.no_grad():
        return tensor.detach().clone()


def _without_graph(tensor: Tensor) -> Tensor:
    """Its values alone: its graph would hold the state of the call before, and that the one before it."""
    return tensor.detach().requires_grad_()


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


# --- looking at the first calls ---------------------------------------------------------------------------------------

# Results of these are memory that nothing has been written to yet.
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_")


# Autocast keeps copies of weights, and makes them in one run or the other.
_COPIES = ("_to_copy", "copy_", "clone", "detach", "alias", "lift_fresh", *_UNWRITTEN)


_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
"""Operators whose results are there only once somebody has waited for them."""


class Look(TorchDispatchMode):
    """Watch the operators of a call: copy what is about to be written, and remember what each operator returned.

    Args:
        on_write: Called with the tensors that an operator is about to write.
        watched: Tensors to watch, by place.
        kept: Operators whose results are kept for the recomputation.

    Attributes:
        results: What each operator returned, in numbers.
        changes_kept: Whether a result that is kept has been written in place, which torch doesn't always see.
        sides: Storages of what operators returned besides their first result.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        on_write: Callable[[Place, Tensor], None],
        watched: Iterable[tuple[Place, Tensor]],
        kept: frozenset[Any] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_write = on_write
        self._watched: dict[int, list[tuple[Place, Tensor]]] = {}
        for place, tensor in watched:
            if type(tensor) in TENSORS and tensor.layout is torch.strided:
                self._watched.setdefault(tensor.untyped_storage()._cdata, []).append((place, tensor))
        self.results: list[tuple[str, float]] = []
        self.sides: set[int] = set()
        self.changes_kept = False
        self._kept = kept
        self._kept_storages: set[int] = set()
        self.is_paused = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable and (self._watched or self._kept_storages):
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note_write(args[number] if number < len(args) else kwargs.get(argument.name))
        result = func(*args, **kwargs)
        self._note_result(func, result)
        is_left_out = func.is_view or func._opname in _COPIES or func.namespace in _COLLECTIVES
        if schema is not None and not self.is_paused and not is_left_out:
            self.results.append((func.name(), _reading(func, result)))
        return result

    def _note_result(self, func: Any, result: Any) -> None:
        for number, value in enumerate(result if isinstance(result, tuple) else (result,)):
            if type(value) in TENSORS and value.layout is torch.strided:
                storage = value.untyped_storage()._cdata
                (self.sides.add if number else self.sides.discard)(storage)
                if func in self._kept and not self.is_paused:
                    self._kept_storages.add(storage)

    def _note_write(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if type(tensor) in TENSORS and tensor.layout is torch.strided:
                self.changes_kept |= tensor.untyped_storage()._cdata in self._kept_storages
                for place, watched in self._watched.pop(tensor.untyped_storage()._cdata, ()):
                    self._on_write(place, watched)


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def gradient_hooks_kept(places: StatePlaces, leaves: Iterable[Any]) -> Iterator[None]:
    """Take off at the end what a second run registers on tensors that outlive a block: its first has done so already.

    Args:
        places: Of the block, whose parameters are meant.
        leaves: Its arguments, of which the tensors are meant.
    """
    weights = (one for module in places.modules for one in module._parameters.values() if one is not None)
    tensors = [*weights, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
    before = [[tuple(getattr(one, name) or ()) for name in _GRADIENT_HOOKS] for one in tensors]
    try:
        yield
    finally:
        for tensor, held in zip(tensors, before, strict=True):
            for name, keys in zip(_GRADIENT_HOOKS, held, strict=True):
                hooks = getattr(tensor, name)
                for key in [key for key in hooks or () if key not in keys]:
                    del hooks[key]


def first_difference(
    first: Sequence[tuple[str, float]], again: Sequence[tuple[str, float]], is_whole: bool = False
) -> str | None:
    """The first operator that returned something else when a block ran again; None if none did.

    Args:
        first: What the operators returned at first.
        again: The same of the second run.
        is_whole: Whether that ran to its end, so that an operator may be missing.
    """
    for (name, value), (other, found) in zip(first, again, strict=False):
        if name != other or not _same(value, found):
            return other
    if len(again) < len(first) and is_whole:
        return first[len(again)][0]
    return again[len(first)][0] if len(again) > len(first) else None


_TOLERANCE = 1e-3
"""Kernels of accelerators may add in another order each time; so may those of the CPU on memory aligned otherwise."""


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-30) or (one != one and other != other)


def in_trace() -> bool:
    """Whether tensors are fake, as in a trace: they have no values."""
    return torch._guards.detect_fake_mode(()) is not None


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` runs, whose tensors can't be read: some would end the process."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _reading(func: Any, result: Any) -> float:
    """A number that tells a result from others; 0 where there is none to compare."""
    value = result[0] if isinstance(result, (list, tuple)) and result else result
    if type(value) not in (Tensor, nn.Parameter) or value.is_nested:
        return 0.0
    if not value.numel() or value.layout is not torch.strided:
        return 0.0
    if value.device.type == "meta" or value.is_quantized or in_function_transform():
        return 0.0
    with _disable_current_modes():  # what keeps count of a device's memory is not to count these
        if value.is_complex():
            value = torch.view_as_real(value)
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32  # some devices have no other
        if not value.is_floating_point():
            return float(value.sum(dtype=torch.int64).item())
        return float(torch.linalg.vector_norm(value.detach(), 1, dtype=dtype).item())

"""The state that the code of modules may change in a step: one list, how it is saved, compared and put back.

It is buffers and parameters, attributes of modules, and the global generators of Python and NumPy. Attributes are
followed if they are numbers, strings, tensors, arrays, generators of random numbers, or lists, dicts, sets, deques and
tuples of these. Objects of other classes, globals, closures and files are not part of it.
"""

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.memory.generators import NUMPY, PYTHON

_FEW_ITEMS = 16
_MAX_ITEMS = 1000
"""Containers with more entries are kept as they are: a data set, a vocabulary."""

_MAX_DEPTH = 4
_INTERNALS = frozenset(vars(nn.Module())) - {"training"} | {"_trainer", "_fabric", "forward"}
_CONTAINERS = (list, dict, set, deque)


# --- generators of random numbers -------------------------------------------------------------------------------------


def is_random_source(value: Any) -> bool:
    """Whether a value is a generator of random numbers of torch, NumPy or Python, which can be put back.

    The system's own (`random.SystemRandom`) can't.
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


# --- one value --------------------------------------------------------------------------------------------------------


class Held:
    """A value as it is now: the object, and a copy of its content where that can change in place.

    Containers of few entries are followed into; longer ones are copied with the entries as they are, and of a list of
    very many its length is kept.

    Args:
        value: Anything.
        copies_tensors: Whether the values of tensors are copied. If not, torch's count of writes stands for them.
        keeps_graphs: Whether a tensor is held with the graph that made it.
        copy: Makes a copy of a tensor, such as `HostCopy`, which can write itself back; by default a clone.
        depth: How many containers it lies in.
    """

    __slots__ = ("back", "content", "identity", "is_deep", "version")

    def __init__(
        self,
        value: Any,
        copies_tensors: bool = True,
        keeps_graphs: bool = False,
        copy: Callable[[Tensor], Any] | None = None,
        depth: int = 0,
    ) -> None:
        self.identity = id(value)
        self.back = value
        self.content: Any = None
        self.version: Any = None
        self.is_deep = False
        if isinstance(value, nn.Parameter) and depth:
            return  # of another group: DeepSpeed and others keep lists of weights that they give and take
        if isinstance(value, Tensor):
            self.version = _version(value)
            if value.grad_fn is not None and not keeps_graphs:
                self.back = value.detach().requires_grad_()
            if copies_tensors and value.grad_fn is None:
                self.content = _copied(value) if copy is None else copy(value)
        elif is_random_source(value):
            self.content = random_source_state(value)
        elif isinstance(value, np.ndarray):
            self.content = value.copy()
        elif isinstance(value, (tuple, *_CONTAINERS)):
            size = len(value)
            self.is_deep = size <= _FEW_ITEMS and depth < _MAX_DEPTH
            if self.is_deep:
                held = [Held(item, copies_tensors, keeps_graphs, copy, depth + 1) for item in _items(value)]
                self.content = list(zip(value, held, strict=True)) if isinstance(value, dict) else held
            elif size <= _MAX_ITEMS:
                self.content = dict(value) if isinstance(value, dict) else list(value)
            elif isinstance(value, list):
                self.content = size

    def is_now(self, value: Any) -> bool:
        """Whether a value is the same object with the same content, or an equal number or text."""
        if id(value) != self.identity:
            simple = (bool, int, float, complex, str, bytes)
            return type(value) is type(self.back) and isinstance(value, simple) and bool(value == self.back)
        if isinstance(value, Tensor):
            if self.content is None:
                return bool(_version(value) == self.version)
            if not isinstance(self.content, Tensor):
                return bool(self.content.is_in(value))
            return bool(value.shape == self.content.shape and _equal(value, self.content))
        if self.content is None:
            return True
        if is_random_source(value):
            state = random_source_state(value)
            return torch.equal(state, self.content) if isinstance(state, Tensor) else str(state) == str(self.content)
        if isinstance(value, np.ndarray):
            return bool(np.array_equal(value, self.content))
        return self._holds_the_same(value)

    def _holds_the_same(self, value: Any) -> bool:
        content = self.content
        if isinstance(content, int):
            return len(value) == content
        if len(value) != len(content):
            return False
        if not self.is_deep:
            pairs = zip(_items(content), _items(value), strict=True)
            keys_are_same = not isinstance(value, dict) or list(value) == list(content)
            return keys_are_same and all(one is other for one, other in pairs)
        if isinstance(value, dict):
            if list(value) != [key for key, _ in content]:
                return False
            content = [held for _, held in content]
        return all(one.is_now(item) for one, item in zip(content, _items(value), strict=True))

    def restored(self) -> Any:
        """The object, with its content as it was."""
        value, content = self.back, self.content
        if content is None:
            return value
        if isinstance(value, Tensor):
            if not isinstance(content, Tensor):
                if not content.equals(value):  # writing would count as a change of the tensor, which a batch may share
                    content.restore(value)
                return value
            with _unseen(value):
                value.data.copy_(content)  # no write that torch counts: autograd may have saved it
        elif is_random_source(value):
            set_random_source_state(value, content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif isinstance(content, int):
            del value[content:]
        elif isinstance(value, dict):
            items = {key: held.restored() for key, held in content} if self.is_deep else content
            if list(value) != list(items):
                value.clear()
            restore_dict(value, items)
        else:
            items = [held.restored() for held in content] if self.is_deep else content
            if isinstance(value, list):
                value[:] = items
            elif isinstance(value, (set, deque)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(items)
        return value


def _version(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or gets another storage; as far as that can be told."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return (0 if tensor.is_inference() else tensor._version), 0
    return (0 if tensor.is_inference() else tensor._version), tensor.data_ptr()


def _unseen(tensor: Tensor) -> AbstractContextManager[Any]:
    """No mode sees that a weight is saved: a technique may watch what reads it."""
    return _disable_current_modes() if isinstance(tensor, nn.Parameter) else nullcontext()


def _copied(tensor: Tensor) -> Tensor:
    with torch.no_grad(), _unseen(tensor):
        return tensor.detach().clone()


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    if one.dtype != other.dtype or one.layout is not torch.strided or one.is_quantized:
        return one.dtype == other.dtype and one.layout is not torch.strided
    with torch.no_grad(), _unseen(one):
        return bool(((one == other) | ((one != one) & (other != other))).all())


# --- modules ----------------------------------------------------------------------------------------------------------


def _is_followed(name: str) -> bool:
    """Whether an attribute is state of the user's code: not of `nn.Module`, Lightning or DeepSpeed."""
    return name not in _INTERNALS and not name.startswith("ds_")


class Group(NamedTuple):
    """What is saved and put back together: the attributes, buffers or parameters of one module."""

    module: nn.Module
    kind: Literal["attributes", "buffers", "parameters"]

    def values(self) -> dict[str, Any]:
        """What the module holds of this kind now, by name."""
        if self.kind == "attributes":
            return {name: value for name, value in vars(self.module).items() if _is_followed(name)}
        return dict(self._owner().items())

    def put_back(self, values: dict[str, Any]) -> None:
        """Let the module hold these values."""
        if self.kind == "attributes":
            attributes = vars(self.module)
            restore_dict(attributes, values, keep=frozenset(name for name in attributes if not _is_followed(name)))
        elif not isinstance(self.module, torch.jit.ScriptModule):  # whose tensors can't be exchanged
            restore_dict(self._owner(), values)

    def _owner(self) -> Any:
        return self.module._buffers if self.kind == "buffers" else self.module._parameters


def groups_of(modules: Iterable[nn.Module]) -> tuple[Group, ...]:
    """All that the code of some modules may change, those inside them included."""
    found = dict.fromkeys(child for module in modules for child in module.modules())
    return tuple(
        Group(child, kind)
        for child in found
        for kind in ("attributes", "buffers", "parameters")
        if kind != "attributes" or not isinstance(child, torch.jit.ScriptModule)
    )


class State:
    """The state of some groups as it is now.

    Args:
        groups: What to save.
        copies_tensors: Whether the values of tensors are copied; without it only exchanged ones can be put back.
        keeps_graphs: Whether tensors stay attached to what computed them. Without it, the graph of an earlier call is
            not kept alive.
        has_generators: Whether the global generators of Python and NumPy belong to it.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        copies_tensors: bool = True,
        keeps_graphs: bool = False,
        has_generators: bool = True,
    ) -> None:
        self._held = [
            (group, {name: Held(value, copies_tensors, keeps_graphs) for name, value in group.values().items()})
            for group in groups
        ]
        self._generators = _host_generators() if has_generators else None

    @property
    def groups(self) -> tuple[Group, ...]:
        """What was saved."""
        return tuple(group for group, _ in self._held)

    def changed(self) -> tuple[Group, ...]:
        """Groups that are no longer what they were."""
        return tuple(group for group, held in self._held if not _is_now(held, group.values()))

    def have_generators_moved(self) -> bool:
        """Whether Python's or NumPy's global generator has drawn since."""
        return self._generators is not None and _bytes_of(self._generators) != _bytes_of(_host_generators())

    def only(self, groups: Iterable[Group], has_generators: bool) -> "State":
        """The same state of fewer groups."""
        part = State((), has_generators=False)
        wanted = {(id(group.module), group.kind) for group in groups}
        part._held = [entry for entry in self._held if (id(entry[0].module), entry[0].kind) in wanted]
        part._generators = self._generators if has_generators else None
        return part

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """In this context everything is as it was; afterwards as it is now."""
        now = State(self.groups, keeps_graphs=True, has_generators=self._generators is not None)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Put everything back as it was."""
        for group, held in self._held:
            group.put_back({name: one.restored() for name, one in held.items()})
        if self._generators is not None:
            PYTHON.restore(self._generators[0])
            NUMPY.restore(self._generators[1])


def _host_generators() -> tuple[Any, Any]:
    return PYTHON.state(), NUMPY.state()


def _bytes_of(generators: tuple[Any, Any]) -> bytes:
    return pickle.dumps(generators)


def _is_now(held: dict[str, Held], values: dict[str, Any]) -> bool:
    return held.keys() == values.keys() and all(held[name].is_now(value) for name, value in values.items())

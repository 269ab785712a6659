"""Stable descriptions of modules, settings, batches and the processor, from which cache keys are made.

Importing this module is cheap: a cached profile is found without torch and Lightning.
"""

import hashlib
import os
import platform
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from lightning_memfit.profile.reads import (
    Names,
    Undescribed,
    globals_of,
    is_opaque,
    is_users_function,
    is_users_module,
    names_in,
)

_MAX_DEPTH = 25
"""Deeper nesting is described apart, so that it doesn't exceed what Python allows of recursion."""

_MAX_ITEMS = 1_000_000

_MAX_PATH = 1000

_MAX_BYTES = 1 << 24
"""Values of larger arrays, and of larger tensors outside of a module, don't count: hashing them would take long."""

_EXACT = (bool, int, float, complex, str, bytes, type(None))
"""Values that describe themselves; the order puts `bool` before its base."""

_CONTAINERS = {dict, list, tuple, OrderedDict}

_PRINTABLE = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects have a short and stable `repr`, or one with an address, which isn't used."""

_NOT_STATE = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_compiler_ctx", "_jit_is_scripting"} | {
    "log",  # Lightning binds these to the module while it runs
    "log_dict",
}

_NOT_CLASS_STATE = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__annotate__",
    "__annotations_cache__",
    "__abstractmethods__",
    "__parameters__",
    "__orig_bases__",
    "__dataclass_fields__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
}
"""What Python itself keeps in a class."""

_BUILT_IN = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
)

_WITHOUT_CONTENTS = {"_thread.lock", "_thread.RLock", "torch._C.Generator", "logging.Logger", "logging.RootLogger"}
"""Classes whose objects have no part in how much memory a step needs."""

_RUNS = ("lightning.pytorch.trainer.", "pytorch_lightning.trainer.")
"""Where the classes of Trainers are, whose settings a trace gets apart."""

_COVERED_BY_VERSION = {"builtins", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"}


_PROCESSOR_FACTS = ("model name", "flags", "cache size")

PROCESSOR_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),  # keep from using all that it can do
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables by which oneDNN and torch choose kernels of the CPU."""


def describe_module(module: Any) -> object:
    """Classes, simple attributes, what the code reads besides, source files, and what a trace has of all tensors.

    Raises:
        Undescribed: If something that the module's code reads can't be described.
    """
    defined_in = {kind.__module__ for child in module.modules() for kind in type(child).__mro__}
    sources = {path: _file_hash(path) for name in defined_in for path in _source_files(name)}
    description = _Description(values=False)
    parts = description.of(module, 0)
    found = parts, description.rest(), sorted(sources.values())
    data = getattr(getattr(module, "_trainer", None), "datamodule", None)
    asked = data is not None and "datamodule" in description.attributes
    return (*found, describe(type(data))) if asked else found


def describe_settings(value: Any) -> object:
    """Class with the hash of its source files, and simple attributes.

    This is for objects that a training step may ask, such as a data module: the rest of their contents reaches the
    step in the batch.
    """
    simple = [
        (key, describe(item))
        for key, item in sorted(_stored(type(value), value), key=lambda stored: stored[0])
        if issubclass(type(item), (bool, int, float, str))
    ]
    files = {path for kind in type(value).__mro__ for path in _source_files(kind.__module__)}
    return type(value).__qualname__, simple, sorted(map(_file_hash, files))


def describe_processor(device: str) -> object:
    """Facts that decide which kernels the CPU runs, and so their scratch memory; None for a trace for CUDA.

    Reads them without torch, so that a cached profile is found without importing it.

    Args:
        device: `cpu` or `cuda`, as in `Emulation`.
    """
    if device != "cpu":
        return None
    return hashlib.sha256(_processor().encode()).hexdigest(), [
        (name, os.environ.get(name)) for name in PROCESSOR_VARIABLES
    ]


@cache
def _processor() -> str:
    """Model, instruction sets and cache of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(_PROCESSOR_FACTS))


def describe(value: Any, values: bool = False) -> object:
    """A stable description of a value; tensors by what a trace takes over, with `values` also by integer contents.

    Nothing on an object that isn't torch's or Python's is called or asked: of any other the class and the stored
    attributes count, read past whatever the class does on attribute access. What the user's functions and classes in it
    read besides their arguments counts as well.

    Raises:
        Exception: If the value can't be described: tensors of classes that refuse, objects that hold something out of
            sight, or more than a million items.
    """
    description = _Description(values)
    return description.of(value, 0), description.rest()


class _Description:
    """One description; an object that occurs again is named by the number of its first occurrence.

    Functions, classes and modules are named by a number where they occur and described in `rest`.

    Args:
        values: Whether integer contents of tensors count, as a trace carries those of a batch; else only numbers do, as
            it carries those of a module.
    """

    def __init__(self, values: bool) -> None:
        self.attributes: set[str] = set()
        """Names of all attributes that the user's code reads."""
        self._values = values
        self._seen: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # an id must not be given to another object in between
        self._num_items = 0
        self._later: deque[Any] = deque()
        self._reads_environment = False
        self._is_outside = False
        """Whether what is described is held by code, not by a module or batch."""

    def of(self, value: Any, depth: int) -> object:
        """Describe a value at a depth of nesting."""
        self._num_items += 1
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"there are more than {_MAX_ITEMS} items to describe")
        kind = type(value)
        if kind in _EXACT:
            return _describe_text(value) if kind is str else value
        if kind in _CONTAINERS and not value:  # most of what modules hold
            return kind.__qualname__
        for base in _EXACT:
            if issubclass(kind, base):  # with a `__repr__` of its own, perhaps
                return kind.__qualname__, base.__repr__(value)  # type: ignore[call-arg]
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return self._of_tensor(value)
        if issubclass(kind, _BUILT_IN):
            return value.__module__ if issubclass(kind, BuiltinFunctionType) else None, value.__qualname__
        if issubclass(kind, (tuple, frozenset, CodeType)) and depth < _MAX_DEPTH:
            return self._of_object(kind, value, depth + 1)  # equal ones may be one object or not
        if issubclass(kind, type) and not is_users_module(value.__module__):
            return type.__repr__(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._see(value)
        is_module = torch is not None and issubclass(kind, torch.nn.Module)
        if depth >= _MAX_DEPTH or is_module or issubclass(kind, (FunctionType, type, ModuleType)):
            self._later.append(value)
            return "first", self._seen[id(value)]
        return self._of_object(kind, value, depth + 1)

    def rest(self) -> object:
        """What the values that were described so far refer to, and the environment if code among it asks for that."""
        found: list[object] = []
        while self._later:
            value = self._later.popleft()
            torch = sys.modules.get("torch")
            if torch is not None and issubclass(type(value), torch.nn.Module):
                found.append(self._of_torch_module(value))
            else:
                self._is_outside = issubclass(type(value), (FunctionType, type, ModuleType))
                found.append(self._of_object(type(value), value, 1))
                self._is_outside = False
        return found, sorted(os.environ.items()) if self._reads_environment else None

    def _of_tensor(self, tensor: Any) -> object:
        """All that a trace takes over of a tensor (`turn_fake`, `RealIntegers`), and whose storage it has."""
        if id(tensor) in self._seen:
            return "again", self._seen[id(tensor)]
        self._see(tensor)
        torch, kind = sys.modules["torch"], type(tensor)
        named = "" if kind.__module__.partition(".")[0] == "torch" else type.__repr__(kind)  # fakes stand for others
        learned = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, tensor.is_leaf
        if tensor.layout is not torch.strided and (parts := self._parts_of(tensor)):
            return named, *parts, *learned
        storage = self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))
        layout = tuple(tensor.shape), tensor.stride(), str(tensor.dtype), storage
        return named, *layout, *learned, self._contents_of(tensor)

    def _parts_of(self, tensor: Any) -> tuple[object, ...]:
        """A sparse tensor, which has neither strides nor a storage, by the strided ones that hold it; else nothing."""
        from lightning_memfit.memory.host import SPARSE, sparse_parts  # needs torch, which is there with a tensor

        if tensor.layout not in SPARSE:
            return ()
        is_coalesced = tensor.layout is sys.modules["torch"].sparse_coo and tensor.is_coalesced()
        parts = map(self._of_tensor, sparse_parts(tensor))
        return str(tensor.layout), tuple(tensor.shape), str(tensor.dtype), is_coalesced, *parts

    def _contents_of(self, tensor: Any) -> object:
        """The values of a tensor that a trace carries; empty if it carries none."""
        if self._values:
            is_carried = not tensor.is_floating_point() and tensor.device.type != "meta"
        elif self._is_outside:  # no copy of the module has it, so that it stays as it is
            is_carried = tensor.device.type == "cpu" and not tensor.requires_grad and tensor.nbytes <= _MAX_BYTES
        else:
            from lightning_memfit.profile.integers import counter_of  # needs torch, which is there with a tensor

            tensor = counter_of(tensor)
            is_carried = tensor is not None
        if not is_carried:
            return ""
        as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
        return hashlib.sha256(as_bytes.numpy().tobytes()).hexdigest()

    def _of_array(self, array: Any, base: Any, depth: int) -> object:
        """An array of NumPy, which a trace copies with its values."""
        shape, strides, dtype = (getattr(base, name).__get__(array) for name in ("shape", "strides", "dtype"))
        contents: object = ""
        if base.nbytes.__get__(array) <= _MAX_BYTES:
            if dtype.hasobject:
                contents = self.of(base.tolist(array), depth)
            else:
                contents = hashlib.sha256(base.tobytes(array)).hexdigest()
        return tuple(shape), tuple(strides), str(dtype), contents

    def _see(self, value: Any) -> None:
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)

    def _of_torch_module(self, module: Any) -> object:
        parts: list[object] = []
        children = list(module.named_modules())
        for _, child in children:
            if id(child) not in self._seen:
                self._see(child)
        for name, child in children:
            stored = [(key, value) for key, value in _stored(type(child), child) if key not in _NOT_STATE]
            attributes = [(key, self.of(value, 1)) for key, value in stored]
            parts.append((name, self._seen[id(child)], self.of(type(child), 1), attributes))
        buffers = module.named_buffers(remove_duplicate=False)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *buffers):
            registered = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
            hooks = [self.of(list((one or {}).values()), 1) for one in registered]  # their keys count all in a process
            parts.append((name, self._of_tensor(tensor), hooks))
        libraries = {base for _, child in children for base in type(child).__mro__ if base is not object}
        theirs = [base for base in libraries if not is_users_module(base.__module__)]
        theirs.sort(key=lambda base: (base.__module__, base.__qualname__))
        return parts, [(type.__repr__(base), self._put_there(vars(base))) for base in theirs]

    def _put_there(self, space: Any, names: frozenset[str] | None = None) -> list[object]:
        """Simple values, and the user's functions and classes, in a library's class or module."""
        found: list[object] = []
        for name in sorted(space if names is None else names & space.keys()):
            value = space[name]
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if type(value) in _EXACT and not name.startswith("__"):
                found.append((name, value))
            elif type(value) is FunctionType:
                if is_users_function(value) and not value.__code__.co_filename.startswith("<"):
                    found.append((name, self.of(value, 1)))
            elif names is not None and issubclass(type(value), type) and is_users_module(value.__module__):
                found.append((name, self.of(value, 1)))
        return found

    def _of_object(self, kind: type, value: Any, depth: int) -> object:
        if issubclass(kind, FunctionType):
            return self._of_function(value, depth)
        if issubclass(kind, MethodType):
            return self.of(value.__func__, depth), self.of(value.__self__, depth)
        if issubclass(kind, CodeType):
            return self._of_code(value, depth)
        if issubclass(kind, type):
            return self._of_class(value, depth)
        if issubclass(kind, ModuleType):
            return self._of_python_module(value, frozenset(), set(), depth)
        if kind.__module__.startswith(_RUNS) or f"{kind.__module__}.{kind.__qualname__}" in _WITHOUT_CONTENTS:
            return kind.__qualname__
        if issubclass(kind, (staticmethod, classmethod)):
            return kind.__qualname__, self.of(value.__func__, depth)
        if issubclass(kind, weakref.ref):
            return kind.__qualname__, self.of(weakref.ref.__call__(value), depth)
        contents: list[object] = []
        if issubclass(kind, dict):
            contents.append([(self.of(key, depth), self.of(item, depth)) for key, item in dict.items(value)])
        elif issubclass(kind, MappingProxyType):
            contents.append([(self.of(key, depth), self.of(item, depth)) for key, item in value.items()])
        elif (sequence := next((base for base in (list, tuple, deque) if issubclass(kind, base)), None)) is not None:
            contents.append([self.of(item, depth) for item in sequence.__iter__(value)])
        elif (group := next((base for base in (set, frozenset) if issubclass(kind, base)), None)) is not None:
            contents.append(sorted(repr(self.of(item, depth)) for item in group.__iter__(value)))
        elif issubclass(kind, partial):
            parts = (partial.__dict__[name].__get__(value) for name in ("func", "args", "keywords"))
            contents.append([self.of(part, depth) for part in parts])
        elif issubclass(kind, property):
            contents.append([self.of(getattr(property, name).__get__(value), depth) for name in ("fget", "fset")])
        elif (array := _array_type()) is not None and issubclass(kind, array):
            contents.append(self._of_array(value, array, depth))
        elif kind.__module__.partition(".")[0] in _PRINTABLE and not kind.__dictoffset__:
            text = repr(value)  # their slots may hold what they computed once, such as a path's text
            if " at 0x" not in text and len(text) < _MAX_PATH:
                return text
            _refuse_opaque(kind)
        else:
            _refuse_opaque(kind)
        state = [(key, self.of(item, depth)) for key, item in _stored(kind, value) if key not in _NOT_STATE]
        return f"{kind.__module__}.{kind.__qualname__}", self.of(kind, depth), contents, state

    def _of_class(self, kind: type, depth: int) -> object:
        """All that a class of the user's defines or was given, and its bases."""
        contents = [
            (name, self.of(value, depth))
            for name, value in sorted(vars(kind).items(), key=lambda item: str(item[0]))
            if name not in _NOT_CLASS_STATE
        ]
        return type.__repr__(kind), [self.of(base, depth) for base in (type(kind), *kind.__mro__[1:])], contents

    def _of_function(self, function: Any, depth: int) -> object:
        names = names_in(function.__code__)
        cells = [self._read(_contents(cell), names, depth) for cell in function.__closure__ or ()]
        defaults = self.of(function.__defaults__, depth), self.of(function.__kwdefaults__, depth)
        stored = [(key, self.of(value, depth)) for key, value in vars(function).items()]
        read: list[object] = []
        if is_users_function(function):
            self.attributes |= names.attributes
            self._reads_environment |= names.environment
            read = [(name, self._read(value, names, depth)) for name, value in globals_of(function, names)]
        return function.__qualname__, self._of_code(function.__code__, depth), cells, defaults, stored, read

    def _read(self, value: Any, names: Names, depth: int) -> object:
        """A global or what a closure holds, read by code with those names."""
        if issubclass(type(value), ModuleType):
            return self._of_python_module(value, names.attributes, set(), depth)
        return self.of(value, depth)

    def _of_python_module(self, module: Any, names: frozenset[str], read: set[int], depth: int) -> object:
        """What code with some names may read in a module; of the user's own all simple values."""
        if id(module) in read:
            return None
        read.add(id(module))
        name, space = (
            str(ModuleType.__getattribute__(module, "__name__")),
            ModuleType.__getattribute__(module, "__dict__"),
        )
        inner = [
            (key, self._of_python_module(space[key], names, read, depth))
            for key in sorted(names & space.keys())
            if issubclass(type(space[key]), ModuleType)
        ]
        if not is_users_module(name):
            return name, self._put_there(space, names), inner
        own = [
            (key, self.of(value, depth))
            for key, value in sorted(space.items())
            if not key.startswith("__")
            and not issubclass(type(value), ModuleType)
            and (key in names or type(value) in _EXACT)
        ]
        return name, own, inner

    def _of_code(self, code: CodeType, depth: int) -> object:
        constants = [self.of(item, depth) for item in code.co_consts]
        return hashlib.sha256(code.co_code + repr((constants, code.co_names)).encode()).hexdigest()


def _refuse_opaque(kind: type) -> None:
    if is_opaque(kind):
        raise Undescribed(f"what an object of class {kind.__module__}.{kind.__qualname__} holds can't be told")


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


def _stored(kind: type, value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes that an object stores, in its `__dict__` or in slots, without its class having a say."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        yield from ((key, item) for key, item in attributes.items() if type(key) is str)
    for name, member in _slots(kind):
        try:
            yield name, member.__get__(value)
        except AttributeError:  # not set
            continue


@lru_cache(1024)
def _slots(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for base in kind.__mro__
        if base.__module__ != "builtins"
        for name, member in vars(base).items()
        if type(member) is MemberDescriptorType
    ]


def _array_type() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.ndarray


def _describe_text(text: str) -> object:
    """A text, together with the model's configuration if it names a model folder."""
    if 0 < len(text) < _MAX_PATH and "\n" not in text:
        config = os.path.join(text, "config.json")
        if os.path.isfile(config):  # which `Path.is_file` refuses to say of a name that is too long
            return text, _file_hash(config)
    return text


def _source_files(module_name: str) -> Iterator[str]:
    """A module's file and the imported files of its package, as the module may call what they define.

    A module outside any package, such as a script, comes with its neighbours in the folder.
    """
    package = module_name.partition(".")[0]
    own = getattr(sys.modules.get(module_name), "__file__", None)
    if package in _COVERED_BY_VERSION or own is None:
        return
    yield own
    folder = os.path.dirname(own)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or path == own or not path.endswith(".py"):
            continue
        if name.partition(".")[0] == package or ("." not in name and os.path.dirname(path) == folder):
            yield path


@cache
def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return path

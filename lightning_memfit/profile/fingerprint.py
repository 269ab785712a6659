"""Stable descriptions of modules, settings, batches and the processor, from which cache keys are made.

`attached_datamodule` and `has_datamodule` find and pass on the data module that a training step may ask. Importing this
module is cheap: a cached profile is found without torch and Lightning.
"""

import hashlib
import os
import platform
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
)
from typing import Any

from typing_extensions import override

_MAX_DEPTH = 8
"""Deeper nesting is named by its class only."""

_MAX_ITEMS = 1_000_000

_MAX_PATH = 1000

_EXACT = (bool, int, float, complex, str, bytes, type(None))
"""Values that describe themselves; the order puts `bool` before its base."""

_PRINTABLE = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose objects have a short and stable `repr`, or one with an address, which isn't used."""

_NOT_STATE = {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_compiler_ctx", "_jit_is_scripting"} | {
    "log",  # Lightning binds these to the module while it runs
    "log_dict",
}

_COVERED_BY_VERSION = {"builtins", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"}


_PROCESSOR_FACTS = ("model name", "flags", "cache size")

_PROCESSOR_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables that keep oneDNN and torch from using all that the processor can do."""


def describe_module(module: Any) -> object:
    """Classes with the hashes of their source files, simple attributes, and the shapes of all tensors."""
    parts: list[object] = []
    defined_in = {kind.__module__ for child in module.modules() for kind in type(child).__mro__}
    sources = {path: _file_hash(path) for name in defined_in for path in _source_files(name)}
    for name, child in module.named_modules():
        stored = {key: value for key, value in _stored(type(child), child) if key not in _NOT_STATE}
        attributes = [(key, describe(value)) for key, value in stored.items()]
        parts.append((name, type(child).__qualname__, attributes))
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        parts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    return parts, sorted(sources.values())


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
        (name, os.environ.get(name)) for name in _PROCESSOR_LIMITS
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
    """A stable description of a value; tensors by shape and dtype, with `values` also by integer contents.

    Nothing on an object that isn't torch's or Python's is called or asked: of any other the class and the stored
    attributes count, read past whatever the class does on attribute access.

    Raises:
        Exception: If the value can't be described: tensors of classes that refuse, or more than a million items.
    """
    return _Description(values).of(value, 0)


class _Description:
    """One description; an object that occurs again is named by the number of its first occurrence.

    Args:
        values: Whether integer contents of tensors and arrays count.
    """

    def __init__(self, values: bool) -> None:
        self._values = values
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # an id must not be given to another object in between
        self._num_items = 0

    def of(self, value: Any, depth: int) -> object:
        """Describe a value at a depth of nesting."""
        self._num_items += 1
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"there are more than {_MAX_ITEMS} items to describe")
        kind = type(value)
        if kind in _EXACT:
            return _describe_text(value) if kind is str else value
        for base in _EXACT:
            if issubclass(kind, base):  # with a `__repr__` of its own, perhaps
                return kind.__qualname__, base.__repr__(value)  # type: ignore[call-arg]
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            return _describe_tensor(value, self._values)
        if issubclass(kind, type):
            return type.__repr__(value)
        if issubclass(kind, (BuiltinFunctionType, MethodDescriptorType)):
            return value.__module__ if issubclass(kind, BuiltinFunctionType) else None, value.__qualname__
        if depth >= _MAX_DEPTH or (torch is not None and issubclass(kind, torch.nn.Module)):
            return kind.__qualname__
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._of_object(kind, value, depth + 1)

    def _of_object(self, kind: type, value: Any, depth: int) -> object:
        if issubclass(kind, FunctionType):
            return self._of_function(value, depth)
        if issubclass(kind, MethodType):
            return self.of(value.__func__, depth), self.of(value.__self__, depth)
        if issubclass(kind, CodeType):
            return self._of_code(value, depth)
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
        elif (array := _array_type()) is not None and issubclass(kind, array):
            contents.append(_describe_array(value, array, self._values))
        elif kind.__module__.partition(".")[0] in _PRINTABLE and not kind.__dictoffset__:
            text = repr(value)  # their slots may hold what they computed once, such as a path's text
            return text if " at 0x" not in text and len(text) < _MAX_PATH else kind.__qualname__
        state = [(key, self.of(item, depth)) for key, item in _stored(kind, value) if key not in _NOT_STATE]
        return f"{kind.__module__}.{kind.__qualname__}", contents, state

    def _of_function(self, function: Any, depth: int) -> object:
        cells = [self.of(_contents(cell), depth) for cell in function.__closure__ or ()]
        defaults = self.of(function.__defaults__, depth), self.of(function.__kwdefaults__, depth)
        return function.__qualname__, self._of_code(function.__code__, depth), cells, defaults

    def _of_code(self, code: CodeType, depth: int) -> object:
        constants = [self.of(item, depth) for item in code.co_consts]
        return hashlib.sha256(code.co_code + repr((constants, code.co_names)).encode()).hexdigest()


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
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if type(member) is MemberDescriptorType and base.__module__ != "builtins":
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not set
                    continue


def _array_type() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.ndarray


def _describe_array(array: Any, base: Any, values: bool) -> object:
    shape, dtype = base.shape.__get__(array), base.dtype.__get__(array)
    contents = ""
    if values and dtype.kind in "iub":
        contents = hashlib.sha256(base.tobytes(array)).hexdigest()
    return tuple(shape), str(dtype), contents


def _describe_text(text: str) -> object:
    """A text, together with the model's configuration if it names a model folder."""
    if 0 < len(text) < _MAX_PATH and "\n" not in text:
        config = os.path.join(text, "config.json")
        if os.path.isfile(config):  # which `Path.is_file` refuses to say of a name that is too long
            return text, _file_hash(config)
    return text


def _describe_tensor(tensor: Any, values: bool) -> object:
    contents = ""
    if values and not tensor.is_floating_point() and tensor.device.type != "meta":
        contents = hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    return tuple(tensor.shape), str(tensor.dtype), contents


def _source_files(module_name: str) -> Iterator[str]:
    """A module's file and the imported files of its package, as the module may call what they define.

    A module outside any package, such as a script, comes with its neighbours in the folder.
    """
    package = module_name.partition(".")[0]
    own = getattr(sys.modules.get(module_name), "__file__", None)
    if package in _COVERED_BY_VERSION or own is None:
        return
    yield own
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or path == own or not path.endswith(".py"):
            continue
        if name.partition(".")[0] == package or ("." not in name and Path(path).parent == Path(own).parent):
            yield path


@cache
def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return path


# --- the data module that a step may ask through `self.trainer.datamodule` --------------------------------------------


def attached_datamodule(module: Any) -> Any:
    """The data module of the trainer that a module belongs to; None without either."""
    return getattr(getattr(module, "_trainer", None), "datamodule", None)


def has_datamodule(datamodule: Any) -> Any:
    """A callback that lets a traced or measured module ask a data module, none of whose hooks is called.

    The trainer has it only after Lightning would prepare and set it up, and no longer when it would tear it down.
    """
    import lightning.pytorch as pl

    class HasDataModule(pl.Callback):
        @override
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            trainer.datamodule = datamodule

        @override
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.datamodule = None

        @override
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.datamodule = None

    return HasDataModule()

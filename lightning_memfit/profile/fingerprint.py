"""Descriptions from which cache keys are made: digests that are the same in every process.

What a module, a batch and settings hold is pickled, with tensors by what a trace takes over of them, and code by name.
What the code is follows from the user's source files and from the stamps of installed packages. What can't be pickled,
such as an object of a class that a function makes, can't be described, so that nothing is kept.

Importing this module is cheap: a cached profile is found without torch and Lightning.
"""

import hashlib
import os
import pickle
import platform
import sys
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from typing_extensions import override

from lightning_memfit.profile.culprit import owner_of

_MAX_ITEMS = 1_000_000

_MAX_PATH = 1000

_MAX_BYTES = 1 << 24
"""Values of larger arrays don't count: hashing them would take long."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_WITHOUT_CONTENTS = {
    *("_thread.lock", "_thread.RLock", "torch._C.Generator", "logging.Logger", "logging.RootLogger"),
    "transformers.generation.configuration_utils.GenerationConfig",  # it keeps a `hash`, another one in every process
}
"""Classes whose objects have no part in how much memory a step needs."""

_COVERED_BY_VERSION = {"builtins", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers"} | {
    "lightning_memfit"  # by `cache.own_code`
}

_PROCESSOR_FACTS = ("model name", "flags", "cache size")

PROCESSOR_VARIABLES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),  # keep from using all that it can do
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Environment variables by which oneDNN and torch choose kernels of the CPU."""


def describe(value: Any) -> str:
    """Digest of a value and of the code that it is made of.

    Trainers count as nothing, as traces get their settings apart; of tensors integers and single numbers, which traces
    carry.
    """
    description = _Description()
    description.dump(value)
    return hashlib.sha256(repr((description.digest.hexdigest(), description.code())).encode()).hexdigest()


def settings_of(value: Any) -> dict[str, object]:
    """Simple attributes of an object that a training step may ask, such as a data module, by name.

    The rest of what it holds reaches the step in the batch.
    """
    return {name: item for name, item in sorted(vars(value).items()) if isinstance(item, _PLAIN)}


def describe_processor(device: str) -> object:
    """Facts that decide which kernels the CPU runs, and so their scratch memory; None for a trace for CUDA.

    Reads them without torch, so that a cached profile is found without importing it.
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


class _Description(pickle.Pickler):
    """Hashes the pickle of one value, with descriptions for what a pickle holds by its contents or not at all.

    These are tensors, code, Trainers, and sets and texts, whose order and identity differ between processes.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        super().__init__(SimpleNamespace(write=self.digest.update), protocol=4)
        self._seen: dict[int, tuple[int, Any]] = {}  # with the objects, whose ids must not be given to others meanwhile
        self._storages: dict[int, int] = {}
        self._modules: set[str] = set()
        self._num_items = 0

    def code(self) -> object:
        """What the code of all that was described is."""
        packages = {path for name in self._modules if (path := _package_file(name)) is not None}
        installed = sorted(path for path in packages if owner_of(path) != "user")
        stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in installed]
        sources = {str(module.__file__) for module in list(sys.modules.values()) if _is_users(module)}
        return stamps, sorted(map(_source_hash, sources))

    @override
    def persistent_id(self, value: Any) -> object:
        kind = type(value)
        if kind is str:
            return _describe_text(value)
        if kind in _PLAIN:
            return None
        self._num_items += 1
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"there are more than {_MAX_ITEMS} items to describe")
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and issubclass(kind, torch.Tensor):
            return self._first(value) or self._of_tensor(value)
        if issubclass(kind, FunctionType):
            return self._first(value) or self._of_function(value)
        if issubclass(kind, type):
            self._modules.update(base.__module__ for base in value.__mro__)
            return None
        if issubclass(kind, (ModuleType, BuiltinFunctionType)):
            return str(getattr(value, "__module__", "")), value.__name__
        if kind in (set, frozenset):
            return kind.__name__, sorted(map(repr, value))
        if numpy is not None and issubclass(kind, numpy.ndarray) and value.nbytes > _MAX_BYTES:
            return value.shape, value.strides, str(value.dtype)
        is_trainer = kind.__name__ == "Trainer" and hasattr(value, "fit_loop")
        if f"{kind.__module__}.{kind.__qualname__}" in _WITHOUT_CONTENTS or is_trainer:
            return kind.__qualname__
        return None

    def _first(self, value: Any) -> object:
        """The number of an object that was described before; None of another."""
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return None

    def _of_tensor(self, tensor: Any) -> object:
        """All that a trace takes over of a tensor (`turn_fake`, `RealIntegers`), and whose storage it has."""
        torch, kind = sys.modules["torch"], type(tensor)
        named = "" if kind.__module__.partition(".")[0] == "torch" else repr(kind)  # fakes stand for others
        hooks = [list((one or {}).values()) for one in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
        learned = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, tensor.is_leaf, hooks
        storage = self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))
        layout = tuple(tensor.shape), tensor.stride(), str(tensor.dtype), storage
        return named, layout, learned, self._contents_of(tensor)

    def _contents_of(self, tensor: Any) -> str:
        """The values of a tensor that a trace carries; empty if it carries none."""
        from lightning_memfit.profile.integers import counter_of  # needs torch, which is there with a tensor

        carried = counter_of(tensor)
        is_whole = not tensor.is_floating_point() and tensor.device.type != "meta" and tensor.nbytes <= _MAX_BYTES
        if carried is None and not is_whole:
            return ""
        as_bytes = (tensor.detach().cpu() if carried is None else carried).contiguous().reshape(-1)
        return hashlib.sha256(as_bytes.view(sys.modules["torch"].uint8).numpy().tobytes()).hexdigest()

    def _of_function(self, function: FunctionType) -> object:
        self._modules.add(str(function.__module__))
        held = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        place = function.__qualname__, function.__code__.co_firstlineno
        return function.__module__, place, held, function.__defaults__, function.__kwdefaults__, vars(function)


def _describe_text(text: str) -> object:
    """A text, together with the model's configuration if it names a model folder."""
    if 0 < len(text) < _MAX_PATH and "\n" not in text:
        config = os.path.join(text, "config.json")
        if os.path.isfile(config):  # which `Path.is_file` refuses to say of a name that is too long
            return text.encode(), _source_hash(config).encode()
    return text.encode(errors="surrogatepass")


def _is_users(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and path.endswith(".py") and owner_of(path) == "user" and os.path.isfile(path)


def _package_file(module_name: str) -> str | None:
    """The first file of the package that a module is of; None where versions in the key cover it."""
    package = module_name.partition(".")[0]
    if package in _COVERED_BY_VERSION or package in sys.stdlib_module_names - {"__main__"}:
        return None
    path = getattr(sys.modules.get(package), "__file__", None)
    if path is None:
        path = getattr(sys.modules.get(module_name), "__file__", None)
    if path is None:
        raise ValueError(f"the module `{module_name}` has no source file")
    return str(path)


def _source_hash(path: str) -> str:
    return hashlib.sha256(_read(path, os.stat(path).st_mtime_ns)).hexdigest()


@cache
def _read(path: str, changed_ns: int) -> bytes:
    return Path(path).read_bytes()

"""Stable descriptions of modules, settings, batches and the processor, from which cache keys are made.

`attached_datamodule` and `has_datamodule` find and pass on the data module that a training step may ask. Importing this
module is cheap: a cached profile is found without torch and Lightning.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

from typing_extensions import override

_MAX_DEPTH = 8
"""Deeper nesting is named by its class only."""

_MAX_PATH = 1000

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
        attributes = [(key, describe(value)) for key, value in vars(child).items() if key not in _NOT_STATE]
        parts.append((name, type(child).__qualname__, attributes))
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        parts.append((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    return parts, sorted(sources.values())


def describe_settings(value: Any) -> object:
    """Class with the hash of its source files, and simple attributes.

    This is for objects that a training step may ask, such as a data module: the rest of their contents reaches the
    step in the batch.
    """
    simple = [(key, item) for key, item in sorted(vars(value).items()) if isinstance(item, (bool, int, float, str))]
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


def describe(value: Any, values: bool = False, _depth: int = 0) -> object:
    """A stable description of a value; tensors by shape and dtype, with `values` also by integer contents."""
    if value is None or isinstance(value, (bool, int, float, complex, bytes)):
        return value
    if isinstance(value, str):
        return _describe_text(value)
    if hasattr(value, "untyped_storage"):
        return _describe_tensor(value, values)
    if _depth >= _MAX_DEPTH or hasattr(value, "named_modules"):
        return type(value).__qualname__

    def inner(item: Any) -> object:
        return describe(item, values, _depth + 1)

    if hasattr(value, "items"):
        return [(str(key), inner(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [inner(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(inner(item)) for item in value)
    if isinstance(value, partial):
        return [inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, BuiltinFunctionType):
        return value.__module__, value.__qualname__
    if hasattr(value, "__code__"):
        closure = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        return value.__qualname__, _code_hash(value.__code__), closure, inner(value.__defaults__)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        state = ((key, item) for key, item in vars(value).items() if key not in _NOT_STATE)
        return type(value).__qualname__, [(key, inner(item)) for key, item in state]
    text = repr(value)
    return text if " at 0x" not in text else type(value).__qualname__


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


def _code_hash(code: Any) -> str:
    constants = [item for item in code.co_consts if not hasattr(item, "co_code")]
    return hashlib.sha256(code.co_code + repr((constants, code.co_names)).encode()).hexdigest()


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

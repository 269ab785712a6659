"""Read files of checkpoints without running what is hidden in them, whoever reads them."""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from typing_extensions import override

from lightning_memfit.extras import is_installed
from lightning_memfit.strategies.integrity import ZERO_MARK

_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
"""Classes in the files that DeepSpeed 0.19 writes: plain values under a name."""

_LIGHTNING = {"lightning.fabric.utilities.data": ("AttributeDict",)}
"""What `save_hyperparameters` leaves in a checkpoint."""

_INDEX = {
    *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"),
    *("pathlib.PosixPath", "pathlib.WindowsPath", "torch.distributed.checkpoint.filesystem._StorageInfo"),
}
"""What the index of a distributed checkpoint of torch has besides its own classes and types of numbers."""

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""By this variable `torch.load` refuses code even where its caller, such as DeepSpeed, asks for it."""


class UnsafeCheckpointError(ValueError):
    """A file of a checkpoint asks for a function or class that no checkpoint needs."""


@contextmanager
def without_code(path: str | Path, weights_only: bool | None = None) -> Iterator[None]:
    """Let `torch.load`, whoever calls it, make tensors, plain values, and the classes that upstream's own files have.

    Args:
        path: The checkpoint: in a folder of DeepSpeed's, its own classes are allowed as well.
        weights_only: False asks for everything that is in it, and runs what is hidden there.

    Raises:
        UnsafeCheckpointError: If there is something else in it. It was not made, and nothing of the file ran.
    """
    if weights_only is False:
        yield
        return
    classes: dict[str, tuple[str, ...]] = dict(_LIGHTNING)
    if (Path(path) / ZERO_MARK).is_file() and is_installed("deepspeed"):
        classes |= _DEEPSPEED
    known = [getattr(import_module(module), name) for module, names in classes.items() for name in names]
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals([*known, (partial(_member, path), "builtins.getattr")]):
            yield
    except pickle.UnpicklingError as error:
        raise _refused(path, _found(str(error)), _ALLOW) from error
    finally:
        os.environ.pop(_FORCED)
        os.environ.update({} if before is None else {_FORCED: before})


def _member(path: Any, kind: Any, name: Any) -> Any:
    """A member of an enumeration, for where Python 3.11.0 to 3.11.3, which Debian 12 has, write `getattr`.

    Raises:
        UnsafeCheckpointError: If an attribute of anything else is asked for.
    """
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    what = getattr(kind, "__name__", type(kind).__name__)
    raise _refused(
        path, f"the attribute {str(name)!r} of {what}", "Only members of enumerations are looked up by name."
    )


def _found(message: str) -> str:
    """What torch refused, of its message of several paragraphs."""
    named = re.search(r"(?:GLOBAL |Unsupported class |but got <class ')(\S+)", message)
    return message.splitlines()[0] if named is None else named[1].strip("`'\",>")


_ALLOW = (
    "If it is a class of your own, allow it before loading (`torch.serialization.add_safe_globals([...])`), or save "
    "plain values in its stead."
)


def _refused(file: Any, what: str, fix: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"{str(file)!r} holds {what}, which is neither a tensor nor a plain value: loading it could run any code. {fix}"
    )


class _Index(pickle.Unpickler):
    """Makes what the index of a distributed checkpoint is made of, and nothing else."""

    path: Path

    @override
    def find_class(self, module: str, name: str) -> Any:
        """The classes of an index, or an error."""
        module = "pathlib" if module == "pathlib._local" else module  # where Python 3.13 has them
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return partial(_member, self.path)
        found = getattr(import_module(module), name, None) if module == "torch" and "." not in name else None
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        own = getattr(metadata, name, None) if module == metadata.__name__ else None
        if f"{module}.{name}" in _INDEX or getattr(own, "__module__", "") == metadata.__name__:
            return getattr(import_module(module), name)
        raise _refused(self.path, f"{module}.{name}", "No index of a checkpoint has such a thing.")


def load_index(path: Path) -> Any:
    """Load the index, `.metadata`, of a distributed checkpoint of torch, which torch itself reads by `pickle`.

    Raises:
        UnsafeCheckpointError: If there is something else in it.
    """
    with path.open("rb") as file:
        index = _Index(file)
        index.path = path
        return index.load()

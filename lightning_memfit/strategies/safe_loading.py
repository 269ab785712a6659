"""Read files of checkpoints without running what is hidden in them."""

import io
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import EnumMeta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from typing_extensions import override

from lightning_memfit.extras import is_installed
from lightning_memfit.strategies.integrity import refuse_foreign

_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
"""Classes in the files that DeepSpeed 0.19 writes: plain values under a name."""

_LIGHTNING = {"lightning.fabric.utilities.data": ("AttributeDict",)}
"""What `save_hyperparameters` leaves in a checkpoint."""

_DISTRIBUTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""What the index of a distributed checkpoint of torch is made of, besides types of numbers."""


class UnsafeCheckpointError(ValueError):
    """A file of a checkpoint asks for a function or class that no checkpoint needs."""


def load(
    file: str | Path | IO[bytes],
    weights_only: bool | None = None,
    name: str | Path | None = None,
    of_deepspeed: bool = False,
) -> Any:
    """Load a file of `torch.save`: tensors, plain values, and the classes that upstream's own files have.

    Args:
        file: Path of the file, whose tensors stay on disk until they are used, or a stream.
        weights_only: False asks for everything that is in it, and runs what is hidden there.
        name: What to call a stream in messages.
        of_deepspeed: Whether DeepSpeed wrote it, whose own classes it may hold then.

    Raises:
        CheckpointError: If it is a zip archive that `torch.save` did not write.
        UnsafeCheckpointError: If there is something else in it. It was not made, and nothing of the file ran.
    """
    if isinstance(file, (str, Path)):
        refuse_foreign(Path(file))
    options: dict[str, Any] = {"map_location": "cpu", "mmap": isinstance(file, (str, Path))}
    if weights_only is False:
        return torch.load(file, weights_only=False, **options)  # nosec B614  # asked for by name
    member = partial(_member, name or file)
    with (
        refusing(name or file),
        torch.serialization.safe_globals([*_known(of_deepspeed), (member, "builtins.getattr")]),
    ):
        return torch.load(file, weights_only=True, **options)


@contextmanager
def refusing(name: Any) -> Iterator[None]:
    """Say what torch refuses to load, and from where.

    Raises:
        UnsafeCheckpointError: If it does.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refused(name, _found(str(error)), _ALLOW) from error


def _known(of_deepspeed: bool) -> list[Any]:
    classes: dict[str, tuple[str, ...]] = dict(_LIGHTNING)
    if of_deepspeed and is_installed("deepspeed"):
        classes |= _DEEPSPEED
    return [getattr(import_module(module), name) for module, names in classes.items() for name in names]


def _member(file: Any, kind: Any, name: Any) -> Any:
    """A member of an enumeration, for which Python 3.11.0 to 3.11.3 write `getattr` and its name; nothing else.

    Raises:
        UnsafeCheckpointError: If an attribute of anything else is asked for.
    """
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    what = getattr(kind, "__name__", type(kind).__name__)
    raise _refused(
        file, f"the attribute {str(name)!r} of {what}", "Only members of enumerations are looked up by name."
    )


def _found(message: str) -> str:
    """What torch refused, of its message of several paragraphs."""
    for begin in ("GLOBAL ", "Unsupported class ", "Unsupported global: GLOBAL "):
        if begin in message:
            return message.split(begin, 1)[1].split()[0].strip("`'\",")
    other = re.search(r"but got <class '(.+?)'>", message)
    if other is not None:
        return other[1]
    return message.splitlines()[0]


_ALLOW = (
    "If it is a class of your own, allow it before loading (`torch.serialization.add_safe_globals([...])`), or save "
    "plain values in its stead."
)


def _refused(file: Any, what: str, fix: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"{str(file)!r} holds {what}, which is neither a tensor nor a plain value: loading it could run any code. {fix}"
    )


class _Index(pickle._Unpickler):
    """Makes what the index of a distributed checkpoint is made of, and nothing else.

    It is the unpickler in Python, whose `BUILD` can be overridden: given a class or function, the one in C sets
    attributes of it, by which a file could have this process write wherever it likes.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        super().__init__(stream)
        self.path = path

    @override
    def find_class(self, module: str, name: str) -> Any:
        """The classes of an index, or an error."""
        if module == "pathlib._local":  # where Python 3.13 has them
            module = "pathlib"
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return partial(_member, self.path)
        found = getattr(import_module(module), name, None) if module == "torch" and "." not in name else None
        if (module, name) in _DISTRIBUTED:
            return getattr(import_module(module), name)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        raise _refused(self.path, f"{module}.{name}", "No index of a checkpoint has such a thing.")

    def _build(self: Any) -> None:
        """Give a record its fields; nothing else has any."""
        made = type(self.stack[-2])
        if not (is_dataclass(made) and (made.__module__, made.__name__) in _DISTRIBUTED):
            raise _refused(self.path, f"attributes of a {made.__name__}", "Only records of an index have any.")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    dispatch[pickle.BUILD[0]] = _build


def load_index(path: Path) -> Any:
    """Load the index, `.metadata`, of a distributed checkpoint of torch.

    Raises:
        UnsafeCheckpointError: If there is something else in it.
    """
    return _Index(io.BytesIO(path.read_bytes()), path).load()

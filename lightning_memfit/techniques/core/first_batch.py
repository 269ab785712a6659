"""Read one real batch before training begins, without affecting the run that follows.

It is read from a copy of the data, as reading may count, move files, or use up a stream. What can't be copied, such as
a generator or a queue that a thread fills, is refused. Large tensors, arrays and lists are shared with the copy, which
can't write to them.

This reads `trainer.fit_loop._data_source` (Lightning 2.6), which has no public name:
`tests/contract/techniques/test_first_batch.py` fails if it moves.
"""

import copyreg
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memfit.profile.copying import copied
from lightning_memfit.profile.outside import kept_outside
from lightning_memfit.profile.seal import RefusedError, sealed
from lightning_memfit.profile.threads import one_at_a_time


def first_batch(trainer: Trainer) -> Any:
    """Read one batch of a copy of the training data, in this process.

    Files that reading would write are refused, and global variables and random generators are put back.

    Raises:
        ValueError: If the data are not available yet, are empty, or can't be read without a change: what training gets
            must not depend on it.
    """
    with _unchanged(trainer):
        source = _source(trainer)
        try:
            own, shared = _own(source, trainer)
            with _Unwritten(shared):
                for batch in own:
                    return batch
        except _ReadError:
            raise
        except Exception as error:
            raise _ReadError(f"{type(error).__name__}: {error}") from error
    raise ValueError("the training data is empty.")


def batches_per_epoch(trainer: Trainer) -> int | None:
    """Batches of an epoch as far as loader and Trainer tell before training begins; None if they don't."""
    try:
        with _unchanged(trainer):
            length: float = len(_source(trainer))
    except Exception:  # a loader without a length, or a user's `train_dataloader` that can't be called yet
        length = float("inf")
    limit = trainer.limit_train_batches
    found = min(length, limit) if isinstance(limit, int) else length * limit
    return int(found) if found < float("inf") else None


def training_data_source(trainer: Trainer) -> Any:
    """The object whose method `dataloader` gives a Trainer its training loaders."""
    return trainer.fit_loop._data_source


class _ReadError(ValueError):
    """Data can't be read without a change.

    Args:
        reason: Why, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"a batch can't be read before the run without changing what training gets: {reason.rstrip('.')}. A data "
            "set's `__deepcopy__` can say what its copy reads."
        )


@contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """In this context data are read, but nothing changes.

    Raises:
        ValueError: If something was refused, or has changed that can't be put back.
    """
    owner = getattr(training_data_source(trainer), "instance", None)
    try:
        with one_at_a_time(), isolate_rng(), kept_outside(None, owner), sealed(reading=True):
            yield
    except RefusedError as error:
        raise _ReadError(str(error)) from error


def _source(trainer: Trainer) -> Any:
    try:
        return training_data_source(trainer).dataloader()
    except Exception as error:
        raise ValueError(
            f"the training data can't be had before the run: {type(error).__name__}: {error}. Give a DataLoader to "
            "`fit`, or a LightningDataModule."
        ) from error


def _own(source: Any, trainer: Trainer) -> tuple[Any, list[torch.Tensor]]:
    """A copy of a loader, without workers, prefetching or pinned memory, and the tensors that it shares with it."""
    if not isinstance(source, DataLoader):
        _refuse_iterators(source)
        return _copied(source, trainer)
    is_iterable = isinstance(source.dataset, torch.utils.data.IterableDataset)
    if is_iterable:
        _refuse_iterators(source.dataset)
    given = (source.dataset, None if is_iterable else source.sampler, source.batch_sampler, source.collate_fn)
    (dataset, sampler, batch_sampler, collate), shared = _copied(given, trainer)
    if is_iterable or batch_sampler is None:
        return DataLoader(
            dataset,
            batch_size=source.batch_size,
            sampler=sampler,
            collate_fn=collate,
            drop_last=source.drop_last,
        ), shared
    return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=collate), shared


def _refuse_iterators(source: Any) -> None:
    if hasattr(source, "__next__"):
        raise ValueError(
            f"the training data is an iterator ({type(source).__name__}), and reading a batch would use it up. Give "
            "something that can be iterated over anew, such as a DataLoader."
        )


# --- copies of data ---------------------------------------------------------------------------------------------------

_LARGE_BYTES = 1 << 20

_MANY = 10_000
"""Entries of a list or dictionary that are copied when they are read."""

_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))

_NOT_COPIED = (type, FunctionType, BuiltinFunctionType, ModuleType)


def _copied(value: Any, trainer: Any) -> tuple[Any, list[torch.Tensor]]:
    """A deep copy that shares what is large, and the Trainer, if data know it, and the tensors among that."""
    shared = _shared_parts(value, trainer)
    return copied(value, shared), [one for one in shared.values() if isinstance(one, torch.Tensor)]


def _shared_parts(value: Any, trainer: Any) -> dict[int, Any]:
    """What a copy has for large parts of an object and for the Trainer, by their `id`.

    Raises:
        _ReadError: If it waits for a thread, of which a copy knows nothing.
    """
    found: dict[int, Any] = {id(trainer): trainer}
    known: dict[int, Any] = {id(trainer): trainer}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in _ATOMS or id(one) in known or isinstance(one, _NOT_COPIED):
            continue
        known[id(one)] = one
        if isinstance(one, (threading.Thread, queue.Queue, queue.SimpleQueue)):
            raise _ReadError(f"it has a {kind.__name__}, and what another thread does with it is not in a copy")
        if isinstance(one, torch.Tensor):
            if one.layout == torch.strided and one.nbytes > _LARGE_BYTES:
                found[id(one)] = one
        elif isinstance(one, np.ndarray) and not one.dtype.hasobject:
            if one.nbytes > _LARGE_BYTES:
                found[id(one)] = one.view()
                found[id(one)].flags.writeable = False
        elif hasattr(kind, "__deepcopy__"):
            continue  # it says itself what a copy has
        elif kind in (list, dict):
            entries = list(one.values() if kind is dict else one)
            if len(entries) <= _MANY:
                waiting += entries
            elif set(map(type, entries)) <= _ATOMS:
                found[id(one)] = kind(one)
            else:
                found[id(one)] = (_LargeDict if kind is dict else _LargeList)(one)
        else:
            waiting += _parts(one)
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    slots = [getattr(value, name, None) for name in copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
    attributes = getattr(value, "__dict__", {})
    return [*slots, *(attributes.values() if isinstance(attributes, dict) else ())]


class _LargeList(list[Any]):
    """A list whose entries are copied when they are read."""

    @override
    def __getitem__(self, key: Any) -> Any:
        found = copied(super().__getitem__(key))
        if not isinstance(key, slice):
            super().__setitem__(key, found)
        return found

    @override
    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))


class _LargeDict(dict[Any, Any]):
    """A dictionary whose values are copied when they are read."""

    @override
    def __getitem__(self, key: Any) -> Any:
        found = copied(super().__getitem__(key))
        super().__setitem__(key, found)
        return found

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    @override
    def values(self) -> Any:
        return (self[key] for key in self)

    @override
    def items(self) -> Any:
        return ((key, self[key]) for key in self)


class _Unwritten(TorchDispatchMode):
    """Refuses operators that write to tensors.

    Args:
        tensors: Those that are shared with the data.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments if self._storages else ():
            tensor = given.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(tensor, torch.Tensor):
                continue
            if tensor.untyped_storage().data_ptr() in self._storages:
                raise ValueError(f"{func} writes to a tensor of the data")
        return func(*args, **(kwargs or {}))

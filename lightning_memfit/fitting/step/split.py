"""Find the batch dimension of a batch of any nesting, and split the batch into micro-batches along it.

The loader's batch size says what to look for. What the first full batch shows is remembered: which tensors have a batch
dimension and where, and which lists hold one entry per sample. Everything else is passed whole to every micro-batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_memfit.memory.attach import exchange_tensors
from lightning_memfit.memory.host_copy import HostCopy

SplitHook = Callable[[Any, list[int]], Sequence[Any]]

Path = tuple[Any, ...]
"""Keys, indices and field names from the batch to a part of it."""

_HOST = torch.device("cpu")


class BatchSplitter:
    """Split batches into micro-batches along their batch dimension.

    Mappings (Hugging Face `BatchEncoding` among them), lists, tuples, named tuples and dataclasses are walked through.
    Tensors and NumPy arrays with a batch dimension are split without copying, columns of padding included; lists of one
    entry per sample are sliced; everything else is passed whole to every micro-batch. The batch dimension is the first;
    only if no tensor of the batch has the loader's batch size there, it is the second (time-major sequences). Batches
    of graphs that say how many they hold (`num_graphs`) are counted so, and cut by their own `index_select`, as PyTorch
    Geometric's `Batch` has it.

    Args:
        hook: `split_batch(batch, sizes) -> parts` for batches that can't be split that way: graphs, ragged data,
            custom classes.
        num_samples: Number of samples in a batch, for use with `hook`; without it `len(batch)` counts, or what the
            tensors of the batch say.
        expected: The loader's batch size, if known.
        remainder: Samples of the loader's last batch if that is smaller, if known.
    """

    def __init__(
        self,
        hook: SplitHook | None = None,
        num_samples: Callable[[Any], int] | None = None,
        expected: int | None = None,
        remainder: int | None = None,
    ) -> None:
        self._hook = hook
        self._num_samples = num_samples
        self._expected = expected if expected is not None and expected > 1 else None
        self._remainder = remainder or None
        self._dims: dict[Path, int | None] = {}  # of tensors; None: passed whole
        self._per_sample: set[Path] = set()
        self._shares_no_first = False
        self._is_learned = False

    # --- how many samples -------------------------------------------------------------------------------------------

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        Raises:
            ValueError: If the batch contradicts the loader's batch size, an earlier batch or itself.
        """
        if self._num_samples is not None:
            return int(self._num_samples(batch))
        if self._hook is not None and hasattr(batch, "__len__") and not _is_container(batch):
            return len(batch)
        if type(batch) is Tensor and (shape := batch.shape) and self._is_plain(shape[0]):  # needs no search
            return shape[0]
        if _num_graphs(batch) is not None:
            return int(batch.num_graphs)
        leaves, lists = list(_tensors(batch)), list(_lists(batch))
        known = self._known_sizes(leaves, lists)
        if len(known) == 1:
            return known.pop()
        if len(known) > 1:
            return self._settle(leaves, known, batch)
        count, dim = self._find(batch, leaves, lists)
        if count > 1:
            self._learn(leaves, lists, count, dim)
        return count

    def _is_plain(self, size: int) -> bool:
        """Whether a batch that is one tensor has its batch dimension where tensors usually have it."""
        return self._dims.get(()) == 0 or (() not in self._dims and self._expected in (None, size))

    def _known_sizes(self, leaves: list[tuple[Path, Any]], lists: list[tuple[Path, Any]]) -> set[int]:
        """Return the sizes of what had a batch dimension in earlier batches; one if the batch is as they were."""
        found: set[int] = set()
        for path, leaf in leaves:
            dim = self._dims.get(path)
            if dim is not None and leaf.ndim > dim:
                found.add(int(leaf.shape[dim]))
        if self._per_sample:
            found.update(len(value) for path, value in lists if path in self._per_sample)
        return found

    def _settle(self, leaves: list[tuple[Path, Any]], sizes: set[int], batch: Any) -> int:
        """Resolve a contradiction to earlier batches: a constant can have had as many rows as a full batch."""
        if self._remainder in sizes and sizes == {self._remainder, self._expected}:
            for path, leaf in leaves:
                dim = self._dims.get(path)
                if dim is not None and leaf.ndim > dim and leaf.shape[dim] == self._expected:
                    self._dims[path] = None
            return int(self._remainder or 0)
        raise ValueError(
            f"Parts of the batch that had equal numbers of samples before now have {sorted(sizes)}: {_shapes(batch)}. "
            f"{_WAY_OUT}"
        )

    def _find(self, batch: Any, leaves: list[tuple[Path, Any]], lists: list[tuple[Path, Any]]) -> tuple[int, int]:
        """Return the number of samples and the batch dimension."""
        promised = [size for size in (self._expected, self._remainder) if size is not None]
        for size in promised:
            if any(leaf.shape[0] == size for _, leaf in leaves) or any(len(value) == size for _, value in lists):
                return size, 0
        for size in promised:
            if any(leaf.ndim > 1 and leaf.shape[1] == size for _, leaf in leaves):
                return size, 1
        sizes = {int(leaf.shape[0]) for _, leaf in leaves} or {len(value) for _, value in lists if value}
        if self._expected is not None and sizes and not (self._remainder is None and max(sizes) < self._expected):
            raise ValueError(
                f"The loader's batch size is {self._expected}, but nothing in the batch has this size: "
                f"{_shapes(batch)}. {_WAY_OUT}"
            )
        if len(sizes) == 1:
            return sizes.pop(), 0
        found = f"first dimensions {sorted(sizes)}" if sizes else f"a `{type(batch).__name__}` without tensors"
        raise ValueError(f"The batch size can't be told from the batch ({found}). {_WAY_OUT}")

    def _learn(self, leaves: list[tuple[Path, Any]], lists: list[tuple[Path, Any]], count: int, dim: int) -> None:
        """Remember what has a batch dimension, if this batch is a full one or nobody knows."""
        if self._expected not in (None, count):
            return
        self._is_learned = True
        for _, value in lists:
            if _is_per_sample(value, count, self._shares_no_first):
                self._shares_no_first = True
        self._per_sample |= {p for p, value in lists if _is_per_sample(value, count, self._shares_no_first)}
        for path, leaf in leaves:
            if not any(path[: len(above)] == above for above in self._per_sample):
                self._dims[path] = dim if leaf.ndim > dim and leaf.shape[dim] == count else None

    def cuts(self, batch: Any) -> frozenset[Path]:
        """Return what of a batch is split: where that changes, it may be cut in the wrong place."""
        if self._hook is not None or not _is_container(batch):
            return frozenset()
        count = self.count(batch)
        found = {path for path, leaf in _tensors(batch) if self._dim(leaf, path, count) is not None}
        return frozenset(found | {path for path, value in _lists(batch) if path in self._per_sample})

    # --- splitting --------------------------------------------------------------------------------------------------

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Split into parts of the given sizes, which add up to the number of samples.

        Raises:
            ValueError: If part of the batch can't be split, or the hook returns a wrong number of parts.
        """
        if self._hook is not None:
            parts = list(self._hook(batch, sizes))
            if len(parts) != len(sizes):
                raise ValueError(
                    f"`split_batch(batch, sizes={sizes})` returned {len(parts)} parts. Return one for each of the "
                    f"{len(sizes)} sizes."
                )
            return parts
        if len(sizes) == 1:
            return [batch]
        if _num_graphs(batch) is not None:
            return _split_graphs(batch, sizes)
        return self._split(batch, (), sizes, sum(sizes))

    def _split(self, value: Any, path: Path, sizes: list[int], total: int) -> list[Any]:
        if isinstance(value, Tensor):
            return self._split_tensor(value, path, sizes, total)
        if _is_array(value):
            dim = self._dim(value, path, total)
            return [value] * len(sizes) if dim is None else _slices(value, sizes, dim)
        if isinstance(value, Mapping) and is_batched(value, total):
            return _slices(value, sizes)
        if isinstance(value, Mapping):
            columns = {key: self._split(one, (*path, key), sizes, total) for key, one in value.items()}
            return _rebuild_mapping(value, columns, len(sizes))
        if _is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            columns = {name: self._split(one, (*path, name), sizes, total) for name, one in fields.items()}
            return _rebuild_dataclass(value, columns, len(sizes))
        if isinstance(value, (list, tuple)):
            found = path in self._per_sample if self._is_learned else _is_per_sample(value, total, False)
            if found and len(value) == total:
                return _slices(value, sizes)
            items = [self._split(one, (*path, index), sizes, total) for index, one in enumerate(value)]
            return [_rebuild_sequence(value, row) for row in zip(*items, strict=True)] or [value] * len(sizes)
        return [value] * len(sizes)

    def _split_tensor(self, tensor: Tensor, path: Path, sizes: list[int], total: int) -> list[Tensor]:
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            raise ValueError(
                f"The batch contains a {kind} tensor, which can't be split. Define `split_batch(batch, sizes)`."
            )
        dim = self._dim(tensor, path, total)
        return [tensor] * len(sizes) if dim is None else list(tensor.split(sizes, dim))

    def _dim(self, leaf: Any, path: Path, total: int) -> int | None:
        """Return the batch dimension of a tensor or array: as in the first full batch, else by its size."""
        dim = self._dims.get(path, 0)
        return dim if dim is not None and leaf.ndim > dim and leaf.shape[dim] == total else None


_WAY_OUT = (
    "Define `split_batch(batch, sizes)` and `num_samples(batch)` on the LightningModule, or pass them to "
    "`MicroBatching`."
)


def _num_graphs(batch: Any) -> int | None:
    """How many graphs a batch says it holds; None if it isn't one of graphs."""
    number = None if _is_container(batch) else getattr(batch, "num_graphs", None)
    return number if isinstance(number, int) else None


def _split_graphs(batch: Any, sizes: list[int]) -> list[Any]:
    """Split a batch of graphs by what its class offers for it."""
    together = next((kind for kind in type(batch).__mro__ if "from_data_list" in vars(kind)), None)
    if together is None or not hasattr(batch, "index_select"):
        raise ValueError(
            f"A `{type(batch).__name__}` of {batch.num_graphs} graphs can't be split: it has no `index_select` and "
            "`from_data_list`. Define `split_batch(batch, sizes)`."
        )
    parts = (batch.index_select(list(range(e - size, e))) for e, size in zip(accumulate(sizes), sizes, strict=True))
    return [together.from_data_list(part) for part in parts]  # type: ignore[attr-defined]


def sizes_of(num_samples: int, micro_batch_size: int) -> list[int]:
    """Return the sizes of micro-batches for a number of samples; only the last may be smaller.

    A single sample is not left over where that can be helped: layers of batch statistics can't run one.
    """
    full, rest = divmod(num_samples, micro_batch_size)
    if rest == 1 and full and micro_batch_size > 2:
        return [micro_batch_size] * (full - 1) + [micro_batch_size - 1, 2]
    return [micro_batch_size] * full + ([rest] if rest else [])


# --- copies, for steps that change what they are given --------------------------------------------------------------


def with_own_containers(batch: Any) -> Any:
    """Return the batch in new containers of the same kinds; tensors and everything else stay the same objects."""
    if type(batch) is Tensor:
        return batch
    return _rebuilt(batch, lambda leaf: leaf)


def with_own_tensors(batch: Any) -> Any:
    """Return a copy of the batch that shares no containers, tensors or arrays with it.

    Objects of unknown classes are deep-copied as well if they can be.
    """
    return _rebuilt(batch, _copied)


def versions(batch: Any) -> list[int]:
    """Return the version counters of a batch's tensors, which grow whenever one is changed in place.

    Those that are made in inference mode have none, which counts as 0.
    """
    tensors = [batch] if type(batch) is Tensor else tensors_of(batch)
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    return [leaf for _, leaf in _tensors(batch, with_scalars=True) if isinstance(leaf, Tensor)]


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, MutableMapping):
        columns = {key: [_rebuilt(one, leaf)] for key, one in value.items()}
        return _rebuild_mapping(value, columns, 1)[0]
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _rebuild_dataclass(value, {name: [_rebuilt(getattr(value, name), leaf)] for name in names}, 1)[0]
    if isinstance(value, (list, tuple)):
        return _rebuild_sequence(value, tuple(_rebuilt(one, leaf) for one in value))
    return leaf(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    try:
        return copy.deepcopy(value)
    except Exception:  # open files, locks: what can't be copied is passed as it is
        return value


@dataclasses.dataclass(slots=True)
class KeptBatch:
    """What a batch was before its step.

    Attributes:
        batch: The same tensors in containers that the step does not see.
        versions: Version counters of its tensors.
        copies: Values of its tensors, if they were copied.
    """

    batch: Any
    versions: list[int]
    copies: list[tuple[Tensor, HostCopy]] | None

    @property
    def has_changed(self) -> bool:
        """Whether a tensor of it has been changed in place; where it has no version, as far as copies tell."""
        if versions(self.batch) != self.versions:
            return True
        uncounted = ((t, copy) for t, copy in self.copies or () if type(t) is Tensor and t.is_inference())
        return any(t.layout == torch.strided and not t.is_nested and not _is_in(copy, t) for t, copy in uncounted)


def _is_in(copy: HostCopy, tensor: Tensor) -> bool:
    try:
        return copy.is_in(tensor)
    except Exception:  # no memory, or a type without comparison: the copy is there to be written back
        return False


class BatchGuard:
    """Keeps batches so that their step can be repeated.

    Containers are copied in every step, which is cheap. Tensors are copied to host memory in the first step, and from
    then on only if that step has changed one in place.

    Args:
        step: Name of the step, for messages.
    """

    def __init__(self, step: str = "training_step") -> None:
        self._step = step
        self._copies = True

    def keep(self, batch: Any) -> KeptBatch:
        """Keep a batch before its step."""
        copies = [(t, HostCopy(t)) for t in tensors_of(batch)] if self._copies else None
        return KeptBatch(with_own_containers(batch), versions(batch), copies)

    def learn(self, kept: KeptBatch) -> None:
        """Note after a step whether it has changed a tensor of its batch."""
        if self._copies:
            self._copies = kept.has_changed

    def restored(self, kept: KeptBatch) -> Any:
        """Return the batch as it was, in containers of its own.

        Raises:
            RuntimeError: If a step has changed a tensor for the first time, and there is no copy of it.
        """
        if kept.has_changed:
            if kept.copies is None:
                raise RuntimeError(
                    f"`{self._step}` has changed its batch in place for the first time, and memory ran out in it: the "
                    f"batch can't be repeated as it was. Change a copy of the batch in `{self._step}`, or give it "
                    "fewer samples at once."
                )
            for tensor, copy in kept.copies:
                copy.restore(tensor)
            kept.versions = versions(kept.batch)
        return with_own_containers(kept.batch)

    def put_aside(self, kept: KeptBatch) -> KeptBatch:
        """Return what is kept of a batch whose step is done in host memory, to repeat it after later ones.

        It is the batch as it was before the step, whatever that has made of it; what the step has left of it stays.
        """
        if not kept.has_changed:
            batch = move_data_to_device(kept.batch, _HOST)
            return KeptBatch(with_own_containers(batch), versions(batch), None)
        if kept.copies is None:
            return kept  # `restored` says so
        values = {id(tensor): copy for tensor, copy in kept.copies}
        batch = exchange_tensors(
            with_own_containers(kept.batch), lambda t: values[id(t)].moved_to(_HOST) if id(t) in values else t
        )
        return KeptBatch(batch, versions(batch), [(t, HostCopy(t)) for t in tensors_of(batch)])


# --- walking through a batch ----------------------------------------------------------------------------------------


def _tensors(value: Any, path: Path = (), with_scalars: bool = False) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor and array that has dimensions."""
    if isinstance(value, Tensor) or _is_array(value):
        if with_scalars or (value.ndim and not getattr(value, "is_nested", False)):
            yield path, value
    else:
        for key, child in children(value):
            yield from _tensors(child, (*path, key), with_scalars)


def _lists(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every sequence that may hold one entry per sample."""
    if isinstance(value, (list, tuple)) and value and not hasattr(value, "_fields"):
        yield path, value
    for key, child in children(value):
        yield from _lists(child, (*path, key))


def children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a mapping, a sequence or a dataclass with their keys."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif _is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _is_per_sample(value: Sequence[Any], count: int, others_are: bool) -> bool:
    """Whether a sequence holds one entry per sample, rather than one per field.

    If all tensors in it have the batch size, they are fields, unless other sequences of the batch are surely per
    sample. If some have it and others don't, entries of one kind are samples, and entries of several kinds fields.
    """
    if len(value) != count or hasattr(value, "_fields"):
        return False
    sizes = [leaf.shape[0] == count for _, leaf in _tensors(list(value))]
    is_of_one_kind = len({_kind(one) for one in value}) == 1
    if all(sizes):
        return not sizes or (others_are and is_of_one_kind)
    return others_are or not any(sizes) or is_of_one_kind


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor) or _is_array(value):
        return type(value), value.ndim, str(value.dtype), tuple(value.shape[1:])
    return (type(value), tuple(sorted(map(str, value)))) if isinstance(value, Mapping) else type(value)


def _shapes(batch: Any) -> str:
    """Return the names and shapes of a batch's tensors, for errors."""
    found = [f"{'.'.join(map(str, path)) or 'the tensor'} {tuple(leaf.shape)}" for path, leaf in _tensors(batch)]
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else f"a `{type(batch).__name__}`"


def _is_container(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list, tuple, Tensor)) or _is_dataclass(batch)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_batched(value: Any, total: int) -> bool:
    """Whether an object knows that all in it has the batch dimension, as a `TensorDict` does."""
    size = getattr(value, "batch_size", None)
    return isinstance(size, torch.Size) and size[:1] == (total,)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ndim") and hasattr(value, "__len__")


def _slices(value: Any, sizes: list[int], dim: int = 0) -> list[Any]:
    rows = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [value[(slice(None),) * dim + (row,)] if dim else value[row] for row in rows]


def _rebuild_mapping(value: Mapping[Any, Any], columns: dict[Any, list[Any]], count: int) -> list[Any]:
    parts = []
    for index in range(count):
        part: Any = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, column in columns.items():
            part[key] = column[index]
        parts.append(part)
    return parts


def _rebuild_sequence(value: Any, row: tuple[Any, ...]) -> Any:
    return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)


def _rebuild_dataclass(value: Any, columns: dict[str, list[Any]], count: int) -> list[Any]:
    parts = [copy.copy(value) for _ in range(count)]
    for name, column in columns.items():
        for part, item in zip(parts, column, strict=True):
            object.__setattr__(part, name, item)
    return parts

"""Find the samples of a batch of any nesting, and split the batch into micro-batches along its first dimension.

The loader's batch size says what to look for. What the first full batch shows is remembered: which tensors have one row
per sample, and which lists hold one entry per sample. Everything else is passed whole to every micro-batch.
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
_WAY_OUT = (
    "Define `split_batch(batch, sizes)` and `num_samples(batch)` on the LightningModule, or pass them to "
    "`MicroBatching`."
)


class BatchSplitter:
    """Split batches into micro-batches along their first dimension.

    Mappings (Hugging Face `BatchEncoding` among them), lists, tuples, named tuples and dataclasses are walked through.
    Tensors and NumPy arrays with one row per sample are split without copying, columns of padding included; lists of
    one entry per sample are sliced; everything else is passed whole to every micro-batch. Batches of graphs that say
    how many they hold (`num_graphs`) are counted so, and cut by their own `index_select`, as PyTorch Geometric's
    `Batch` has it.

    Args:
        hook: `split_batch(batch, sizes) -> parts` for batches that can't be split that way: time-major sequences,
            ragged data, custom classes.
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
        self._is_cut: dict[Path, bool] = {}  # of tensors and lists, in the first full batch

    # --- how many samples -------------------------------------------------------------------------------------------

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        Raises:
            ValueError: If the batch contradicts the loader's batch size, the first batch or itself.
        """
        if self._num_samples is not None:
            return int(self._num_samples(batch))
        if self._hook is not None and hasattr(batch, "__len__") and not _is_container(batch):
            return len(batch)
        if type(batch) is Tensor and batch.ndim and self._expected in (None, batch.shape[0]):  # needs no search
            return batch.shape[0]
        if _num_graphs(batch) is not None:
            return int(batch.num_graphs)
        known = {len(part) for path, part in parts_of(batch) if self._is_cut.get(path)} if self._is_cut else set()
        if len(known) == 1:
            return known.pop()
        if known == {self._remainder, self._expected}:  # a constant has as many rows as a full batch
            return int(self._remainder or 0)
        if known:
            raise ValueError(
                f"Parts of the batch that had equal numbers of samples before now have {sorted(known)}: "
                f"{_shapes(batch)}. {_WAY_OUT}"
            )
        count = self._find(batch)
        if count > 1 and self._expected in (None, count):
            self._is_cut = {path: is_cut for path, _, is_cut in self._walk(batch, count)}
        return count

    def _find(self, batch: Any) -> int:
        """Return the number of samples of a batch, as the loader or its tensors say."""
        tensors = [part for _, part in parts_of(batch) if not isinstance(part, (list, tuple))]
        lengths = {len(part) for _, part in parts_of(batch)}
        for size in (self._expected, self._remainder):
            if size in lengths:
                return int(size or 0)
        sizes = {len(part) for part in tensors} or lengths
        if self._expected is not None and sizes and (self._remainder is not None or max(sizes) >= self._expected):
            raise ValueError(
                f"The loader's batch size is {self._expected}, but nothing in the batch has this size in its first "
                f"dimension: {_shapes(batch)}. {_WAY_OUT}"
            )
        if len(sizes) == 1:
            return sizes.pop()
        found = f"first dimensions {sorted(sizes)}" if sizes else f"a `{type(batch).__name__}` without tensors"
        raise ValueError(f"The batch size can't be told from the batch ({found}). {_WAY_OUT}")

    def cuts(self, batch: Any) -> frozenset[Path]:
        """Return what of a batch is split: where that changes, it may be cut in the wrong place."""
        if self._hook is not None or not _is_container(batch):
            return frozenset()
        return frozenset(path for path, _, is_cut in self._walk(batch, self.count(batch)) if is_cut)

    def _walk(self, batch: Any, count: int) -> Iterator[tuple[Path, Any, bool]]:
        """Yield tensors, arrays and lists with whether they are cut; nothing inside of lists that are."""
        others_are = not self._is_cut and any(_is_per_sample(part, count, False) for _, part in parts_of(batch))
        inside: list[Path] = []
        for path, part in parts_of(batch):  # what is inside of a list comes after it
            if any(path[: len(above)] == above for above in inside):
                continue
            is_list = isinstance(part, (list, tuple))
            is_cut = len(part) == count and self._is_cut.get(path, True)
            if is_list and path not in self._is_cut:
                is_cut = _is_per_sample(part, count, others_are)
            if is_list and is_cut:
                inside.append(path)
            yield path, part, is_cut

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
        total = sum(sizes)
        return self._split(batch, (), sizes, {path for path, _, is_cut in self._walk(batch, total) if is_cut})

    def first(self, batch: Any, size: int) -> Any:
        """Return the first samples of a batch, as they are split in training."""
        rest = self.count(batch) - size
        return self.split(batch, [size, rest])[0] if rest > 0 else batch

    def _split(self, value: Any, path: Path, sizes: list[int], cut: set[Path]) -> list[Any]:
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            kind = "nested" if value.is_nested else "sparse"
            raise ValueError(
                f"The batch contains a {kind} tensor, which can't be split. Define `split_batch(batch, sizes)`."
            )
        if path in cut or _is_batched(value, sum(sizes)):
            return [value[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        if isinstance(value, Mapping):
            columns = {key: self._split(one, (*path, key), sizes, cut) for key, one in value.items()}
            return _rebuild_mapping(value, columns, len(sizes))
        if _is_dataclass(value):
            columns = {key: self._split(one, (*path, key), sizes, cut) for key, one in _children(value)}
            return _rebuild_dataclass(value, columns, len(sizes))
        if isinstance(value, (list, tuple)):
            items = [self._split(one, (*path, index), sizes, cut) for index, one in enumerate(value)]
            return [_rebuild_sequence(value, row) for row in zip(*items, strict=True)] or [value] * len(sizes)
        return [value] * len(sizes)


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
    """What a batch was before its step: the same tensors in containers of its own, and copies of their values."""

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


def parts_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor and array that has dimensions, and every sequence that may hold one entry per sample."""
    if isinstance(value, Tensor) or _is_array(value):
        if not getattr(value, "is_nested", False) and value.ndim:
            yield path, value
        return
    if isinstance(value, (list, tuple)) and value and not hasattr(value, "_fields"):
        yield path, value
    for key, child in _children(value):
        yield from parts_of(child, (*path, key))


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a mapping, a sequence or a dataclass with their keys."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif _is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, child in _children(value) for tensor in tensors_of(child)]


def _is_per_sample(value: Any, count: int, others_are: bool) -> bool:
    """Whether this is a sequence of one entry per sample, rather than one per field.

    If all tensors in it have the batch size, they are fields, unless other sequences of the batch are surely per
    sample. If some have it and others don't, entries of one kind are samples, and entries of several kinds fields.
    """
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return False
    sizes = [len(part) == count for _, part in parts_of(list(value)) if not isinstance(part, (list, tuple))]
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
    found = [
        f"{'.'.join(map(str, path)) or 'the tensor'} {tuple(part.shape)}"
        for path, part in parts_of(batch)
        if not isinstance(part, (list, tuple))
    ]
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else f"a `{type(batch).__name__}`"


def _is_container(batch: Any) -> bool:
    return isinstance(batch, (Mapping, list, tuple, Tensor)) or _is_dataclass(batch)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_batched(value: Any, total: int) -> bool:
    """Whether a mapping knows that all in it has one row per sample, as a `TensorDict` does."""
    size = getattr(value, "batch_size", None) if isinstance(value, Mapping) else None
    return isinstance(size, torch.Size) and size[:1] == (total,)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ndim") and hasattr(value, "__len__")


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

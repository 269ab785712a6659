"""The batch that needs the most memory: the longest sequences the data can give."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset


def longest_samples(loader: Any, num_samples: int) -> Any | None:
    """Collate the longest samples of a loader's data set, apart from the loader's own iteration.

    Lengths are taken from the data set's attribute `lengths` or its column `length`; without them the answer is None.

    Args:
        loader: The training loader.
        num_samples: How many samples.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        return None
    lengths = _lengths(loader.dataset)
    if lengths is None or len(lengths) < num_samples or loader.collate_fn is None:
        return None
    order = torch.as_tensor(lengths).argsort(descending=True, stable=True)
    return loader.collate_fn([loader.dataset[int(index)] for index in order[:num_samples]])


def lengthened(batch: Any, length: int) -> Any:
    """Lengthen the sequences of a batch by repeating their last column.

    Sequences are the tensors (samples, length, ...) that agree with `input_ids` in their second dimension, or, in
    batches without, all integer tensors of two dimensions.

    Args:
        batch: The batch.
        length: Length wanted; sequences that are longer already stay.
    """
    if isinstance(batch, Mapping):
        current = batch["input_ids"].size(1) if "input_ids" in batch else None
        longer = dict(batch)
        for key, value in batch.items():
            if isinstance(value, Tensor) and _is_sequence(value, current):
                longer[key] = _repeat_last(value, length)
        return longer
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(
            _repeat_last(v, length) if isinstance(v, Tensor) and _is_sequence(v, None) else v for v in batch
        )
    if isinstance(batch, Tensor) and _is_sequence(batch, None):
        return _repeat_last(batch, length)
    return batch


def _is_sequence(value: Tensor, current: int | None) -> bool:
    if current is not None:
        return value.ndim >= 2 and value.size(1) == current
    return value.ndim == 2 and not value.is_floating_point()


def _repeat_last(value: Tensor, length: int) -> Tensor:
    missing = length - value.size(1)
    if missing <= 0:
        return value
    return torch.cat([value, value[:, -1:].expand(-1, missing, *value.shape[2:])], dim=1)


def _lengths(dataset: Any) -> Sequence[int] | None:
    if isinstance(dataset, Subset):
        lengths = _lengths(dataset.dataset)
        return None if lengths is None else [lengths[index] for index in dataset.indices]
    lengths = getattr(dataset, "lengths", None)
    if lengths is None and "length" in (getattr(dataset, "column_names", None) or ()):
        lengths = dataset["length"]
    return lengths if lengths is None or hasattr(lengths, "__len__") else None

"""Split a batch of any nesting into micro-batches, each with its weight in the loss of the effective batch.

A mean over the effective batch is the weighted mean of the means over its micro-batches, where the weight of a
micro-batch is the number its mean was taken over: samples, or label tokens that are not masked.
"""

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

SplitHook = Callable[[Any, list[int]], Sequence[Any]]
LossWeight = Callable[[Any], "float | Tensor"]

IGNORE_INDEX = -100
_WHOLE = (str, bytes, numbers.Number, torch.dtype, torch.device, type(None))
_WITHOUT_LABELS = (Tensor, list, tuple)


class LocalBatch:
    """The number of samples of this device's loader batch, and their weight in the loss.

    Args:
        num_samples: Number of samples in the batch.
        weight: Number of samples or label tokens that its loss is a mean over.
        rows: Weight of every sample, if weights differ and are independent of each other.
        loss_weight: The user's function, called on every part, if the user gave one.
    """

    def __init__(
        self,
        num_samples: int,
        weight: float,
        rows: list[int] | None = None,
        loss_weight: LossWeight | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.weight = weight
        self._rows = rows
        self._loss_weight = loss_weight

    def weights_of(self, parts: list[Any], sizes: list[int]) -> list[float]:
        """Return the weight of each micro-batch.

        Raises:
            ValueError: If the user's weights for the parts don't add up to that for the whole.
        """
        if self._loss_weight is not None:
            weights = [float(self._loss_weight(part)) for part in parts]
            if abs(sum(weights) - self.weight) > 1e-6 * max(abs(self.weight), 1.0):
                raise ValueError(
                    f"`loss_weight` of the parts {weights} adds up to {sum(weights)}, of the whole batch to "
                    f"{self.weight}. Return what the loss is a mean over: a count that adds up."
                )
            return weights
        if self._rows is None:
            return [float(size) for size in sizes]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [float(sum(self._rows[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


class BatchSplitter:
    """Split batches into micro-batches along dimension 0 of their tensors.

    Mappings (Hugging Face `BatchEncoding` among them), lists, tuples, named tuples and dataclasses are walked through;
    tensors and NumPy arrays whose first dimension is the batch size are split without copying, columns of padding
    included; lists of one object per sample are sliced; scalars, strings and tensors of other sizes are passed whole to
    every micro-batch.

    Args:
        hook: `split_batch(batch, sizes) -> parts` for batches that can't be split that way: graphs, ragged data,
            custom classes.
        num_samples: Number of samples in a batch, for use with `hook`; without it `len(batch)` counts, or what the
            tensors of the batch say.
        loss_weight: Function from a batch or a part of it to the number that its loss is averaged over. Without it,
            unmasked label tokens count if the batch has integer `labels`, else samples.
        shifts_labels: Whether the loss predicts the next token, so that the first label of each sample never counts.
        expected: The loader's batch size, if known. It decides what a list of equally sized tensors is: one tensor
            per sample (`expected` of them) or one tensor per field.
    """

    def __init__(
        self,
        hook: SplitHook | None = None,
        num_samples: Callable[[Any], int] | None = None,
        loss_weight: LossWeight | None = None,
        shifts_labels: bool = False,
        expected: int | None = None,
    ) -> None:
        self._hook = hook
        self._num_samples = num_samples
        self._loss_weight = loss_weight
        self._shifts_labels = shifts_labels
        self._expected = expected
        self._per_sample_lists = False

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        Raises:
            ValueError: If the number is ambiguous.
        """
        if self._num_samples is not None:
            return int(self._num_samples(batch))
        if self._hook is not None and hasattr(batch, "__len__") and not _is_container(batch):
            return len(batch)
        expected = self._expected
        if expected is not None and expected > 1:  # a ragged batch shows nothing; what was learned before stays valid
            if any(size == expected for size in _first_sizes(batch)):
                self._per_sample_lists = False
                return expected
            if any(len(leaf) == expected for leaf in _lists(batch)):
                self._per_sample_lists = True
        if self._per_sample_lists:
            return next(len(leaf) for leaf in _lists(batch))
        return _vote(batch, expected)

    def read(self, batch: Any, num_samples: int | None = None) -> LocalBatch:
        """Count and weigh the samples of a batch: by the user's function, by unmasked label tokens, or one each.

        Tokens count if the batch has integer `labels`, (samples, ...), with `-100` for tokens that the loss ignores.
        Reading the counts waits for the device once.

        Args:
            batch: Batch from the loader.
            num_samples: Its number of samples, if already counted.
        """
        count = self.count(batch) if num_samples is None else num_samples
        if self._loss_weight is not None:
            return LocalBatch(count, float(self._loss_weight(batch)), loss_weight=self._loss_weight)
        labels = None
        if type(batch) not in _WITHOUT_LABELS:  # looking for labels where there are none is slow
            labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim == 0 or len(labels) != count:
            return LocalBatch(count, float(count))
        counted = labels[:, 1:] if self._shifts_labels and labels.ndim > 1 else labels
        rows = counted.ne(IGNORE_INDEX).reshape(count, -1).sum(1).tolist()
        return LocalBatch(count, float(sum(rows)), rows)

    def micro_batches(self, batch: Any, local: LocalBatch, size: int) -> tuple[list[Any], list[int], list[float]]:
        """Split a batch into micro-batches of a size; only the last may be smaller.

        Returns:
            The micro-batches, their numbers of samples and their weights.
        """
        sizes = sizes_of(local.num_samples, size)
        parts = self.split(batch, sizes)
        return parts, sizes, local.weights_of(parts, sizes)

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
        return self._split(batch, sizes, sum(sizes))

    def _split(self, value: Any, sizes: list[int], total: int) -> list[Any]:
        if isinstance(value, Tensor):
            return _split_tensor(value, sizes, total)
        if _is_array(value):
            return _slices(value, sizes) if value.ndim and len(value) == total else [value] * len(sizes)
        if isinstance(value, _WHOLE):
            return [value] * len(sizes)
        if isinstance(value, Mapping):
            return _rebuild_mapping(value, {key: self._split(one, sizes, total) for key, one in value.items()}, sizes)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _rebuild_dataclass(value, self._split, sizes, total)
        if isinstance(value, (list, tuple)):
            if self._is_per_sample(value, total):
                return _slices(value, sizes)
            return [
                _rebuild_sequence(value, row)
                for row in zip(*(self._split(v, sizes, total) for v in value), strict=True)
            ] or [value] * len(sizes)
        raise ValueError(
            f"The batch contains a `{type(value).__name__}`, which has no known batch dimension. Define "
            "`split_batch(batch, sizes)` on the LightningModule or pass `MicroBatching(split_batch=...)`."
        )

    def _is_per_sample(self, value: Sequence[Any], total: int) -> bool:
        if len(value) != total or hasattr(value, "_fields"):
            return False
        return self._per_sample_lists or not any(size == total for size in _first_sizes(value))


def sizes_of(num_samples: int, micro_batch_size: int) -> list[int]:
    """Return the sizes of micro-batches for a number of samples; only the last may be smaller."""
    full, rest = divmod(num_samples, micro_batch_size)
    return [micro_batch_size] * full + ([rest] if rest else [])


def _vote(batch: Any, expected: int | None) -> int:
    sizes = list(_first_sizes(batch)) or [len(leaf) for leaf in _lists(batch)]
    if expected is not None and expected in sizes:
        return expected
    if sizes and len(set(sizes)) == 1:
        return sizes[0]
    found = f"first dimensions {sorted(set(sizes))}" if sizes else f"a `{type(batch).__name__}` without tensors"
    raise ValueError(
        f"The batch size can't be told from the batch ({found}). Define `split_batch(batch, sizes)` and "
        "`num_samples(batch)` on the LightningModule or pass them to `MicroBatching`."
    )


def _first_sizes(value: Any) -> Iterator[int]:
    if isinstance(value, Tensor) or _is_array(value):
        if value.ndim:
            yield value.shape[0]  # `len` of a tensor is ten times slower
    else:
        for child in _children(value):
            yield from _first_sizes(child)


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list) and value:
        yield value
    for child in _children(value):
        yield from _lists(child)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, Tensor)) or dataclasses.is_dataclass(value)


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ndim") and hasattr(value, "__len__")


def _split_tensor(tensor: Tensor, sizes: list[int], total: int) -> list[Tensor]:
    if tensor.is_nested:
        raise ValueError(
            "The batch contains a nested tensor, which can't be split. Define `split_batch(batch, sizes)`."
        )
    if tensor.ndim == 0 or tensor.size(0) != total:
        return [tensor] * len(sizes)
    return list(tensor.split(sizes))


def _slices(value: Any, sizes: list[int]) -> list[Any]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _rebuild_mapping(value: Mapping[Any, Any], columns: dict[Any, list[Any]], sizes: list[int]) -> list[Any]:
    parts = []
    for index in range(len(sizes)):
        part: Any = copy.copy(value)
        for key, column in columns.items():
            part[key] = column[index]
        parts.append(part)
    return parts


def _rebuild_sequence(value: Any, row: tuple[Any, ...]) -> Any:
    return type(value)(*row) if hasattr(value, "_fields") else type(value)(row)


def _rebuild_dataclass(value: Any, split: Callable[..., list[Any]], sizes: list[int], total: int) -> list[Any]:
    parts = [copy.copy(value) for _ in sizes]
    for field in dataclasses.fields(value):
        for part, item in zip(parts, split(getattr(value, field.name), sizes, total), strict=True):
            object.__setattr__(part, field.name, item)
    return parts


def predicts_next_token(module: nn.Module) -> bool:
    """Whether a Hugging Face model in the module shifts the labels before its loss, as `ForCausalLMLoss` does.

    Decoders of encoder-decoder models get their labels unshifted and don't count.
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        if config is None or not hasattr(child, "loss_function") or not hasattr(config, "is_encoder_decoder"):
            continue
        if type(child).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return True
        if type(child).__name__.endswith("ForConditionalGeneration"):
            return not config.is_encoder_decoder
    return False

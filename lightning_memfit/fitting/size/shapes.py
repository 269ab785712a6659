"""`ShapeGuard`: batches of larger shapes than any before get a smaller micro-batch before they fail, not after."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

_NO_CAP = 1 << 62
_NEAR = 0.75  # a larger shape's size is good enough for a smaller one from this share of what it may at most have
_MAX_KNOWN = 4096
_MAX_PREDICTIONS = 64


class NoPrediction(Exception):
    """There is no prediction for a size; the message says why."""


class ShapeGuard:
    """Gives every batch the micro-batch size that its shape has room for, which is never above the one in use.

    A batch that is in no dimension larger than one that is known to fit needs no more memory. For any other the size is
    predicted, once for each shape, and it holds for batches of that shape only. Without a prediction, memory is taken
    to grow with the square of the number of elements, which is safe for attention.
    """

    def __init__(
        self,
        shape: Any,  # `shape_of` the batch that is known to fit
        size: int,  # the largest for it
        predict: Callable[[Any, int], int] | None,  # from a batch and an upper bound to the largest size for that batch
    ) -> None:
        self._largest = size
        self._predict = predict
        self._num_predictions = 0
        self._proven = [shape]
        self._caps: dict[Any, int] = {shape: _NO_CAP}

    def size_for(self, batch: Any, current: int) -> int:
        """Return the micro-batch size for a batch: the current one, or less if its shape has no room for that.

        It takes about a microsecond for a shape that came before, and a few traces of the step (seconds) for a
        larger one that did not.
        """
        shape = shape_of(batch)
        cap = self._caps.get(shape)
        if cap is None:
            cap = self._learn(batch, shape)
        return current if current <= cap else cap

    def _learn(self, batch: Any, shape: Any) -> int:
        if len(self._caps) >= _MAX_KNOWN:
            self._caps = {known: cap for known, cap in self._caps.items() if cap < _NO_CAP or known in self._proven}
        cap = _NO_CAP if any(_is_within(shape, known) for known in self._proven) else self._predicted(batch, shape)
        if cap >= self._largest:
            cap = _NO_CAP
            if not any(_is_within(shape, known) for known in self._proven):
                self._proven.append(shape)
        self._caps[shape] = cap
        return cap

    def _predicted(self, batch: Any, shape: Any) -> int:
        """The size for a shape that is larger than all that are known to fit at the largest size."""
        capped = [(known, cap) for known, cap in self._caps.items() if cap < _NO_CAP]
        at_most = min((cap for known, cap in capped if _is_within(known, shape)), default=self._largest)
        at_least = max((cap for known, cap in capped if _is_within(shape, known)), default=0)
        if at_least >= _NEAR * at_most:
            return at_least
        try:
            if self._predict is None or self._num_predictions >= _MAX_PREDICTIONS:
                raise NoPrediction
            self._num_predictions += 1
            size = max(1, self._predict(batch, at_most))
        except NoPrediction:
            proven = max(map(_num_elements, self._proven))
            size = max(1, at_least, int(self._largest * min(1.0, proven / max(_num_elements(shape), 1)) ** 2))
        size = min(size, at_most)
        if size < min((cap for _, cap in capped), default=self._largest):
            rank_zero_info(
                f"MicroBatching: a batch has larger shapes than any before ({_described(shape)}); it runs in "
                f"micro-batches of {size}."
            )
        return size


def shape_of(value: Any) -> Any:
    """The shapes of all tensors in a batch, hashable; equal shapes stand for equal memory."""
    if isinstance(value, Tensor):
        return value.shape
    if type(value) is not dict and not isinstance(value, (list, tuple)):
        if isinstance(value, Mapping):
            value = dict(value)
        elif type(value).__module__ == "numpy" and hasattr(value, "ndim"):
            return tuple(value.shape)
        else:
            attributes = {} if isinstance(value, type) or callable(value) else getattr(value, "__dict__", {})
            return tuple(one.shape for one in attributes.values() if isinstance(one, Tensor))
    items = value.values() if type(value) is dict else value
    return tuple([one.shape if type(one) is Tensor else shape_of(one) for one in items])


def _is_within(shape: Any, other: Any) -> bool:
    """Whether a shape has the structure of another and is nowhere larger."""
    if isinstance(shape, int) or isinstance(other, int):
        return isinstance(shape, int) and isinstance(other, int) and shape <= other
    return len(shape) == len(other) and all(map(_is_within, shape, other))


def _num_elements(shape: Any) -> int:
    """Elements of the tensors of a shape."""
    if all(isinstance(one, int) for one in shape):
        return math.prod(shape) if shape else 0
    return sum(_num_elements(one) for one in shape)


def _described(shape: Any) -> str:
    """Shapes in words; numbers and texts, which have none, are left out."""
    if all(isinstance(one, int) for one in shape):
        return " x ".join(map(str, shape))
    return ", ".join(filter(None, map(_described, shape)))

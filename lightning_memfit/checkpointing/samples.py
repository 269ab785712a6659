"""Compare what a recomputation saves for backward with what the first run saved, in every call.

A few elements of each saved tensor, spread over it, are kept. Gradients are computed from saved tensors alone, so that
whatever a block reads that has changed, seen or not, shows there. `torch.utils.checkpoint` calls its "determinism
check" on every tensor that is saved, and on those of the recomputation that are about to be used: this is one more.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.utils.checkpoint as upstream
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_memfit.checkpointing.state import InexactRecomputationError, in_function_transform

CHECK = "lightning_memfit"
"""Name of the check, as the argument `determinism_check` of `torch.utils.checkpoint.checkpoint`."""

_NUM_ELEMENTS = 64


class Samples:
    """Samples of the tensors that one call of a block saves.

    Args:
        block: What errors call it.
        unsteady: Numbers of saved tensors that differ although all is the same: memory that kernels leave unwritten.
        state: Tensors that are put back after the recomputation, before it is compared.
        is_watched: Whether the operators of this call are compared as well, so that a tensor that differs is unsteady.
    """

    def __init__(self, block: str, unsteady: set[int], state: Iterable[Tensor], is_watched: bool) -> None:
        self._block = block
        self._unsteady = unsteady
        self._is_watched = is_watched
        self._state = {tensor.untyped_storage()._cdata for tensor in state if tensor.layout is torch.strided}
        self._number = 0
        self._is_coarse = False
        self._waiting: list[tuple[int, Tensor, Tensor]] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take samples of what is saved in this context."""
        before = getattr(_running, "samples", None)
        _running.samples = self
        try:
            yield
        finally:
            _running.samples = before

    def add(self, tensor: Tensor) -> "_Sample":
        """Take a sample of a tensor that is saved."""
        self._is_coarse |= tensor.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(
            tensor.device.type
        )
        self._number += 1
        is_state = tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._state
        return _Sample(tensor, None if is_state else self, self._number - 1)

    def compare(self, number: int, first: Tensor, again: Tensor) -> None:
        """Compare a sample with that of the recomputation: on the CPU at once, elsewhere when backward ends."""
        if number in self._unsteady:
            return
        if first.device.type == "cpu":
            if not torch.equal(first, again):
                self._judge(number, _error(first, again))
            return
        if not self._waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self._compare_waiting)
        self._waiting.append((number, first, again))  # as each comparison would wait for the device

    def _compare_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        with _outside_of_modes():
            errors = torch.stack([_error(first, again) for _, first, again in waiting]).tolist()
        for (number, _, _), error in zip(waiting, errors, strict=True):
            self._judge(number, error)

    def _judge(self, number: int, error: Any) -> None:
        tolerance = 3e-2 if self._is_coarse else 1e-3
        if self._is_watched:
            if not float(error) < tolerance / 10:
                self._unsteady.add(number)
        elif not float(error) <= tolerance:
            raise InexactRecomputationError(
                self._block,
                "what it saved for backward was not the same when it was recomputed. It reads something that has "
                "changed since its forward, and that its modules, their hooks and the globals that its code names "
                "don't show.",
            )


class _Sample:
    """Of one saved tensor."""

    def __init__(self, tensor: Tensor, samples: Samples | None = None, number: int = 0) -> None:
        self.kind = (tensor.shape, tensor.dtype, tensor.device)
        self.values = _values(tensor)
        self.samples = samples
        self.number = number

    __hash__ = None  # type: ignore[assignment]

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the recomputation's is of a tensor of the same kind; values that differ are refused."""
        if not isinstance(other, _Sample) or self.kind != other.kind:
            return False
        if self.samples is not None and self.values is not None and other.values is not None:
            self.samples.compare(self.number, self.values, other.values)
        return True

    @override
    def __repr__(self) -> str:
        shape, dtype, device = self.kind
        return f"{dtype} {tuple(shape)} on {device}"


_running = threading.local()


def _sample(tensor: Tensor) -> _Sample:
    samples: Samples | None = getattr(_running, "samples", None)
    return _Sample(tensor) if samples is None else samples.add(tensor)


upstream._allowed_determinism_checks_to_fns[CHECK] = _sample


def _values(tensor: Tensor) -> Tensor | None:
    """A copy of some elements, or None if a tensor has none that can be compared."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or not tensor.numel() or tensor.device.type == "meta" or in_function_transform():
        return None
    is_index = tensor.device.type == "cpu" and tensor.dtype in (torch.int64, torch.int32)
    is_number = is_index or tensor.is_floating_point()
    if not (is_number or tensor.dtype is torch.bool) or not tensor.untyped_storage().nbytes():
        return None  # other bytes may be anything, such as a kernel's workspace
    with _outside_of_modes():
        extent, places = _places(tuple(tensor.shape), tensor.stride(), tensor.device)
        return tensor.detach().as_strided((extent,), (1,)).index_select(0, places)


@lru_cache(maxsize=4096)
def _places(shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> tuple[int, Tensor]:
    """Where elements are read, counted from a tensor's first, and how far they reach."""
    numel = prod(shape)
    count = min(_NUM_ELEMENTS, numel)
    chosen = [int((i + (i * 0.618034) % 1) * numel / count) for i in range(count)]  # no two in the same column
    places = []
    for element in chosen:
        place = 0
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            element, index = divmod(element, size)
            place += index * step
        places.append(place)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return extent, torch.tensor(places, device=device)


def _error(first: Tensor, again: Tensor) -> Tensor:
    """Relative difference of two samples; of truth values and integers, the share that differs, less one element."""
    if not first.is_floating_point():
        differs = (first != again).sum()
        return (differs - (len(first) > 1)).clamp(min=0) / len(first)
    first, again = first.to(_exact(first)), again.to(_exact(again))
    are_finite = first.isfinite() & again.isfinite()
    difference = torch.where(are_finite, first - again, 0.0).norm()
    same_gaps = (first.isfinite() == again.isfinite()).all()
    size = torch.where(are_finite, first, 0.0).norm()
    error = torch.where(difference > 0, difference / size.clamp(min=1e-30), 0.0)
    return torch.where(same_gaps, error, torch.inf).to(torch.float32)


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _outside_of_modes() -> Any:
    """What keeps count of operators or of a device's memory is not to count these."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()

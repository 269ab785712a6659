"""Compare what a recomputation saves for backward with what the first run saved, in every call.

A few elements of each saved tensor, spread over it, are kept. Gradients are computed from saved tensors alone, so that
whatever a block reads that has changed, seen or not, shows there. Samples are taken by hooks around those of
`torch.utils.checkpoint`, so that they need nothing that early stop leaves out, and are compared before backward gets a
recomputed tensor.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import string_at
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_memfit.checkpointing.state import InexactRecomputationError, Look
from lightning_memfit.memory.kind import DeviceKind

_NUM_ELEMENTS = 64
_RUN = 8
"""Elements that are read one after the other in host memory."""

_NUM_SEEDS = 4
"""Numbers of a random generator that attention on a device returns beside its result, unset if there is no dropout."""

Sample = bytes | Tensor | int
"""Elements in host memory or on a device; of a weight where its memory begins."""

_COARSE = (torch.bfloat16, torch.float16)
_ALLOWED = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4}
"""Relative differences on the CPU, whose kernels add in another order only on memory that is aligned otherwise."""

_INTEGERS = (torch.bool, torch.int64, torch.int32)

Kind = tuple[torch.Size, torch.dtype]


class Samples:
    """Samples of the tensors that one call of a block saves.

    Args:
        block: What errors call it.
        unsteady: Numbers of saved tensors that differ although all operators return the same: memory that kernels leave
            unwritten. Calls that are watched add to them.
        must_know_now: Whether a difference has to be known before backward goes on.
        has_own_weights: Whether no strategy may gather weights anew between forward and backward. That they are where
            they were is all that is compared then: backward of the plain run would read the same memory, too.
    """

    def __init__(
        self, block: str, unsteady: set[int], must_know_now: Callable[[], bool], has_own_weights: bool
    ) -> None:
        self._block = block
        self._has_own_weights = has_own_weights
        self._unsteady = unsteady
        self._must_know_now = must_know_now
        self._kinds: list[Kind] = []
        self._samples: list[Sample | None] = []
        self._sides: set[int] = set()
        self._is_coarse = False
        self._waiting: list[tuple[int, Tensor, Tensor]] = []

    @contextmanager
    def taken(self, look: Look | None) -> Iterator[None]:
        """Take samples of what is saved in this context.

        Args:
            look: What watches the operators of the call.
        """
        self._is_coarse = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")

        def note(tensor: Tensor) -> None:
            if look is not None and _is_plain(tensor) and tensor.untyped_storage()._cdata in look.sides:
                self._sides.add(len(self._kinds))
            self._kinds.append((tensor.shape, tensor.dtype))
            self._samples.append(self._sample(tensor))

        with _noting(note):
            yield

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare what is saved in this context, which is the recomputation, when it ends."""
        kinds: list[Kind] = []
        samples: list[Sample | None] = []

        def note(tensor: Tensor) -> None:
            kinds.append((tensor.shape, tensor.dtype))
            samples.append(self._sample(tensor))

        try:
            with _noting(note):
                yield
        finally:  # torch stops a recomputation by an exception
            self._compare(kinds, samples)
        if len(kinds) < len(self._kinds):
            self._refuse(f"it saved {len(self._kinds)} tensors for backward, and {len(kinds)} when it was recomputed")

    def _sample(self, tensor: Tensor) -> Sample | None:
        if self._has_own_weights:
            held = tensor._base if tensor._is_view() else tensor
            if type(held) is nn.Parameter and held.layout is torch.strided:
                return held.untyped_storage().data_ptr()
        return _sample(tensor)

    def _compare(self, kinds: list[Kind], samples: list[Sample | None]) -> None:
        for number, (kind, first_kind) in enumerate(zip(kinds, self._kinds, strict=False)):
            if kind != first_kind:
                self._refuse(f"{self._named(number)}, was {_described(kind)} when it was recomputed")
        must_know_now: bool | None = None  # asked once, and only of what is on a device
        for number, (first, again) in enumerate(zip(self._samples, samples, strict=False)):
            if first is None or again is None or number in self._unsteady:
                continue
            if isinstance(first, int) or isinstance(again, int):
                if first != again:
                    self._refuse(f"{self._named(number)}, was in other memory when it was recomputed")
            elif isinstance(first, Tensor) or isinstance(again, Tensor):
                if must_know_now is None:
                    must_know_now = torch._C._current_graph_task_id() == -1 or self._must_know_now()
                self._compare_on_device(number, first, again, must_know_now)
            elif first != again:
                dtype = self._kinds[number][1]
                self._judge(number, *(torch.frombuffer(bytearray(sample), dtype=dtype) for sample in (first, again)))

    def _compare_on_device(self, number: int, first: Sample, again: Sample, must_know_now: bool) -> None:
        if not (isinstance(first, Tensor) and isinstance(again, Tensor)):
            self._refuse(f"{self._named(number)}, was on another device when it was recomputed")
        elif must_know_now:
            self._judge(number, first, again)
        else:
            if not self._waiting:  # as each comparison would wait for the device
                torch.autograd.Variable._execution_engine.queue_callback(self._compare_waiting)
            self._waiting.append((number, first, again))

    def _compare_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        with _outside_of_modes(), torch.no_grad():
            for kind in {(first.dtype, first.device) for _, first, _ in waiting}:
                alike = [pair for pair in waiting if (pair[1].dtype, pair[1].device) == kind]
                firsts, agains = torch.cat([pair[1] for pair in alike]), torch.cat([pair[2] for pair in alike])
                if not torch.equal(firsts, agains):  # waits once for all of them
                    for number, first, again in alike:
                        self._judge(number, first, again)

    def _judge(self, number: int, first: Tensor, again: Tensor) -> None:
        with _outside_of_modes(), torch.no_grad():
            error = _error(first, again)
        if error <= self._allowed(again):
            return
        if number in self._sides:
            self._unsteady.add(number)
            return
        self._refuse(
            f"{self._named(number)}, was not the same when it was recomputed (relative difference {error:.1e})"
        )

    def _allowed(self, values: Tensor) -> float:
        is_far = values.device.type != "cpu"
        if not (values.is_floating_point() or values.is_complex()):
            # Where kernels add in another order, a comparison with a threshold may come out otherwise.
            return 1 / 32 if is_far else 0.0
        if self._is_coarse or any(dtype in _COARSE for _, dtype in self._kinds):
            return 3e-2
        return 1e-3 if is_far else _ALLOWED.get(values.dtype, 1e-3)

    def _named(self, number: int) -> str:
        return f"tensor {number + 1} that it saved for backward, {_described(self._kinds[number])}"

    def _refuse(self, found: str) -> None:
        raise InexactRecomputationError(
            self._block,
            f"{found}. It reads something that has changed since its forward, and that its modules, their hooks and "
            "the globals that its code names don't show.",
        )


@contextmanager
def _noting(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each tensor that is saved in this context, before the hooks around it."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert around is not None
    pack, unpack = around

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        yield


def _described(kind: Kind) -> str:
    shape, dtype = kind
    return f"{tuple(shape)} in {str(dtype).removeprefix('torch.')}"


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.device.type != "meta"


def _sample(tensor: Tensor) -> Sample | None:
    """Some elements, or None if a tensor has none that can be compared."""
    if not _is_plain(tensor):
        if not is_traceable_wrapper_subclass(tensor) or isinstance(tensor, FakeTensor):
            return None
        names, _ = tensor.__tensor_flatten__()
        return _sample(getattr(tensor, names[0])) if names else None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return None  # there is no memory behind them
    start = tensor.untyped_storage().data_ptr()
    if not start:  # freed by a strategy
        return None
    return _host_sample(tensor, start) if tensor.is_cpu else _device_sample(tensor)


def _host_sample(tensor: Tensor, start: int) -> bytes:
    length, places = _runs(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return b"".join([string_at(start + place, length) for place in places])


def _device_sample(tensor: Tensor) -> Tensor | None:
    if not _is_comparable(tensor.dtype) or not tensor.numel():
        return None
    if tensor.dtype in _INTEGERS and tensor.numel() <= _NUM_SEEDS:
        return None
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        with _outside_of_modes(), _set_fwd_grad_enabled(False):
            return _taken(tensor)
    return _taken(tensor)


def _taken(tensor: Tensor) -> Tensor:
    """As few operators as can be: every call of a block reads all that it saves, twice."""
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    stream = torch.cuda.current_stream(tensor.device) if DeviceKind.of(tensor.device).has_own_memory else None
    return torch.take(tensor.detach(), _indices(tensor.numel(), tensor.device, stream))


def _is_comparable(dtype: torch.dtype) -> bool:
    """Whether all bytes of a type are numbers, and not what a kernel uses for work."""
    return dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS


@lru_cache(maxsize=4096)
def _runs(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype
) -> tuple[int, tuple[int, ...]]:
    """Where runs of neighbouring elements are read in host memory, and their length, both in bytes.

    One operator takes 40 us of a processor that has just multiplied matrices and reads new code, these reads 5.
    """
    if not _is_comparable(dtype) or not prod(shape):
        return 0, ()
    length = min(_RUN, shape[-1]) if shape and stride[-1] == 1 else 1
    starts = _spread(shape, stride, prod(shape) // length, _NUM_ELEMENTS // (_RUN if length > 1 else 2), length)
    return length * dtype.itemsize, tuple((offset + place) * dtype.itemsize for place in starts)


@lru_cache(maxsize=4096)
def _indices(numel: int, device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    """Which elements are read on a device, in the order of rows, which depends on their number alone.

    They are sent without waiting for the device, as every new length of sequences needs others. So only the stream to
    which the copy was given finds them there.
    """
    places = _spread((numel,), (1,), numel, _NUM_ELEMENTS)
    if stream is None:
        return torch.tensor(places, device=device)
    return torch.tensor(places, device="cpu", pin_memory=True).to(device, non_blocking=True)


def _spread(shape: tuple[int, ...], stride: tuple[int, ...], numel: int, most: int, length: int = 1) -> list[int]:
    """Places of some elements that are spread over a tensor, no two in the same column."""
    count = min(most, numel)
    places = []
    for number in range(count):
        element = int((number + (number * 0.618034) % 1) * numel / count) * length
        place = 0
        if shape:
            element -= max(0, element % shape[-1] + length - shape[-1])  # a run ends with its row
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            element, index = divmod(element, size)
            place += index * step
        places.append(place)
    return places


def _error(first: Tensor, again: Tensor) -> float:
    """Relative difference of two samples; of truth values and integers, the share that differs."""
    if not (first.is_floating_point() or first.is_complex()):
        return (first != again).sum().item() / len(first)
    if first.is_complex():
        first, again = torch.view_as_real(first), torch.view_as_real(again)
    exact = torch.float64 if first.dtype is torch.float64 else torch.float32
    first, again = first.to(exact), again.to(exact)
    are_finite = first.isfinite() & again.isfinite()
    gaps = [torch.where(are_finite, 0, values).nan_to_num(-1.0, 1.0, -2.0) for values in (first, again)]
    if not torch.equal(*gaps):
        return math.inf
    difference = torch.where(are_finite, first - again, 0).abs().max().item()
    size = torch.where(are_finite, first, 0).abs().max().item()
    return difference / max(size, 1e-30)


def _outside_of_modes() -> AbstractContextManager[Any]:
    """What keeps count of operators or of a device's memory is not to count these."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()

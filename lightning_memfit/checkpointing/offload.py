"""Keep a block's saved tensors in host memory between its forward and backward pass.

On CUDA, copies run on their own stream. Out: a tensor's copy begins when autograd saves it, and its device memory is
released after the forward pass of the next offloaded block; the last block's tensors stay, as their backward comes
next. Back: when the backward pass reaches an offloaded block, copying the tensors of the block before it begins. So
little more than one block's tensors are being copied at a time. On the CPU the same code makes plain copies, which
represent host memory (`memory.host`). In a trace on fake tensors the host side takes no memory, as it takes none of a
device's.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from typing_extensions import override

from lightning_memfit.checkpointing.recompute import ReplacedForward
from lightning_memfit.memory import Category
from lightning_memfit.memory.host import copy_to_host
from lightning_memfit.memory.ledger import held_tensors

MIN_OFFLOAD_BYTES = 1 << 16
"""Smaller storages stay on the device: a copy's latency would cost more than their memory is worth."""


class OffloadPool:
    """State that the offloaded blocks of a module share: the order in which they ran, their copies, and the streams."""

    def __init__(self, min_bytes: int = MIN_OFFLOAD_BYTES) -> None:
        self.min_bytes = min_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._latest: weakref.ref[_BlockRun] | None = None
        self._copies: weakref.WeakValueDictionary[tuple[Any, ...], _HostCopy] = weakref.WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadPool":
        return OffloadPool(self.min_bytes)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The copy stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    @contextmanager
    def saving(self, block: nn.Module) -> Iterator[None]:
        """Send the tensors that autograd saves in a forward pass of a block to the host.

        Hooks that are set up inside take precedence: in a block that is recomputed they handle all but its inputs.
        """
        if torch.compiler.is_compiling():
            # The compiler leaves the block to eager execution; with fullgraph=True the error reaches the user.
            raise NotImplementedError(f"{type(block).__name__} is offloaded: not compiled.")
        previous = None if self._latest is None else self._latest()
        run = _BlockRun(self, block, previous)
        self._latest = weakref.ref(run)
        with torch.autograd.graph.saved_tensors_hooks(run.pack, _unpack):
            yield
        run.end_forward()

    def copy_of(self, tensor: torch.Tensor) -> "_HostCopy":
        """The copy of a tensor's storage, which several blocks may save (position embeddings, masks)."""
        # What is conjugated or negated lazily lies in the same memory as what is not, and has other values.
        key = (tensor.untyped_storage()._cdata, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        copy = self._copies.get(key)
        if copy is None or not copy.is_of(tensor):
            stream = self.stream(tensor.device) if tensor.is_cuda else None
            copy = self._copies[key] = _HostCopy(tensor, stream)
        return copy


class OffloadedForward(ReplacedForward):
    """Replaces the `forward` of one block whose saved tensors go to the host."""

    def __init__(self, block: nn.Module, pool: OffloadPool) -> None:
        super().__init__(block)
        self.pool = pool

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; with gradients on, with hooks that move the tensors that autograd saves."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        with self.pool.saving(self.block):
            return self.inner(*args, **kwargs)


class _BlockRun:
    """One forward pass of an offloaded block. It lives as long as autograd holds one of its tensors."""

    def __init__(self, pool: OffloadPool, block: nn.Module, previous: "_BlockRun | None") -> None:
        self._pool = pool
        self._previous = None if previous is None else weakref.ref(previous)
        parts = (part for tensor in (*block.parameters(), *block.buffers()) for part in held_tensors(tensor))
        self._staying = {part.untyped_storage()._cdata for part in parts}
        self._copies: dict[int, _HostCopy] = {}
        self._reached = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps in place of a tensor."""
        if not self._is_worth_moving(tensor):
            return tensor
        copy = self._pool.copy_of(tensor)
        self._copies[id(copy)] = copy
        return _Saved(self, copy, tensor)

    def end_forward(self) -> None:
        """Release the device memory of the block before this one, whose copies had a whole block's time to finish."""
        if self._before is not None:
            for copy in self._before._copies.values():
                copy.leave()

    def reach(self) -> None:
        """Backward reaches this block: bring its tensors to the device, and request those of the block before it."""
        if not self._reached:
            self._reached = True
            self._request()
            if self._before is not None:
                self._before._request()

    @property
    def _before(self) -> "_BlockRun | None":
        """The offloaded block that ran before this one, while any of its tensors is alive."""
        return None if self._previous is None else self._previous()

    def _request(self) -> None:
        for copy in self._copies.values():
            copy.request()

    def _is_worth_moving(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, FakeTensor) or tensor.layout is not torch.strided:
            return False
        if isinstance(tensor._base, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < self._pool.min_bytes
        return not is_small and storage._cdata not in self._staying and storage.nbytes() % tensor.itemsize == 0


class _Saved:
    """One saved tensor: a view of a storage that was moved."""

    def __init__(self, run: _BlockRun, copy: "_HostCopy", tensor: torch.Tensor) -> None:
        self.run = run
        self.copy = copy
        self.layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        copy.add_view()


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    saved.run.reach()
    tensor: torch.Tensor = saved.copy.use().as_strided(*saved.layout)
    return tensor


class _HostCopy:
    """A storage that goes to the host and comes back, as a flat tensor. Views of it share one copy."""

    def __init__(self, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._storage = weakref.ref(tensor.untyped_storage())
        self._num_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        # A view of the tensor, so that both count changes in place alike.
        self._on_device: torch.Tensor | None = tensor.detach().as_strided((self._num_elements,), (1,), 0)
        self._is_original = True
        self._version = tensor._version
        self._count = _count_of(tensor)
        self._changed = False
        self._num_views = self._num_unused = 0
        self._copied: torch.cuda.Event | None = None
        self._requested_on: torch.cuda.Stream | None = None
        self._dtype, self._device = tensor.dtype, tensor.device
        self._on_host = None if isinstance(tensor, FakeTensor) else self._copy_out(self._on_device)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether this is a copy of the tensor's storage as it is now, as far as torch counts changes for both alike.

        `x.data` and parts of `torch.unsafe_chunk`, as in recurrent layers on the CPU, have counts of their own.
        """
        is_now = self._storage() is tensor.untyped_storage() and self._version == tensor._version
        return is_now and (self._count is None or _count_alike(self._count, tensor))

    def add_view(self) -> None:
        """Count a saved tensor."""
        self._num_views += 1
        self._num_unused += 1

    def leave(self) -> None:
        """Release the original; its memory may be reused once the copy is done."""
        if self._is_original:
            self._part_from_original()
            self._on_device = None

    def request(self) -> None:
        """Begin to copy the storage back, unless it is on the device."""
        if self._on_device is not None:
            return
        self._on_device = torch.empty(self._num_elements, dtype=self._dtype, device=self._device)
        if self._on_host is None:
            return
        if self._stream is None:
            self._on_device.copy_(self._on_host)
            return
        self._requested_on = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._requested_on)  # the memory may still be in use
        with torch.cuda.stream(self._stream):
            self._on_device.copy_(self._on_host, non_blocking=True)
            self._copied = self._stream.record_event()

    def use(self) -> torch.Tensor:
        """Return the storage on the device, and release it with its last view: then only autograd holds it.

        Raises:
            RuntimeError: If the original was changed in place after it was saved.
        """
        if self._is_original:
            self._part_from_original()
        if self._changed:
            raise RuntimeError(
                "A tensor that an offloaded block saved for backward was changed in place afterwards. Leave that "
                "block out of offloading (`choices`), or make the change out of place."
            )
        self.request()
        self._wait()
        device = self._on_device
        assert device is not None
        self._num_unused -= 1
        if self._num_unused <= 0:
            self._num_unused = self._num_views  # for a second backward pass over the same graph
            self._on_device = None
        return device

    def _part_from_original(self) -> None:
        assert self._on_device is not None
        self._changed = self._on_device._version != self._version
        self._is_original = False
        self._wait()

    def _copy_out(self, flat: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            return copy_to_host(flat, Category.ACTIVATION)
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # What is conjugated or negated lazily, torch would settle on the host before the copy has arrived
            # (pytorch issue 146286).
            host.copy_(flat.resolve_conj().resolve_neg(), non_blocking=True)
            self._copied = self._stream.record_event()
        return host

    def _wait(self) -> None:
        """Make the current stream wait for the last copy."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        """Let no one reuse device memory that a copy still fills: a graph may be dropped before its backward.

        Freed memory may be reused at once by the stream on which it was allocated, so that this has to wait.
        """
        if self._requested_on is not None and self._copied is not None:
            self._requested_on.wait_event(self._copied)


def _count_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor without memory that has the count of changes of another one; None in a trace, which copies nothing."""
    if isinstance(tensor, FakeTensor):
        return None
    count = tensor.detach()
    count.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return count


def _count_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether torch counts a change of one tensor for the other, too."""
    with _unsafe_preserve_version_counter((one,)):
        before = other._version
        increment_version(one)
        return other._version != before

"""`StorageLedger`: the tensor storages that are alive, their sizes and their categories.

One mechanism serves three users: tracing on fake tensors (`profile`), the simulated device (`device`) and the memory
monitor on the CPU (`measure`). A storage is entered when an operator returns it and leaves when its last tensor dies.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_memfit.memory.breakdown import Category
from lightning_memfit.memory.host import SPARSE, is_on_host, keep_on_host, sparse_parts, stands_for_host

# --- operators on the CPU that are written in Python ------------------------------------------------------------------

# A dispatch mode doesn't see the tensors inside such an operator. Written for bitsandbytes 0.50, whose CPU
# optimizers dequantize, step and quantize with torch operators inside one custom operator; its fake kernel shows none
# of that. On CUDA the operator is one kernel without scratch memory. A test in `tests/rules/memory` fails when names
# move.


_MODULE = "bitsandbytes.backends.cpu.ops"
_KERNELS = {
    "optimizer_update_8bit_blockwise": "_optimizer_update_8bit_blockwise_cpu",
    "optimizer_update_32bit": "_optimizer_update_32bit_cpu",
}


@functools.cache
def python_kernel(operator: Any) -> Callable[..., Any] | None:
    """The Python function that runs an operator of bitsandbytes on the CPU; None for every other operator."""
    if operator.namespace != "bitsandbytes":
        return None
    kernel = _KERNELS.get(operator._opname)
    return None if kernel is None else getattr(sys.modules[_MODULE], kernel)


_TO_COPY = torch.ops.aten._to_copy.default


class _Entry:
    """One live storage."""

    __slots__ = ("category", "identity", "reference", "size_bytes")

    def __init__(self, identity: int, size_bytes: int, category: Category) -> None:
        self.identity = identity
        self.size_bytes = size_bytes
        self.category = category
        self.reference: weakref.ref[Any] | None = None


class StorageLedger(TorchDispatchMode):
    """Follow every storage that operators create while the mode is active.

    New storages are classified by where they are made: inside `optimizer.step` (gradient mode off) and during backward
    they are `temporary`, elsewhere `activation`. Gradients are re-labelled when they are accumulated, and optimizer
    states when the step ends; if they were alive at the peak, its figures change, too. Results that a step computes
    from tensors in host memory (`memory.host`) are also on the host, and are left out. This mode doesn't see scratch
    memory inside kernels, except in CPU kernels that are written in Python.

    Args:
        rounding_bytes: Sizes are rounded up to a multiple of this (512 for the CUDA caching allocator).
        device_type: Storages on other types of device are left out, so that the host's tensors are not counted on a
            GPU. None follows every device.
        python_kernels: Look inside operators on CPU tensors that are written in Python.
    """

    def __init__(self, rounding_bytes: int = 1, device_type: str | None = None, python_kernels: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if rounding_bytes < 1:
            raise ValueError(f"`rounding_bytes={rounding_bytes}` must be at least 1.")
        self.rounding_bytes = rounding_bytes
        self.device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live_by_category: dict[Category, int] = dict.fromkeys(Category, 0)
        self.peak_by_category: dict[Category, int] = dict.fromkeys(Category, 0)
        self._entries: dict[int, _Entry] = {}
        self._next_identity = 0
        self._first_after_peak = 0
        self._parameter_keys: set[int] = set()
        self._handles: list[Any] = []
        self._step_open = False
        self._python_kernels = python_kernels

    # --- what subclasses may override -------------------------------------------------------------------------------

    def on_allocate(self, identity: int, size_bytes: int, category: Category, name: str) -> None:
        """Called after a storage was entered."""

    def on_free(self, identity: int, size_bytes: int, category: Category) -> None:
        """Called after a storage left."""

    def on_resize(self, identity: int, size_bytes: int) -> None:
        """Called after a storage changed its size in place."""

    def on_relabel(self, identity: int, category: Category) -> None:
        """Called after a storage changed its category."""

    # --- entering what exists already -------------------------------------------------------------------------------

    def track(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Enter a tensor's storage, or re-label it if it is entered already.

        For a tensor without memory of its own (sparse, a DTensor, quantized) the tensors inside are entered. One of a
        lazy module, which the first forward makes, has none yet.
        """
        if is_lazy(tensor):
            return
        if tensor.layout in SPARSE:
            for inner in sparse_parts(tensor):
                self.track(inner, category, name)
            return
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is not None:
            self._relabel(entry, category)
        elif is_traceable_wrapper_subclass(tensor):
            for inner in _inner_tensors(tensor):
                self.track(inner, category, name)
        else:
            self._enter(storage, category, name)

    def move_to_host(self, tensor: torch.Tensor, category: Category, serves: torch.Tensor | None) -> None:
        """Leave a storage out from now on, as it represents host memory (`memory.host`)."""
        key = tensor.untyped_storage()._cdata
        entry = self._entries.get(key)
        if entry is not None:
            self._leave(key, entry)

    def is_tracked(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is entered, or for a sparse tensor, the storages of the tensors inside."""
        if tensor.layout in SPARSE:
            return all(map(self.is_tracked, sparse_parts(tensor)))
        return tensor.untyped_storage()._cdata in self._entries

    def track_module(self, module: torch.nn.Module) -> None:
        """Enter parameters, buffers and gradients of a module and label its later gradients."""
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                continue
            self.track(parameter, Category.PARAMETER, name)
            self._parameter_keys.add(parameter.untyped_storage()._cdata)
            if parameter.grad is not None:
                self.track(parameter.grad, Category.GRADIENT, name)
        self.track_trained(module)
        for name, buffer in module.named_buffers():
            self.track(buffer, Category.BUFFER, name)

    def track_trained(self, module: torch.nn.Module) -> None:
        """Label the later gradients of a module's parameters that are trained, and weren't before."""
        for parameter in module.parameters():
            # Its hooks tell: torch can't swap a parameter that has weak references, as `Module.to` may do.
            if (
                parameter.requires_grad
                and not is_lazy(parameter)
                and self._label_gradient not in (parameter._post_accumulate_grad_hooks or {}).values()
            ):
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._label_gradient))

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Enter the optimizer's states, and label those that later steps make.

        If an optimizer wraps the one that steps, as DeepSpeed's do, the inner one is followed.
        """
        while not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer.optimizer
        self._label_states(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(self._open_step))
        self._handles.append(optimizer.register_step_post_hook(self._close_step))

    def close(self) -> None:
        """Remove every hook. The ledger keeps its figures and follows frees, but enters nothing on its own."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak_bytes = self.live_bytes
        self.peak_by_category = dict(self.live_by_category)
        self._first_after_peak = self._next_identity

    # --- the mode ---------------------------------------------------------------------------------------------------

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = python_kernel(func) if self._python_kernels else None
        if kernel is not None and _on_cpu(args):
            with self:
                return kernel(*args, **(kwargs or {}))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(result, torch.Tensor):
            self._see(func, args, result)
        elif isinstance(result, (list, tuple)):
            for tensor in tensors_among(result):
                self._see(func, args, tensor)
        return result

    def _see(self, func: Any, args: Any, tensor: torch.Tensor) -> None:
        if is_without_memory(tensor):
            return
        if tensor.layout in SPARSE:
            for inner in sparse_parts(tensor):
                self._see(func, args, inner)
            return
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None:
            if is_traceable_wrapper_subclass(tensor):
                for inner in _inner_tensors(tensor):
                    self._see(func, args, inner)
            elif not self._made_on_host(args):
                self._enter(storage, self._classify(func, args), str(func))
        elif entry.size_bytes != self._rounded(storage.nbytes()):
            self._resize(entry, self._rounded(storage.nbytes()))

    def _classify(self, func: Any, args: Any) -> Category:
        if torch._C._current_graph_task_id() != -1:
            return Category.TEMPORARY
        if self._step_open and not torch.is_grad_enabled():
            return Category.TEMPORARY
        if (
            func is _TO_COPY
            and args[0].layout is torch.strided
            and args[0].untyped_storage()._cdata in self._parameter_keys
        ):
            return Category.TEMPORARY  # autocast's cached half-precision copy of a weight
        return Category.ACTIVATION

    def _made_on_host(self, args: Any) -> bool:
        """Whether an operator of an optimizer's step works on host memory, judged by its first tensor."""
        if not self._step_open or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return False
        first = next(tensors_among(args), None)
        return first is not None and first.layout is torch.strided and is_on_host(first)

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.rounding_bytes) * self.rounding_bytes

    def _enter(self, storage: torch.UntypedStorage, category: Category, name: str) -> None:
        if self.device_type is not None and storage.device.type != self.device_type:
            return
        if stands_for_host(storage):
            return
        self._enter_key(storage._cdata, storage, self._rounded(storage.nbytes()), category, name)

    def _enter_key(self, key: int, owner: torch.UntypedStorage, size_bytes: int, category: Category, name: str) -> None:
        """Enter memory that lives as long as a storage."""
        entry = _Entry(self._next_identity, size_bytes, category)
        self._next_identity += 1
        self._entries[key] = entry

        def leave(_: Any, ledger: "StorageLedger" = self, key: int = key, entry: _Entry = entry) -> None:
            ledger._leave(key, entry)

        entry.reference = weakref.ref(owner, leave)
        self._add(entry.size_bytes, category)
        self.on_allocate(entry.identity, entry.size_bytes, category, name)

    def _leave(self, key: int, entry: _Entry) -> None:
        if self._entries.get(key) is not entry:
            return
        del self._entries[key]
        self._parameter_keys.discard(key)
        self.live_bytes -= entry.size_bytes
        self.live_by_category[entry.category] -= entry.size_bytes
        self.on_free(entry.identity, entry.size_bytes, entry.category)

    def _resize(self, entry: _Entry, size_bytes: int) -> None:
        self._add(size_bytes - entry.size_bytes, entry.category)
        entry.size_bytes = size_bytes
        self.on_resize(entry.identity, size_bytes)

    def _relabel(self, entry: _Entry, category: Category) -> None:
        if entry.category is category:
            return
        self.live_by_category[entry.category] -= entry.size_bytes
        self.live_by_category[category] += entry.size_bytes
        if entry.identity < self._first_after_peak:
            self.peak_by_category[entry.category] -= entry.size_bytes
            self.peak_by_category[category] += entry.size_bytes
        entry.category = category
        self.on_relabel(entry.identity, category)

    def _add(self, size_bytes: int, category: Category) -> None:
        self.live_bytes += size_bytes
        self.live_by_category[category] += size_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.peak_by_category = dict(self.live_by_category)
            self._first_after_peak = self._next_identity

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.track(parameter.grad, Category.GRADIENT)

    def _label_states(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, value in state_tensors(optimizer):
            if is_on_host(parameter):
                keep_on_host(value, Category.OPTIMIZER_STATE, parameter)
                self.move_to_host(value, Category.OPTIMIZER_STATE, parameter)
            else:
                self.track(value, Category.OPTIMIZER_STATE)

    def _open_step(self, *_: Any) -> None:
        self._step_open = True

    def _close_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step_open = False
        self._label_states(optimizer)


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Whether a storage has a size and no memory: of a shape alone, or of forward-mode differentiation's zeros."""
    # `is_meta` of a fake tensor asks every dispatch mode for its device.
    return tensor.device.type == "meta" or tensor._is_zerotensor()


def held_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that hold a tensor's memory: itself, or the parts of a sparse tensor or a wrapper.

    One that a lazy module has yet to make has none.
    """
    if is_lazy(tensor):
        return
    if tensor.layout in SPARSE:
        yield from sparse_parts(tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for inner in _inner_tensors(tensor):
            yield from held_tensors(inner)
    else:
        yield tensor


def _on_cpu(args: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors_among(args))


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operator, or in containers of any depth."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, set, deque)):
            yield from tensors_among(value)
        elif isinstance(value, dict):
            yield from tensors_among(value.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The states of an optimizer, each after the parameter that it belongs to.

    Some optimizers keep several in a list or a dict (SOAP, Shampoo, LBFGS). What is kept under a key that is no
    parameter belongs to itself.
    """
    for parameter, state in optimizer.state.items():
        for value in tensors_among((state,)):
            yield (parameter if isinstance(parameter, torch.Tensor) else value), value


def _inner_tensors(wrapper: torch.Tensor) -> list[torch.Tensor]:
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = [getattr(wrapper, name) for name in names]
    return [part for part in inner if isinstance(part, torch.Tensor)]  # a DTensor names its mesh, too

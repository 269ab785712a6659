"""`TrainerAttachment`: a ledger that is active only while a Lightning Trainer works on the device.

`exchange_tensors` gives a batch other tensors.
`hide_idle_hooks` keeps callbacks that use one from costing time in every batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule

from lightning_memfit.memory.breakdown import Category
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.memory.wrapping import wrap_method

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

_DEVICE_WORK = ("training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step")

_EPOCH_ENDS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")
"""Hooks in which modules join what their steps have kept."""


class TrainerAttachment:
    """Activate a ledger inside the strategy's steps and the module's hooks at the end of an epoch, and count batches.

    A batch counts as `input` once it is moved to the device.

    Trainer hooks are called first in, first out, but dispatch modes must be left last in, first out: entering a mode in
    one hook and leaving it in another breaks as soon as two callbacks do so. Here every step enters and leaves on its
    own, so that exceptions, other modes and other attachments do no harm. Allocations of callbacks and of other hooks
    of the module are not seen.

    On the CPU moving a batch copies nothing, and the loader's tensors represent host memory. The batch is copied
    there, and the copy counts as device memory.

    Args:
        ledger: The ledger.
        strategy: The Trainer's strategy.
        copies: False counts the loader's own tensors on the CPU, where nothing but the run itself must allocate.
    """

    def __init__(self, ledger: StorageLedger, strategy: "Strategy", copies: bool = True) -> None:
        self.ledger = ledger
        self._copies = copies
        self._strategy = strategy
        self._inside = False
        self._undo = [wrap_method(strategy, name, self._activated) for name in _DEVICE_WORK]
        self._undo.append(wrap_method(strategy, "batch_to_device", self._counting_batches))
        module = getattr(strategy, "lightning_module", None)
        for name in _EPOCH_ENDS if module is not None else ():
            if getattr(type(module), name, None) not in (None, getattr(LightningModule, name)):
                self._undo.append(wrap_method(module, name, self._activated))

    def detach(self) -> None:
        """Take the ledger off the strategy's methods."""
        while self._undo:
            self._undo.pop()()

    def _activated(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # `optimizer_step` runs `training_step` and `backward` in its closure
            return method(*args, **kwargs)
        self._inside = True
        try:
            with self.ledger:
                return method(*args, **kwargs)
        finally:
            self._inside = False

    def _counting_batches(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return exchange_tensors(self._activated(method, *args, **kwargs), self._on_device)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        is_host = DeviceKind.of(self._strategy.root_device).is_host
        if self._copies and is_host and not self.ledger.is_tracked(tensor):
            tensor = tensor.clone()
        self.ledger.track(tensor, Category.INPUT)
        return tensor


def exchange_tensors(value: Any, exchange: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with other tensors, in objects of its own classes, which a constructor would not always make.

    What Lightning's `apply_to_collection` makes of a `TensorDict` has lost its `batch_size`, and of a `BatchEncoding`
    its offsets. Mappings that can't be written to keep their tensors.
    """
    if isinstance(value, torch.Tensor):
        return exchange(value)
    found: Any = value
    if isinstance(value, Mapping):
        changed = _changed(value.items(), exchange)
        if changed and isinstance(value, MutableMapping):
            found = copy.copy(value)
            for key, item in changed.items():
                found[key] = item
    elif isinstance(value, (list, tuple)):
        if changed := _changed(enumerate(value), exchange):
            items = [changed.get(index, item) for index, item in enumerate(value)]
            found = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        if changed := _changed(((name, getattr(value, name)) for name in fields), exchange):
            found = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(found, name, item)
    return found


def _changed(items: Iterable[tuple[Any, Any]], exchange: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, Any]:
    exchanged = ((key, item, exchange_tensors(item, exchange)) for key, item in items)
    return {key: new for key, item, new in exchanged if new is not item}


# --- idle hooks -------------------------------------------------------------------------------------------------------


_PER_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def hide_idle_hooks(callback: Callback) -> None:
    """Hide the per-batch hooks that a callback does not define.

    Lightning opens a profiler's context for every callable hook of every callback, empty ones included: six times two
    microseconds in each batch. It skips hooks that are not callable. Only the instance is changed, so that subclasses
    can define the hooks and call `super()`.

    Args:
        callback: A callback, best in its constructor.
    """
    for name in _PER_BATCH:
        if getattr(type(callback), name) is getattr(Callback, name):
            vars(callback)[name] = None

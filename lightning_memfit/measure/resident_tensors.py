"""Bytes that a module and its optimizers hold between steps, by category and by tier."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_memfit.memory import Category, MemoryBreakdown, Tier
from lightning_memfit.memory.host import host_memory_of, stands_for_host
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import StorageLedger, held_tensors, state_tensors


class _Sum:
    """Bytes by tier and category; every storage counts once."""

    def __init__(self, device: torch.device) -> None:
        self.sizes: dict[tuple[Tier, Category], int] = defaultdict(int)
        self._device = device
        self._seen: set[int] = set()

    def add(self, tensor: torch.Tensor, category: Category) -> None:
        for part in held_tensors(tensor):
            if part.device.type != "meta":
                storage = part.untyped_storage()
                self.add_storage(storage, self._tier(part, storage), category)

    def add_storage(self, storage: torch.UntypedStorage, tier: Tier, category: Category) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.sizes[tier, category] += storage.nbytes()

    def _tier(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Tier:
        if tensor.device.type == self._device.type:
            return Tier.HOST if stands_for_host(storage) else Tier.DEVICE
        return Tier.PINNED_HOST if DeviceKind.of(self._device).has_own_memory and tensor.is_pinned() else Tier.HOST


def held_bytes(module: torch.nn.Module, optimizers: Iterable[Any], device: torch.device) -> MemoryBreakdown:
    """Return the current bytes of parameters, buffers, gradients and optimizer states.

    Parameters that an optimizer steps but the module does not know, such as the float32 copies that DeepSpeed keeps,
    count as optimizer states. Host memory that a technique keeps for parameters and buffers (`memory.host`), such as
    float32 masters and their gradients, counts as what it is used for. Tensors that were swapped out to a disk count as
    0 bytes.
    """
    total = _Sum(device)
    for parameter in module.parameters():
        total.add(parameter, Category.PARAMETER)
        shard = getattr(parameter, "ds_tensor", None)  # DeepSpeed's stage 3 empties the parameter itself
        if isinstance(shard, torch.Tensor):
            total.add(shard, Category.PARAMETER)
    for buffer in module.buffers():
        total.add(buffer, Category.BUFFER)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total.add(parameter.grad, Category.GRADIENT)
    for optimizer in optimizers:
        _add_optimizer(total, optimizer)
    for storage, category in host_memory_of((*module.parameters(), *module.buffers())):
        total.add_storage(storage, Tier.HOST, category)
    return MemoryBreakdown(total.sizes)


def untracked_tensors(holders: Iterable[Any], ledger: StorageLedger, device: torch.device) -> Iterator[torch.Tensor]:
    """Tensors on a device that objects hold in attributes and containers, and that a ledger doesn't track.

    Trainers, data modules, loaders, data sets and optimizers that they refer to are not looked into.
    """
    waiting = [value for holder in holders for value in vars(holder).values()]
    known: set[int] = set()
    while waiting:
        value = waiting.pop()
        if type(value) in _ATOMS or id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            for part in held_tensors(value):
                if part.device.type == device.type and not ledger.is_tracked(part):
                    yield part
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set, deque)):
            waiting.extend(value)
        elif not isinstance(value, _OTHERS) and type(getattr(value, "__dict__", None)) is dict:
            waiting.extend(vars(value).values())


def untracked_bytes(holders: Iterable[Any], ledger: StorageLedger) -> int:
    """Bytes of host tensors that objects hold and a ledger doesn't track; see `untracked_tensors`."""
    host = torch.device("cpu")
    total = _Sum(host)
    for tensor in list(untracked_tensors(holders, ledger, host)):
        total.add(tensor, Category.ACTIVATION)
    return sum(total.sizes.values())


_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))

_OTHERS = (
    Trainer,
    LightningDataModule,
    torch.optim.Optimizer,
    Dataset,
    DataLoader,
    ModuleType,
    FunctionType,
    type,
)


def stepped_parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what an optimizer steps: the module's parameters, or copies and shards that only the optimizer knows."""
    for group in _inner(optimizer).param_groups:
        yield from group["params"]
    # DeepSpeed's stage 3 empties its groups between steps.
    yield from getattr(optimizer, "fp32_partitioned_groups_flat", ())


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the innermost optimizer, which does the step, if others wrap it."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _add_optimizer(total: _Sum, optimizer: Any) -> None:
    for parameter in stepped_parameters(optimizer):
        total.add(parameter, Category.OPTIMIZER_STATE)  # the module's own are counted already
        if parameter.grad is not None:
            total.add(parameter.grad, Category.GRADIENT)
    for _, value in state_tensors(_inner(optimizer)):
        total.add(value, Category.OPTIMIZER_STATE)

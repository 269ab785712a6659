"""`MemoryLimit`: train as if the device had less memory than it has.

On the CPU it uses a `SimulatedDevice`, which runs real operators on real tensors and enforces a limit on their bytes.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_memfit.memory import Category, format_bytes, parse_bytes
from lightning_memfit.memory.attach import TrainerAttachment
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import StorageLedger


class SimulatedDevice(StorageLedger):
    """Follow live storages and raise `torch.OutOfMemoryError` when they would exceed a limit.

    The error has the class and the form of message that CUDA's has. The refused output is released before the error is
    raised, and neither `live_bytes` nor `peak_bytes` ever include it.

    One thing differs from a real device: the operator has run by the time its output is refused. If it also changes an
    input in place (running statistics of a batch norm) or draws random numbers, that has happened.

    Args:
        limit_bytes: Capacity, `"12GiB"` or an integer.
        rounding_bytes: Sizes are rounded up to a multiple of this; 512 as in the CUDA caching allocator.

    Attributes:
        num_ooms: Errors raised so far.
    """

    def __init__(self, limit_bytes: int | str, rounding_bytes: int = 512) -> None:
        super().__init__(rounding_bytes)
        self.limit_bytes = parse_bytes(limit_bytes, "limit_bytes")
        self.num_ooms = 0
        self._allocated_bytes = 0  # since the start of the operator
        self._refused = False

    @override
    def on_allocate(self, identity: int, size_bytes: int, category: Category, name: str) -> None:
        """Check a new storage against the limit."""
        self._allocated_bytes += size_bytes
        self._refused |= self.live_bytes > self.limit_bytes

    @override
    def on_resize(self, identity: int, size_bytes: int) -> None:
        """Check a storage of another size against the limit."""
        self.on_allocate(identity, size_bytes, Category.TEMPORARY, "resize_")

    @override
    def track(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Enter a tensor that exists already.

        Raises:
            torch.OutOfMemoryError: If it does not fit. The caller still holds the tensor, so it stays entered until the
                caller lets it go.
        """
        peak = self._begin()
        super().track(tensor, category, name)
        if self._refused:
            self._raise(peak)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        peak = self._begin()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._refused:
            del result  # before the traceback can keep it alive
            self._raise(peak)
        return result

    def _begin(self) -> tuple[int, dict[Category, int], int]:
        self._allocated_bytes = 0
        self._refused = False
        return self.peak_bytes, self.peak_by_category, self._first_after_peak

    def _raise(self, peak: tuple[int, dict[Category, int], int]) -> None:
        self.peak_bytes, self.peak_by_category, self._first_after_peak = peak
        self._refused = False
        self.num_ooms += 1
        raise torch.OutOfMemoryError(self._message())

    def _message(self) -> str:
        free_bytes = max(0, self.limit_bytes - self.live_bytes)
        live = ", ".join(f"{category} {format_bytes(n)}" for category, n in self.live_by_category.items() if n)
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(self._allocated_bytes)}. GPU 0 has a total capacity "
            f"of {format_bytes(self.limit_bytes)} of which {format_bytes(free_bytes)} is free (simulated). "
            f"Of the allocated memory: {live or 'nothing'}."
        )


# --- the callback -----------------------------------------------------------------------------------------------------


class MemoryLimit(Callback):
    """Limit the memory of a run's device; with several processes the limit holds for each.

    On CUDA it sets torch's per-process memory fraction, which is restored afterwards; that limits the bytes reserved by
    the caching allocator and leaves the CUDA context out. On the CPU a `SimulatedDevice` is active during every step:
    weights, buffers, gradients, optimizer states, batches and the tensors that the steps compute count; the loader's
    own tensors and allocations of hooks between steps don't. Following operators there costs microseconds for each.

    Args:
        limit: `12GiB`, `500MiB` or a number of bytes.

    Attributes:
        ledger: On the CPU the `SimulatedDevice` of the current or last run, for reading; otherwise None.

    Raises:
        ValueError: If the limit is not a size, or larger than the CUDA device.
        MisconfigurationException: If on the CPU the limit is smaller than the module's own weights, the accelerator is
            neither CUDA nor CPU, or the Trainer has two limits.
    """

    def __init__(self, limit: int | str) -> None:
        self.limit_bytes = parse_bytes(limit, "limit")
        self.ledger: SimulatedDevice | None = None
        self._attachment: TrainerAttachment | None = None
        self._restored_fraction: tuple[torch.device, float] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Limit CUDA before the weights are moved there."""
        limits = [callback for callback in trainer.callbacks if isinstance(callback, MemoryLimit)]  # type: ignore[attr-defined]
        if len(limits) > 1:
            named = ", ".join(format_bytes(callback.limit_bytes) for callback in limits)
            raise MisconfigurationException(f"There are {len(limits)} `MemoryLimit` callbacks ({named}). Keep one.")
        device = trainer.strategy.root_device
        kind = DeviceKind.of(device)
        if kind.has_caching_allocator:
            self._limit_cuda(device)
        elif not kind.is_modelled:
            raise MisconfigurationException(f"`MemoryLimit` works on CUDA and on the CPU, not on `{device.type}`.")

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin on the CPU, unless this is the validation of a fit, which has begun."""
        if not DeviceKind.of(trainer.strategy.root_device).is_host or self._attachment is not None:
            return
        self.ledger = SimulatedDevice(self.limit_bytes)
        try:
            self.ledger.track_module(pl_module)
        except torch.OutOfMemoryError as error:
            raise MisconfigurationException(
                f"`limit={format_bytes(self.limit_bytes)}` is smaller than the module's own parameters and buffers. "
                "Raise it, store the weights in fewer bytes (`precision: bf16-true`, quantized weights), or shard or "
                "offload them (FSDP2, DeepSpeed stage 3)."
            ) from error
        self._attachment = TrainerAttachment(self.ledger, trainer.strategy)
        rank_zero_info(f"Memory limit: {format_bytes(self.limit_bytes)} on a simulated device (CPU).")

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the optimizer states, which a checkpoint may have restored."""
        if self.ledger is not None:
            for optimizer in trainer.optimizers:
                self.ledger.track_optimizer(optimizer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lift the limit."""
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lift the limit; Lightning calls no `teardown` after an exception."""
        self._stop()

    def _stop(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment.ledger.close()
            self._attachment = None
        if self._restored_fraction is not None:
            device, fraction = self._restored_fraction
            torch.cuda.set_per_process_memory_fraction(fraction, device)
            self._restored_fraction = None

    def _limit_cuda(self, device: torch.device) -> None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        if self.limit_bytes > total_bytes:
            raise ValueError(
                f"`limit={format_bytes(self.limit_bytes)}` is more than {device} has, {format_bytes(total_bytes)}. "
                "Lower it or leave `MemoryLimit` out."
            )
        fraction = torch.cuda.get_per_process_memory_fraction(device)
        self._restored_fraction = (device, min(1.0, fraction))  # cudaMallocAsync without a limit says far above 1
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total_bytes, device)
        rank_zero_info(
            f"Memory limit: {format_bytes(self.limit_bytes)} of the {format_bytes(total_bytes)} of {device}."
        )

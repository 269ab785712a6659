"""`Watch`: the instruments of `memfit bench` around a training loop that is not Lightning's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.bench.record import Memory
from lightning_memfit.bench.step_clock import ResidentGrowth, StepClock
from lightning_memfit.memory import Category
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.memory.process import nvml_usage, peak_rss_bytes


class Watch:
    """Measures one training loop: live tensors during the warm-up, step times, losses and resident memory.

    A loop calls `starts` before it builds anything, `follow` before its first step and `ends` after the last. It wraps
    every optimizer step in `step()`, or calls `step_starts` and `step_ends`. The ledger, its rules and the clock are
    the same as for Lightning's runs.

    Args:
        warmup_steps: Optimizer steps during which live tensors are tracked, and after which the clock starts.
        device: Where the training runs.

    Attributes:
        sees_device: Whether live tensors are those of the device. Set it to False if a tool keeps tensors in host
            memory and the device is the CPU: the two can't be told apart, so no live bytes are recorded.
        clock: The clock that keeps times and losses.
    """

    def __init__(self, warmup_steps: int, device: torch.device) -> None:
        self.clock = StepClock(warmup_steps)
        self.sees_device = True
        self.ledger = StorageLedger(rounding_bytes=DeviceKind.of(device).rounding_bytes, device_type=device.type)
        self._device = device
        self._kind = DeviceKind.of(device)
        self._resident = ResidentGrowth()
        self._following = True
        self._step = ExitStack()
        self._growth_bytes: int | None = None

    def starts(self) -> None:
        """Start measuring; everything must be imported, and nothing built."""
        self._resident.start()

    def follow(self, module: torch.nn.Module, optimizer: Any | None) -> None:
        """Track model and optimizer, which are built, before the first step; None for an optimizer on the host."""
        self.ledger.track_module(module)
        if optimizer is not None:
            self.ledger.track_optimizer(optimizer)
        self.ledger.reset_peak()
        if self._kind.has_caching_allocator:
            torch.cuda.reset_peak_memory_stats(self._device)
        self.clock.start()

    # --- steps ------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one optimizer step, from its first batch to the end of its update."""
        self.step_starts()
        yield
        self.step_ends()

    def step_starts(self) -> None:
        """Begin a step; during the warm-up, live tensors are tracked from here on."""
        if self._following:
            self._step.enter_context(self.ledger)

    def step_ends(self) -> None:
        """End a step, after its update."""
        self._step.close()
        self.clock.step_ends(self._device)
        if self._following and self.clock.num_steps == self.clock.warmup_steps:
            self._following = False
            self.ledger.close()

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next micro-batch on the device, and count the wait for it."""
        with _disable_current_modes():  # a loader's tensors are in host memory
            batch = next(batches)
        self.clock.batch_starts()
        return self.on_device(batch)

    def on_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move a micro-batch to the device; on the CPU copy it, as in Lightning's runs, so that the copy counts."""
        moved = {}
        for name, tensor in batch.items():
            if self._kind.is_host:
                moved[name] = tensor.clone() if self._following else tensor
            else:
                moved[name] = tensor.to(self._device, non_blocking=True)
            if self._following:
                self.ledger.track(moved[name], Category.INPUT)
        return moved

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Suspend tracking, for compiled programs that refuse to run while tensors are tracked."""
        if not self._following:
            yield
            return
        with _disable_current_modes():
            yield

    # --- results ----------------------------------------------------------------------------------------------------

    def ends(self) -> None:
        """End measuring, after the loop and while its model still exists."""
        self._growth_bytes = self._resident.growth_bytes

    def close(self) -> None:
        """Stop tracking, however the loop ended."""
        self._step.close()
        self.ledger.close()

    def memory(self) -> Memory:
        """Return the peaks of the run."""
        counted = self._kind.has_caching_allocator
        usage = nvml_usage(self._device) if counted else None
        by_category = {str(category): size for category, size in self.ledger.peak_by_category.items() if size}
        live = (sum(by_category.values()) or None) if self.sees_device else None
        return Memory(
            allocated_bytes=torch.cuda.max_memory_allocated(self._device) if counted else live,
            reserved_bytes=torch.cuda.max_memory_reserved(self._device) if counted else None,
            by_category=by_category if self.sees_device else {},
            process_bytes=usage.process_bytes if usage else None,
            card_bytes=usage.card_bytes if usage else None,
            peak_rss_bytes=peak_rss_bytes(),
            rss_growth_bytes=self._growth_bytes,
        )

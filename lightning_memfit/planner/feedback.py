"""`PlanFeedback`: compare a plan with the first steps of the run it was made for, and learn from them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memfit.device.catalogue import find_device
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.kind import DeviceKind, synchronize
from lightning_memfit.planner.rates import CalibrationFile, cpu_name

_SKIPPED_STEPS = 2
"""The first steps create optimizer states, load kernels and fill caches, so they are not measured."""

_TOLERANCE = 0.05


class PlanFeedback(pl.Callback):
    """Measure the first optimizer steps of a run, save them as an observation for later plans, and report differences.

    If the device is not the one that the plan was made for, nothing is saved, and a message says so. With several
    processes, the first one saves and reports. Steps are timed from the end of one to the end of the next, without any
    validation in between.


    Args:
        seconds: Seconds of an optimizer step by component, as the plan predicted them without corrections.
        rates: Name of the device's rates in the plan.
        peak_bytes: Predicted peak of `torch.cuda.max_memory_allocated`.
        num_steps: Optimizer steps to measure.

    Attributes:
        measured_seconds: Median time of a step, None until it is known.

    Raises:
        ValueError: If `num_steps` is less than 1.
    """

    def __init__(self, seconds: dict[str, float], rates: str, peak_bytes: int = 0, num_steps: int = 5) -> None:
        if num_steps < 1:
            raise ValueError(f"`num_steps={num_steps}` must be at least 1.")
        self.seconds = dict(seconds)
        self.rates = rates
        self.peak_bytes = peak_bytes
        self.num_steps = num_steps
        self.measured_seconds: float | None = None
        self._last: float | None = None
        self._last_step = 0
        self._durations: list[float] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start timing with the next step."""
        self._last, self._last_step, self._durations = None, trainer.global_step, []
        self.measured_seconds = None

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave out the step that a validation interrupts."""
        self._last = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Time whole optimizer steps."""
        if self.measured_seconds is not None or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        now = _now(trainer.strategy.root_device)
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now
        if len(self._durations) == _SKIPPED_STEPS + self.num_steps:
            self.measured_seconds = statistics.median(self._durations[_SKIPPED_STEPS:])
            if trainer.is_global_zero:
                self._tell(trainer.strategy.root_device)

    def _tell(self, device: torch.device) -> None:
        assert self.measured_seconds is not None
        name = device_name(device)
        if name != self.rates:
            rank_zero_info(f"PlanFeedback: planned for {self.rates}, runs on {name}; nothing is learned from it.")
            return
        CalibrationFile(self.rates).add(self.seconds, self.measured_seconds)
        predicted = sum(self.seconds.values())
        rank_zero_info(
            f"PlanFeedback: a step takes {self.measured_seconds:.3f} s, {predicted:.3f} s by data sheet; later plans "
            "take it into account."
        )
        if DeviceKind.of(device).has_caching_allocator and self.peak_bytes:
            measured = torch.cuda.max_memory_allocated(device)
            if abs(measured / self.peak_bytes - 1) > _TOLERANCE:
                rank_zero_warn(
                    f"PlanFeedback: the peak is {format_bytes(measured)}, {format_bytes(self.peak_bytes)} was "
                    "predicted. Run `memfit estimate` on this configuration, and please report it."
                )


def device_name(device: torch.device) -> str:
    """The name under which a device's rates are known."""
    if not DeviceKind.of(device).is_catalogued:
        return cpu_name()
    driver = torch.cuda.get_device_name(device)
    try:
        return find_device(driver).name
    except ValueError:
        return driver


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()

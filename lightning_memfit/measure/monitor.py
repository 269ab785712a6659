"""`MemoryMonitor`: what a run uses, logged while it runs and shown in a table at its end.

`usage_of` reads memory by category and place. The callback decides when, adds speed and loss, and makes the report.
"""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_memfit.measure.report import RunReport, versions
from lightning_memfit.measure.resident_tensors import (
    held_bytes,
    stepped_parameters,
    untracked_bytes,
    untracked_tensors,
)
from lightning_memfit.measure.throughput import Throughput
from lightning_memfit.memory import GIB, Category, MemoryBreakdown, Tier
from lightning_memfit.memory.allocations import AllocationReader, ProfilerRunningError, profiler_runs
from lightning_memfit.memory.attach import TrainerAttachment, hide_idle_hooks
from lightning_memfit.memory.host import stands_for_host
from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.ledger import StorageLedger
from lightning_memfit.memory.process import nvml_usage, peak_rss_bytes, pinned_bytes, rss_bytes, swapped_out_bytes

# --- sampling ---------------------------------------------------------------------------------------------------------


def usage_of(trainer: Trainer, device: torch.device, ledger: StorageLedger | None) -> dict[str, int]:
    """Bytes in use and peaks since the run began, by the names that `MemoryMonitor` logs; unknown ones have no entry.

    It visits every tensor of the module and the optimizers, at some microseconds each.
    """
    held = held_bytes(trainer.lightning_module, trainer.optimizers, device)
    sizes: dict[str, int | None] = {f"{category}": size for category, size in held.by_category().items()}
    if ledger is not None:
        sizes |= {f"{category}_peak": size for category, size in ledger.peak_by_category.items() if size}
        sizes["live_peak"] = ledger.peak_bytes
    peak = sizes.get("live_peak")
    if DeviceKind.of(device).has_caching_allocator:
        peak = torch.cuda.max_memory_allocated(device)
        sizes |= {"allocated_peak": peak, "reserved_peak": torch.cuda.max_memory_reserved(device)}
        sizes["allocated"] = torch.cuda.memory_allocated(device)
        sizes["reserved"] = torch.cuda.memory_reserved(device)
    sizes["working_peak"] = None if peak is None else max(0, peak - held.total())
    sizes["host"] = held.total(Tier.HOST) + held.total(Tier.PINNED_HOST) or None
    sizes |= {"pinned": pinned_bytes(), "swap": swapped_out_bytes(), "rss": rss_bytes()}
    sizes["disk"] = getattr(trainer.strategy, "swapped_bytes", None)
    return {name: size for name, size in sizes.items() if size is not None} | card_usage(device)


def card_usage(device: torch.device) -> dict[str, int]:
    """What NVML says of this process and of the whole card, in bytes; empty where it says nothing."""
    usage = nvml_usage(device) if DeviceKind.of(device).has_own_memory else None
    sizes = {} if usage is None else {"process": usage.process_bytes, "card": usage.card_bytes}
    return {name: size for name, size in sizes.items() if size is not None}


# --- the callback -----------------------------------------------------------------------------------------------------


class MemoryMonitor(Callback):
    """Measure the memory and the speed of a fit, for any LightningModule.

    - During the first `tracked_steps` optimizer steps all live tensors are tracked and counted by category:
      parameters, buffers, gradients, optimizer states, activations, temporaries, inputs. Tracking slows down those
      steps, but not later ones. A `MemoryLimit` on the CPU tracks tensors anyway; its figures are then used for the
      whole run. Compiled modules run uncompiled while they are tracked: set `tracked_steps` to 0 for them.
    - After the tracked steps, and every `every_n_steps` optimizer steps, figures go to every logger and to
      `trainer.callback_metrics`, those of memory in GiB and named `memory/..._gib`:
      `parameter`, `buffer`, `gradient` and `optimizer_state`, which the device holds at the end of a step;
      `host`, what module and optimizers hold in host memory instead; `rss`; `swap`, what the system swapped out;
      `disk`, what the strategy keeps on a drive; while tensors are tracked, `live_peak` and its categories as
      `..._peak`; on CUDA `allocated`, `allocated_peak`, `reserved`, `reserved_peak`, `process` and `card` (NVML) and
      `pinned`; and `working_peak`, the part of a step's peak above what is held between steps.
      Speed is `throughput/tokens_per_second` (batches with `input_ids`), `throughput/samples_per_second` and
      `throughput/seconds_per_step`.
    - The progress bar shows one figure, `mem_gib`: on CUDA the peak of allocated memory, on the CPU the peak of live
      tensors under a `MemoryLimit`, and otherwise the resident set.
    - At the end of fit the first process prints a table. What validation needs beyond training is a row of its own, as
      predictions are of training.

    Speed is measured after the tracked steps; it includes waiting for data and leaves out validation.

    Args:
        tracked_steps: Optimizer steps during which live tensors are tracked; 0 tracks none. States of an optimizer
            that steps more seldom than others are in the peak only if it has stepped by then.
        every_n_steps: Optimizer steps between two samples. None takes the Trainer's `log_every_n_steps`.
        report_path: JSON file for the report. If the file exists, a number is added to the name.
        exact: On the CPU, read the allocator's events during the tracked steps, so that the measured peak holds what
            kernels take while they run, too, which tracking tensors doesn't show. It includes batches that the loader
            makes in this process. Those steps are slower, and no other profiler of torch can run meanwhile. On CUDA
            the allocator's counter is exact anyway.

    Attributes:
        predicted: Predicted bytes of this run by category, set by whatever made the prediction; None is shown as
            "not predicted".
        report: Report of the last finished fit.
    """

    def __init__(
        self,
        tracked_steps: int = 3,
        every_n_steps: int | None = None,
        report_path: str | Path | None = None,
        exact: bool = False,
    ) -> None:
        if exact and tracked_steps == 0:
            raise ValueError(
                "`exact=True` reads what is allocated in the tracked steps: `tracked_steps` must not be 0."
            )
        if tracked_steps < 0:
            raise ValueError(f"`tracked_steps={tracked_steps}` must not be negative; 0 follows no tensors.")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"`every_n_steps={every_n_steps}` must be at least 1.")
        self.tracked_steps = tracked_steps
        self.every_n_steps = every_n_steps
        self.report_path = report_path
        self.exact = exact
        self.predicted: MemoryBreakdown | None = None
        self.report: RunReport | None = None
        self._attachment: TrainerAttachment | None = None
        self._reader = AllocationReader()
        self._reset(torch.device("cpu"))
        hide_idle_hooks(self)

    def _reset(self, device: torch.device) -> None:
        self._device = device
        self._throughput = Throughput(device)
        self._largest: dict[str, int] = {}
        self._ledger: StorageLedger | None = None
        self._measured: MemoryBreakdown | None = None
        self._measured_over = ""
        self._limit_bytes: int | None = None
        self._held_bytes = 0
        self._exact_bytes: int | None = None
        self._highest = {"live": 0, "allocated": 0}
        self._allocated_bytes = 0
        self._validation_bytes: int | None = None
        self._num_steps = 0
        self._global_step = 0
        self._is_automatic = False
        self._every = 1
        self._is_made_later = False
        self._losses: tuple[str, float, float] | None = None

    def reset_peak(self) -> None:
        """Forget the peak so far, after steps that were not part of training."""
        if self._followed is not None:
            self._followed.reset_peak()
        if DeviceKind.of(self._device).has_caching_allocator:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._highest = dict.fromkeys(self._highest, 0)

    def _end_phase(self, in_validation: bool) -> None:
        """Note the peaks of training or of a validation that ends, where they are higher than all before."""
        ledger = self._followed
        if ledger is not None and ledger.peak_bytes > self._highest["live"]:
            self._highest["live"] = ledger.peak_bytes
            if in_validation:
                self._validation_bytes = ledger.peak_bytes
            else:
                self._measured = MemoryBreakdown.device(ledger.peak_by_category)
        if not DeviceKind.of(self._device).has_caching_allocator:
            return
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if peak_bytes > self._highest["allocated"]:
            self._highest["allocated"] = peak_bytes
            if in_validation:
                self._validation_bytes = peak_bytes
            else:
                self._allocated_bytes = peak_bytes

    @property
    def _followed(self) -> StorageLedger | None:
        """What follows live tensors at present."""
        return self._ledger or (self._attachment.ledger if self._attachment is not None else None)

    # --- hooks ------------------------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last run."""
        self._reset(trainer.strategy.root_device)
        if self._reads_events and (profiler_runs() or isinstance(getattr(trainer, "profiler", None), PyTorchProfiler)):
            raise MisconfigurationException(f"`MemoryMonitor(exact=True)`: {ProfilerRunningError()}.")
        if DeviceKind.of(self._device).has_caching_allocator:
            torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track live tensors, unless a limit already does so."""
        self._global_step = trainer.global_step
        self._is_automatic = pl_module.automatic_optimization
        self._every = self.every_n_steps or max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        limit = next((c for c in trainer.callbacks if isinstance(getattr(c, "ledger", None), StorageLedger)), None)  # type: ignore[attr-defined]
        if limit is not None:
            self._ledger = limit.ledger
            self._limit_bytes = limit.limit_bytes
        self.reset_peak()  # of the sanity check
        if limit is None and self.tracked_steps:
            self._follow(trainer, pl_module)
        ledger = self._followed
        if self._reads_events and ledger is not None:
            self._held_bytes = ledger.live_bytes + untracked_bytes((pl_module, *self._others_of(trainer)), ledger)
            self._reader.start()

    @property
    def _reads_events(self) -> bool:
        return self.exact and DeviceKind.of(self._device).is_host

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; take a sample every `every_n_steps` optimizer steps."""
        if self._is_automatic and trainer.accumulate_grad_batches == 1:
            stepped = True
            self._global_step += 1
        else:  # Lightning's count costs six calls
            before, self._global_step = self._global_step, trainer.global_step
            stepped = self._global_step != before
        self._throughput.add(batch, stepped)
        if not stepped:
            return
        if self._is_made_later and self._attachment is not None:
            self._is_made_later = False
            self._attachment.ledger.track_module(pl_module)
        self._num_steps += 1
        warmed_up = self._num_steps == (self.tracked_steps or 1)
        if not warmed_up and self._num_steps % self._every:
            return
        ledger = self._followed
        if warmed_up:
            self._stop_following()
        self._sample(trainer, ledger)
        if warmed_up:
            self._throughput.start()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock, and note the peak of training so far."""
        self._throughput.pause()
        if not trainer.sanity_checking:
            self._end_phase(in_validation=False)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock run again, and keep the loss and the peak."""
        self._throughput.resume()
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._end_phase(in_validation=True)
            self._keep_loss(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the last figures before the strategy is torn down."""
        self._throughput.stop()
        self._end_phase(in_validation=False)
        self._stop_following()
        self._keep_largest(card_usage(self._device))
        if self._ledger is not None:
            self._measured_over = "the whole run"

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table and write the report."""
        self.report = self._make_report(trainer)
        self._ledger = None
        if not trainer.is_global_zero:
            return
        from rich.console import Console

        Console().print(self.report.table())
        if self.report_path is None:
            return
        try:
            rank_zero_info(f"Run report written to {self.report.write(self.report_path)}")
        except OSError as error:  # the run is over, and has what it trained
            rank_zero_warn(f"`report_path={str(self.report_path)!r}` can't be written: {error.strerror}.")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the ledger off the strategy."""
        self._stop_following()

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _follow(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger = StorageLedger(DeviceKind.of(self._device).rounding_bytes, device_type=self._device.type)
        ledger.track_module(pl_module)
        self._is_made_later = any(map(is_lazy, (*pl_module.parameters(), *pl_module.buffers())))
        its_own = {id(parameter) for parameter in pl_module.parameters()}
        for optimizer in trainer.optimizers:
            ledger.track_optimizer(optimizer)
            for parameter in stepped_parameters(optimizer):
                if id(parameter) not in its_own:  # a float32 copy that only the optimizer knows
                    ledger.track(parameter, Category.OPTIMIZER_STATE)
        # Of ours, techniques keep what they hold on other tiers, and instruments a number per step.
        foreign: list[Any] = [callback for callback in self._others_of(trainer) if not _is_ours(type(callback))]
        if not _is_ours(type(pl_module)):  # our modules hold metrics, which are instruments, too
            foreign.append(pl_module)
        for tensor in list(untracked_tensors(foreign, ledger, self._device)):
            if not stands_for_host(tensor.untyped_storage()):
                ledger.track(tensor, Category.ACTIVATION)  # averages of weights, for example
        self._attachment = TrainerAttachment(ledger, trainer.strategy, copies=not self._reads_events)

    def _others_of(self, trainer: Trainer) -> list[Callback]:
        return [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]

    def _stop_following(self) -> None:
        if self._reader.is_running:
            peak = max(accumulate(self._reader.stop()), default=0)
            self._exact_bytes = self._held_bytes + max(0, peak)
        if self._attachment is None:
            return
        self._end_phase(in_validation=False)
        self._attachment.detach()
        self._attachment.ledger.close()
        self._attachment = None
        self._measured_over = f"the first {self._num_steps} optimizer steps"

    # --- figures ----------------------------------------------------------------------------------------------------

    def _sample(self, trainer: Trainer, ledger: StorageLedger | None) -> None:
        self._throughput.synchronize()
        sizes = usage_of(trainer, self._device, ledger)
        self._keep_largest(sizes)
        figures = {f"memory/{name}_gib": size / GIB for name, size in sizes.items()}
        in_bar = figures["memory/rss_gib"]
        if DeviceKind.of(self._device).has_caching_allocator:
            in_bar = figures["memory/allocated_peak_gib"]
        elif self._ledger is not None:
            in_bar = figures["memory/live_peak_gib"]
        speeds = {
            "throughput/tokens_per_second": self._throughput.tokens_per_second,
            "throughput/samples_per_second": self._throughput.samples_per_second,
            "throughput/seconds_per_step": self._throughput.seconds_per_step,
        }
        figures.update({name: value for name, value in speeds.items() if value is not None})
        if not trainer.barebones:
            _publish(trainer, figures, in_bar)

    def _keep_largest(self, sizes: Mapping[str, int]) -> None:
        self._largest |= {name: max(size, self._largest.get(name, 0)) for name, size in sizes.items()}

    def _keep_loss(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        name = next((n for n in metrics if n.startswith("val") and "loss" in n), None)
        if name is None:
            return
        last = float(metrics[name])
        first = last if self._losses is None else self._losses[1]
        self._losses = (name, first, last)

    def _make_report(self, trainer: Trainer) -> RunReport:
        counted = DeviceKind.of(self._device).has_caching_allocator
        name, first, last = self._losses or (None, None, None)
        return RunReport(
            device=torch.cuda.get_device_name(self._device) if counted else str(self._device),
            num_steps=self._num_steps,
            predicted=self.predicted,
            measured=self._measured,
            measured_over=self._measured_over,
            exact_peak_bytes=self._exact_bytes,
            is_host=DeviceKind.of(self._device).is_host,
            limit_bytes=self._limit_bytes,
            validation_peak_bytes=self._validation_bytes,
            peak_allocated_bytes=self._allocated_bytes if counted else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device) if counted else None,
            rss_bytes=rss_bytes(),
            peak_rss_bytes=max(peak_rss_bytes(), rss_bytes()),
            tokens_per_second=self._throughput.tokens_per_second,
            samples_per_second=self._throughput.samples_per_second,
            seconds_per_step=self._throughput.seconds_per_step,
            loss_name=name,
            first_loss=first,
            last_loss=last,
            num_processes=trainer.world_size,
            versions=versions(),
            **{f"{name}_bytes": self._largest.get(name) for name in _LARGEST},
        )


_LARGEST = ("process", "card", "host", "pinned", "swap", "disk")
"""Figures of which a report has the largest sample."""


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _publish(trainer: Trainer, figures: dict[str, float], in_bar: float) -> None:
    """Pass figures to the loggers and to other callbacks, and one of them to the progress bar.

    `LightningModule.log` would do so too, but Lightning then processes all logged values again in every batch until the
    epoch ends, which costs 15 microseconds a step.
    """
    step = trainer.global_step - 1  # Lightning counts the steps of its logs from 0
    for logger in trainer.loggers:
        logger.log_metrics(figures, step=step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in figures.items()})
    trainer.progress_bar_metrics["mem_gib"] = in_bar

"""`RunSummary`: predicted and measured figures over all processes, as the last entry of every logger."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memfit.measure.data_wait import DataWaitMonitor
from lightning_memfit.measure.monitor import MemoryMonitor
from lightning_memfit.measure.report import RunReport
from lightning_memfit.measure.utilization import FlopsMonitor
from lightning_memfit.memory import GIB
from lightning_memfit.memory.replicas import num_replicas

_OVER_RANKS = ("measured_peak_bytes", "peak_reserved_bytes", "peak_rss_bytes")


class RunSummary(Callback):
    """Log predicted and measured figures to every logger at the end of fit.

    Every process needs a `MemoryMonitor` before it in the Trainer's list. At the last step it logs, as `summary/...`,
    `predicted_peak_gib`, `measured_peak_gib`, `prediction_error`, `peak_reserved_gib` (CUDA), `peak_rss_gib`,
    `seconds_per_step`, `samples_per_second` and `tokens_per_second` of all processes; `data_wait_fraction` and `mfu`
    if there is a `DataWaitMonitor` or a `FlopsMonitor`. With several processes, memory is that of the first, and
    `..._max_rank_gib` is the largest of all. Unknown figures are left out. Weights & Biases shows the last value of a
    metric in a run's summary; TensorBoard and CSV files hold it as their last entry.
    """

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the figures of all processes and log them."""
        monitor = next((c for c in trainer.callbacks if isinstance(c, MemoryMonitor)), None)  # type: ignore[attr-defined]
        if monitor is None or monitor.report is None:
            rank_zero_warn("RunSummary: nothing to sum up. Put a `MemoryMonitor` before it in `trainer.callbacks`.")
            return
        figures = _figures(monitor.report, num_replicas(trainer))
        figures |= self._over_ranks(trainer, monitor.report)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, DataWaitMonitor):
                figures["data_wait_fraction"] = callback.fraction
            elif isinstance(callback, FlopsMonitor):
                figures["mfu"] = callback.mfu
        if not trainer.is_global_zero:
            return
        known = {f"summary/{name}": float(value) for name, value in figures.items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(known, step=trainer.global_step)
            logger.save()

    def _over_ranks(self, trainer: Trainer, report: RunReport) -> dict[str, float | None]:
        """Return the largest figures of all processes; every process must call this."""
        if trainer.world_size == 1:
            return {}
        own = [float(getattr(report, name) or 0) for name in _OVER_RANKS]
        tensor = torch.tensor(own, dtype=torch.float64, device=trainer.strategy.root_device)
        gathered: Any = trainer.strategy.all_gather(tensor)
        largest = gathered.reshape(-1, len(own)).max(0).values.tolist()
        return {
            f"{name.removesuffix('_bytes')}_max_rank_gib": size / GIB or None
            for name, size in zip(_OVER_RANKS, largest, strict=True)
        }


def _figures(report: RunReport, replicas: int) -> dict[str, float | None]:
    sizes = ("predicted_peak", "measured_peak", "peak_reserved", "peak_rss")
    in_bytes = {name: getattr(report, f"{name}_bytes") for name in sizes}
    rates = {name: getattr(report, name) for name in ("samples_per_second", "tokens_per_second")}
    return {
        **{f"{name}_gib": None if size is None else size / GIB for name, size in in_bytes.items()},
        **{name: None if rate is None else rate * replicas for name, rate in rates.items()},
        "prediction_error": report.prediction_error,
        "seconds_per_step": report.seconds_per_step,
    }

"""`RunReport`: what a run used, as a frozen record, a table and a JSON file."""

import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_memfit
from lightning_memfit.memory import Category, MemoryBreakdown, format_bytes, format_percent
from lightning_memfit.memory.units import in_json

if TYPE_CHECKING:
    from rich.table import Table

_NOT_IN_TENSORS = (Category.RUNTIME_CONTEXT, Category.FRAGMENTATION)
TOLERANCE = 0.05
"""Relative error of the prediction above which the report of a run says so."""


@dataclass(frozen=True)
class RunReport:
    """Figures of one run. A figure that was not measured is None and is shown as such."""

    device: str
    num_steps: int
    """Optimizer steps taken."""
    predicted: MemoryBreakdown | None = None
    """Bytes by category at the predicted peak."""
    measured: MemoryBreakdown | None = None
    """Live tensor bytes by category at the measured peak."""
    measured_over: str = ""
    """Which part of the run `measured` covers."""
    exact_peak_bytes: int | None = None
    """CPU: peak by the allocator's events over the tracked steps, memory inside kernels included."""
    is_host: bool = False
    """Whether the run trained on the CPU, where tracked tensors don't show what kernels take while they run."""
    limit_bytes: int | None = None
    """Memory limit that the run had to keep."""
    validation_peak_bytes: int | None = None
    """Peak of live tensors in validation (CUDA: allocated), if it is above that of training up to then."""
    peak_allocated_bytes: int | None = None
    """CUDA: `torch.cuda.max_memory_allocated` in training."""
    peak_reserved_bytes: int | None = None
    """CUDA: `torch.cuda.max_memory_reserved`."""
    process_bytes: int | None = None
    """CUDA: memory of this process by NVML, largest sample."""
    card_bytes: int | None = None
    """CUDA: memory of all processes on the card by NVML, largest sample."""
    host_bytes: int | None = None
    """What module and optimizers hold in host memory rather than on the device, largest sample."""
    pinned_bytes: int | None = None
    """CUDA: page-locked host memory that torch holds, largest sample."""
    swap_bytes: int | None = None
    """What the system swapped out of this process, largest sample; Linux only."""
    disk_bytes: int | None = None
    """What the strategy keeps on this machine's drive, largest sample."""
    rss_bytes: int | None = None
    """Resident set size of the process at the end."""
    peak_rss_bytes: int | None = None
    """Largest resident set size since the process started."""
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    loss_name: str | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    num_processes: int = 1
    """Number of processes; all figures are those of the first."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted bytes of live tensors on the device, without context and fragmentation, which are not tensors."""
        if self.predicted is None:
            return None
        return self.predicted.total() - sum(self.predicted.get(category) for category in _NOT_IN_TENSORS)

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak to compare it with: the allocator's figure on CUDA, otherwise the tracked live bytes.

        On the CPU the exact peak counts where it was read.
        """
        if self.peak_allocated_bytes is not None:
            return self.peak_allocated_bytes
        if self.exact_peak_bytes is not None:
            return self.exact_peak_bytes
        return None if self.measured is None else self.measured.total()

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured peak, minus one; None if either is missing."""
        predicted, measured = self.predicted_peak_bytes, self.measured_peak_bytes
        return predicted / measured - 1 if predicted is not None and measured else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: every field in bytes, and `prediction_error`; a loss of NaN or infinity is a string."""
        data = asdict(self)
        for name in ("predicted", "measured"):
            breakdown = getattr(self, name)
            data[name] = None if breakdown is None else breakdown.to_dict()
        return in_json({**data, "prediction_error": self.prediction_error})

    def write(self, path: str | Path) -> Path:
        """Write JSON to `path`, or to `path` with the next free number if the file exists."""
        path, text = Path(path), json.dumps(self.to_dict(), indent=2) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
        target = next(one for one in chain([path], numbered) if not one.exists())
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
        return target

    def table(self) -> "Table":
        """Rich table: memory by category, then figures of process and driver, speed and loss."""
        from rich.table import Table

        table = Table(title=f"Run report: {self.num_steps} optimizer steps on {self.device}", title_justify="left")
        table.add_column("", no_wrap=True)
        table.add_column("predicted", justify="right", no_wrap=True)
        table.add_column("measured", justify="right", overflow="fold")
        for label, predicted, measured in (*self._memory_rows(), *self._process_rows()):
            table.add_row(label, predicted, measured)
        table.add_section()
        for label, value in self._run_rows():
            table.add_row(label, "", value)
        table.caption = self._caption()
        table.caption_justify = "left"
        return table

    def _memory_rows(self) -> list[tuple[str, str, str]]:
        predicted = self.predicted.by_category() if self.predicted else {}
        measured = self.measured.by_category() if self.measured else {}
        rows = [
            (f"  {category.value.replace('_', ' ')}", _bytes(predicted.get(category)), _bytes(measured.get(category)))
            for category in Category
            if category in predicted or category in measured
        ]
        shown = "not predicted" if self.predicted is None else _bytes(self.predicted_peak_bytes)
        total = _bytes(self.measured.total()) if self.measured else "not tracked"
        return [("peak of live tensors", shown, total), *rows]

    def _process_rows(self) -> list[tuple[str, str, str]]:
        reserved = None
        if self.predicted is not None and self.peak_reserved_bytes is not None:
            reserved = self.predicted.total() - self.predicted.get(Category.RUNTIME_CONTEXT)
        rows = [
            ("peak with memory inside kernels", "", self.exact_peak_bytes),
            ("peak in validation", "", self.validation_peak_bytes),
            ("memory limit", "", self.limit_bytes),
            ("peak allocated (CUDA)", "", self.peak_allocated_bytes),
            ("peak reserved (CUDA)", _bytes(reserved), self.peak_reserved_bytes),
            ("process on the card (NVML)", "", self.process_bytes),
            ("whole card (NVML)", "", self.card_bytes),
            ("module and optimizers on the host", "", self.host_bytes),
            ("page-locked host memory", "", self.pinned_bytes or None),
            ("on disk", "", self.disk_bytes),
            ("swapped out by the system", "", self.swap_bytes or None),
            ("process RSS, peak", "", self.peak_rss_bytes),
            ("process RSS, at the end", "", self.rss_bytes),
        ]
        return [(label, predicted, _bytes(value)) for label, predicted, value in rows if value is not None]

    def _run_rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.tokens_per_second is not None:
            rows.append(("tokens/s", f"{self.tokens_per_second:,.0f}"))
        if self.samples_per_second is not None:
            rows.append(("samples/s", f"{self.samples_per_second:,.2f}"))
        step = "run too short" if self.seconds_per_step is None else f"{self.seconds_per_step:.4g} s"
        rows.append(("optimizer step", step))
        if self.loss_name is not None:
            rows.append((self.loss_name, f"{self.first_loss:.4f} -> {self.last_loss:.4f}"))
        return rows

    def _caption(self) -> str:
        parts = []
        if self.measured is not None:
            parts.append(f"Categories measured over {self.measured_over}.")
        if self.is_host and self.measured is not None and self.exact_peak_bytes is None:
            parts.append("Memory inside kernels is not in them: `MemoryMonitor(exact=True)` measures it.")
        error = self.prediction_error
        if error is not None:
            parts.append(f"The prediction is off by {format_percent(error)}.")
            if abs(error) > TOLERANCE:
                parts.append(f"That is more than {TOLERANCE:.0%}: please report it with this run's configuration.")
        if self.num_processes > 1:
            parts.append(f"Figures are those of the first of {self.num_processes} processes.")
        return " ".join(parts)


_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "accelerate", "deepspeed", "torchao")


def versions() -> dict[str, str]:
    """Versions of the libraries that decide how much memory a run uses; those not installed are left out."""
    found = {"lightning_memfit": lightning_memfit.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _bytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)

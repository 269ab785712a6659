"""`Result`: the record of one row, as it is written to disk.

`benchmarks/README.md` describes every field. The module also reads which hardware and commit a
result is of, without importing torch.
"""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.memory.kind import DeviceKind
from lightning_memfit.memory.units import in_json

SCHEMA = 1

Status = Literal["ok", "out_of_memory", "unsupported", "failed"]
"""How a row ended; `unsupported` means that a peer can't do it on this machine, for the reason in `error`."""


class UnsupportedError(Exception):
    """A peer can't do on this machine what its row asks for."""


@dataclass(frozen=True)
class Prediction:
    """The peak that was predicted before the run allocated anything."""

    allocated_bytes: int
    """Live tensors; on CUDA the prediction for `torch.cuda.max_memory_allocated`."""
    reserved_bytes: int
    """Memory that the caching allocator will hold; on the CPU equal to `allocated_bytes`."""
    total_bytes: int
    """Reserved memory and the runtime's context."""
    by_category: dict[str, int]
    """Bytes by category at the peak, context and fragmentation included."""
    phase: str
    """Phase in which the peak occurs: forward, backward or step."""
    model_flops_per_step: int
    """FLOPs of forward and backward of one optimizer step on one device, recomputation included."""
    seconds: float
    """Time that the prediction took."""


@dataclass(frozen=True)
class Memory:
    """Memory peaks of the first process."""

    allocated_bytes: int | None
    """CUDA: the allocator's counter. CPU: live tensors, tracked during the warm-up."""
    reserved_bytes: int | None
    """CUDA: the allocator's counter."""
    by_category: dict[str, int]
    """Live tensors at the peak of the warm-up steps."""
    process_bytes: int | None
    """CUDA: memory of this process by NVML."""
    card_bytes: int | None
    """CUDA: memory of all processes on the card by NVML."""
    peak_rss_bytes: int
    """Largest resident set since the process started, libraries and loader included."""
    rss_growth_bytes: int | None = None
    """What the run added to the resident set at its peak, without libraries; None if the system doesn't tell."""


@dataclass(frozen=True)
class Speed:
    """Times of optimizer steps, the wait for data included."""

    timed_steps: int
    step_seconds_median: float
    step_seconds_q05: float
    step_seconds_q95: float
    samples_per_second: float | None
    """Sum over all processes, from the median step time."""
    tokens_per_second: float | None
    """Sum over all processes, from the median step time; None for batches without `input_ids`."""
    data_wait_fraction: float
    """Share of the time that passes between the end of a batch and the start of the next."""
    queued_fraction: float | None = None
    """Share of the time in which a thread waited for a core, in records that have it."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    type: str
    message: str
    log_tail: str = ""
    """Last lines that the process wrote."""


NESTED: dict[str, Any] = {"error": Failure, "predicted": Prediction, "measured": Memory, "speed": Speed}
"""Fields of a result that are records themselves."""

_QUIET = 0.03
"""Share of the time that a quiet machine's own services take from a run's threads."""


@dataclass(frozen=True)
class Result:
    """One row of an experiment, measured."""

    schema: int
    experiment: str
    row: str
    title: str
    scale: str
    device: str
    key: str
    """Hash of settings and measured steps; a result counts as finished as long as the row has the same key."""
    command: str
    commit: str
    """Commit of the checkout, with `-dirty` if it had changes; empty outside a checkout."""
    started: str
    """Time at which the run started, in UTC."""
    seconds: float
    """Duration of the whole process, imports included."""
    versions: dict[str, str]
    hardware: dict[str, Any]
    """Keys: `device`, `cores`, `threads`, `memory_bytes`, `load`, `notes`."""
    settings: dict[str, Any]
    """The resolved configuration."""
    status: Status
    error: Failure | None = None
    no_prediction: str = ""
    """Why there is no prediction."""
    predicted: Prediction | None = None
    measured: Memory | None = None
    speed: Speed | None = None
    loss_first: float | None = None
    """Loss of the first optimizer step, averaged over its micro-batches."""
    loss_last: float | None = None
    reference: dict[str, float] = field(default_factory=dict)
    """Figures of the source."""
    point: dict[str, Any] = field(default_factory=dict)
    """Position of the run in a matrix of `memfit scale`."""
    group: str = ""
    """Name shared by rows in which several tools do the same training."""
    peer: str = ""
    """Tool that trained the row; empty for this package."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the peer, in addition to the settings and in its own terms."""

    @property
    def had_cores(self) -> bool:
        """Whether the row had the cores to itself; if not, its times say little, but memory and losses remain valid.

        Where the system doesn't tell how long its threads waited for a core, the load before the run stands for it.
        """
        queued = None if self.speed is None else self.speed.queued_fraction
        if DeviceKind.of(self.device).is_host and queued is not None:
            return queued <= _QUIET
        load, cores = self.hardware.get("load"), self.hardware.get("cores")
        return not DeviceKind.of(self.device).is_host or load is None or cores is None or bool(load <= cores)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured allocated bytes, minus one; None for a run that did not reach its peak."""
        if self.status != "ok" or self.predicted is None or self.measured is None:
            return None
        if not self.measured.allocated_bytes:
            return None
        return self.predicted.allocated_bytes / self.measured.allocated_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; a loss that is no number or infinite is a string."""
        return in_json(asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Result":
        """Make a result from what `to_dict` returned."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"`schema={data.get('schema')}` is not {SCHEMA}: made by another version. Measure anew.")
        made = {name: kind(**data[name]) for name, kind in NESTED.items() if data.get(name) is not None}
        losses = {name: float(data[name]) for name in ("loss_first", "loss_last") if data.get(name) is not None}
        return cls(**{**data, **made, **losses})

    def write(self, path: Path) -> None:
        """Write JSON atomically: a reader sees either the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read_result(path: Path) -> Result:
    """Read a result."""
    return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))


# --- where a result comes from: hardware, commit (imports no torch) --------------------------------------------------


def hardware(notes: str) -> dict[str, Any]:
    """Cores, host memory and load of this machine; the caller adds the device."""
    import psutil

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "notes": notes,
    }


def commit() -> str:
    """Commit of the checkout that the package runs from, with `-dirty` if it has changes; empty outside one."""
    import lightning_memfit

    root = Path(lightning_memfit.__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        try:
            run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return run.stdout.strip()

    name = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no", "--", "lightning_memfit", "cli", "recipes")
    return f"{name}-dirty" if name and changes else name

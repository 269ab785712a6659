"""`Result`: the record of one row, as it is written to disk. Every field stands in `benchmarks/README.md`."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from lightning_memfit.memory.kind import DeviceKind

SCHEMA = 1

Status = Literal["ok", "out_of_memory", "unsupported", "failed"]
"""`unsupported`: a peer that can't do this here, as `error` says."""


@dataclass(frozen=True)
class Prediction:
    """Peak that was predicted before the run allocated anything."""

    allocated_bytes: int
    """Live tensors; on CUDA what `torch.cuda.max_memory_allocated` will say."""
    reserved_bytes: int
    """What the caching allocator will hold; on the CPU the same."""
    total_bytes: int
    """With the runtime's context."""
    by_category: dict[str, int]
    """At the peak, context and fragmentation included."""
    phase: str
    """forward, backward or step."""
    model_flops_per_step: int
    """FLOPs of forward and backward of one optimizer step on one device, recomputation included."""
    seconds: float
    """What the prediction took."""


@dataclass(frozen=True)
class Memory:
    """Peaks of the first process."""

    allocated_bytes: int | None
    """CUDA: the allocator's counter. CPU: live tensors, followed during the warm-up."""
    reserved_bytes: int | None
    """CUDA: the allocator's counter."""
    by_category: dict[str, int]
    """Live tensors at the peak of the warm-up steps."""
    process_bytes: int | None
    """CUDA: what NVML says this process holds."""
    card_bytes: int | None
    """CUDA: what NVML says is used on the card by everyone."""
    peak_rss_bytes: int
    """Largest resident set since the process started, libraries and loader included."""
    rss_growth_bytes: int | None = None
    """What the run added to the resident set at its peak, libraries left out; None where the system doesn't tell."""


@dataclass(frozen=True)
class Speed:
    """Times of optimizer steps, the wait for data included."""

    timed_steps: int
    step_seconds_median: float
    step_seconds_q05: float
    step_seconds_q95: float
    samples_per_second: float | None
    """Of all processes, from the median."""
    tokens_per_second: float | None
    """Of all processes, from the median; batches with `input_ids` only."""
    data_wait_fraction: float
    """Share of the time between the end of a batch and the start of the next."""


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    type: str
    message: str
    log_tail: str = ""
    """Last lines the process wrote."""


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
    """Hash of settings and measured steps; a result counts as finished while it is that of the row."""
    command: str
    commit: str
    """Of the checkout; `-dirty` where it had changes, empty outside of one."""
    started: str
    """UTC."""
    seconds: float
    """Whole process, imports included."""
    versions: dict[str, str]
    hardware: dict[str, Any]
    """device, cores, threads, memory_bytes, load, notes."""
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
    """Of the first optimizer step, micro-batches averaged."""
    loss_last: float | None = None
    reference: dict[str, float] = field(default_factory=dict)
    """Figures of the source."""
    point: dict[str, Any] = field(default_factory=dict)
    """Where the run lies in a matrix of `memfit scale`."""
    group: str = ""
    """What is compared, where the same is done by several tools."""
    peer: str = ""
    """The tool that ran it by itself; empty where it was this package."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the peer was told beside the settings, in its own words."""

    @property
    def had_cores(self) -> bool:
        """Whether the row had the cores to itself; else its times say little, its memory and losses as much as ever."""
        load, cores = self.hardware.get("load"), self.hardware.get("cores")
        return not DeviceKind.of(self.device).is_host or load is None or cores is None or bool(load <= cores)

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured allocated bytes, less one; None for a run that did not reach its peak."""
        if self.status != "ok" or self.predicted is None or self.measured is None:
            return None
        if not self.measured.allocated_bytes:
            return None
        return self.predicted.allocated_bytes / self.measured.allocated_bytes - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Result":
        """Inverse of `to_dict`.

        Raises:
            ValueError: If the data has another schema.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"`schema={data.get('schema')}` is not {SCHEMA}: made by another version. Measure anew.")
        nested = {"error": Failure, "predicted": Prediction, "measured": Memory, "speed": Speed}
        made = {name: kind(**data[name]) for name, kind in nested.items() if data.get(name) is not None}
        return cls(**{**data, **made})

    def write(self, path: Path) -> None:
        """Write JSON in one move: a reader sees the old file or the new one, never half of one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        ValueError: If the file has another schema.
    """
    return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))


def field_paths(kind: type = Result, prefix: str = "") -> list[str]:
    """All fields as they stand in the file: `row`, `predicted.allocated_bytes`, ..."""
    nested = {"error": Failure, "predicted": Prediction, "measured": Memory, "speed": Speed}
    assert is_dataclass(kind)
    paths = []
    for one in fields(kind):
        name = f"{prefix}{one.name}"
        inner = nested.get(one.name) if kind is Result else None
        paths += field_paths(inner, f"{name}.") if inner else [name]
    return paths


# Where and from what a result comes: versions, hardware, commit. Reads no torch, so that it costs nothing.


PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "accelerate", "deepspeed", "torchao")


def versions() -> dict[str, str]:
    """Versions of what decides a result; what is not installed is left out."""
    import lightning_memfit

    found = {"python": platform.python_version(), "lightning_memfit": lightning_memfit.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(notes: str) -> dict[str, Any]:
    """Cores, host memory and load of this machine; who measured adds the device."""
    import psutil

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "notes": notes,
    }


def commit() -> str:
    """Commit of the checkout that the package is run from, `-dirty` with changes; empty outside of one."""
    from pathlib import Path

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

"""Compare estimates with measurement: `python -m benchmarks.estimator.run --device cpu|cuda`.

Every case runs in a child process of its own, so that one's memory doesn't touch another's, and that one which dies or
hangs is a row. Cases whose result is in the output file already are skipped, so that an interrupted run goes on where
it stopped. The exit code is 1 if a case failed or none was run.

With `--predict-only` nothing is measured: the predictions of the rows that are there are renewed, for the device that
each was measured on, which need not be here.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  (imported before the fork: children start at once)
import torch
import transformers  # noqa: F401
from torch.nn.attention import sdpa_kernel

from benchmarks.estimator.cases import Batches, Case, build_batch, build_callbacks, build_module, cpu_cases, cuda_cases
from benchmarks.estimator.measure import BACKENDS
from benchmarks.processes import Job, in_a_process, rows_of
from lightning_memfit.bench.record import versions
from lightning_memfit.device.catalogue import find_device

RESULTS = Path(__file__).parents[1] / "results"


def describe(case: Case) -> dict[str, Any]:
    """The CUDA device at hand, looked at in a process that ends, as a process that has a context can't be forked."""
    capability, (free_bytes, _) = torch.cuda.get_device_capability(), torch.cuda.mem_get_info()
    return {"name": case.name, "gpu": torch.cuda.get_device_name(), "capability": capability, "free_bytes": free_bytes}


def predict(case: Case, device: str, capability: tuple[int, int]) -> dict[str, Any]:
    """Predicted figures of a case, from a module without weights."""
    from lightning_memfit.device.runtime import runtime_memory
    from lightning_memfit.estimate.estimate import estimate_step
    from lightning_memfit.profile.build import profile_module
    from lightning_memfit.profile.step import StepOptions
    from lightning_memfit.profile.trace import Emulation

    options = StepOptions(case.precision, case.accumulate_grad_batches)  # type: ignore[arg-type]
    emulation = Emulation(device, capability)  # type: ignore[arg-type]
    started = time.perf_counter()
    module, batch = build_module(case, "meta"), next(iter(Batches(build_batch(case), 1)))
    with sdpa_kernel(BACKENDS[case.kernel]) if case.kernel else nullcontext():
        profile = profile_module(module, batch, options, emulation, build_callbacks(case), any_micro_batch=False)
    runtime = runtime_memory(capability) if device == "cuda" else None
    result = estimate_step(profile, runtime=runtime)
    predicted = {
        "allocated_bytes": result.allocated_bytes,
        "reserved_bytes": result.reserved_bytes,
        "workspace_bytes": result.workspace_bytes,
        "spare_bytes": result.spare_bytes,
        "phase": result.phase,
        "breakdown": result.breakdown.to_dict(),
        "by_phase": result.by_phase,
        "attention_kernels": profile.attention_kernels,
        "assumptions": list(profile.assumptions),
        "traced_blocks": profile.traced_blocks,
        "num_blocks": profile.num_blocks,
        "seconds": time.perf_counter() - started,
    }
    return {"name": case.name, "predicted": predicted}


def measure_case(case: Case, device: str, row: dict[str, Any], history: Path | None) -> dict[str, Any]:
    """The row of a prediction with what the run takes, and on the CPU MemTracker's figure."""
    from benchmarks.estimator import measure

    row = {"name": case.name, "case": case.to_dict(), **row}
    started = time.perf_counter()
    row["measured"] = measure.measure_cuda(case, history) if device == "cuda" else measure.measure_cpu(case)
    row["measured"]["seconds"] = time.perf_counter() - started
    row = _with_errors(row)
    if device == "cpu" and case.optimizer != "adamw_8bit" and case.precision != "16-mixed":
        started = time.perf_counter()
        try:
            peak = measure.mem_tracker(case)
            row["mem_tracker"] = {
                "allocated_bytes": peak,
                "error": peak / row["measured"]["allocated_bytes"] - 1,
                "seconds": time.perf_counter() - started,
            }
        except Exception as error:
            row["mem_tracker"] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    return row


def _with_errors(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its relative errors."""
    predicted, measured = row["predicted"], row["measured"]
    keys = [key for key in ("allocated_bytes", "reserved_bytes") if key in measured]
    return row | {f"error_{key.removesuffix('_bytes')}": predicted[key] / measured[key] - 1 for key in keys}


def predicted_anew(
    rows: list[dict[str, Any]], device: str, case_seconds: float, processes: int
) -> Iterator[dict[str, Any]]:
    """Rows with new predictions beside what was measured, as they end; one whose prediction fails says so alone.

    Args:
        rows: Rows of a results file that were measured.
        device: What they were measured on, `cpu` or `cuda`.
        case_seconds: A prediction that takes longer is killed.
        processes: Predictions at a time.
    """
    old = {row["name"]: row for row in rows}
    jobs = []
    for row in rows:
        capability = find_device(row["gpu"]).compute_capability if "gpu" in row else (8, 0)
        jobs.append(Job(predict, Case(**row["case"]), (device, capability)))
    for row in rows_of(jobs, case_seconds, processes):
        yield row if "failed" in row else _with_errors(old[row["name"]] | row)


@dataclass(frozen=True)
class Run:
    """How cases are run."""

    device: str
    case_seconds: float
    """A prediction or measurement that takes longer is killed."""
    limit_seconds: float = float("inf")
    """No case is started after this time."""
    processes: int = 1
    """Predictions at a time, and on CUDA measurements, as far as the device's memory goes."""
    history: Path | None = None
    """Folder for all events of the allocator, on CUDA."""

    def rows(self, cases: list[Case]) -> Iterator[dict[str, Any]]:
        """All predictions, then all measurements, whose rows are given as they end."""
        until, capability, about = time.monotonic() + self.limit_seconds, (8, 0), {}
        room = float("inf")
        if self.device == "cuda" and cases:
            about = in_a_process(describe, cases[0], seconds=self.case_seconds)
            if "failed" in about:
                yield about
                return
            capability, room = about["capability"], 0.85 * about["free_bytes"]
        jobs = [Job(predict, case, (self.device, capability)) for case in cases]
        predicted = {row["name"]: row for row in rows_of(jobs, self.case_seconds, self.processes, until=until)}
        yield from (row for row in predicted.values() if "failed" in row)
        gpu = {"gpu": about["gpu"]} if about else {}
        jobs = []
        for case in cases:
            if "failed" not in (row := predicted.get(case.name, {"failed": "no time left"})):
                size = row["predicted"]["reserved_bytes"] + _CONTEXT_BYTES
                jobs.append(Job(measure_case, case, (self.device, {**gpu, **row}, self.history), size))
        at_once = self.processes if self.device == "cuda" else 1  # on the CPU, timed; and memory is the machine's own
        yield from rows_of(jobs, self.case_seconds, at_once, room, until)


_CONTEXT_BYTES = 1 << 30
"""Set aside for the context of every process beside what its allocator reserves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--case-seconds", type=float, default=600.0, help="a case that takes longer is killed")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time (default: 1)")
    parser.add_argument("--history", type=Path, help="on CUDA, keep every event of the allocator in this folder")
    parser.add_argument("--predict-only", action="store_true", help="renew the predictions of rows that were measured")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"estimator_{arguments.device}.json"
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    if arguments.predict_only:
        return _predict_only(document, out, arguments)
    document |= {"command": f"python -m benchmarks.estimator.run --device {arguments.device}", "versions": versions()}
    done = {row["name"] for row in document["rows"] if "failed" not in row}
    chosen = cuda_cases if arguments.device == "cuda" else cpu_cases
    cases = [case for case in chosen() if arguments.only in case.name]
    run = Run(arguments.device, arguments.case_seconds, arguments.limit_seconds, arguments.processes, arguments.history)
    for row in run.rows([case for case in cases if case.name not in done]):
        document["rows"] = [*(r for r in document["rows"] if r["name"] != row["name"]), row]
        _write(document, out)
        print(_line(row), flush=True)
    rows = {row["name"]: row for row in document["rows"]}
    return 0 if cases and all("failed" not in rows.get(case.name, {"failed": "not run"}) for case in cases) else 1


def _predict_only(document: dict[str, Any], out: Path, arguments: argparse.Namespace) -> int:
    """Renew predictions in a results file, in which each row keeps its place; a failure leaves its row as it was."""
    rows = document["rows"]
    chosen = [row for row in rows if "measured" in row and arguments.only in row["name"]]
    document["predicted_with"] = versions()
    failed = not chosen
    for row in predicted_anew(chosen, arguments.device, arguments.case_seconds, arguments.processes):
        print(_line(row), flush=True)
        if "failed" in row:
            failed = True
            continue
        rows[next(at for at, other in enumerate(rows) if other["name"] == row["name"])] = row
        _write(document, out)
    return int(failed)


def _write(document: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:60s} FAILED {row['failed'][:120]}"
    tracker = row.get("mem_tracker", {})
    parts = [f"{row['name']:60s} {row['measured']['allocated_bytes'] / 2**20:9.1f} MiB"]
    parts.append(f"allocated {100 * row['error_allocated']:+7.3f} %")
    if "error_reserved" in row:
        parts.append(f"reserved {100 * row['error_reserved']:+7.3f} %")
    if "error" in tracker:
        parts.append(f"MemTracker {100 * tracker['error']:+7.2f} %")
    parts.append(f"{row['predicted']['seconds']:.1f} s")
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())

"""Compare estimates with measurement: `python -m benchmarks.estimator.run --device cpu|cuda`.

Every case runs in a child process of its own, so that one's memory doesn't touch another's, and that one which dies or
hangs is a row. Cases whose result is in the output file already are skipped, so that an interrupted run goes on where
it stopped. The exit code is 1 if a case failed or none was run.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  (imported before the fork: children start at once)
import torch
import transformers  # noqa: F401

from benchmarks.estimator.cases import Case, build_batch, build_callbacks, build_module, cpu_cases, cuda_cases

RESULTS = Path(__file__).parents[1] / "results"


def estimate(case: Case, device: str, capability: tuple[int, int]) -> dict[str, Any]:
    """Predicted figures of a case, from a module without weights."""
    from lightning_memfit.device.runtime import runtime_memory
    from lightning_memfit.estimate.estimate import estimate_step
    from lightning_memfit.profile.build import profile_module
    from lightning_memfit.profile.step import StepOptions
    from lightning_memfit.profile.trace import Emulation

    options = StepOptions(case.precision, case.accumulate_grad_batches)  # type: ignore[arg-type]
    emulation = Emulation(device, capability, case.kernel or None)  # type: ignore[arg-type]
    started = time.perf_counter()
    module = build_module(case, "meta")
    profile = profile_module(
        module, build_batch(case), options, emulation, build_callbacks(case), any_micro_batch=False
    )
    runtime = runtime_memory(capability) if device == "cuda" else None
    result = estimate_step(profile, runtime=runtime)
    return {
        "allocated_bytes": result.allocated_bytes,
        "reserved_bytes": result.reserved_bytes,
        "phase": result.phase,
        "breakdown": result.breakdown.to_dict(),
        "by_phase": result.by_phase,
        "attention_kernels": profile.attention_kernels,
        "assumptions": list(profile.assumptions),
        "traced_blocks": profile.traced_blocks,
        "num_blocks": profile.num_blocks,
        "seconds": time.perf_counter() - started,
    }


def run_case(case: Case, device: str) -> dict[str, Any]:
    """Estimate, measure, and on the CPU MemTracker's figure for one case."""
    from benchmarks.estimator import measure

    row: dict[str, Any] = {"name": case.name, "case": case.to_dict()}
    capability = (8, 0)
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        row["gpu"] = torch.cuda.get_device_name()
    row["predicted"] = estimate(case, device, capability)
    started = time.perf_counter()
    row["measured"] = (measure.measure_cuda if device == "cuda" else measure.measure_cpu)(case)
    row["measured"]["seconds"] = time.perf_counter() - started
    for key in ("allocated_bytes", "reserved_bytes"):
        if key in row["measured"]:
            row[f"error_{key.removesuffix('_bytes')}"] = row["predicted"][key] / row["measured"][key] - 1
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


def in_a_process(function: Callable[..., dict[str, Any]], case: Any, *arguments: Any, seconds: float) -> dict[str, Any]:
    """The row of a case, from a forked process of its own.

    Args:
        function: Called with the case and the arguments.
        case: Something with a `name`, for the row of a process that failed, died, or was killed.
        *arguments: Further arguments of the function.
        seconds: Time after which the process is killed.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, function, case, *arguments))
    process.start()
    send.close()  # the child's is then the only one, so that its death ends the wait
    try:
        if receive.poll(seconds):
            row: dict[str, Any] = receive.recv()
        else:
            process.kill()
            row = {"name": case.name, "failed": f"was killed after {seconds:.0f} s"}
    except EOFError:
        process.join()
        row = {"name": case.name, "failed": f"its process ended with exit code {process.exitcode}"}
    process.join()
    receive.close()
    return row


def _child(connection: Any, function: Callable[..., dict[str, Any]], case: Any, *arguments: Any) -> None:
    torch.manual_seed(0)
    try:
        connection.send(function(case, *arguments))
    except BaseException as error:
        connection.send({"name": case.name, "failed": f"{type(error).__name__}: {error}"[:500]})
        traceback.print_exc()


def versions() -> dict[str, str]:
    """Packages and hardware of this run."""
    from importlib.metadata import version

    names = ("torch", "lightning", "transformers", "bitsandbytes")
    found = {name: version(name) for name in names}
    return {**found, "python": platform.python_version(), "machine": f"{os.cpu_count()} cores, {platform.machine()}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--case-seconds", type=float, default=600.0, help="a case that takes longer is killed")
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"estimator_{arguments.device}.json"
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    document |= {"command": f"python -m benchmarks.estimator.run --device {arguments.device}", "versions": versions()}
    done = {row["name"] for row in document["rows"] if "failed" not in row}
    started = time.perf_counter()
    cases = [
        case for case in (cuda_cases if arguments.device == "cuda" else cpu_cases)() if arguments.only in case.name
    ]
    for case in cases:
        if case.name in done:
            continue
        if time.perf_counter() - started > arguments.limit_seconds:
            break
        row = in_a_process(run_case, case, arguments.device, seconds=arguments.case_seconds)
        document["rows"] = [*(r for r in document["rows"] if r["name"] != case.name), row]
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
        print(_line(row), flush=True)
    rows = {row["name"]: row for row in document["rows"]}
    return 0 if cases and all("failed" not in rows.get(case.name, {"failed": "not run"}) for case in cases) else 1


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

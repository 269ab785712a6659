"""Host memory under ZeRO on the CPU and from disk: `python -m benchmarks.offload_host_memory.run --drive FOLDER`.

Every case runs in processes of its own; the first rank's peak resident memory, beyond what it had when a preflight
looks, is what a prediction is held against. Needs 5 GiB of memory, 10 GB on FOLDER's drive and half an hour; writes
`benchmarks/results/offload_host_memory.json`. The largest case runs once more with glibc's defaults.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.offload_host_memory.cases import LARGEST, cases
from benchmarks.offload_host_memory.predict import activation_bytes
from benchmarks.record import ROOT, answer_of, write

RESULTS = ROOT / "benchmarks" / "results" / "offload_host_memory.json"
WORKER = "benchmarks.offload_host_memory.worker"
MOMENTS = ("build", "setup", "passes", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drive", required=True, help="folder on the drive to offload to")
    drive = Path(parser.parse_args().drive).resolve()
    rows = []
    for case in cases():
        rows.append(row_of(case, answer_of(WORKER, *case, drive, "returned")))
        print(json.dumps(rows[-1]), flush=True)
    kept = row_of(LARGEST, answer_of(WORKER, *LARGEST, drive, "kept"))
    write(RESULTS, {"rows": rows, "largest_with_freed_memory_kept": kept})


def row_of(case: tuple[str, str, int, str], marks: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth of resident memory since the start: its peak in each moment, and what stays after the last step."""
    start, *later = marks
    before = start["resident_bytes"]
    kind, size, ranks, precision = case
    peaks = {name: max(mark["peak_bytes"] for mark in later if mark["moment"] == name) - before for name in MOMENTS}
    return {
        "kind": kind,
        "size": size,
        "ranks": ranks,
        "precision": precision,
        "activation_bytes": activation_bytes(size, precision),
        "before_bytes": before,
        "peak_bytes": max(peaks.values()),
        "peak_by_moment": peaks,
        "kept_bytes": later[-1]["resident_bytes"] - before,
        "tensor_bytes": later[-1]["tensor_bytes"],
        "locked_bytes": later[-1]["locked_bytes"],
    }


if __name__ == "__main__":
    main()

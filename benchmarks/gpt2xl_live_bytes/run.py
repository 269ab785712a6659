"""Live bytes of two full fine-tuning steps of GPT-2 XL on the CPU, predicted and measured, with and without gradients.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python -m benchmarks.gpt2xl_live_bytes.run`. Needs 15 GiB of free
memory and half an hour, of which tracing all 48 blocks takes a part; writes `result.json` beside this file. Live bytes
are those of all tensors that operators make, followed by a `StorageLedger` during both steps, those inside
bitsandbytes' CPU kernels included (not so before commit 00b5eed).
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import ROOT, provenance, read_metrics, run

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
NEEDED_BYTES = 15 * GIB
CASES: dict[str, tuple[tuple[str, ...], float]] = {
    "gradients released": (("release.yaml",), 7.0),
    "gradients kept": ((), 9.5),
}
"""Overlays and the bar in GiB of each case."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
"""Have the C library give freed memory back, so that the resident set says something about live bytes."""
PLACES = """
trainer:
  logger: {{init_args: {{save_dir: {folder}}}}}
  callbacks+:
    - class_path: lightning_memfit.measure.monitor.MemoryMonitor
      init_args: {{tracked_steps: 2, report_path: {folder}/report.json}}
"""


def main() -> int:
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES:
        print(f"{free / GIB:.1f} GiB are free, {NEEDED_BYTES / GIB:.0f} are needed.", file=sys.stderr)
        return 2
    os.environ.update(MALLOC)
    failed = 0
    for name, (overlays, bar_gib) in CASES.items():
        row = measure(name, overlays, round(bar_gib * GIB))
        if row is None:
            failed = 1
        else:
            write(row)
    return failed


def write(row: dict[str, Any]) -> None:
    """Put a case into the result, in the place of its last figures."""
    path = HERE / "result.json"
    known = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else []
    cases = [*(case for case in known if case["name"] != row["name"]), row]
    result = {
        "benchmark": "gpt2xl_live_bytes",
        "command": "python -m benchmarks.gpt2xl_live_bytes.run",
        "tokens": "1 x 1024",
        "cases": cases,
        **provenance(),
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(name: str, overlays: tuple[str, ...], bar_bytes: int) -> dict[str, Any] | None:
    """Fit once; None if that failed."""
    here = HERE.relative_to(ROOT)
    configs = ["recipes/gpt2xl.yaml", *(f"{here}/{file}" for file in ("override.yaml", *overlays))]
    command = ["python", "-m", "cli", "fit", *(part for config in configs for part in ("--config", config))]
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "places.yaml"
        places.write_text(PLACES.format(folder=folder), encoding="utf-8")
        started = time.perf_counter()
        code, peak_rss_bytes = run([sys.executable, *command[1:], "--config", str(places)])
        if code:
            print(f"`{' '.join(command)}` ended with {code}, largest resident set {peak_rss_bytes / GIB:.1f} GiB.")
            return None
        seconds = time.perf_counter() - started
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        steps = read_metrics(Path(folder))
    predicted, measured = (report[key]["device"] for key in ("predicted", "measured"))
    row = {
        "name": name,
        "command": " ".join(command),
        "predicted_bytes": sum(predicted.values()),
        "measured_bytes": sum(measured.values()),
        "bar_bytes": bar_bytes,
        "under_the_bar": sum(measured.values()) <= bar_bytes,
        "predicted": predicted,
        "measured": measured,
        "peak_rss_bytes": peak_rss_bytes,
        "seconds_total": round(seconds, 1),
        "optimizer_steps": steps,
    }
    print(json.dumps(row, indent=2), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())

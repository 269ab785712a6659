"""Live bytes of two full fine-tuning steps of GPT-2 XL on the CPU, predicted and measured, with and without gradients.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python -m benchmarks.gpt2xl_live_bytes.run`. Needs 15 GiB of free
memory and half an hour, of which tracing all 48 blocks takes a part; writes `result.json` beside this file. Live bytes
are those of all tensors that operators make, followed by a `StorageLedger` during both steps, those inside
bitsandbytes' CPU kernels included (not so before commit 00b5eed).
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, fit, write
from lightning_memfit.memory import GIB

HERE = Path(__file__).resolve().parent
RESULT = HERE / "result.json"
CASES: dict[str, tuple[tuple[str, ...], float]] = {
    "gradients released": (("release.yaml",), 7.0),
    "gradients kept": ((), 9.5),
}
"""Overlays and the bar in GiB of each case."""
PLACES = """
trainer:
  logger: {{init_args: {{save_dir: {folder}}}}}
  callbacks+:
    - class_path: lightning_memfit.measure.monitor.MemoryMonitor
      init_args: {{tracked_steps: 2, report_path: {folder}/report.json}}
"""


def main() -> None:
    for name, (overlays, bar_gib) in CASES.items():
        row = measure(name, overlays, round(bar_gib * GIB))
        known = json.loads(RESULT.read_text(encoding="utf-8"))["cases"] if RESULT.exists() else []
        cases = [*(case for case in known if case["name"] != name), row]
        write(RESULT, {"benchmark": "gpt2xl_live_bytes", "tokens": "1 x 1024", "cases": cases})


def measure(name: str, overlays: tuple[str, ...], bar_bytes: int) -> dict[str, Any]:
    """Fit once."""
    configs = ["recipes/gpt2xl.yaml", *(f"{HERE.relative_to(ROOT)}/{file}" for file in ("override.yaml", *overlays))]
    run = fit(configs, [], PLACES, needed_gib=15)
    predicted, measured = (run.report[key]["device"] for key in ("predicted", "measured"))
    row = {
        "name": name,
        "command": run.command,
        "predicted_bytes": sum(predicted.values()),
        "measured_bytes": sum(measured.values()),
        "bar_bytes": bar_bytes,
        "under_the_bar": sum(measured.values()) <= bar_bytes,
        "predicted": predicted,
        "measured": measured,
        "peak_rss_bytes": run.peak_rss_bytes,
        "seconds_total": run.seconds,
        "optimizer_steps": run.steps,
    }
    print(json.dumps(row, indent=2), flush=True)
    return row


if __name__ == "__main__":
    main()

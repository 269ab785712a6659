"""Two optimizer steps of GPT-2 XL's true architecture on the CPU: peak memory, seconds, losses.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python benchmarks/gpt2xl_two_steps/run.py`. Needs 15 GiB of free
memory and a few minutes; writes `result.json` beside this file.
"""

import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDED_BYTES = 15 << 30
BAR_BYTES = 14 << 30
PACKAGES = ("lightning-memfit", "torch", "lightning", "transformers", "bitsandbytes")


def main() -> int:
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES:
        print(f"{free / 2**30:.1f} GiB are free, 15 are needed.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        options = ["--config", "recipes/gpt2xl.yaml", "--config", f"{HERE.relative_to(ROOT)}/override.yaml"]
        command = ["python", "-m", "cli", "fit", *options]
        started = time.perf_counter()
        code, peak_bytes = run([sys.executable, *command[1:], f"--trainer.logger.init_args.save_dir={folder}"])
        seconds = time.perf_counter() - started
        if code:
            return code
        rows = read_metrics(Path(folder))
    result = {
        "benchmark": "gpt2xl_two_steps",
        "command": " ".join(command),
        "peak_rss_bytes": peak_bytes,
        "bar_bytes": BAR_BYTES,
        "under_the_bar": peak_bytes < BAR_BYTES,
        "seconds_total": round(seconds, 1),
        "optimizer_steps": rows,
        **provenance(),
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0


def run(command: list[str]) -> tuple[int, int]:
    """Run to the end; return exit code and the kernel's own figure for the largest resident set, in bytes."""
    process = subprocess.Popen(command, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Everything logged at each optimizer step."""
    [file] = folder.rglob("metrics.csv")
    steps: dict[int, dict[str, float]] = {}
    with file.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            values = {key: float(value) for key, value in row.items() if value}
            steps.setdefault(int(values["step"]), {}).update(values)
    return [steps[step] for step in sorted(steps)]


def provenance() -> dict[str, Any]:
    """What figures depend on: hardware, versions, commit."""
    return {
        "hardware": hardware(),
        "versions": {package: version(package) for package in PACKAGES} | {"python": platform.python_version()},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
    }


def hardware() -> dict[str, str | int]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "memory_bytes": psutil.virtual_memory().total,
    }


if __name__ == "__main__":
    sys.exit(main())

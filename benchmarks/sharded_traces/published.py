"""Llama-3.1-8B beside figures that torchtitan and torchtune publish: `python -m benchmarks.sharded_traces.published`.

Every estimate is a command of its own, without any cache. Writes the results and the section of the page.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.marks import insert
from benchmarks.micro_batching.record import write
from benchmarks.sharded_traces.table import PAGE, ROOT
from lightning_memfit.memory import GIB

RESULT = ROOT / "benchmarks" / "results" / "llama31_published.json"
_FSDP2 = [
    "--sequence-length=8192",
    "--micro-batch-size=2",
    "--precision=bf16-mixed",
    "--optimizer=adamw_fused",
    "--strategy=fsdp2",
]
_FULL = "--technique=activation_checkpointing"
_SELECTIVE = "--technique=activation_checkpointing:mode=selective,keep=[matmul,attention]"
_TUNED = [
    "--sequence-length=2048",
    "--micro-batch-size=2",
    "--precision=bf16-true",
    "--checkpointing=full",
    "--device=48GiB",
    "--technique=paged_optimizer_8bit",
    "--technique=gradient_release",
]
_TITAN = "torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`"
RUNS: dict[str, tuple[float, str, list[str]]] = {
    f"{ranks} H100, FSDP, 2 x 8192; {words}": (
        published,
        f"{_TITAN}, table {table}",
        [*_FSDP2, technique, f"--device={ranks}x H100 SXM"],
    )
    for ranks, published, table in ((8, 82.4, 1), (128, 67.0, 3))
    for words, technique in (("all recomputed", _FULL), ("products and attention kept", _SELECTIVE))
} | {"1 A6000, full finetune, 2 x 2048": (37.4, "torchtune, `README.md`", _TUNED)}
"""Published GiB, where they stand, and our options, by run."""


def estimate(options: list[str]) -> dict[str, Any]:
    """The estimate, with the seconds that the command took, of the clock and of processors."""
    command = [sys.executable, "-m", "lightning_memfit.cli", "estimate", "--model=llama-3.1-8b", "--json", "--no-cache"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout, done.stderr[-2000:]
    peak = json.loads(done.stdout)["peak"]
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load = os.getloadavg()[0]
    return {
        "peak": peak,
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor, 1),
        "load": round(load, 1),
    }


def text() -> str:
    """A row for each run."""
    rows = json.loads(RESULT.read_text())["rows"]
    lines = [
        "| run | published | reserved, predicted | allocated | seconds of processors | of the clock, at load |",
        "|---|---|---|---|---|---|",
    ]
    for name, (published, source, _) in RUNS.items():
        row = rows[name]
        reserved, allocated = (row["peak"][f"{key}_bytes"] / GIB for key in ("reserved", "allocated"))
        seconds = f"{row['seconds']} at {row['load']}"
        lines.append(
            f"| {name} ({source}) | {published} GiB | {reserved:.1f} GiB | {allocated:.1f} GiB | "
            f"{row['processor_seconds']} | {seconds} |"
        )
    return "\n".join(lines)


def page(before: str) -> str:
    """The page with its table made anew."""
    return insert(before, "llama31", text())


if __name__ == "__main__":
    write(RESULT, {"rows": {name: estimate(options) for name, (_, _, options) in RUNS.items()}})
    Path(PAGE).write_text(page(PAGE.read_text()))
    print(f"wrote {RESULT.name} and {PAGE.name}")

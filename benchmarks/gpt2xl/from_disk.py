"""Optimizer steps of GPT-2 XL's true architecture with everything on disk: memory, bytes, seconds, share of the drive.

Needs 12 GiB of memory, 40 GB on the drive and some minutes.
"""

import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.gpt2xl.on_cpu import HERE, SMALL_MODEL, fit
from benchmarks.runner import DEVICE, SMALL, Benchmark, Named, Options, Row, Stage, named
from benchmarks.text import table
from lightning_memfit.memory import GIB, format_bytes
from lightning_memfit.nvme.folder import find_runs

RESULT = "gpt2xl_zero_infinity.json"


def measure(case: Named, options: Options, row: Row) -> Row:
    """Train, and measure the drive before and after."""
    drive, raw_gib = options.drive.resolve(), 1 if options.small else 2
    raw = {"before": raw_rates(drive, raw_gib)}
    configs = ["--config", "recipes/gpt2xl_zero_infinity.yaml", "--config", f"{HERE}/zero_infinity.yaml"]
    configs += SMALL_MODEL if options.small else []
    configs += ["--trainer.accelerator=gpu"] if options.device == "cuda" else []
    folder = options.folder
    places = [f"--trainer.strategy.init_args.nvme_path={drive}", f"--trainer.logger.init_args.save_dir={folder}"]
    variables = {"DS_ACCELERATOR": "cpu"} if options.device == "cpu" else {}
    with DiskUse(drive) as disk:
        run = fit(configs, places, folder, variables)
    raw["after"] = raw_rates(drive, raw_gib)
    best = {name: max(rates[name] for rates in raw.values()) for name in ("read", "write")}
    return {
        "runs": run.command,
        "sequence_length": 64,
        "peak_rss_bytes": run.peak_rss_bytes,
        "peak_disk_bytes": disk.peak_bytes,
        "left_on_disk": [str(state.path) for state in find_runs(drive)],
        "seconds_total": run.seconds,
        "optimizer_steps": [step | shares(step, best) for step in run.steps],
        "raw_bytes_per_s": raw,
        "predicted": {"bytes_per_rank": run.report["bytes_per_rank"]},
    }


class DiskUse:
    """The most that swap files of runs below a folder take, looked at twice a second."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive
        self.peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "DiskUse":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, sum(state.size_bytes for state in find_runs(self.drive)))


def shares(row: dict[str, float], raw: dict[str, float]) -> dict[str, float]:
    """Part of the raw bandwidth that a step, and its update alone, made use of."""
    found = {}
    for name, parts in (("step", ("passes", "update")), ("update", ("update",))):
        seconds, read, written = (
            sum(row[f"{part}_{what}"] for part in parts) for what in ("seconds", "read_bytes", "written_bytes")
        )
        found[f"{name}_share_of_raw"] = round((read / raw["read"] + written / raw["write"]) / seconds, 4)
    return found


def raw_rates(drive: Path, gib: int) -> dict[str, float]:
    """Bytes per second of DeepSpeed's own benchmark."""
    with tempfile.TemporaryDirectory(dir=drive) as folder:
        return {"write": deepspeed_io(folder, gib), "read": deepspeed_io(folder, gib, "--read")}


def deepspeed_io(folder: str, gib: int, *options: str) -> float:
    """`ds_io` on one file, which is written anew as swap files are, with DeepSpeed's default settings of I/O.

    Its own figure is in GiB per second.
    """
    script = Path(sys.executable).with_name("ds_io")
    shape = ["--io_size", f"{gib}G", "--loops", "2", "--warmup_loops", "1"]
    settings = ["--block_size", "1M", "--queue_depth", "8", "--io_parallel", "1"]
    command = [sys.executable, str(script), "--folder", folder, *shape, *settings, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [figure] = re.findall(r"Task (?:Read|Write) Speed = ([\d.]+) GB/sec", done.stdout)
    return float(figure) * GIB


def text(document: dict[str, Any]) -> str:
    """What the preflight said beforehand beside what was measured, and the last step."""
    (row,), hardware = document["rows"], document["hardware"]
    tiers = {tier: sum(sizes.values()) for tier, sizes in row["predicted"]["bytes_per_rank"].items()}
    in_memory = sum(size for tier, size in tiers.items() if tier != "disk")
    raw = {name: max(rates[name] for rates in row["raw_bytes_per_s"].values()) for name in ("read", "write")}
    step = row["optimizer_steps"][-1]
    read, written = (step[f"passes_{what}_bytes"] + step[f"update_{what}_bytes"] for what in ("read", "written"))
    sizes = [
        [
            "memory",
            f"{format_bytes(in_memory)}, and libraries and activations",
            f"{format_bytes(row['peak_rss_bytes'])}, the whole process with memory that glibc kept",
        ],
        ["disk", format_bytes(tiers["disk"]), format_bytes(row["peak_disk_bytes"])],
    ]
    return (
        f"GPT-2 XL's true architecture, random weights, {row['sequence_length']} tokens a step, on "
        f"{hardware['cores']} cores with {format_bytes(hardware['memory_bytes'])} and no GPU\n"
        f"(`benchmarks/results/{RESULT}`, by `python -m benchmarks gpt2xl_zero_infinity`):\n\n"
        f"{table(['', 'predicted by the preflight', 'measured'], sizes)}\n\n"
        f"Step {len(row['optimizer_steps'])} took {step['passes_seconds']:.0f} s for forward and backward and "
        f"{step['update_seconds']:.0f} s for the update. It read {read / 1e9:.1f} GB and wrote {written / 1e9:.1f} "
        f"GB: {step['step_share_of_raw']:.0%} of the drive's raw {raw['read'] / 1e9:.2f} and "
        f"{raw['write'] / 1e9:.2f} GB/s (DeepSpeed's `ds_io`), {step['update_share_of_raw']:.0%} in the update."
    )


DRIVE = ("--drive", {"type": Path, "required": True, "help": "folder on the drive to offload to"})
BENCHMARK = Benchmark(
    RESULT,
    lambda options: named(["GPT-2 XL"]),
    (Stage(measure),),
    seconds=7200,
    threads=None,
    arguments=(DEVICE, SMALL, DRIVE),
)

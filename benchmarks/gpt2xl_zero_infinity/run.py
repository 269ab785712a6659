"""Optimizer steps of GPT-2 XL's true architecture with everything on disk: memory, bytes, seconds, share of the drive.

Run from the root of a checkout: `OMP_NUM_THREADS=2 python -m benchmarks.gpt2xl_zero_infinity.run --drive FOLDER`. Needs
12 GiB of memory, 40 GB on FOLDER's drive and some minutes; writes `result.json` beside this file. Options that follow
are handed to `fit` and nothing is written: `--model.config.n_embd=768` and so on try a small model.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import ROOT, read_metrics, run, write
from lightning_memfit.bench.record import commit, hardware
from lightning_memfit.device.storage import measure_storage
from lightning_memfit.memory import GIB
from lightning_memfit.nvme.folder import find_runs

HERE = Path(__file__).resolve().parent
BAR_BYTES = 12 * GIB
RAW_GIB = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drive", required=True, help="folder on the drive to offload to")
    arguments, options = parser.parse_known_args()
    drive = Path(arguments.drive).resolve()
    if not any(option.startswith("--trainer.accelerator=") for option in options):
        os.environ["DS_ACCELERATOR"] = "cpu"  # as the override says
    at_start = commit()
    raw = [raw_rates(drive)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("python", "-m", "cli", "fit", "--config", "recipes/gpt2xl_zero_infinity.yaml"),
            *("--config", f"{HERE.relative_to(ROOT)}/override.yaml", *options),
        ]
        places = [f"--trainer.strategy.init_args.nvme_path={drive}", f"--trainer.logger.init_args.save_dir={folder}"]
        started = time.perf_counter()
        with DiskUse(drive) as disk:
            code, peak_bytes = run([sys.executable, *command[1:], *places])
        seconds = time.perf_counter() - started
        if code:
            return code
        rows = read_metrics(Path(folder))
        [report] = Path(folder).rglob("preflight.json")
        predicted = json.loads(report.read_text(encoding="utf-8"))
    raw.append(raw_rates(drive))
    best = {name: max(rates["deepspeed_io"][name] for rates in raw) for name in ("read", "write")}
    result = {
        "benchmark": "gpt2xl_zero_infinity",
        "command": " ".join(command),
        "sequence_length": 64,
        "peak_rss_bytes": peak_bytes,
        "bar_bytes": BAR_BYTES,
        "under_the_bar": peak_bytes < BAR_BYTES,
        "peak_disk_bytes": disk.peak_bytes,
        "left_on_disk": [str(state.path) for state in find_runs(drive)],
        "seconds_total": round(seconds, 1),
        "optimizer_steps": [row | shares(row, best) for row in rows],
        "raw_bytes_per_s": {"before": raw[0], "after": raw[1]},
        "predicted": {
            "bytes_per_rank": predicted["bytes_per_rank"],
            "seconds_per_step_at_least": predicted["seconds_per_step"],
            "problems": predicted["problems"],
        },
        "hardware": hardware("") | {"file_system": file_system(drive)},
        "commit": at_start,
    }
    if not options:
        write(HERE / "result.json", result)
    print(json.dumps(result, indent=2))
    return 0


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


def raw_rates(drive: Path) -> dict[str, dict[str, float]]:
    """Bytes per second of DeepSpeed's own benchmark, and of plain O_DIRECT calls one after the other."""
    plain = measure_storage(drive, RAW_GIB * GIB)
    with tempfile.TemporaryDirectory(dir=drive) as folder:
        rates = {"write": deepspeed_io(folder), "read": deepspeed_io(folder, "--read")}
    return {"deepspeed_io": rates, "o_direct": {"write": plain.write_bytes_per_s, "read": plain.read_bytes_per_s}}


def deepspeed_io(folder: str, *options: str) -> float:
    """`ds_io` on one file, which is written anew as swap files are, with DeepSpeed's default settings of I/O.

    Its own figure is in GiB per second.
    """
    script = Path(sys.executable).with_name("ds_io")
    shape = ["--io_size", f"{RAW_GIB}G", "--loops", "2", "--warmup_loops", "1"]
    settings = ["--block_size", "1M", "--queue_depth", "8", "--io_parallel", "1"]
    command = [sys.executable, str(script), "--folder", folder, *shape, *settings, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    [figure] = re.findall(r"Task (?:Read|Write) Speed = ([\d.]+) GB/sec", done.stdout)
    return float(figure) * GIB


def file_system(drive: Path) -> dict[str, Any]:
    """What the folder lies on."""
    mounts = [part for part in psutil.disk_partitions(all=True) if drive.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint))
    return {"type": mount.fstype, "device": mount.device, "free_bytes": psutil.disk_usage(str(drive)).free}


if __name__ == "__main__":
    sys.exit(main())

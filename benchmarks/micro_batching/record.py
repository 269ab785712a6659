"""Write a benchmark's figures with what they depend on."""

import json
import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_memfit.bench.record import versions


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write one JSON file: figures, versions, hardware and commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    module = getattr(sys.modules["__main__"], "__spec__", None)
    record = {
        "command": " ".join(["python -m", module.name if module else Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": versions(),
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "threads": torch.get_num_threads(),
        "commit": commit,
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def write_aside(path: Path, figures: dict[str, Any]) -> None:
    """Write in a process of its own: asking a device for its name leaves a context, which can't be forked."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(path, figures))
    process.start()
    process.join()

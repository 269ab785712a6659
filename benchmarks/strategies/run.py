"""What each strategy keeps on each of two ranks, measured on the CPU: `python -m benchmarks.strategies.run`.

Needs 7 GiB of memory and some minutes; writes `benchmarks/results/strategies_cpu.json`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import ROOT, provenance
from benchmarks.strategies.worker import CONFIG

RESULTS = ROOT / "benchmarks" / "results" / "strategies_cpu.json"
STRATEGIES = ("ddp", "fsdp2", "zero_1", "zero_2", "zero_3", "zero_offload", "zero_3_offload", "zero_infinity")
PACKAGES = ("lightning-memfit", "torch", "lightning", "transformers", "deepspeed")


def main() -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    rows = {}
    for name in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "benchmarks.strategies.worker", name, str(result), folder]
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
            rows[name] = json.loads(result.read_text(encoding="utf-8"))
        print(name, rows[name], flush=True)
    document = {
        "command": "python -m benchmarks.strategies.run",
        "config": CONFIG,
        "parameters": num_parameters(),
        "ranks": 2,
        "precision": "bf16-mixed",
        "rows": rows,
        **provenance(PACKAGES),
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def num_parameters() -> int:
    """Of the model, without building it."""
    import torch

    from lightning_memfit.models.architecture import build, resolve_config

    with torch.device("meta"):
        return sum(
            parameter.numel() for parameter in build(resolve_config(None, None, CONFIG), None, "sdpa").parameters()
        )


if __name__ == "__main__":
    main()

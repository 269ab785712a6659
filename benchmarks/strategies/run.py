"""What each strategy keeps on each of two ranks, measured on the CPU: `python -m benchmarks.strategies.run`.

Needs 7 GiB of memory and some minutes; writes `benchmarks/results/strategies_cpu.json`.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

import lightning_memfit.strategies  # noqa: F401  registers the names
from benchmarks.record import QUIET, ROOT, answer_of, host_tensor_bytes, write
from lightning_memfit import CausalLM, RandomTokens
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.nvme.folder import find_runs
from lightning_memfit.strategies import ZeroStrategy

RESULTS = ROOT / "benchmarks" / "results" / "strategies_cpu.json"
STRATEGIES = ("ddp", "fsdp2", "zero_1", "zero_2", "zero_3", "zero_offload", "zero_3_offload", "zero_infinity")
CONFIG = {
    "model_type": "gpt2",
    "n_embd": 1024,
    "n_layer": 8,
    "n_head": 16,
    "n_positions": 64,
    "vocab_size": 8192,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STEPS = 3


class Memory(pl.Callback):
    """Tensors of this rank between two steps, when activations and gathered weights are gone."""

    def __init__(self, drive: Path) -> None:
        self.drive = drive
        self.live_bytes = self.resident_bytes = self.disk_bytes = 0
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Look."""
        self.seconds.append(time.perf_counter() - self._start)
        self.live_bytes = host_tensor_bytes()
        self.resident_bytes = psutil.Process().memory_info().rss
        self.disk_bytes = sum(state.size_bytes for state in find_runs(self.drive))


def train(name: str, drive: str, result: str) -> None:
    """Three steps on two ranks; the first writes what it keeps."""
    os.environ["MEMFIT_NVME_PATH"] = drive
    torch.set_num_threads(1)
    strategy = {
        "zero_3_offload": lambda: ZeroStrategy(3, offload_optimizer=True, offload_parameters=True),
    }.get(name, lambda: f"memfit_{name}")()
    data = RandomTokens(num_samples=64, sequence_length=64, batch_size=1, vocab_size=CONFIG["vocab_size"])
    memory = Memory(Path(drive))
    module = CausalLM(config=CONFIG, learning_rate=1e-4)
    import deepspeed  # noqa: F401  part of what is there before, under every strategy

    before = psutil.Process().memory_info().rss
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        max_steps=STEPS,
        callbacks=[memory],
        **QUIET,
    )
    trainer.fit(module, data)
    if trainer.global_rank == 0:
        row = {
            "live_bytes": memory.live_bytes,
            "resident_bytes": memory.resident_bytes - before,
            "disk_bytes": memory.disk_bytes,
            "seconds": [round(seconds, 3) for seconds in memory.seconds],
        }
        Path(result).write_text(json.dumps(row), encoding="utf-8")


def main() -> None:
    rows = {}
    for name in STRATEGIES:
        with tempfile.TemporaryDirectory() as drive:
            rows[name] = answer_of("benchmarks.strategies.run", name, drive)
        print(name, rows[name], flush=True)
    figures = {"config": CONFIG, "parameters": num_parameters(), "ranks": 2, "precision": "bf16-mixed", "rows": rows}
    write(RESULTS, figures)


def num_parameters() -> int:
    """Of the model, without building it."""
    with torch.device("meta"):
        model = build(resolve_config(None, None, CONFIG), None, "sdpa")
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:
        main()

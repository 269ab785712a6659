"""One strategy on two CPU processes: `python -m benchmarks.strategies.worker NAME RESULT DRIVE`."""

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch.distributed.tensor import DTensor

import lightning_memfit.strategies  # noqa: F401  registers the names
from lightning_memfit import CausalLM, RandomTokens
from lightning_memfit.nvme.folder import find_runs
from lightning_memfit.strategies import ZeroStrategy

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
        self.live_bytes = live_bytes()
        self.resident_bytes = psutil.Process().memory_info().rss
        self.disk_bytes = sum(state.size_bytes for state in find_runs(self.drive))


def live_bytes() -> int:
    """Storages of all tensors that Python can reach, each once."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and not isinstance(found, DTensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main(name: str, result: str, drive: str) -> None:
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
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
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


if __name__ == "__main__":
    main(*sys.argv[1:])

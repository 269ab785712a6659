"""What each strategy keeps on each of two ranks between steps; needs 7 GiB of memory and some minutes."""

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
from benchmarks.host_memory.cases import Case, config_of, module_of, train
from benchmarks.runner import Benchmark, Options, Row, Stage
from benchmarks.training import answer_of, host_tensor_bytes
from lightning_memfit.models.architecture import build, resolve_config
from lightning_memfit.nvme.folder import find_runs
from lightning_memfit.strategies import ZeroStrategy

RESULT = "strategies_cpu.json"
STRATEGIES = ("ddp", "fsdp2", "zero_1", "zero_2", "zero_3", "zero_offload", "zero_3_offload", "zero_infinity")
SIZE, RANKS, PRECISION, STEPS = "109M", 2, "bf16-mixed", 3


class Memory(pl.Callback):
    """Tensors of this rank between two steps, when activations and gathered weights are gone."""

    def __init__(self, drive: Path) -> None:
        self.drive, self.seconds = drive, list[float]()
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, *args: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Look."""
        self.seconds.append(round(time.perf_counter() - self._start, 3))
        self.found = {
            "live_bytes": host_tensor_bytes(),
            "resident_bytes": psutil.Process().memory_info().rss,
            "disk_bytes": sum(state.size_bytes for state in find_runs(self.drive)),
            "seconds": self.seconds,
        }


def main(name: str, drive: str, result: str) -> None:
    """Three steps on two ranks; the first writes what it keeps."""
    os.environ["MEMFIT_NVME_PATH"] = drive
    everything = ZeroStrategy(3, offload_optimizer=True, offload_parameters=True)
    strategy = everything if name == "zero_3_offload" else f"memfit_{name}"
    case, memory = Case(name, SIZE, RANKS, PRECISION), Memory(Path(drive))
    import deepspeed  # noqa: F401  part of what is there before, under every strategy

    before = psutil.Process().memory_info().rss
    if train(strategy, module_of(case), case, STEPS, memory):
        memory.found["resident_bytes"] -= before
        Path(result).write_text(json.dumps(memory.found), encoding="utf-8")


def measure(case: Case, options: Options, row: Row) -> Row:
    """The row of a strategy."""
    with tempfile.TemporaryDirectory() as drive:
        found: Row = answer_of("benchmarks.host_memory.strategies", case.kind, drive, seconds=options.seconds)
    return {"strategy": case.kind, **found}


def about(rows: list[Row], options: Options) -> Row:
    """The rows, with the model that they trained."""
    with torch.device("meta"):
        model = build(resolve_config(None, None, config_of(SIZE)), None, "sdpa")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model_of = {"config": config_of(SIZE), "parameters": num_parameters}
    return {**model_of, "ranks": RANKS, "precision": PRECISION, "rows": rows}


BENCHMARK = Benchmark(
    RESULT,
    lambda options: [Case(name, SIZE, RANKS, PRECISION) for name in STRATEGIES],
    (Stage(measure),),
    about,
)


if __name__ == "__main__":
    main(*sys.argv[1:])

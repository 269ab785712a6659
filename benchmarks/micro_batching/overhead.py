"""What our callbacks cost when nothing goes wrong, against plain Lightning.

    python -m benchmarks.micro_batching.overhead

Four measurements: an empty loop (one parameter, a loss that computes nothing), in microseconds per step; a small
model that logs its loss in every step; a step of GPT-2 with 124 million parameters on the CPU, in percent; and one of a
GPT-2 of as many layers and tensors that are so narrow that computing them takes a few milliseconds, in which what the
callbacks do per module and per tensor shows above the noise of a large step. Runs with and without alternate, so that
both see the same machine. Beside the median stands the 5 % quantile of the steps, which other processes disturbed
least. The monitor follows no tensors here, as after its first three steps.

The small model's step is shorter with the callbacks than without: values that a name logs in every step reach Lightning
without what it does anew for each of them, which takes longer than everything that the callbacks add.

The process starts itself anew with a C library that keeps freed memory (pieces up to 32 MiB, its most). By default it
returns GPT-2's 500 MB of gradients to the system in every step and takes them again, which costs up to half of a step,
more or less by the luck of what was allocated before: noise many times larger than what is measured.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.micro_batching.record import write
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size.prediction import MemoryPrediction
from lightning_memfit.measure.monitor import MemoryMonitor

_GPT2_STEPS = 7
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class Empty(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Logging(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Gpt2(pl.LightningModule):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Clock(pl.Callback):
    """Times of the starts of batches."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def ours() -> list[pl.Callback]:
    """What a user attaches: the README's callbacks and the one that predicts."""
    return [MicroBatching(), MemoryMonitor(tracked_steps=0), MemoryPrediction()]


def trainer_of(callbacks: list[pl.Callback], logger: Logger | Literal[False] = False) -> pl.Trainer:
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, logger=logger, **quiet)


def seconds_of_steps(
    callbacks: list[pl.Callback], module: pl.LightningModule, data: Tensor, batch_size: int = 1, logs: bool = False
) -> list[float]:
    clock = Clock()
    gc.collect()  # a run's optimizer states die with its Trainer, which is full of cycles
    with redirect_stdout(StringIO()), TemporaryDirectory() as folder:  # the monitor's table
        trainer = trainer_of([clock, *callbacks], CSVLogger(folder) if logs else False)
        trainer.fit(module, DataLoader(data, batch_size))
    return [after - before for before, after in pairwise(clock.times)]


def empty_loop(rounds: int) -> dict[str, Any]:
    """Seconds of a step in which nothing is computed."""
    return in_turns(Empty, torch.zeros(1000, 1), rounds, skip=50)


def logging_loop(rounds: int) -> dict[str, Any]:
    """Seconds of a step of a small model that logs its loss, 8 samples, the device's whole share at once."""
    data = torch.randn(8 * 500, 8, generator=torch.Generator().manual_seed(0))
    return in_turns(Logging, data, rounds, skip=50, batch_size=8, logs=True)


def narrow_steps(rounds: int) -> dict[str, Any]:
    """Seconds of a step of 12 narrow layers: 148 tensors, as in the model of 124 million parameters."""
    data = torch.randint(0, 64, (70, 8), generator=torch.Generator().manual_seed(0))
    return in_turns(lambda: Gpt2(n_embd=24, vocab_size=64, n_positions=8), data, rounds, skip=10)


def in_turns(
    make: Callable[[], pl.LightningModule], data: Tensor, rounds: int, skip: int, **options: Any
) -> dict[str, Any]:
    """Steps of runs without and with ours: the quantile that other programs disturb least, and the median."""
    plain: list[float] = []
    with_ours: list[float] = []
    for _ in range(rounds):
        plain += seconds_of_steps([], make(), data, **options)[skip:]
        with_ours += seconds_of_steps(ours(), make(), data, **options)[skip:]
    figures: dict[str, Any] = {"steps": len(plain)}
    for name, quantile in (("undisturbed", 0.05), ("median", 0.5)):
        without, with_memfit = (sorted(steps)[int(quantile * len(steps))] for steps in (plain, with_ours))
        figures[name] = {
            "plain_seconds": without,
            "memfit_seconds": with_memfit,
            "difference_microseconds": round((with_memfit - without) * 1e6, 2),
        }
    return figures


def gpt2_steps(pairs: int, tokens: int) -> dict[str, Any]:
    """Short runs of one model, without and with ours in turn and in swapped order every other time.

    A pair is compared by the medians of its two runs; the figure is the median over pairs, with the interval that
    holds the true median in 95 % of cases (order statistics, no assumption about the noise).
    """
    module = Gpt2()
    data = torch.randint(0, 50257, (_GPT2_STEPS + 1, tokens), generator=torch.Generator().manual_seed(0))
    seconds_of_steps([], module, data)
    plain, differences = [], []
    for pair in range(pairs):
        runs = [[], ours()] if pair % 2 == 0 else [ours(), []]
        medians = {bool(callbacks): median(seconds_of_steps(callbacks, module, data)[1:]) for callbacks in runs}
        plain.append(medians[False])
        differences.append(100 * (medians[True] / medians[False] - 1))
    differences.sort()
    low = max(0, int((pairs - 1.96 * pairs**0.5) / 2))
    return {
        "pairs": pairs,
        "steps_per_run": _GPT2_STEPS - 1,
        "plain_seconds": median(plain),
        "difference_percent": round(median(differences), 3),
        "interval_95_percent": [round(differences[low], 3), round(differences[-1 - low], 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-gpt2", action="store_true")
    parser.add_argument("--only-narrow", action="store_true", help="measure that part, and keep the record's others")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of GPT-2 runs")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/micro_batching_overhead.json"))
    arguments = parser.parse_args()
    if not _KEEP_FREED_MEMORY.items() <= os.environ.items():
        here = [sys.executable, "-m", "benchmarks.micro_batching.overhead", *sys.argv[1:]]
        os.execve(sys.executable, here, os.environ | _KEEP_FREED_MEMORY)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figures: dict[str, Any] = {"callbacks": [type(callback).__name__ for callback in ours()]}
    if arguments.only_narrow:
        kept = json.loads(arguments.output.read_text(encoding="utf-8"))
        figures |= {name: kept[name] for name in ("empty_loop", "logging_loop", "gpt2_124m_cpu_1x64") if name in kept}
    else:
        figures["empty_loop"] = empty_loop(rounds=12)
        figures["logging_loop"] = logging_loop(rounds=12)
    figures["gpt2_narrow_cpu"] = narrow_steps(rounds=10)
    print(figures, flush=True)
    if not (arguments.skip_gpt2 or arguments.only_narrow):
        figures["gpt2_124m_cpu_1x64"] = gpt2_steps(arguments.pairs, tokens=64)
        print(figures, flush=True)
    write(arguments.output, figures)


if __name__ == "__main__":
    main()

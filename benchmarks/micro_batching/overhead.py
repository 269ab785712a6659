"""What `MicroBatching` costs when nothing goes wrong, against plain Lightning.

    python -m benchmarks.micro_batching.overhead

Two measurements: an empty loop (one parameter, a loss that computes nothing), in microseconds per step, and a step of
GPT-2 with 124 million parameters on the CPU, in percent. Runs with and without alternate, so that both see the same
machine. Beside the median stands the 5 % quantile of the steps, which other processes disturbed least.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.micro_batching.record import write
from lightning_memfit.fitting import MicroBatching


class Empty(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Gpt2(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config())

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


def seconds_of_steps(make: Callable[[], pl.LightningModule], data: Tensor, batch_size: int, ours: bool) -> list[float]:
    clock = Clock()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [clock, MicroBatching()] if ours else [clock]
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(make(), DataLoader(data, batch_size))
    steps = [after - before for before, after in pairwise(clock.times)]
    return steps[min(50, len(steps) // 3) :]


def alternate(make: Callable[[], pl.LightningModule], data: Tensor, batch_size: int, rounds: int) -> dict[str, Any]:
    plain: list[float] = []
    ours: list[float] = []
    for _ in range(rounds):
        plain += seconds_of_steps(make, data, batch_size, ours=False)
        ours += seconds_of_steps(make, data, batch_size, ours=True)
    figures: dict[str, Any] = {"steps": len(plain)}
    for name, quantile in (("undisturbed", 0.05), ("median", 0.5)):
        without, with_ours = (sorted(steps)[int(quantile * len(steps))] for steps in (plain, ours))
        figures[name] = {
            "plain_seconds": without,
            "memfit_seconds": with_ours,
            "difference_microseconds": round((with_ours - without) * 1e6, 2),
            "difference_percent": round(100 * (with_ours / without - 1), 3),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-gpt2", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/micro_batching_overhead.json"))
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figures = {"empty_loop": alternate(Empty, torch.zeros(1000, 1), 1, rounds=12)}
    print(figures, flush=True)
    if not arguments.skip_gpt2:
        tokens = torch.randint(0, 50257, (10, 128), generator=torch.Generator().manual_seed(0))
        figures["gpt2_124m_cpu_1x128"] = alternate(Gpt2, tokens, 1, rounds=2)
        print(figures, flush=True)
    write(arguments.output, figures)


if __name__ == "__main__":
    main()

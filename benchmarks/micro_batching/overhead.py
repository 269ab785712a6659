"""What `MicroBatching` costs when nothing goes wrong, against plain Lightning.

    python -m benchmarks.micro_batching.overhead

Two measurements: an empty loop (one parameter, a loss that computes nothing), in microseconds per step, and a step of
GPT-2 with 124 million parameters on the CPU, in percent. Runs alternate, so that both see the same machine; medians.
Wall time and the process's CPU time stand side by side: the latter doesn't count what other processes take away.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
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
    """Wall and CPU times of the starts of batches."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time()))


def seconds_per_step(
    make: Callable[[], pl.LightningModule], data: Tensor, batch_size: int, ours: bool
) -> tuple[float, float]:
    """Median wall and CPU seconds of a step."""
    clock = Clock()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [clock, MicroBatching()] if ours else [clock]
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(make(), DataLoader(data, batch_size))
    wall, cpu = (
        [after - before for before, after in zip(times, times[1:], strict=False)]
        for times in zip(*clock.times, strict=True)
    )
    start = min(50, len(wall) // 3)
    return statistics.median(wall[start:]), statistics.median(cpu[start:])


def alternate(make: Callable[[], pl.LightningModule], data: Tensor, batch_size: int, rounds: int) -> dict[str, Any]:
    pairs = [
        (seconds_per_step(make, data, batch_size, ours=False), seconds_per_step(make, data, batch_size, ours=True))
        for _ in range(rounds)
    ]
    figures: dict[str, Any] = {"rounds": rounds}
    for index, kind in enumerate(("wall", "cpu")):
        plain = statistics.median(without[index] for without, _ in pairs)
        difference = statistics.median(with_ours[index] - without[index] for without, with_ours in pairs)
        figures[kind] = {
            "plain_seconds": plain,
            "memfit_seconds": statistics.median(with_ours[index] for _, with_ours in pairs),
            "difference_microseconds": round(difference * 1e6, 2),
            "difference_percent": round(100 * difference / plain, 3),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-gpt2", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/micro_batching_overhead.json"))
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figures = {"empty_loop": alternate(Empty, torch.zeros(2000, 1), 1, rounds=7)}
    print(figures, flush=True)
    if not arguments.skip_gpt2:
        tokens = torch.randint(0, 50257, (8, 512), generator=torch.Generator().manual_seed(0))
        figures["gpt2_124m_cpu_1x512"] = alternate(Gpt2, tokens, 1, rounds=3)
        print(figures, flush=True)
    write(arguments.output, figures)


if __name__ == "__main__":
    main()

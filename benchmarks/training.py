"""What benchmarks that train have in common: Trainers, clocks, true peaks, and processes with several ranks."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.text import ROOT
from lightning_memfit.memory.kind import synchronize
from lightning_memfit.techniques.core.precision import trainer_options

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
"""Options of a Trainer that leaves nothing behind and says nothing."""


def trainer_of(*callbacks: pl.Callback, max_steps: int = 2, device: str = "cpu", **options: Any) -> pl.Trainer:
    """A Trainer of one device that leaves nothing behind, with what the callbacks ask of its options."""
    precision = options.pop("precision", None)  # a Trainer takes it, or a plugin of it
    return pl.Trainer(
        accelerator="gpu" if device == "cuda" else device,
        devices=1,
        max_steps=max_steps,
        max_epochs=-1,  # an epoch may have two steps only
        **(QUIET | options | trainer_options(callbacks, precision)),
    )


class WithAdamW(pl.LightningModule):
    """A module that AdamW trains."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class OwnLoss(pl.LightningModule):
    """A model of transformers, which computes its own loss.

    Args:
        model: The model.
        make_optimizer: Makes the optimizer of what is trained; AdamW by default.
    """

    def __init__(self, model: torch.nn.Module, make_optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        self.model, self.make_optimizer = model, make_optimizer

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class Repeated:
    """A loader that gives one batch again and again, and makes nothing in memory."""

    def __init__(self, batch: Any, times: int) -> None:
        self.batch, self.times = batch, times

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.times)

    def __len__(self) -> int:
        return self.times


class Clock(pl.Callback):
    """Seconds of every optimizer step by a clock of one's own, the device's work included."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds: list[float] = []
        self._clock = clock

    def on_train_start(self, *_: Any) -> None:
        """Start the clock."""
        self._step, self._last = 0, self._clock()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Read it after a batch that stepped."""
        if trainer.global_step != self._step:
            synchronize(trainer.strategy.root_device)
            now = self._clock()
            self.seconds.append(now - self._last)
            self._step, self._last = trainer.global_step, now


# --- true peaks, by the events of torch's CPU allocator ---------------------------------------------------------------


MARK = 7_654_321
"""Bytes of a tensor that marks where to begin among the allocator's events."""


def mark(number: int = 0) -> None:
    """Leave a mark."""
    torch.empty(MARK + number, dtype=torch.uint8)


def peak_after_mark(changes: list[int]) -> int:
    """Peak from the mark on, of changes that `allocation_events` gave, kernels' scratch memory included."""
    return max(list(accumulate(changes))[changes.index(MARK) + 1 :])


# --- ranks on the CPU -------------------------------------------------------------------------------------------------


def answer_of(module: str, *arguments: Any, seconds: float = 1800.0, **environment: str) -> Any:
    """Run `python -m MODULE ARGUMENTS FILE` on the CPU, and return what it wrote into FILE as JSON.

    Args:
        module: A module of a benchmark, whose Trainer starts further ranks.
        arguments: What it is told.
        seconds: All its processes are killed after this time.
        environment: Further variables.

    Raises:
        RuntimeError: If it failed, or wrote nothing.
    """
    variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", module, *map(str, arguments), str(answer)]
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(seconds)
        finally:
            if process.poll() != 0:  # other ranks would wait for it
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if not answer.exists():
            raise RuntimeError(f"`{' '.join(command[1:-1])}` ended with {process.returncode}")
        return json.loads(answer.read_text(encoding="utf-8"))


def host_tensors() -> Iterator[torch.Tensor]:
    """Tensors of this process on the CPU that Python can reach; parts of distributed ones, not these themselves."""
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            yield found


def host_tensor_bytes() -> int:
    """Bytes of their storages, each once."""
    storages = (tensor.untyped_storage() for tensor in host_tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

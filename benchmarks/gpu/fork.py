"""Can a fork of a process that is about to train on a device trace its step? `python -m benchmarks.gpu.fork`.

    python -m benchmarks.gpu.fork [--device cuda|cpu] [--output FILE] [--seconds 50] [--child-seconds 12]

One process moves a module to the device, pins its batches and joins a process group (NCCL, or gloo on the CPU) of one.
A callback does in `setup`, before the first backward pass, what `FORKS_BESIDE_CUDA` of `profile.process` would let this
package do: it brings tensors to plain host memory, and runs a backward pass (`run`), a trace (`profile_module`) and one
by a `Worker`, which also traces when training is over. The parent trains two steps, which are compared with two steps
without forks, and reduces over its group once more. Other forks follow behind the backward passes, which torch is
expected to refuse.

The result is written after each of these, and forks that don't answer are killed, as is the program itself after
`--seconds`: nothing hangs. The exit code is 0 if forks before the first backward pass did all they were asked and the
parent noticed nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.runner import write
from benchmarks.training import trainer_of
from lightning_memfit.profile import process
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.course import TraceLimits

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_WORDS, _WIDTH, _STEPS = 128, 64, 2

Batch = dict[str, Tensor]

PARTS = ("backward", "profile", "worker", "worker at the end")
"""What forks are asked to do."""


class Small(pl.LightningModule):
    """Reads integers, and counts in a buffer: what a trace needs the values of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.body = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WORDS))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    @override
    def forward(self, batch: Batch) -> Tensor:
        self.seen += 1
        logits = self.body(self.words(batch["ids"]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten())

    @override
    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# --- forks ------------------------------------------------------------------------------------------------------------


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextlib.contextmanager
def _on_host(module: nn.Module) -> Iterator[None]:
    """Hold parameters and buffers in plain host memory; a fork can read neither the device's nor pinned memory."""
    on_device = [(tensor, tensor.data) for _, tensor in _tensors(module)]
    for tensor, data in on_device:
        tensor.data = torch.from_numpy(data.cpu().numpy().copy())
    try:
        yield
    finally:
        for tensor, data in on_device:
            tensor.data = data


def _tried(function: Callable[[], Any]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        result: dict[str, Any] = {"result": function()}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**result, "seconds": round(time.perf_counter() - started, 3)}


def _backward() -> list[float]:
    value = torch.ones(3, requires_grad=True)
    (value * 2).sum().backward()
    assert value.grad is not None
    return value.grad.tolist()


def _flops(module: Small, batch: Batch, limit_s: float) -> int:
    limits = TraceLimits(seconds=limit_s)
    return sum(profile_module(module, batch, any_micro_batch=False, limits=limits).flops.values())


def forks_of(module: Small, batch: Batch, limit_s: float) -> tuple[dict[str, Any], process.Worker | None]:
    """What forks of this process can do with a module and a batch, and a worker if one can be had."""
    plain = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in batch.items()}  # not pinned again
    workers: list[process.Worker] = []

    def work() -> int:
        workers.append(process.Worker(module))
        return workers[0].run(partial(_flops, module, plain, limit_s))

    # Spawned processes trace where there are no forks, and would say nothing about these.
    with patch.object(process, "FORKS_BESIDE_CUDA", True), patch.object(process, "_spawn", _no_spawn), _on_host(module):
        found = {
            "backward": _tried(lambda: process.run(_backward, limit_s)),
            "profile": _tried(lambda: _flops(module, plain, limit_s)),
            "worker": _tried(work),
        }
    return found, workers[0] if workers else None


def _no_spawn(*_: Any) -> None:
    raise process.NoProcessError("there is no fork")


# --- the parent -------------------------------------------------------------------------------------------------------


@dataclass
class _Forks(pl.Callback):
    """Forks in `setup`, where no backward pass has run yet, and asks the worker of then once more at the end."""

    batch: Batch
    limit_s: float
    answer: dict[str, Any] = field(default_factory=dict)
    worker: process.Worker | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.answer, self.worker = forks_of(pl_module, self.batch, self.limit_s)  # type: ignore[arg-type]

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.worker is not None:
            plain = {name: tensor.clone() for name, tensor in self.batch.items()}
            task = partial(_flops, pl_module, plain, self.limit_s)
            self.answer["worker at the end"] = _tried(lambda: self.worker.run(task))  # type: ignore[union-attr, arg-type]
            self.worker.close()


def _batches(device: str) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, _WORDS, (4, 16), generator=generator) for _ in range(_STEPS)]
    return [{"ids": ids.pin_memory() if device == "cuda" else ids} for ids in batches]


def train(device: str, *callbacks: pl.Callback) -> Small:
    """Two steps from the same weights."""
    torch.manual_seed(0)
    module = Small().to(device)
    loader: DataLoader[Any] = DataLoader(_batches(device), batch_size=None)  # type: ignore[arg-type]
    trainer_of(*callbacks, max_steps=_STEPS, device=device).fit(module, loader)
    return module


def _all_reduce(device: str) -> float:
    value = torch.full((4,), 2.0, device=device)
    dist.all_reduce(value)
    return float(value.sum())  # waits for the device


def run(device: str, output: Path, child_s: float) -> bool:
    """Everything, in its order; writes what is known after each part."""
    found: dict[str, Any] = {"device": device}

    def keep(name: str, value: Any) -> None:
        found[name] = value
        write(output, found)
        print(f"{name}: {value}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        group = f"file://{folder}/store"
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=group, rank=0, world_size=1)
        keep("all_reduce_before", _tried(lambda: _all_reduce(device)))
        forks = _Forks(_batches(device)[0], child_s)
        forked = train(device, forks)
        keep("before_backward", forks.answer)
        keep("all_reduce_after", _tried(lambda: _all_reduce(device)))
        plain = train(device)
        differences = [
            float((one - other).abs().max())
            for (_, one), (_, other) in zip(_tensors(forked), _tensors(plain), strict=True)
        ]
        keep("largest_difference", max(differences))
        keep("after_backward", forks_of(plain, _batches(device)[0], child_s)[0])
        keep("all_reduce_at_the_end", _tried(lambda: _all_reduce(device)))
        first = found["before_backward"]
        did_all = all("result" in first.get(part, {}) for part in PARTS)
        reduced = all(found[name].get("result") == 8.0 for name in ("all_reduce_after", "all_reduce_at_the_end"))
        keep("works", bool(did_all and reduced and found["largest_difference"] == 0))
        dist.destroy_process_group()  # last, as it may wait for what a fork has spoilt
    return bool(found["works"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS / "fork.json")
    parser.add_argument("--seconds", type=int, default=50, help="the program ends after so long, whatever hangs")
    parser.add_argument("--child-seconds", type=float, default=12.0, help="a fork without an answer is killed")
    arguments = parser.parse_args()
    signal.alarm(arguments.seconds)  # its default action ends the process, and children don't inherit it
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return int(not run(arguments.device, arguments.output, arguments.child_seconds))


if __name__ == "__main__":
    sys.exit(main())

"""Can a fork of a process that is about to train on a device trace its step? `python -m benchmarks.gpu.fork`.

    python -m benchmarks.gpu.fork [--device cuda|cpu] [--output FILE] [--seconds 50] [--child-seconds 12]

One process moves a module to the device, pins its batches and joins a process group (NCCL, or gloo on the CPU) of one.
A callback forks in `setup`, before the first backward pass; the child gets the module's tensors and the batch in plain
host memory and runs a backward pass, a step on fake tensors, and this package's own trace. The parent trains two steps,
which are compared with two steps without a fork, and reduces over its group once more. A second fork follows behind the
backward passes, which torch is expected to refuse.

The result is written after each of these, and children that don't answer are killed, as is the program itself after
`--seconds`: nothing hangs. The exit code is 0 if the first fork did all it was asked and the parent noticed nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.micro_batching.compare import trainer_of
from benchmarks.micro_batching.record import write
from lightning_memfit.profile.build import profile_module

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
_WORDS, _WIDTH, _STEPS = 128, 64, 2

Batch = dict[str, Tensor]


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


# --- the child --------------------------------------------------------------------------------------------------------


def _host_copies(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers in plain host memory; a child can read neither the device's nor pinned memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in _tensors(module)}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _in_child(module: Small, host: dict[str, Tensor], batch: Batch) -> dict[str, Any]:
    """What a fork can do, each with its time; what fails says why."""
    on_device = [tensor.data for _, tensor in _tensors(module)]  # never freed here: the blocks are the parent's
    for name, tensor in _tensors(module):
        tensor.data = host[name]
    no_group = patch.object(dist, "is_initialized", return_value=False)  # the group's threads are the parent's
    with no_group:
        return {
            "tensors": len(on_device),
            "backward": _tried(_backward),
            "fake step": _tried(lambda: _fake_step(module, batch)),
            "profile": _tried(lambda: sum(profile_module(module, batch, any_micro_batch=False).flops.values())),
        }


def _tried(function: Callable[[], Any]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        result: dict[str, Any] = {"result": function()}
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    return {**result, "seconds": round(time.perf_counter() - started, 3)}


def _backward() -> list[float]:
    value = torch.ones(3, requires_grad=True)
    (value * 2).sum().backward()
    assert value.grad is not None
    return value.grad.tolist()


def _fake_step(module: Small, batch: Batch) -> int:
    """Number of gradients of a step without this package's trace."""
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(tensor.detach()) for name, tensor in _tensors(module)}
    weights = [fakes[name].requires_grad_() for name, _ in module.named_parameters()]
    inputs = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
    with mode:
        torch.func.functional_call(module, fakes, (inputs,)).backward()
    return sum(weight.grad is not None for weight in weights)


def ask_fork(function: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    """What a function returns in a fork, which is killed when it takes too long; its stack then says where it was."""
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stack:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                gc.disable()
                torch.set_num_threads(1)
                faulthandler.register(signal.SIGUSR1, file=stack)
                os.write(writing, json.dumps(function()).encode())  # less than a pipe holds
            os._exit(0)
        os.close(writing)
        answered = bool(select.select([reading], [], [], limit_s)[0])
        answer = os.read(reading, 1 << 16) if answered else b""
        seconds = round(time.monotonic() - started, 3)
        if not answered:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if answer:
            return {"answered": True, "seconds": seconds, **json.loads(answer)}
        stack.seek(0)
        where = stack.read().decode(errors="replace").splitlines()[:8]
        code = os.waitstatus_to_exitcode(status)
        return {"answered": False, "seconds": seconds, "exit_code": code, "stack": where}


# --- the parent -------------------------------------------------------------------------------------------------------


@dataclass
class _Forks(pl.Callback):
    """Forks in `setup`, where no backward pass has run yet."""

    batch: Batch
    limit_s: float
    answer: dict[str, Any] = field(default_factory=dict)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.answer = ask_about(pl_module, self.batch, self.limit_s)


def ask_about(module: Any, batch: Batch, limit_s: float) -> dict[str, Any]:
    """What a fork of this process can do with a module and its batch."""
    host = _host_copies(module)
    plain = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in batch.items()}  # not pinned again
    return ask_fork(lambda: _in_child(module, host, plain), limit_s)


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
        keep("after_backward", ask_about(plain, _batches(device)[0], child_s))
        keep("all_reduce_at_the_end", _tried(lambda: _all_reduce(device)))
        first = found["before_backward"]
        did_all = first["answered"] and all("error" not in first[part] for part in ("backward", "fake step", "profile"))
        reduced = all(found[name].get("result") == 8.0 for name in ("all_reduce_after", "all_reduce_at_the_end"))
        keep("works", bool(did_all and reduced and found["largest_difference"] == 0))
        dist.destroy_process_group()  # last, as it may wait for what a fork has spoilt
    return bool(found["works"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--output", type=Path, default=RESULTS / "fork.json")
    parser.add_argument("--seconds", type=int, default=50, help="the program ends after so long, whatever hangs")
    parser.add_argument("--child-seconds", type=float, default=12.0, help="a child without an answer is killed")
    arguments = parser.parse_args()
    signal.alarm(arguments.seconds)  # its default action ends the process, and children don't inherit it
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return int(not run(arguments.device, arguments.output, arguments.child_seconds))


if __name__ == "__main__":
    sys.exit(main())

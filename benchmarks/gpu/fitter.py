"""`MicroBatching` beside Lightning's `BatchSizeFinder` on a real device: `python -m benchmarks.gpu.fitter`.

    python -m benchmarks.gpu.fitter [--device cuda|cpu] [--scale full|small] [--output FILE]

Both look for the largest batch within one limit: on CUDA a share of the card that torch's allocator is held to, on the
CPU a simulated device. Each search has a process of its own; what it found is held against the true maximum of its kind
of run (with micro-batches, or without), which bisection finds by training three steps. The exit code is 1 if a search
failed or ours found more than fits.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import Tensor, nn

from benchmarks.micro_batching.compare import EarlyLimit, largest_that
from benchmarks.micro_batching.models import Case, Lit
from benchmarks.processes import Job, in_a_process, rows_of
from benchmarks.record import trainer_of, write_aside
from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.memory import GIB, MIB

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
TOOLS = ("memfit", "lightning_power", "lightning_binsearch")


def _gpt2(width: int, layers: int, heads: int, tokens: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": tokens, "vocab_size": 1000}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))

    return build


def _perceptron(width: int, depth: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def _convolutions(width: int, depth: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    return build


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(1, *shape, generator=generator)


def _tokens(length: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(1, 199, (1, length), generator=generator)


@dataclass(frozen=True)
class Search:
    """One tool on one model under one limit."""

    case: Case
    limit_bytes: int
    share: int
    """Samples of the batch that ours cuts: at least two full micro-batches of the largest size."""
    tool: str
    device: str

    @property
    def name(self) -> str:
        """Model and tool."""
        return f"{self.case.name}, {self.tool}"


def searches(scale: str, device: str) -> list[Search]:
    """Every tool on every model."""
    if scale == "small":
        models = [(Case("perceptron", _perceptron(64, 3), _floats(64), 0), MIB, 1024)]
    else:
        models = [
            (Case("gpt2", _gpt2(512, 8, 8, 256), _tokens(256), 0), 6 * GIB, 1024),
            (Case("perceptron", _perceptron(4096, 8), _floats(4096), 0), 4 * GIB, 2048),
            (Case("convolutions", _convolutions(64, 8), _floats(3, 128, 128), 0), 6 * GIB, 1024),
        ]
    return [Search(case, limit, share, tool, device) for case, limit, share in models for tool in TOOLS]


class _Share(pl.Callback):
    """Hold torch's allocator to a number of bytes from the first moment of a run, on CUDA."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total)


def _fits(search: Search, size: int) -> bool:
    """Whether three steps with micro-batches of this size, or for Lightning with batches of it, run."""
    cuts = search.tool == "memfit"
    own = [MicroBatching(micro_batch_size=size, recover=False)] if cuts else []
    try:
        trainer_of(*own, MemoryLimit(search.limit_bytes), max_steps=3, device=search.device).fit(
            Lit(search.case, search.share if cuts else size)
        )
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if search.device == "cuda":
            torch.cuda.empty_cache()
    return True


def run(search: Search) -> dict[str, Any]:
    """What a search finds."""
    _quiet(search.device)
    row: dict[str, Any] = {"name": search.name, "limit_bytes": search.limit_bytes, "share": search.share}
    started = time.perf_counter()
    if search.tool == "memfit":
        row |= _ours(search)
    else:
        row |= _lightnings(search, search.tool.removeprefix("lightning_"))
    return {**row, "seconds": round(time.perf_counter() - started, 2)}


def hold(search: Search, row: dict[str, Any]) -> dict[str, Any]:
    """The row of a search, beside the true maximum."""
    _quiet(search.device)
    true_maximum = largest_that(partial(_fits, search), 0, search.share)
    return {**row, "true_maximum": true_maximum, "fraction": round((row["largest"] or 0) / max(true_maximum, 1), 4)}


def _quiet(device: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if device == "cpu":
        torch.set_num_threads(1)


def _ours(search: Search) -> dict[str, Any]:
    callback = MicroBatching()
    limit, module = MemoryLimit(search.limit_bytes), Lit(search.case, search.share)
    trainer_of(callback, limit, max_steps=3, device=search.device).fit(module)  # two are measured
    assert callback.found is not None
    found = callback.found
    return {"largest": found.largest, "tried": found.tried, "steps": found.num_steps, "errors": found.num_failed}


def _lightnings(search: Search, mode: str) -> dict[str, Any]:
    on_cuda = search.device == "cuda"
    finder, module = BatchSizeFinder(mode=mode), Lit(search.case, 2)
    limit = _Share(search.limit_bytes) if on_cuda else EarlyLimit(search.limit_bytes)
    stopped = None
    try:
        trainer_of(limit, finder, max_steps=1, device=search.device).fit(module)
    except Exception as error:
        stopped = f"{type(error).__name__}: {str(error)[:120]}"
    errors = torch.cuda.memory_stats()["num_ooms"] if on_cuda else limit.ledger.num_ooms  # type: ignore[union-attr]
    return {"largest": finder.optimal_batch_size, "steps": module.num_steps, "errors": errors, "stopped": stopped}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--scale", choices=("full", "small"), default="full")
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/gpu/fitter_DEVICE.json")
    parser.add_argument("--search-seconds", type=float, default=90.0, help="a search that takes longer is killed")
    parser.add_argument("--processes", type=int, default=1, help="true maxima looked for at a time (default: 1)")
    arguments = parser.parse_args(argv)
    output = arguments.output or RESULTS / f"fitter_{arguments.device}.json"
    chosen = searches(arguments.scale, arguments.device)
    found: dict[str, dict[str, Any]] = {}

    def keep(row: dict[str, Any]) -> None:
        print(row, flush=True)
        found[row["name"]] = row
        rows = [found[search.name] for search in chosen if search.name in found]
        write_aside(output, {"device": arguments.device, "scale": arguments.scale, "rows": rows})

    with torch.device("meta"):
        for search in chosen:
            search.case.build()  # imports here what every process would import again, and count as its own time
    for search in chosen:  # one after the other, as they are timed
        keep(in_a_process(run, search, seconds=arguments.search_seconds))
    jobs = [Job(hold, search, (found[search.name],)) for search in chosen if "failed" not in found[search.name]]
    for row in rows_of(jobs, 2 * arguments.search_seconds, arguments.processes):
        keep(row)
    ours = [row for name, row in found.items() if name.endswith("memfit")]
    return int(any("failed" in row for row in found.values()) or any(row["fraction"] > 1 for row in ours))


if __name__ == "__main__":
    sys.exit(main())

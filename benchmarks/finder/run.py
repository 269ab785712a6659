"""The largest batch that `MicroBatching` finds, beside Lightning's `BatchSizeFinder`, within one limit of memory.

On CUDA the limit is a share of the card that torch's allocator is held to, on the CPU that of a simulated device, just
above the peak of a case's `largest` micro-batch. What a search found is held against the true maximum of its kind of
run (with micro-batches, or without), which bisection finds by training three steps. Steps and errors of the search are
counted: trial steps of `BatchSizeFinder`, and of ours the training steps that ended the search; on the CPU errors in
50 more steps, too. A row fails if ours found more than fits.

Models whose memory is not linear in the batch (`models.CURVED`) are tried with ours alone. Where the second batch is
longer, the limit leaves room for `largest` samples of that one, and the size that it ran with is noted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.finder.models import CASES, CURVED, ON_CUDA, SMALL_CASE, Case, Lit
from benchmarks.runner import DEVICE, SMALL, Benchmark, Options, Row, Stage
from benchmarks.text import table
from benchmarks.training import trainer_of
from lightning_memfit.device.limit import MemoryLimit, SimulatedDevice
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size.search import MAX_STEPS
from lightning_memfit.memory.attach import TrainerAttachment

SHARE = 1024
"""Samples of the batch that ours cuts: at least two full micro-batches of the largest size."""
LATER_STEPS = 50
_HUGE = 1 << 40
OURS, LIGHTNINGS = "memfit", ("power", "binsearch")


@dataclass(frozen=True)
class Search:
    """One tool on one model."""

    case: Case
    tool: str
    device: str = "cpu"
    limit_bytes: int | None = None
    """None to set it by the case's `largest`."""

    @property
    def name(self) -> str:
        """Model and tool."""
        return f"{self.case.name}, {self.tool}"

    @property
    def share(self) -> int:
        """Samples of a batch."""
        if self.case.kind == "linear":
            return self.case.share or SHARE
        return (16 if self.case.longer else 4) * self.case.largest


def searches(options: Options) -> Iterator[Search]:
    """Every tool on every model."""
    device, tools = options.device, (OURS, *(f"lightning_{mode}" for mode in LIGHTNINGS))
    limits: dict[Case, Any] = ON_CUDA if device == "cuda" else dict.fromkeys(CASES)
    limited = {SMALL_CASE: 1 << 20} if options.small else limits
    for case, limit_bytes in limited.items():
        yield from (Search(case, tool, device, limit_bytes) for tool in tools)
    if device == "cpu" and not options.small:
        yield from (Search(case, OURS) for case in CURVED)


class EarlyLimit(pl.Callback):
    """The same limit, there before `BatchSizeFinder` starts: Lightning calls `on_fit_start` of finders first."""

    def __init__(self, limit_bytes: int, device: str) -> None:
        self.limit_bytes, self.ledger = limit_bytes, None if device == "cuda" else SimulatedDevice(limit_bytes)

    @property
    def num_ooms(self) -> int:
        """Errors so far."""
        return int(torch.cuda.memory_stats()["num_ooms"]) if self.ledger is None else self.ledger.num_ooms

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.ledger is None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total)
        else:
            self.ledger.track_module(pl_module)
            self._attachment = TrainerAttachment(self.ledger, trainer.strategy)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers if self.ledger is not None else ():
            self.ledger.track_optimizer(optimizer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.ledger is not None:
            self._attachment.detach()
            self.ledger.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


class _SizesUsed(pl.Callback):
    """The largest micro-batch of every batch."""

    def __init__(self) -> None:
        self.by_batch: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.largest_seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.by_batch.append(pl_module.largest_seen)


def limit_of(search: Search) -> tuple[int, int]:
    """Bytes that hold micro-batches of `largest` samples and not of more, and how many samples they hold.

    Steps hold several micro-batches. Where all sizes within a span need the same, they hold more.
    """
    largest = search.case.largest
    if search.limit_bytes is not None:
        return search.limit_bytes, largest
    at = _peak_with(search, largest)
    while (above := _peak_with(search, largest + 1)) <= at:
        largest += 1
    return (at + above) // 2, largest


def _peak_with(search: Search, size: int) -> int:
    limit = MemoryLimit(_HUGE)
    trainer_of(MicroBatching(micro_batch_size=size), limit).fit(Lit(search.case, search.share))
    assert limit.ledger is not None
    return limit.ledger.peak_bytes


def run(search: Search, options: Options | None = None, row: Row | None = None) -> Row:
    """What a search finds."""
    limit_bytes, largest = limit_of(search)
    found: Row = {"limit_bytes": limit_bytes, "share": search.share, "kind": search.case.kind}
    if search.case.longer:
        found["true_maximum_of_second_batch"] = largest
    with torch.device("meta"):
        search.case.build()  # imports what would count as the search's own time
    started = time.perf_counter()
    found |= _ours(search, limit_bytes) if search.tool == OURS else _lightnings(search, limit_bytes)
    return {**found, "seconds": round(time.perf_counter() - started, 2)}


def _ours(search: Search, limit_bytes: int) -> Row:
    callback, limit, used = MicroBatching(), MemoryLimit(limit_bytes), _SizesUsed()
    steps = 3 if search.device == "cuda" else MAX_STEPS + 1 + LATER_STEPS  # two are measured
    trainer_of(callback, limit, used, max_steps=steps, device=search.device).fit(Lit(search.case, search.share))
    assert callback.found is not None
    assert limit.ledger is not None
    found = callback.found
    row = {"largest": found.largest, "tried": found.tried, "steps": found.num_steps, "errors": found.num_failed}
    if search.device == "cpu":
        row["later_errors"] = limit.ledger.num_ooms - found.num_failed
    if search.case.longer:
        row["size_of_second_batch"] = used.by_batch[1]
    return row


def _lightnings(search: Search, limit_bytes: int) -> Row:
    finder, module = BatchSizeFinder(mode=search.tool.removeprefix("lightning_")), Lit(search.case, 2)
    limit, stopped = EarlyLimit(limit_bytes, search.device), None
    try:
        trainer_of(limit, finder, max_steps=1, device=search.device).fit(module)
    except Exception as error:
        stopped = f"{type(error).__name__}: {str(error)[:120]}"
    found = {"largest": finder.optimal_batch_size, "steps": module.num_steps, "errors": limit.num_ooms}
    return {**found, "stopped": stopped}


def hold(search: Search, options: Options | None, row: Row) -> Row:
    """The true maximum beside a search's row."""
    plain = replace(search, case=replace(search.case, longer=())) if search.case.longer else search
    true_maximum = largest_that(lambda size: _fits(plain, size, row["limit_bytes"], row["share"]), 0, row["share"])
    fraction = round((row["largest"] or 0) / max(true_maximum, 1), 4)
    if search.tool == OURS and fraction > 1:
        raise ValueError(f"found {row['largest']}, where {true_maximum} fit")
    return {"true_maximum": true_maximum, "fraction": fraction}


def largest_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` that fits, where `low` and all below it do."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(search: Search, size: int, limit_bytes: int, share: int) -> bool:
    """Whether three steps with micro-batches of this size, or for Lightning with batches of it, run."""
    cuts = search.tool == OURS
    own = [MicroBatching(micro_batch_size=size, recover=False)] if cuts else []
    try:
        trainer = trainer_of(*own, MemoryLimit(limit_bytes), max_steps=3, device=search.device)
        trainer.fit(Lit(search.case, share if cuts else size))
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()
        if search.device == "cuda":
            torch.cuda.empty_cache()
    return True


def text(document: dict[str, Any]) -> str:
    """The least and the most of sizes found on the CPU, as shares of the true maximum, of trial steps and of errors."""

    def line(words: str, tool: str, *kinds: str) -> list[str]:
        rows = [row for row in document["rows"] if row["name"].endswith(f", {tool}") and row["kind"] in kinds]
        shares = _span([round(100 * row["fraction"]) for row in rows])
        steps, errors = (_span([row[key] for row in rows]) for key in ("steps", "errors"))
        return [words, str(len(rows)), f"{shares} %", steps, errors]

    return table(
        ["", "models", "share of the true maximum", "steps", "errors"],
        [
            line("`MicroBatching`, memory linear in the batch", OURS, "linear"),
            line("`MicroBatching`, memory not linear, or longer batches later", OURS, "quadratic", "stepped", "longer"),
            line("`MicroBatching`, steps that can't be traced", OURS, "untraceable"),
            *(line(f"`BatchSizeFinder`, `{mode}`, linear", f"lightning_{mode}", "linear") for mode in LIGHTNINGS),
        ],
    )


def _span(values: list[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"


BENCHMARK = Benchmark(
    "finder_{device}.json",
    searches,
    (Stage(run, kept=True), Stage(hold, timed=False)),
    lambda rows, options: {"device": options.device, "later_steps": LATER_STEPS, "rows": rows},
    arguments=(DEVICE, SMALL),
)

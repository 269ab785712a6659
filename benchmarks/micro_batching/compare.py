"""Find the largest micro-batch of small models on a simulated device, beside Lightning's `BatchSizeFinder`.

    python -m benchmarks.micro_batching.compare

For every model the limit is set just above the peak of its case's `largest` micro-batch, so that this is the true
maximum of a run with several micro-batches. `BatchSizeFinder` runs without micro-batches, where gradients are released
during backward; its true maximum is found by bisection. Steps, errors and the result are counted for each: trial steps
of the finder, and of ours the training steps that ended the search. Errors in 50 more steps are counted, too.

Models whose memory is not linear in the batch (`models.CURVED`) are tried with ours alone. Where the second batch is
longer, the limit leaves room for `largest` samples of that one, and the size that it ran with is noted.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder

from benchmarks.micro_batching.models import CASES, CURVED, Case, Lit
from benchmarks.record import trainer_of, write
from lightning_memfit.device.limit import MemoryLimit, SimulatedDevice
from lightning_memfit.fitting import MicroBatching
from lightning_memfit.fitting.size.search import MAX_STEPS
from lightning_memfit.memory.attach import TrainerAttachment

SHARE = 1024  # at least two full micro-batches of the largest case
HUGE = 1 << 40
LATER_STEPS = 50


class EarlyLimit(pl.Callback):
    """The same limit, there before `BatchSizeFinder` starts: Lightning calls `on_fit_start` of finders first."""

    def __init__(self, limit_bytes: int) -> None:
        self.ledger = SimulatedDevice(limit_bytes)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.ledger.track_module(pl_module)
        self._attachment = TrainerAttachment(self.ledger, trainer.strategy)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            self.ledger.track_optimizer(optimizer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._attachment.detach()
        self.ledger.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def peak_with(case: Case, size: int, share: int = SHARE) -> int:
    """Peak of steps that consist of several micro-batches."""
    limit = MemoryLimit(HUGE)
    trainer_of(MicroBatching(micro_batch_size=size), limit).fit(Lit(case, share))
    assert limit.ledger is not None
    return limit.ledger.peak_bytes


def fits(case: Case, size: int, limit_bytes: int, *callbacks: pl.Callback, share: int) -> bool:
    try:
        trainer_of(*callbacks, MemoryLimit(limit_bytes), max_steps=3).fit(Lit(case, share))
    except torch.OutOfMemoryError:
        return False
    return True


def ours_fits(case: Case, size: int, limit_bytes: int, share: int = SHARE) -> bool:
    callback = MicroBatching(micro_batch_size=size, recover=False)
    return fits(case, size, limit_bytes, callback, share=share)


def largest_that(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number up to `high` that fits, where `low` and all below it do."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class SizesUsed(pl.Callback):
    """The largest micro-batch of every batch."""

    def __init__(self) -> None:
        self.by_batch: list[int] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Lit)
        pl_module.largest_seen = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Lit)
        self.by_batch.append(pl_module.largest_seen)


def run_ours(case: Case, limit_bytes: int, share: int = SHARE, later_steps: int = 0) -> dict[str, Any]:
    callback, limit, module = MicroBatching(), MemoryLimit(limit_bytes), Lit(case, share)
    used = SizesUsed()
    started = time.perf_counter()
    trainer_of(callback, limit, used, max_steps=MAX_STEPS + 1 + later_steps).fit(module)
    assert limit.ledger is not None
    assert callback.found is not None
    errors = callback.found.num_failed
    result = {
        "largest": callback.found.largest,
        "tried": callback.found.tried,
        "steps": callback.found.num_steps,
        "errors": errors,
        "size_used": callback.micro_batch_size_in_use,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if later_steps:
        result["later_errors"] = limit.ledger.num_ooms - errors
        result["size_of_second_batch"] = used.by_batch[1]
    return result


def run_linear(case: Case, limit_bytes: int) -> dict[str, Any]:
    """Search with the whole share, train with a smaller one, which is faster."""
    later = run_ours(case, limit_bytes, 2 * case.largest + 1, LATER_STEPS)
    return {**run_ours(case, limit_bytes), "later_errors": later["later_errors"]}


def run_curved(case: Case) -> dict[str, Any]:
    """Ours alone on a model whose memory is not linear."""
    plain = replace(case, longer=())
    share = (16 if case.longer else 4) * case.largest
    at = peak_with(case, case.largest, share)
    largest = case.largest
    while (above := peak_with(case, largest + 1, share)) <= at:  # within a step all sizes need the same
        largest += 1
    limit_bytes = (at + above) // 2
    row: dict[str, Any] = {"model": case.name, "kind": case.kind, "limit_bytes": limit_bytes, "share": share}
    row["true_maximum"] = (
        largest_that(lambda size: ours_fits(plain, size, limit_bytes, share), largest, share - 1)
        if case.longer
        else largest
    )
    row["checked"] = ours_fits(plain, row["true_maximum"], limit_bytes, share) and not ours_fits(
        plain, row["true_maximum"] + 1, limit_bytes, share
    )
    row["memfit"] = run_ours(case, limit_bytes, share, LATER_STEPS)
    row["memfit"]["fraction"] = round(row["memfit"]["largest"] / row["true_maximum"], 4)
    if case.longer:
        row["true_maximum_of_second_batch"] = largest
    return row


def run_lightning(case: Case, limit_bytes: int, mode: str) -> dict[str, Any]:
    finder, limit, module = BatchSizeFinder(mode=mode), EarlyLimit(limit_bytes), Lit(case, 2)
    started = time.perf_counter()
    failed = None
    try:
        trainer_of(limit, finder, max_steps=1).fit(module)
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error)[:120]}"
    return {
        "largest": finder.optimal_batch_size,
        "steps": module.num_steps,
        "errors": limit.ledger.num_ooms,
        "failed": failed,
        "seconds": round(time.perf_counter() - started, 2),
    }


def compare(case: Case) -> dict[str, Any]:
    at, above = peak_with(case, case.largest), peak_with(case, case.largest + 1)
    limit_bytes = (at + above) // 2
    row: dict[str, Any] = {"model": case.name, "limit_bytes": limit_bytes, "true_maximum": case.largest}
    row["checked"] = ours_fits(case, case.largest, limit_bytes) and not ours_fits(case, case.largest + 1, limit_bytes)
    row["true_maximum_without_micro_batches"] = largest_that(
        lambda size: fits(case, size, limit_bytes, share=size), 0, 2 * SHARE
    )
    row["memfit"] = run_linear(case, limit_bytes)
    for mode in ("power", "binsearch"):
        row[f"lightning_{mode}"] = run_lightning(case, limit_bytes, mode)
    return rated(row)


def rated(row: dict[str, Any]) -> dict[str, Any]:
    """The row with every size as a share of the true maximum of its kind of run."""
    for name, base in (
        ("memfit", "true_maximum"),
        ("lightning_power", "true_maximum_without_micro_batches"),
        ("lightning_binsearch", "true_maximum_without_micro_batches"),
    ):
        row[name]["fraction"] = round((row[name]["largest"] or 0) / max(row[base], 1), 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="name of one model")
    parser.add_argument("--ours", action="store_true", help="measure ours anew, keep the rest")
    parser.add_argument("--curved", action="store_true", help="only models that are not linear, keep the rest")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/micro_batching_compare.json"))
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    before = json.loads(arguments.output.read_text()) if arguments.ours or arguments.curved else {"rows": []}
    known = {row["model"]: row for row in before["rows"]}
    rows, curved = before["rows"] if arguments.curved else [], []
    for case in (*CASES, *CURVED) if not arguments.curved else CURVED:
        if arguments.only not in (None, case.name):
            continue
        if case.kind != "linear":
            curved.append(run_curved(case))
            print(curved[-1], flush=True)
            continue
        row = known.get(case.name)
        rows.append(rated({**row, "memfit": run_linear(case, row["limit_bytes"])}) if row else compare(case))
        print(rows[-1], flush=True)
    write(arguments.output, {"share": SHARE, "later_steps": LATER_STEPS, "rows": rows, "curved": curved})


if __name__ == "__main__":
    main()

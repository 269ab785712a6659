"""True peak of a rank: a real run over gloo, by the events of torch's CPU allocator.

`python -m benchmarks.sharded_traces.measure NAME PATIENCE RESULT` is one rank of it, and starts the others.
"""

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks.sharded_traces.cases import CASES, Case
from benchmarks.training import MARK, Repeated, answer_of, mark
from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile.quiet import LIGHTNING, SILENT_TRAINER, loggers_at

_BATCHES = 4


class _Marks(pl.Callback):
    """Marks where a step begins among the allocator's events."""

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx % trainer.accumulate_grad_batches:
            mark(batch_idx // trainer.accumulate_grad_batches)


@contextmanager
def patient_collectives(seconds: float) -> Iterator[None]:
    """Hold every collective's work for a moment longer than its thread does, and wait for gathers as they begin.

    gloo copies what it scatters. The thread that has run a collective holds the copy until after its caller goes on,
    and the allocator's events leave out what such a thread frees: the copy would seem to stay, in some runs and ranks.
    It also has a buffer for every gather that stage 3 begins ahead, which NCCL hasn't; how many run at once is a matter
    of time, by which equal runs were 16 % apart.
    """
    import torch.distributed._functional_collectives as functional
    from torch._C._distributed_c10d import Work

    wait, gather, wait_tensor = Work.wait, torch.distributed.all_gather_into_tensor, functional.wait_tensor

    def wait_longer(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(seconds)
        return result

    def gather_at_once(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        if work is not None:
            wait_longer(work)
        return work

    def wait_tensor_longer(tensor: Any) -> Any:
        result = wait_tensor(tensor)
        time.sleep(seconds)
        return result

    Work.wait, functional.wait_tensor = wait_longer, wait_tensor_longer
    torch.distributed.all_gather_into_tensor = gather_at_once
    try:
        yield
    finally:
        Work.wait, functional.wait_tensor = wait, wait_tensor
        torch.distributed.all_gather_into_tensor = gather


@contextmanager
def locked_buffers(case: Case) -> Iterator[list[int]]:
    """Collect the sizes of buffers that DeepSpeed's own allocator locks, and never frees, for what is on disk."""
    found: list[int] = []
    if not case.to_disk:
        yield found
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    from lightning_memfit.nvme.extensions import outlive_killed_builds

    outlive_killed_builds()  # a lock that a killed process left would be waited for until the run's time is over
    handle = AsyncIOBuilder().load().aio_handle
    make = handle.new_cpu_locked_tensor

    def make_noted(self: Any, *arguments: Any) -> Any:
        made = make(self, *arguments)
        found.append(made.nbytes)
        return made

    handle.new_cpu_locked_tensor = make_noted
    try:
        yield found
    finally:
        handle.new_cpu_locked_tensor = make


def measure(case: Case, patience: float) -> tuple[int, dict[str, Any]]:
    """Rank, and its peak over the second and third step, with what was alive when each step began.

    ZeRO-Infinity's first step is counted, too: there the optimizer makes its states in new memory, and in swap buffers
    from then on. It must run before anything else reads allocation events in the process.
    """
    gc.collect()
    with allocation_events() as changes, patient_collectives(patience), locked_buffers(case) as locked:
        module, batch = case.make()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=case.world_size,
            strategy=case.make_strategy(os.getcwd()),
            precision=case.precision,
            max_epochs=1,
            accumulate_grad_batches=case.accumulate,
            logger=False,
            callbacks=[*case.make_callbacks(), _Marks()],
            **SILENT_TRAINER,
        )
        trainer.fit(module, Repeated(batch, _BATCHES * case.accumulate))
    levels = list(accumulate(changes))
    starts = [changes.index(MARK + number) for number in range(_BATCHES)]
    at_starts = [levels[start] - changes[start] for start in starts]
    without_marks = [level - changes[at] if at in set(starts) else level for at, level in enumerate(levels)]
    peak = max(without_marks[starts[not case.to_disk] : starts[3]])
    return trainer.global_rank, {
        "true_bytes": peak + sum(locked),
        **({"locked_bytes": sum(locked)} if locked else {}),
        "at_starts": at_starts,
        "is_complete": len(set(at_starts[1:])) == 1,  # later steps begin alike
    }


def measured(case: Case, seconds: float) -> dict[str, Any]:
    """Run a case, again where a thread of gloo was too late for the allocator's events.

    Returns:
        What its rank found; `is_complete` says whether its events are.
    """
    found: dict[str, Any] = {}
    # What is lost before the first step isn't noticed: ranks that divide their weights gather most until then.
    least = 0.01 if case.to_disk or case.strategy.startswith("zero 3") else 0.002
    for patience in (least, 0.01, 0.05):
        if not found.get("is_complete"):
            found = answer_of("benchmarks.sharded_traces.measure", case.name, patience, seconds=seconds)
    return found


def main(name: str, patience: str, result: str) -> None:
    """Measure a case as one rank, and write what was found if it is the rank that is compared."""
    torch.set_num_threads(1)
    (case,) = (case for case in CASES if case.name == name)
    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank, found = measure(case, float(patience))
    if rank == case.rank:
        Path(result).write_text(json.dumps(found))
    torch.distributed.barrier()  # the first rank ends the others
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

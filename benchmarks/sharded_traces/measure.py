"""True peaks of ranks: real runs over gloo, by the events of torch's CPU allocator.

Run in one process per rank: `python -m benchmarks.sharded_traces.measure RANK WORLD_SIZE PORT RESULT NAME ...`.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from benchmarks.record import Repeated
from benchmarks.sharded_traces.cases import CASES, Case
from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile.quiet import LIGHTNING, SILENT_TRAINER, loggers_at

_BATCHES = 4

_MARK = 7_654_321
"""Bytes of a tensor that marks where a batch begins among the allocator's events; the batch's number is added."""


class _Marks(pl.Callback):
    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not batch_idx % trainer.accumulate_grad_batches:
            torch.empty(_MARK + batch_idx // trainer.accumulate_grad_batches, dtype=torch.uint8)


_PATIENCE = "MEMFIT_PATIENCE"
"""Variable with the seconds for which a rank waits after every collective."""


@contextmanager
def patient_collectives() -> Any:
    """Hold every collective's work for a moment longer than its thread does, and wait for gathers as they begin.

    gloo copies what it scatters. The thread that has run a collective holds the copy until after its caller goes on,
    and the allocator's events leave out what such a thread frees: the copy would seem to stay, in some runs and ranks.
    It also has a buffer for every gather that stage 3 begins ahead, which NCCL hasn't; how many run at once is a matter
    of time, by which equal runs were 16 % apart.
    """
    seconds = float(os.environ.get(_PATIENCE, 0.002))
    import torch.distributed._functional_collectives as functional
    from torch._C._distributed_c10d import Work

    wait = Work.wait

    def wait_longer(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(seconds)
        return result

    gather = torch.distributed.all_gather_into_tensor

    def gather_at_once(*args: Any, **kwargs: Any) -> Any:
        work = gather(*args, **kwargs)
        if work is not None:
            wait_longer(work)
        return work

    wait_tensor = functional.wait_tensor

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
def locked_buffers(case: Case) -> Any:
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


def measure(case: Case) -> dict[str, Any]:
    """Peak of this rank over the second and third step, and what was alive when each step began.

    ZeRO-Infinity's first step is counted, too: there the optimizer makes its states in new memory, and in swap buffers
    from then on. It must run before anything else reads allocation events in the process.
    """
    gc.collect()
    with allocation_events() as changes, patient_collectives(), locked_buffers(case) as locked:
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
    starts = [changes.index(_MARK + number) for number in range(_BATCHES)]
    at_starts = [levels[start] - changes[start] for start in starts]
    peak = max(level for level in _without_marks(changes, levels, starts)[starts[not case.to_disk] : starts[3]])
    return {
        "true_bytes": peak + sum(locked),
        **({"locked_bytes": sum(locked)} if locked else {}),
        "at_starts": at_starts,
        "is_complete": len(set(at_starts[1:])) == 1,  # later steps begin alike
    }


def _without_marks(changes: list[int], levels: list[int], starts: list[int]) -> list[int]:
    marks = set(starts)
    return [level - changes[at] if at in marks else level for at, level in enumerate(levels)]


def main() -> None:
    """Measure cases as one rank and, as any rank, write what was found."""
    rank, world_size, port, result, *names = sys.argv[1:]
    os.environ.update(LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=world_size)
    torch.set_num_threads(1)
    found = {}
    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in CASES:
            if case.name in names:
                found[case.name] = measure(case)
                Path(f"{result}.{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def measured(cases: Sequence[Case], seconds: float) -> dict[str, dict[str, Any]]:
    """Run cases of one world size, again where a thread of gloo was too late for the allocator's events.

    Returns:
        What the rank of each case found, by the case's name; `is_complete` says whether its events are. Cases after one
        that failed are missing.
    """
    found: dict[str, dict[str, Any]] = {}
    # What is lost before the first step isn't noticed: ranks that divide their weights gather most until then.
    least = 0.01 if any(case.to_disk or case.strategy.startswith("zero 3") for case in cases) else 0.002
    for patience in (least, 0.01, 0.05):
        lacking = [case for case in cases if not found.get(case.name, {}).get("is_complete")]
        if lacking:
            found |= _run(lacking, seconds, patience)
    return found


def _run(cases: Sequence[Case], seconds: float, patience: float) -> dict[str, dict[str, Any]]:
    """Run cases together, in a process per rank; those of a failed or hanging run are killed."""
    import socket

    world_size = cases[0].world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found"
        command = [sys.executable, "-m", __spec__.name]
        names = [case.name for case in cases]
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        environment[_PATIENCE] = str(patience)
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(port), str(result), *names], cwd=folder, env=environment
            )
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + seconds
        try:
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        by_rank = {}
        for rank in range(world_size):
            path = Path(f"{result}.{rank}")
            by_rank[rank] = json.loads(path.read_text()) if path.exists() else {}
    return {case.name: by_rank[case.rank][case.name] for case in cases if case.name in by_rank[case.rank]}


if __name__ == "__main__":
    main()

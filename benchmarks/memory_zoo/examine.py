"""What one module of the zoo takes, as traced and in truth, and whether the trace left everything as it was."""

import gc
import os
import random
import tempfile
import time
import warnings
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import Repeated
from lightning_memfit.memory.allocations import allocation_events

_MARK = 7_654_321
"""Bytes of a tensor that marks where training starts among the allocator's events."""

_BATCHES = 4


def examine(name: str) -> dict[str, Any]:
    """Predict and measure a module.

    Returns:
        `true_bytes`; `predicted_bytes`, `remarks` and `seconds` of the trace, or `refused`, why there is none; and
        `changed`, what the trace changed, which should be nothing.
    """
    from benchmarks.memory_zoo.modules import ZOO
    from lightning_memfit.profile.quiet import LIGHTNING, loggers_at
    from lightning_memfit.profile.step import StepOptions, Workload
    from lightning_memfit.profile.trace import Emulation, TraceError, TraceRequest, trace_step

    entry = ZOO[name]
    with loggers_at(40, *LIGHTNING, "transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        true = true_peak(entry)
        torch.manual_seed(0)
        module, batch = entry.make()
        before = _state(module, batch)
        started, found = time.process_time(), {"true_bytes": true}
        try:
            workload = Workload(module, batch, StepOptions(entry.precision))
            trace = trace_step(TraceRequest(workload, Emulation("cpu")))
            found["predicted_bytes"] = int(trace.events.live_bytes().max())
            found["remarks"] = list(trace.remarks)
            found["assumptions"] = list(trace.assumptions)
        except TraceError as error:
            found["refused"] = str(error)
        found["seconds"] = round(time.process_time() - started, 3)
        after = _state(module, batch)
        found["changed"] = sorted(part for part in before if not _same(before[part], after[part]))
    return found


def in_empty_folder(name: str) -> dict[str, Any]:
    """`examine` in a folder of its own, as a process can."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return examine(name)
        finally:
            os.chdir("/")


def true_peak(entry: Any) -> int:
    """Peak of a plain Lightning run by the allocator's events, from where training starts.

    It must run before anything else reads allocation events in the process.
    """
    import lightning.pytorch as pl

    from lightning_memfit.profile.quiet import SILENT_TRAINER

    torch.manual_seed(0)
    gc.freeze()  # what is there already isn't looked at: that takes longer than the run
    with allocation_events() as changes:
        module, batch = entry.make()
        gc.collect()
        torch.empty(_MARK, dtype=torch.uint8)
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, precision=entry.precision, max_epochs=1, logger=False, **SILENT_TRAINER
        )
        trainer.fit(module, Repeated(batch, _BATCHES))
    gc.unfreeze()
    start = changes.index(_MARK)
    return max(list(accumulate(changes))[start + 1 :])


def _state(module: Any, batch: Any) -> dict[str, Any]:
    """Everything that a trace could change."""
    import benchmarks.memory_zoo.modules as own

    leaves = (leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return {
        "files": sorted((str(path), path.stat().st_mtime_ns) for path in Path().rglob("*")),
        "environment": dict(os.environ),
        "globals": {key: id(value) for key, value in vars(own).items()},
        "random numbers": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),  # noqa: NPY002
        "weights": [(name, tensor.clone()) for name, tensor in module.state_dict().items()],
        "gradients": [parameter.grad is None for parameter in module.parameters()],
        "batch": [(str(index), leaf.detach().clone()) for index, leaf in enumerate(leaves)],
        "attributes": [
            (path, [(key, repr(value)) for key, value in vars(child).items() if key not in _LIVING])
            for path, child in module.named_modules()
        ],
    }


_LIVING = {"_parameters", "_buffers", "_modules"}


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)

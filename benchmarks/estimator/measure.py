"""What a case really needs: the allocator's events on the CPU, allocator counters on CUDA."""

import gc
import json
import warnings
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.estimator.cases import Batches, Case, build_batch, build_callbacks, build_module
from benchmarks.record import QUIET
from lightning_memfit.memory.allocations import allocation_events

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class _Start(pl.Callback):
    """Run a function when the first batch begins."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Only the first."""
        if trainer.global_step == 0 and batch_idx == 0:
            self.function()


def _fit(case: Case, batch: dict[str, torch.Tensor], accelerator: str, on_start: Any, steps: int = 3) -> None:
    if accelerator == "gpu":  # random numbers for a billion weights take minutes on a CPU
        module = build_module(case, "cuda").cpu()
        gc.collect()
        torch.cuda.empty_cache()
    else:
        module = build_module(case)
    count = case.accumulate_grad_batches
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=case.precision,
        max_steps=steps,
        accumulate_grad_batches=count,
        callbacks=[*build_callbacks(case), _Start(on_start)],
        **QUIET,
    )
    trainer.fit(module, Batches(batch, steps * count))


def measure_cpu(case: Case) -> dict[str, int]:
    """Peak of what the CPU allocator gave out from the first batch on, kernels' scratch memory included."""
    batch = build_batch(case)  # the dataset, so to speak: not part of the step
    gc.collect()
    with warnings.catch_warnings(), allocation_events() as changes:
        warnings.simplefilter("ignore")
        _fit(case, batch, "cpu", lambda: torch.empty(_MARK, dtype=torch.uint8))
    return {"allocated_bytes": max(list(accumulate(changes))[changes.index(_MARK) + 1 :])}


_MARK = 7_654_321
"""Bytes of a tensor that marks among the allocator's events where the first batch begins."""


def measure_cuda(case: Case, history: Path | None = None) -> dict[str, Any]:
    """Peaks of the caching allocator from the first batch on.

    Args:
        case: The run.
        history: Folder that gets every event of the allocator from the first batch on; see `save_history`.
    """
    started: dict[str, int] = {}

    def on_start() -> None:
        torch.cuda.synchronize()
        started.update(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        if history:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1_000_000)

    with warnings.catch_warnings(), sdpa_kernel(BACKENDS[case.kernel]) if case.kernel else nullcontext():
        warnings.simplefilter("ignore")
        _fit(case, build_batch(case), "gpu", on_start)
    stats = torch.cuda.memory_stats()
    measured = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "requested_bytes": stats["requested_bytes.all.peak"],
        "before_bytes": started["allocated"],
        "reserved_before_bytes": started["reserved"],
        "retries": stats["num_alloc_retries"],
    }
    if history:
        save_history(history / f"{case.name}.npz", measured)
    return measured


def save_history(file: Path, measured: dict[str, Any]) -> None:
    """Write the allocator's events as arrays: `action` and `stack` are indices of `actions` and `stacks`.

    Args:
        file: The `.npz` file.
        measured: Figures of the run, as JSON beside the arrays.
    """
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    actions: dict[str, int] = {}
    stacks: dict[str, int] = {}
    columns: dict[str, list[int]] = {"action": [], "address": [], "size": [], "stack": []}
    for event in events:
        frames = event.get("frames", [])[:8]
        stack = " < ".join(f"{Path(one['filename']).name}:{one['line']} {one['name']}" for one in frames)
        columns["action"].append(actions.setdefault(event["action"], len(actions)))
        columns["address"].append(event.get("addr", 0))
        columns["size"].append(event["size"])
        columns["stack"].append(stacks.setdefault(stack, len(stacks)))
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    about = np.array(json.dumps({"actions": list(actions), "stacks": list(stacks), "measured": measured}))
    np.savez_compressed(file, about=about, **arrays)


def mem_tracker(case: Case) -> int:
    """Peak that torch's own MemTracker gives for the same run in the order of Lightning's loop, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        module = build_module(case)
        if case.precision == "bf16-true":
            module = module.to(torch.bfloat16)
        if case.checkpointing:
            from lightning_memfit.checkpointing.apply import apply_checkpointing
            from lightning_memfit.checkpointing.blocks import find_blocks

            for group in find_blocks(module):
                apply_checkpointing(group.modules, ["full"] * len(group.modules))
        batch = {
            name: value.bfloat16() if case.precision == "bf16-true" and value.is_floating_point() else value
            for name, value in build_batch(case).items()
        }
        batch = {name: torch.empty_like(value) for name, value in batch.items()}
        optimizer = module.configure_optimizers()
        tracker = MemTracker()
        tracker.track_external(module, optimizer, *batch.values())
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed")
        with tracker:
            for _ in range(2):
                for index in range(min(case.accumulate_grad_batches, 2)):
                    with autocast:
                        loss = module.training_step(batch, 0)
                    if index == 0:
                        optimizer.zero_grad()
                    loss.backward()
                    tracker.reset_mod_stats()
                optimizer.step()
                del loss
        peak = tracker.get_tracker_snapshot("peak")
        return max(int(next(v for k, v in values.items() if "Total" in str(k))) for values in peak.values())

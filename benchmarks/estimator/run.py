"""Estimates against measurement: small models on the CPU, large ones on a GPU.

With `--predict` nothing is measured: the predictions of the rows that are there are renewed, for the device that each
was measured on, which need not be here.
"""

import gc
import time
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import lightning.pytorch as pl
import torch
import transformers  # noqa: F401  (imported before the fork: children start at once)
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.estimator.cases import Batches, Case, build_batch, build_callbacks, build_module, cpu_cases, cuda_cases
from benchmarks.runner import DEVICE, Benchmark, Options, Row, Stage
from benchmarks.training import QUIET, mark, peak_after_mark
from lightning_memfit.device.catalogue import find_device
from lightning_memfit.device.runtime import runtime_memory
from lightning_memfit.estimate.estimate import estimate_step
from lightning_memfit.memory.allocations import allocation_events
from lightning_memfit.profile.build import profile_module
from lightning_memfit.profile.step import StepOptions
from lightning_memfit.profile.trace import Emulation

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_CONTEXT_BYTES = 1 << 30
"""Set aside for the context of every process beside what its allocator reserves."""


def describe(options: Options) -> Row:
    """The CUDA device at hand, and what cases at a time may take of it."""
    if options.device == "cpu" or options.predict:
        return {}
    capability, (free_bytes, _) = torch.cuda.get_device_capability(), torch.cuda.mem_get_info()
    return {"gpu": torch.cuda.get_device_name(), "capability": capability, "room": 0.85 * free_bytes}


def predict(case: Case, options: Options, row: Row) -> Row:
    """Predicted figures of a case, from a module without weights, and how far they are from what was measured."""
    capability = options.found.get("capability", (8, 0))
    if "gpu" in row:
        capability = find_device(row["gpu"]).compute_capability
    found = {"case": vars(case), "predicted": predicted(case, options.device, capability)}
    found |= {"gpu": options.found["gpu"]} if "gpu" in options.found else {}
    return found | errors(row | found) if "measured" in row else found


def predicted(case: Case, device: str, capability: tuple[int, int]) -> Row:
    """The estimate of a case."""
    emulation = Emulation(device, capability)  # type: ignore[arg-type]
    started = time.perf_counter()
    module, batch = build_module(case, "meta"), next(iter(Batches(build_batch(case), 1)))
    steps = StepOptions(case.precision, case.accumulate_grad_batches)  # type: ignore[arg-type]
    with sdpa_kernel(BACKENDS[case.kernel]) if case.kernel else nullcontext():
        profile = profile_module(module, batch, steps, emulation, build_callbacks(case), any_micro_batch=False)
    result = estimate_step(profile, runtime=runtime_memory(capability) if device == "cuda" else None)
    return {
        "allocated_bytes": result.allocated_bytes,
        "reserved_bytes": result.reserved_bytes,
        "spare_bytes": result.spare_bytes,
        "phase": result.phase,
        "breakdown": result.breakdown.to_dict(),
        "attention_kernels": profile.attention_kernels,
        "seconds": time.perf_counter() - started,
    }


def measure(case: Case, options: Options, row: Row) -> Row:
    """What the run takes, and on the CPU what torch's MemTracker says of it."""
    started = time.perf_counter()
    measured = measure_cuda(case) if options.device == "cuda" else measure_cpu(case)
    found: Row = {"measured": {**measured, "seconds": time.perf_counter() - started}}
    found |= errors(row | found)
    if options.device == "cpu" and case.optimizer != "adamw_8bit":
        with suppress(Exception):  # it follows fewer models
            peak = mem_tracker(case)
            found["mem_tracker"] = {"allocated_bytes": peak, "error": peak / measured["allocated_bytes"] - 1}
    return found


def errors(row: Row) -> Row:
    """Relative errors of a row's predictions."""
    predicted, measured = row["predicted"], row["measured"]
    keys = [key for key in ("allocated_bytes", "reserved_bytes") if key in measured]
    return {f"error_{key.removesuffix('_bytes')}": predicted[key] / measured[key] - 1 for key in keys}


# --- measuring --------------------------------------------------------------------------------------------------------


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
    """Peak of what the CPU allocator gave out from the first batch on."""
    batch = build_batch(case)  # the dataset, so to speak: not part of the step
    gc.collect()
    with warnings.catch_warnings(), allocation_events() as changes:
        warnings.simplefilter("ignore")
        _fit(case, batch, "cpu", mark)
    return {"allocated_bytes": peak_after_mark(changes)}


def measure_cuda(case: Case) -> dict[str, Any]:
    """Peaks of the caching allocator from the first batch on."""
    started: dict[str, int] = {}

    def on_start() -> None:
        torch.cuda.synchronize()
        started.update(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
        torch.cuda.reset_peak_memory_stats()

    with sdpa_kernel(BACKENDS[case.kernel]) if case.kernel else nullcontext():
        _fit(case, build_batch(case), "gpu", on_start)
    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "requested_bytes": stats["requested_bytes.all.peak"],
        "before_bytes": started["allocated"],
        "reserved_before_bytes": started["reserved"],
        "retries": stats["num_alloc_retries"],
    }


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


def _say(row: Row) -> str:
    error = f"allocated {100 * row['error_allocated']:+7.3f} %"
    error += f", reserved {100 * row['error_reserved']:+7.3f} %" if "error_reserved" in row else ""
    return f"{row['measured']['allocated_bytes'] / 2**20:.1f} MiB, {error}, {row['predicted']['seconds']:.1f} s"


BENCHMARK = Benchmark(
    "estimator_{device}.json",
    lambda options: cuda_cases() if options.device == "cuda" else cpu_cases(),
    (
        Stage(predict, timed=False),
        # On the CPU they are timed, and memory is the machine's own; with CUDA as many run as the device has room for.
        Stage(measure, timed=False, size=lambda row: row["predicted"]["reserved_bytes"] + _CONTEXT_BYTES),
    ),
    say=_say,
    describe=describe,
    threads=None,
    arguments=(DEVICE,),
)

"""Measured profiling: two real steps of a copy, recorded event by event. The way out where a trace can't be had."""

import copy
import time
from typing import Any

import torch

from lightning_memfit.profile.build import batch_size, sequence_length
from lightning_memfit.profile.cache import package_versions
from lightning_memfit.profile.datamodule import attached_datamodule
from lightning_memfit.profile.parameters import parameter_table
from lightning_memfit.profile.random_state import kept_random_state
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.profile.recorder import EventRecorder
from lightning_memfit.profile.step import OptimizerFactory, StepOptions, run_step


def measure_step(
    module: torch.nn.Module,
    batch: Any,
    options: StepOptions | None = None,
    callbacks: tuple[Any, ...] = (),
    make_optimizer: OptimizerFactory | None = None,
) -> ModelProfile:
    """Run two real optimizer steps of a deep copy on the CPU and record what they allocate.

    The copy, its gradients and optimizer states need real memory; the module and the random state stay as they were.

    Args:
        module: LightningModule with real weights, or with `make_optimizer` a Hugging Face model.
        batch: One real batch as the loader gives it.
        options: Precision, accumulation, clipping.
        callbacks: Technique callbacks to apply to the copy.
        make_optimizer: Builds the optimizer for a module that is not a LightningModule.
    """
    options = options or StepOptions()
    started = time.perf_counter()
    trainer = getattr(module, "_trainer", None)
    clone = copy.deepcopy(module, {id(trainer): None} if trainer is not None else {})
    with kept_random_state():
        recorder = EventRecorder(python_kernels=True)
        data = attached_datamodule(module)
        run_step(recorder, clone, copy.deepcopy(batch), options, callbacks, make_optimizer, datamodule=data)
    total, per_block = recorder.flops()
    return ModelProfile(
        name=type(module).__name__,
        events=recorder.result(),
        micro_batch_size=batch_size(batch),
        parameters=parameter_table(clone),
        precision=options.precision,
        accumulate_grad_batches=options.accumulate_grad_batches,
        device="cpu",
        optimizer=" + ".join(recorder.optimizers),
        sequence_length=sequence_length(batch),
        flops=total,
        block_flops=per_block,
        only_this_size="it was measured, not traced",
        measured=True,
        host=recorder.host_memory(0).to_dict(),
        versions=package_versions(),
        seconds=time.perf_counter() - started,
    )

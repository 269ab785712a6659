"""`probe`: two real optimizer steps of a copy under a setting, to hold a plan's memory against before training."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_memfit.device.limit import MemoryLimit
from lightning_memfit.fitting.oom import is_out_of_memory
from lightning_memfit.profile.build import batch_size, resize_batch
from lightning_memfit.profile.quiet import LIGHTNING, UNWATCHED, loggers_at
from lightning_memfit.techniques.setting import Setting


@dataclass(frozen=True)
class Probed:
    """What two steps did."""

    fits: bool
    peak_bytes: int | None
    """Of live tensors; None where the run ended before it was known, or nothing follows them."""


def probe(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, setting: Setting) -> Probed:
    """Train a copy of a module for two steps on samples of one batch, as the setting says, and forget it.

    Module, random state, loaders and Trainer stay as they were. The copy needs its own weights: on the device only
    while this runs, in host memory where the module is built already.

    Args:
        trainer: About to fit; its accelerator, clipping and `MemoryLimit` are the probe's.
        module: Not configured by techniques yet.
        batch: A real batch.
        setting: With its micro-batch size.
    """
    assert setting.micro_batch_size is not None
    samples = resize_batch(batch, batch_size(batch), setting.micro_batch_size)
    limits = [MemoryLimit(c.limit_bytes, c.caching) for c in trainer.callbacks if isinstance(c, MemoryLimit)]  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with isolate_rng(), _quiet():
        fits = _two_steps(trainer, module, samples, setting, limits)
    # Trainer, loops and copy refer to one another: without this their tensors would stay beside those of the run.
    gc.collect()
    peak_bytes = _peak_bytes(device, limits) if fits else None
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Probed(fits, peak_bytes)


def _two_steps(
    trainer: pl.Trainer, module: pl.LightningModule, samples: Any, setting: Setting, limits: list[MemoryLimit]
) -> bool:
    """Whether a copy trains for two steps without running out of memory."""
    count, device = min(2, setting.accumulate_grad_batches), trainer.strategy.root_device
    owner = getattr(module, "_trainer", None)
    clone = copy.deepcopy(module, {id(owner): None} if owner is not None else {})
    clone._trainer = None
    probing = pl.Trainer(
        accelerator=device.type if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        precision=setting.precision,
        max_steps=2,
        accumulate_grad_batches=count,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        logger=False,
        callbacks=[*limits, *Setting(chosen=setting.chosen).callbacks()],
        **UNWATCHED,
    )
    try:
        loader: DataLoader[Any] = DataLoader([samples] * (2 * count), batch_size=None)  # type: ignore[arg-type]
        probing.fit(clone, loader)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        clone._trainer = None
    return True


def _peak_bytes(device: torch.device, limits: list[MemoryLimit]) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peaks = [limit.ledger.peak_bytes for limit in limits if limit.ledger is not None]
    return max(peaks, default=None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with loggers_at(logging.ERROR, *LIGHTNING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Fitting the micro-batch size by trial steps that leave no trace."""

import math
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.rollback import TrainingSnapshot
from lightning_memfit.fitting.size.device_memory import MemoryGauge
from lightning_memfit.fitting.size.search import (
    MAX_PROBES,
    Found,
    PeakPredictor,
    Probe,
    find_largest,
    largest_under,
    line_through,
)
from lightning_memfit.fitting.step.loop import MicroBatchLoop, StepRequest
from lightning_memfit.fitting.step.outputs import StepLogs
from lightning_memfit.fitting.step.ranks import Agreement
from lightning_memfit.fitting.step.split import BatchSplitter
from lightning_memfit.memory import format_bytes

_SMALL = 8


class NothingFits(torch.OutOfMemoryError):
    """Not even one sample fits."""


class Trial:
    """Trial steps on a module in training, undone when the context is left.

    Use as a context manager. Inside, gradients and optimizer states exist as in the middle of training: `warm_up` makes
    them. The learning rate is zero meanwhile, so that steps allocate what they allocate without moving the weights.

    Args:
        loop: The loop in training.
        request: The step that waits to be run.
        batch: The worst-case batch, on the device.
        splitter: Cuts micro-batches from it.
        num_samples: Samples in it.
        gauge: Measures peaks; None where memory can't be measured.
        agreement: All ranks try the same sizes together; a size fits if it fits everywhere.
    """

    def __init__(
        self,
        loop: MicroBatchLoop,
        request: StepRequest,
        batch: Any,
        splitter: BatchSplitter,
        num_samples: int,
        gauge: MemoryGauge | None,
        agreement: Agreement,
    ) -> None:
        self._loop = loop
        self._request = request
        self._batch = batch
        self._splitter = splitter
        self._num_samples = num_samples
        self._gauge = gauge
        self._agreement = agreement
        self._snapshot: TrainingSnapshot | None = None
        self.num_steps = 0

    def __enter__(self) -> "Trial":
        trainer = self._loop.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others = [config.scheduler for config in trainer.lr_scheduler_configs] + ([] if scaler is None else [scaler])
        self._hook_name = self._loop.module._current_fx_name
        self._snapshot = TrainingSnapshot(self._loop.module, trainer.optimizers, trainer.strategy.root_device, others)
        for group in self._request.optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._snapshot is not None
        clear_gradients(self._loop.module)
        self._snapshot.restore()
        self._loop.settle_after_failure(self._hook_name)
        if self._gauge is not None:
            self._gauge.reset_peak()

    def warm_up(self) -> Probe:
        """Run a step of one sample, which makes gradients and optimizer states, then measure one more."""
        made = self._run(1)
        return self._run(1) if made.fits else made

    def probe(self, size: int) -> Probe:
        """Run a step with micro-batches of a size."""
        rank_zero_info(f"MicroBatching: trying micro-batch {size} ...")
        self.num_steps += 1
        return self._run(size)

    def _run(self, size: int) -> Probe:
        failure: Exception | None = None
        work_bytes = peak_bytes = -1
        if self._gauge is not None:
            self._gauge.reset_peak()
        try:
            self._forward_backward(size)
            work_bytes = self._peak()
            self._request.optimizer.step()
            peak_bytes = self._peak()
        except Exception as error:
            failure = error
        status = 0 if failure is None else 1 if is_out_of_memory(failure) else 2
        told = self._agreement.exchange(status, peak_bytes, work_bytes)
        if failure is not None:
            if status == 2:
                raise failure
            release(failure)
            self._loop.settle_after_failure(self._hook_name)
        if any(theirs == 2 for theirs, *_ in told):
            raise RuntimeError("Another rank failed in a trial step; see its error. This rank stops, too.")
        fits = all(theirs == 0 for theirs, *_ in told)
        if not fits or peak_bytes < 0:
            return Probe(size, fits)
        return Probe(size, fits, int(max(theirs for _, theirs, _ in told)), int(max(theirs for *_, theirs in told)))

    def _peak(self) -> int:
        return -1 if self._gauge is None else self._gauge.peak_bytes

    def _forward_backward(self, size: int) -> None:
        loop, request = self._loop, self._request
        rest = self._num_samples - size
        part = self._splitter.split(self._batch, [size, rest] if rest else [size])[0]
        with StepLogs().capture(loop.results):
            loss = loop.forward(request, part, 1.0).closure_loss
            if not rest:  # the whole share at once: `zero_grad` comes between forward and backward
                clear_gradients(loop.module)
            if loss is not None:
                loop.backward(request, loss, announce=False)
            del loss


def clear_gradients(module: nn.Module) -> None:
    """Drop all gradients."""
    for parameter in module.parameters():
        parameter.grad = None


def fit_size(trial: Trial, share: int, limit_bytes: int, predict: PeakPredictor | None) -> Found:
    """Find the largest micro-batch up to `share`: predicted, then verified by at most two trial steps.

    Without a prediction two more trials of moderate size take its place.

    Raises:
        NothingFits: If not even one sample fits, on all ranks.
    """
    first = trial.warm_up()
    trial.num_steps += 1
    if not first.fits:
        raise NothingFits("Not even a micro-batch of one sample fits.")
    if predict is None:
        return _measure_and_find(trial, share, limit_bytes, first)
    return find_largest(share, predict, limit_bytes, trial.probe, first)


def _measure_and_find(trial: Trial, share: int, limit_bytes: int, first: Probe) -> Found:
    """Extrapolate from growing trials: one sample, eight, half of what those promise, and from there to the limit."""
    if share == 1 or first.peak_bytes is None:
        return Found(1, True, first.peak_bytes, ())
    measured = [first]
    for size in (min(share, _SMALL), None):
        if size is None:
            promised = largest_under(line_through(*measured[-2:]), limit_bytes, share)
            size = min(share, max(measured[-1].size, promised // 2))
        if size == measured[-1].size:
            continue
        probe = trial.probe(size)
        if not probe.fits:
            share = size - 1
            break
        measured.append(probe)
    if len(measured) == 1:
        return _halve(trial, first, share)
    return find_largest(share, line_through(*measured[-2:]), limit_bytes, trial.probe, measured[-1])


def _halve(trial: Trial, first: Probe, upper: int) -> Found:
    """Between one sample, which fits, and the few that don't, halve twice."""
    best, probes = first, []
    for _ in range(MAX_PROBES):
        if upper <= best.size:
            break
        probe = trial.probe((best.size + upper + 1) // 2)
        probes.append(probe)
        best, upper = (probe, upper) if probe.fits else (best, probe.size - 1)
    return Found(best.size, True, best.peak_bytes, tuple(probes))


def describe(found: Found, chosen: int, share: int, limit_bytes: int, seconds: float) -> str:
    """One line: what was chosen and why."""
    passes = math.ceil(share / chosen)
    predicted = "" if found.predicted_bytes is None else f", {format_bytes(found.predicted_bytes)} predicted for it"
    verified = "verified" if found.is_verified else "not verified"
    return (
        f"MicroBatching: micro-batch {chosen} x {passes} for {share} samples per device; the largest that fits "
        f"{format_bytes(limit_bytes)} is {found.largest} ({verified}{predicted}; {found.num_trials} trial steps, "
        f"{seconds:.1f} s)."
    )

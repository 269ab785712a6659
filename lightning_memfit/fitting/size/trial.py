"""`Trial` runs steps and undoes them; `fit_size` finds the micro-batch size with such steps."""

import math
from collections.abc import Callable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_memfit.fitting.recovery.consensus import RankConsensus
from lightning_memfit.fitting.recovery.oom import is_out_of_memory, release
from lightning_memfit.fitting.recovery.rollback import TrainingSnapshot
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.size.search import (
    MAX_PROBES,
    PeakPredictor,
    Probe,
    SizeSearchResult,
    find_largest,
    largest_under,
    line_through,
)
from lightning_memfit.memory import format_bytes

_SMALL = 8


class NothingFits(torch.OutOfMemoryError):
    """Not even one sample fits."""


class Trial:
    """Runs trial steps on a module in training, and undoes them when the context is left.

    Use it as a context manager. Inside, gradients and optimizer states exist as in the middle of training: `warm_up`
    makes them. The learning rate is zero meanwhile, so steps allocate the same memory without changing the weights.

    Args:
        trainer: The Trainer in training.
        forward_and_backward: Runs forward and backward on a number of samples without logging.
        device_memory: Measures peaks; None if memory can't be measured.
        consensus: Lets all ranks try the same sizes together; a size fits if it fits on every rank.

    Attributes:
        num_steps: Number of trial steps run so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        forward_and_backward: Callable[[int], None],
        device_memory: DeviceMemory | None,
        consensus: RankConsensus,
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._optimizer = trainer.optimizers[0]
        self._forward_and_backward = forward_and_backward
        self._memory = device_memory
        self._consensus = consensus
        self._snapshot: TrainingSnapshot | None = None
        self._hook_name: str | None = None
        self.num_steps = 0

    def __enter__(self) -> "Trial":
        trainer = self._trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others = [config.scheduler for config in trainer.lr_scheduler_configs] + ([] if scaler is None else [scaler])
        self._hook_name = self._module._current_fx_name
        self._snapshot = TrainingSnapshot(self._module, trainer.optimizers, trainer.strategy.root_device, others)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        return self

    def __exit__(self, *_: object) -> None:
        assert self._snapshot is not None
        clear_gradients(self._module)
        self._snapshot.restore()
        if self._memory is not None:
            self._memory.reset_peak()

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
        if self._memory is not None:
            self._memory.reset_peak()
        try:
            self._forward_and_backward(size)
            work_bytes = self._peak()
            self._optimizer.step()
            peak_bytes = self._peak()
        except Exception as error:
            failure = error
        status = 0 if failure is None else 1 if is_out_of_memory(failure) else 2
        told = self._consensus.exchange(status, peak_bytes, work_bytes)
        if failure is not None:
            if status == 2:
                raise failure
            release(failure)
            self._module._current_fx_name = self._hook_name  # Lightning doesn't reset it when a hook raises
        if any(theirs == 2 for theirs, *_ in told):
            raise RuntimeError("Another rank failed in a trial step; see its error. This rank stops, too.")
        fits = all(theirs == 0 for theirs, *_ in told)
        if not fits or peak_bytes < 0:
            return Probe(size, fits)
        return Probe(size, fits, int(max(theirs for _, theirs, _ in told)), int(max(theirs for *_, theirs in told)))

    def _peak(self) -> int:
        return -1 if self._memory is None else self._memory.peak_bytes


def clear_gradients(module: nn.Module) -> None:
    """Set all gradients to None."""
    for parameter in module.parameters():
        parameter.grad = None


def fit_size(trial: Trial, local_batch_size: int, limit_bytes: int, predict: PeakPredictor | None) -> SizeSearchResult:
    """Find the largest micro-batch up to `local_batch_size`: predicted, then verified by at most two trial steps.

    Without a prediction, two more trials of moderate size replace it.

    Raises:
        NothingFits: If not even one sample fits, on all ranks.
    """
    first = trial.warm_up()
    trial.num_steps += 1
    if not first.fits:
        raise NothingFits("Not even a micro-batch of one sample fits.")
    if predict is None:
        return _measure_and_find(trial, local_batch_size, limit_bytes, first)
    return find_largest(local_batch_size, predict, limit_bytes, trial.probe, first)


def _measure_and_find(trial: Trial, local_batch_size: int, limit_bytes: int, first: Probe) -> SizeSearchResult:
    """Extrapolate from growing trials: one sample, eight, half of what those promise, and from there to the limit."""
    if local_batch_size == 1 or first.peak_bytes is None:
        return SizeSearchResult(1, True, first.peak_bytes, ())
    measured = [first]
    for size in (min(local_batch_size, _SMALL), None):
        if size is None:
            promised = largest_under(line_through(*measured[-2:]), limit_bytes, local_batch_size)
            size = min(local_batch_size, max(measured[-1].size, promised // 2))
        if size == measured[-1].size:
            continue
        probe = trial.probe(size)
        if not probe.fits:
            local_batch_size = size - 1
            break
        measured.append(probe)
    if len(measured) == 1:
        return _halve(trial, first, local_batch_size)
    return find_largest(local_batch_size, line_through(*measured[-2:]), limit_bytes, trial.probe, measured[-1])


def _halve(trial: Trial, first: Probe, upper: int) -> SizeSearchResult:
    """Halve twice between one sample, which fits, and the few that don't."""
    best, probes = first, []
    for _ in range(MAX_PROBES):
        if upper <= best.size:
            break
        probe = trial.probe((best.size + upper + 1) // 2)
        probes.append(probe)
        best, upper = (probe, upper) if probe.fits else (best, probe.size - 1)
    return SizeSearchResult(best.size, True, best.peak_bytes, tuple(probes))


def describe(found: SizeSearchResult, chosen: int, local_batch_size: int, limit_bytes: int, seconds: float) -> str:
    """Return one line that says what was chosen and why."""
    passes = math.ceil(local_batch_size / chosen)
    predicted = "" if found.predicted_bytes is None else f", {format_bytes(found.predicted_bytes)} predicted for it"
    verified = "verified" if found.is_verified else "not verified"
    return (
        f"MicroBatching: micro-batch {chosen} x {passes} for {local_batch_size} samples per device; the largest that "
        f"fits {format_bytes(limit_bytes)} is {found.largest} ({verified}{predicted}; {found.num_trials} trial steps, "
        f"{seconds:.1f} s)."
    )

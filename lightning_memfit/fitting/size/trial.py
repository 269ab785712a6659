"""`Trial` runs steps and undoes them; `fit_size` finds the micro-batch size with such steps."""

import gc
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_memfit.fitting.recovery.retry import MemoryExhausted
from lightning_memfit.fitting.recovery.rollback import TrainingSnapshot
from lightning_memfit.fitting.size.device_memory import DeviceMemory
from lightning_memfit.fitting.size.search import (
    ExactPredictor,
    NoPrediction,
    PeakPredictor,
    Probe,
    SizeSearchResult,
    find_by_trials,
    find_largest,
)
from lightning_memfit.memory import format_bytes
from lightning_memfit.memory.oom import is_out_of_memory, release
from lightning_memfit.reliability.consensus import RankConsensus
from lightning_memfit.reliability.upstream.deepspeed import ZeroEngine

_MARGIN = 0.03  # of the memory for more than one sample, where running out of it in a trial step ends the run
_NOT_TAKEN_BACK = (
    "Memory ran out in a trial step with micro-batch {}, before training: under ZeRO that can't be taken back. Set "
    "`MicroBatching(micro_batch_size={})` or less; the effective batch stays the same."
)


class NothingFits(torch.OutOfMemoryError):
    """Not even one sample fits."""


class Trial:
    """Runs trial steps on a module in training, and undoes them when the context is left.

    Use it as a context manager. Inside, gradients and optimizer states exist as in the middle of training: the first
    step makes them. The learning rate is zero meanwhile, so that steps allocate the same memory without changing the
    weights.

    Args:
        trainer: The Trainer in training.
        forward_and_backward: Runs forward and backward on a number of samples without logging.
        device_memory: Measures peaks; None if memory can't be measured.
        consensus: Lets all ranks try the same sizes together; a size fits if it fits on every rank.
        engine: The DeepSpeed engine that holds the optimizer; None under other strategies.

    Attributes:
        num_steps: Number of trial steps run so far.
        leaves_out: Whether sizes that the module can't run are left out. One that runs a single sample has a mistake
            where it fails with more, which is raised.
    """

    def __init__(
        self,
        trainer: Trainer,
        forward_and_backward: Callable[[int], None],
        device_memory: DeviceMemory | None,
        consensus: RankConsensus,
        engine: ZeroEngine | None = None,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._stack = ExitStack()
        self._module = trainer.lightning_module
        self._optimizer = trainer.optimizers[0]
        self._forward_and_backward = forward_and_backward
        self._memory = device_memory
        self._consensus = consensus
        self._snapshot: TrainingSnapshot | None = None
        self._hook_name: str | None = None
        self.num_steps = 0
        self.leaves_out = False

    def __enter__(self) -> "Trial":
        trainer = self._trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        others = [config.scheduler for config in trainer.lr_scheduler_configs] + ([] if scaler is None else [scaler])
        self._hook_name = self._module._current_fx_name
        optimizers = trainer.optimizers
        if self._engine is not None:
            self._stack.enter_context(self._engine.unchanged())
            optimizers = [self._engine.optimizer]
        self._snapshot = TrainingSnapshot(self._module, optimizers, trainer.strategy.root_device, others)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        return self

    def __exit__(self, *_: object) -> None:
        assert self._snapshot is not None
        clear_gradients(self._module)
        if self._engine is not None:
            self._engine.settle()
        self._snapshot.restore()
        self._snapshot = None
        self._stack.close()
        gc.collect()  # what the trial steps leave in cycles would stay in memory for many steps of the run
        if self._memory is not None:
            self._memory.reset_peak()

    @property
    def can_fail(self) -> bool:
        """Whether a step that runs out of memory can be taken back."""
        return self._engine is None

    @property
    def measures(self) -> bool:
        """Whether peaks can be measured."""
        return self._memory is not None

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between two steps, on the rank that has most."""
        live_bytes = 0 if self._memory is None else self._memory.live_bytes
        return int(max(theirs for (theirs,) in self._consensus.exchange(live_bytes)))

    def agree(self, size: int) -> int:
        """Return the smallest of all ranks' sizes."""
        return int(min(theirs for (theirs,) in self._consensus.exchange(size)))

    def probe(self, size: int) -> Probe:
        """Run a step with micro-batches of a size, and say so."""
        rank_zero_info(f"MicroBatching: trying micro-batch {size} ...")
        probe = self.step(size)
        if probe.error is not None and not self.leaves_out:
            raise probe.error
        return probe

    def step(self, size: int) -> Probe:
        """Run a step with micro-batches of a size."""
        self.num_steps += 1
        if self._memory is not None:
            self._memory.reset_peak()

        def run() -> tuple[int, int]:
            try:
                return step()
            except Exception as error:
                if self.can_fail or not is_out_of_memory(error):
                    raise
                raise MemoryExhausted(_NOT_TAKEN_BACK.format(size, max(1, size * 3 // 4))) from error

        has_worked = False

        def step() -> tuple[int, int]:
            nonlocal has_worked
            self._forward_and_backward(size)
            has_worked = True
            work_bytes = self._peak()
            closure: Any = _StepClosure(partial(self._forward_and_backward, size))
            self._optimizer.step(closure=closure)
            return work_bytes, self._peak()

        peaks, failure = self._consensus.together(run)
        work_bytes, peak_bytes = peaks or (-1, -1)
        status = 0 if failure is None else 1 if is_out_of_memory(failure) else 2
        told = self._consensus.exchange(status, peak_bytes, work_bytes)
        if failure is not None:
            if status == 2 and not self.can_fail:
                raise failure
            if status == 1:
                release(failure)
            self._module._current_fx_name = self._hook_name  # Lightning doesn't reset it when a hook raises
        if any(theirs == 2 for theirs, *_ in told):
            other = RuntimeError("Another rank failed in a trial step; see its error. This rank stops, too.")
            clear_gradients(self._module)
            return Probe(size, False, error=failure if status == 2 else other)
        fits = all(theirs == 0 for theirs, *_ in told)
        if not fits or peak_bytes < 0:
            return Probe(size, fits, is_in_optimizer=not fits and has_worked)
        return Probe(size, fits, int(max(theirs for _, theirs, _ in told)), int(max(theirs for *_, theirs in told)))

    def explain_optimizer(self, samples: str) -> str:
        """Say that memory runs out in the optimizer step, and what helps there."""
        return (
            f"Memory runs out in the step of `{type(self._optimizer).__name__}`, whatever the micro-batch: forward and "
            f"backward of {samples} fit, and what the optimizer keeps or makes beside them doesn't. Use one with "
            "smaller states (`Optimizer8bit`) or without a copy of all gradients (`foreach=False`), or divide its "
            "states among devices (`memfit_zero_1`)."
        )

    def _peak(self) -> int:
        return -1 if self._memory is None else self._memory.peak_bytes


class _StepClosure:
    """A closure for steps that need one: forward and backward are done when it is called first, and run again later.

    Args:
        run: Runs forward and backward.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._is_done = True

    @torch.enable_grad()
    def __call__(self) -> torch.Tensor:
        """Return a loss of zero, after which no step looks for a better one."""
        if not self._is_done:
            self._run()
        self._is_done = False
        return torch.zeros(())


def clear_gradients(module: nn.Module) -> None:
    """Set all gradients to None."""
    for parameter in module.parameters():
        parameter.grad = None


def fit_size(
    trial: Trial, local_batch_size: int, limit_bytes: int, predict: PeakPredictor | ExactPredictor | None
) -> SizeSearchResult:
    """Find the largest micro-batch up to `local_batch_size`: predicted, then verified by one or two trial steps.

    Before them comes one with a single sample, which makes gradients and optimizer states. Where the module can't run
    one (batch norms of tables, episodes of few shots), it has the fewest samples of 2, 4, 8 ... with which it runs. A
    prediction that is not traced, or must not be too low because no step can be taken back, is corrected by one more.
    Without a prediction, up to five trial steps of growing size replace it.

    Raises:
        NothingFits: If not even the fewest samples fit, on all ranks.
        Exception: The module's own, if it can't run the whole batch either.
    """
    found: SizeSearchResult | None = None
    is_traced = isinstance(predict, ExactPredictor)
    probe = trial.step(1)
    while probe.error is not None and probe.size < local_batch_size:
        probe = trial.step(min(2 * probe.size, local_batch_size))
    if probe.error is not None:
        raise probe.error
    least = probe.size
    trial.leaves_out = least > 1
    samples = "one sample" if least == 1 else f"{least} samples, the fewest that the module can run,"
    if probe.is_in_optimizer:
        raise NothingFits(trial.explain_optimizer(samples))
    if not probe.fits:
        raise NothingFits(f"Not even a micro-batch of {samples} fits.")
    if predict is not None:
        if isinstance(predict, ExactPredictor) and trial.measures:
            predict.calibrate(trial.rest_bytes)
        first = None if is_traced and trial.can_fail else trial.step(least)
        if not trial.can_fail and first is not None and first.peak_bytes is not None:
            limit_bytes -= int(_MARGIN * max(0, limit_bytes - first.peak_bytes))
        if first is None or first.fits:
            try:
                found = find_largest(local_batch_size, predict, limit_bytes, trial.probe, first, trial.agree)
            except NoPrediction as error:
                rank_zero_info(f"MicroBatching: sizes are drawn from trial steps, for there is no prediction: {error}")
    if found is None and (predict is None or is_traced):
        upper = local_batch_size if trial.measures else least
        found = find_by_trials(upper, trial.rest_bytes, limit_bytes, trial.probe, least)
    if found is None or not found.largest:
        raise NothingFits(f"Not even a micro-batch of {samples} fits beside gradients and optimizer states.")
    return found


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

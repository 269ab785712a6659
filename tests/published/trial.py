"""What the five techniques make of one published module.

Verdicts:

- `exact`: weights, buffers, optimizer states and logged values are those of the plain run under the same seeds,
  relative to the largest of each tensor: with `MicroBatching` by the tolerance of the case, else in every bit
- `accepted`: the run ended well; the module's own runs under the same seeds differ, so that numbers can't be compared
- `peak`: `MemoryPrediction` is within 2 % of what `MemoryMonitor` measures, by tensors or by the allocator, and the run
  is the plain one; `no prediction`: it says that the step can't be traced
- `fits`: `MemFit` trains under a `MemoryLimit` of 70 % of the plain peak
- `trains`: losses and weights are finite with `Optimizer8bit`, and its states are smaller
- `refused`: an error of ours ended the run before its first step; `refused later` after it
- `out of memory`: the run ended with torch's error
- `WRONG`, `crashed`, `other peak`, `states as large`, `did not end`: none of these is ever wanted
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_memfit import (
    ActivationCheckpointing,
    MemFit,
    MemoryLimit,
    MemoryMonitor,
    MemoryPrediction,
    MicroBatching,
    Optimizer8bit,
)
from tests.helpers.trainers import quiet_trainer
from tests.zoo.compare import caught, is_refusal, largest_difference, state_of

STEPS = 4
SHARE = 0.7
"""Of the plain run's peak: the memory that `MemFit` gets."""

WANTED = {
    "MicroBatching": "exact",
    "MemoryPrediction": "peak",
    "MemFit": "fits",
    "ActivationCheckpointing": "exact",
    "Optimizer8bit": "trains",
}


@dataclass(frozen=True)
class Case:
    """A published module.

    Attributes:
        package: What it is installed by.
        name: Name of its class.
        build: Makes the module and its loader.
        wanted: Verdicts by technique; `refused: PHRASE` if the message must contain the phrase.
        precision: In which `MicroBatching` is compared; float32 for modules that don't work in float64.
        tolerance: Relative difference that is rounding there.
        is_random: Whether its own runs under the same seeds differ.
    """

    package: str
    name: str
    build: Callable[[], tuple[pl.LightningModule, Any]]
    wanted: Mapping[str, str] = field(default_factory=dict)
    precision: str = "64-true"
    tolerance: float = 1e-7
    is_random: bool = False

    @property
    def all_wanted(self) -> dict[str, str]:
        """What is wanted of every technique."""
        return WANTED | dict(self.wanted)

    @property
    def version(self) -> str | None:
        """Of the package; None if it isn't installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


@dataclass
class Run:
    """A fit, and how it ended."""

    trainer: pl.Trainer
    module: pl.LightningModule
    warned: set[str]
    error: Exception | None = None

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, optimizer states, and what was logged."""
        logged = {name: value for name, value in self.trainer.callback_metrics.items() if not name.startswith(_OURS)}
        return state_of(self.trainer, self.module) | {f"logged {name}": v.double() for name, v in logged.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer states, tensors that several share once."""
        states = (one for optimizer in self.trainer.optimizers for one in optimizer.state.values())
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum({one.data_ptr(): one.nbytes for one in tensors}.values())


_OURS = ("micro_batch_size", "memory/", "throughput/", "mem_gib")
Found = tuple[str, str]
"""A verdict, and the message of the error or what explains it."""


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def train(case: Case, *callbacks: pl.Callback, precision: str = "32-true") -> Run:
    """Build and train for a few steps under fixed seeds."""
    seed(0)
    module, loader = case.build()
    trainer = quiet_trainer(
        *callbacks,
        max_steps=STEPS,
        limit_train_batches=STEPS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        precision=precision,
    )
    run = Run(trainer, module, set())
    seed(1)
    with caught(run.warned):
        try:
            trainer.fit(module, loader)
        except Exception as error:
            run.error = error
    return run


def plain(case: Case, *callbacks: pl.Callback, precision: str = "32-true") -> Run:
    """The run that others are compared with.

    Raises:
        RuntimeError: If it fails.
    """
    run = train(case, *callbacks, precision=precision)
    if run.error is not None:
        raise RuntimeError(f"{case.name} doesn't train without us") from run.error
    return run


def _failed(run: Run) -> Found | None:
    if run.error is None:
        return None
    message = f"{type(run.error).__name__}: {run.error}"
    if isinstance(run.error, torch.OutOfMemoryError):
        return "out of memory", message
    if not is_refusal(run.error):
        return "crashed", message
    return "refused later" if run.trainer.global_step else "refused", message


def _same(case: Case, expected: Run, found: Run, tolerance: float) -> Found:
    if case.is_random:
        return ("accepted", "") if _is_finite(found) else ("WRONG", "weights aren't finite")
    before, after = expected.state, found.state
    is_logged = {True: {}, False: {}}
    for name in before.keys() | after.keys():
        one = largest_difference(*({name: state[name]} if name in state else {} for state in (before, after)))[1]
        if not one <= tolerance:
            is_logged[name.startswith("logged ")][name] = one
    if is_logged[False]:
        return "WRONG", _worst(is_logged[False])
    silent = {name: one for name, one in is_logged[True].items() if not _is_named(name, found.warned)}
    if silent:
        return "WRONG", _worst(silent)
    return ("exact, logs warned", _worst(is_logged[True])) if is_logged[True] else ("exact", "")


def _worst(differences: dict[str, float]) -> str:
    name = max(differences, key=lambda one: differences[one])
    return f"{name} differs by {differences[name]:.0e}, {len(differences)} in all"


def _is_named(name: str, texts: set[str]) -> bool:
    stem = name.removeprefix("logged ").removesuffix("_step").removesuffix("_epoch")
    return any(stem in text for text in texts)


# --- the techniques -------------------------------------------------------------------------------------------------


def micro_batching(case: Case) -> Found:
    expected = plain(case, precision=case.precision)
    callback = MicroBatching(micro_batch_size=3)
    run = train(case, callback, precision=case.precision)
    return _failed(run) or _same(case, expected, run, case.tolerance)


def memory_prediction(case: Case) -> Found:
    expected, monitor = plain(case), MemoryMonitor(exact=True)
    run = train(case, MemoryPrediction(), monitor)
    failed = _failed(run) or _same(case, expected, run, 0.0)
    if failed[0] not in ("exact", "accepted"):
        return failed
    report: Any = monitor.report
    if report.predicted is None:
        said = [one for one in run.warned if one.startswith("MemoryPrediction")]
        return "no prediction", "; ".join(said)
    measured = (report.measured.total(), report.exact_peak_bytes)
    off = min((report.predicted.total() / one - 1 for one in measured), key=abs)
    return ("peak" if abs(off) < 0.02 else "other peak"), f"{100 * off:+.1f} %"


def memfit(case: Case) -> Found:
    limit = MemoryLimit(1 << 40)
    plain(case, limit)
    assert limit.ledger is not None
    callback = MemFit()
    run = train(case, MemoryLimit(int(SHARE * limit.ledger.peak_bytes)), callback)
    failed = _failed(run)
    if failed or not _is_finite(run):
        return failed or ("WRONG", "weights aren't finite")
    return "fits", "measured" if callback.plan is None else callback.plan.summary()


def activation_checkpointing(case: Case) -> Found:
    expected = plain(case)
    run = train(case, ActivationCheckpointing())
    return _failed(run) or _same(case, expected, run, 0.0)


def optimizer_8bit(case: Case) -> Found:
    expected = plain(case)
    run = train(case, Optimizer8bit())
    failed = _failed(run)
    if failed or not _is_finite(run):
        return failed or ("WRONG", "weights aren't finite")
    share = run.state_bytes / max(1, expected.state_bytes)
    return ("trains" if share < 1 else "states as large"), f"{100 * share:.0f} % of the states' bytes"


def _is_finite(run: Run) -> bool:
    return run.trainer.global_step > 0 and all(bool(value.isfinite().all()) for value in run.state.values())


TECHNIQUES: dict[str, Callable[[Case], Found]] = dict(
    zip(WANTED, (micro_batching, memory_prediction, memfit, activation_checkpointing, optimizer_8bit), strict=True)
)


def is_met(wanted: str, verdict: str, message: str) -> bool:
    """Whether a verdict is what is wanted, and a refusal says what it must."""
    word, _, phrase = wanted.partition(": ")
    return verdict.split(",")[0] == word and phrase in message


def trial(case: Case, technique: str) -> tuple[str, dict[str, Any]]:
    """A verdict with its message, as `tests.zoo.__main__.try_all` takes it."""
    verdict, message = TECHNIQUES[technique](case)
    return verdict, {"message": message}


def trials(case: Case) -> dict[str, Callable[[], tuple[str, dict[str, Any]]]]:
    return {technique: partial(trial, case, technique) for technique in TECHNIQUES}

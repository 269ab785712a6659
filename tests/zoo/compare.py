"""Are weights and logged values those of the undivided batch? Ten steps of every case of the zoo, cut and whole.

Each case trains in float64, once by plain Lightning and then with `MicroBatching`: with the whole batch of 8 at once,
with micro-batches of 4, 3 and 1 samples, and at once until memory runs out. It does from the fourth step on, at the end
of every `training_step` that had more than 5 samples, so that all it changes has been changed. Compared are parameters,
buffers and optimizer states at the end, and every value that the loggers got.

Verdicts on training:

- `equal`: no number differs by more than 1e-9, relative to the largest of its tensor
- `refused`: an error of ours ended the run before the first step (or, when memory ran out, before the step in which it
  did), and weights are what plain Lightning had there
- `refused later`: the same before the first step that would have been wrong
- `accepted`: the run ended well, and its random numbers can't be compared
- `crashed`: another error ended the run
- `WRONG`: weights differ

Verdicts on logged values: `equal`, `warned` (they differ, and a warning named each of them) or `WRONG`. What
torchmetrics computes in float32 may differ by 1e-6.
"""

import inspect
import linecache
import logging
import math
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_memfit
from benchmarks.runner import write
from lightning_memfit.fitting import MicroBatching
from tests.zoo.base import Case

STEPS = 10
SIZES = (8, 4, 3, 1)
SHRINK = "shrink"
FAILING_STEP = 4
MOST_SAMPLES = 5  # that fit from then on
TOLERANCE = 1e-9
MESSAGE = 300  # characters kept in the record
_SMALLEST = 1e-6  # numbers below it are compared with it: rounding of what is exactly zero in exact arithmetic
TRAINING = ("WRONG", "crashed", "refused later", "refused", "accepted", "equal")  # the worst first
LOGS = ("WRONG", "warned", "equal", "none")
RESULT = Path("benchmarks/results/micro_batching_exactness.json")
_OURS = str(Path(lightning_memfit.__file__).parent)


# --- a run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run left behind.

    Attributes:
        state: Parameters, buffers and optimizer states after the last step.
        weights: Trained parameters before the first step and after each one.
        logged: Every value that a logger got, by step and name.
        warned: Texts of warnings.
        calls: Calls of `training_step`.
        failures: Injected out-of-memory errors.
        error: What ended the run.
        steps: Optimizer steps taken.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    logged: dict[tuple[int, str], float] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    calls: int = 0
    failures: int = 0
    error: Exception | None = None
    steps: int = 0


class _Recorder(Logger):
    """Keeps logged values; of one that is logged several times in a step, how often as well."""

    def __init__(self, logged: dict[tuple[int, str], float]) -> None:
        super().__init__()
        self._logged = logged

    @property
    def name(self) -> str:
        return "recorder"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            if name != "micro_batch_size":
                times = "times logged: " + name
                self._logged[step or 0, name] = float(value)
                self._logged[step or 0, times] = self._logged.get((step or 0, times), 0.0) + 1


class _Watch(pl.Callback):
    """Keeps the weights after every step, and the values that only callbacks see."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run.weights.append(_weights(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == len(self._run.weights):
            self._run.weights.append(_weights(pl_module))
        for name, value in trainer.callback_metrics.items():
            self._run.logged[trainer.fit_loop.total_batch_idx, f"callback_metrics: {name}"] = float(value)


def _weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def state_of(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    state = {f"weight {name}": p.detach() for name, p in module.named_parameters()}
    state |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    for index, optimizer in enumerate(trainer.optimizers):
        kept = optimizer.state_dict()
        state |= dict(_tensors(f"optimizer {index} state", kept["state"]))
        rates = [float(group["lr"]) for group in kept["param_groups"]]
        state[f"optimizer {index} rates"] = torch.tensor(rates)
    return {name: torch.as_tensor(value).detach().clone().double() for name, value in state.items()}


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name} {key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(f"{name} {index}", item)


def _watched(module: pl.LightningModule, run: Run, fails: bool) -> pl.LightningModule:
    """Count calls of `training_step`, and let memory run out at the end of those that have too many samples.

    The module's class changes rather than its attributes, so that copies of it behave as it does.
    """
    plain: Any = type(module)

    def training_step(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        run.calls += 1
        is_late = fails and self.trainer.fit_loop.total_batch_idx >= FAILING_STEP - 1
        is_large = is_late and self.samples_in(batch) > MOST_SAMPLES  # before the step changes the batch
        output = plain.training_step(self, batch, *arguments, **options)
        if is_large:
            run.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (injected).")
        return output

    training_step.__signature__ = inspect.signature(plain.training_step)  # type: ignore[attr-defined]
    module.__class__ = type(plain.__name__, (plain,), {"training_step": training_step, "__module__": plain.__module__})
    return module


@contextmanager
def caught(texts: set[str]) -> Iterator[None]:
    """Collect warnings of Python and of Lightning's and our loggers."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.add(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_memfit")]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [Handler()], False
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
            texts.update(str(one.message) for one in found)
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def train(case: Case, callback: MicroBatching | None, fails: bool = False) -> Run:
    """Ten optimizer steps, with the callback or by plain Lightning."""
    run = Run()
    is_reference = callback is None and case.reference is not None
    torch.manual_seed(0)
    module = _watched((case.reference if is_reference and case.reference else case.build)(), run, fails)
    options: dict[str, Any] = {"limit_val_batches": 0, **(case.reference_trainer if is_reference else case.trainer)}
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, precision="64-true", max_steps=STEPS, log_every_n_steps=1,
        num_sanity_val_steps=0, logger=_Recorder(run.logged),
        callbacks=[_Watch(run), *([callback] if callback else [])], **quiet, **options
    )  # fmt: skip
    torch.manual_seed(1)
    with caught(run.warned):
        try:
            trainer.fit(module)
        except Exception as error:
            run.error = error
    run.steps = trainer.global_step
    run.state = state_of(trainer, module)
    if run.error is not None and run.weights:
        run.weights = [*run.weights[: run.steps], _weights(module)]
    return run


# --- verdicts -------------------------------------------------------------------------------------------------------


@dataclass
class Verdicts:
    """What the comparison of two runs found.

    Attributes:
        training: One of `TRAINING`.
        logs: One of `LOGS`.
        difference: The largest relative difference of weights, buffers and optimizer states.
        logs_differ: Logged values that differ, and by how much.
        message: The error that ended the run, or the tensor that differs most.
        steps: Optimizer steps taken.
        calls: Calls of `training_step`, those of checks included.
    """

    training: str
    logs: str
    steps: int
    calls: int
    difference: float = 0.0
    logs_differ: dict[str, float] = field(default_factory=dict)
    message: str = ""


def judge(case: Case, plain: Run, cut: Run, may_be_late: bool = False) -> Verdicts:
    """Compare a run with the plain one.

    Args:
        case: Their case.
        plain: The run of plain Lightning.
        cut: The run with `MicroBatching`.
        may_be_late: Whether a refusal may come in the step in which memory ran out.
    """
    found = Verdicts("equal", "equal", cut.steps, cut.calls)
    name, found.difference = largest_difference(plain.state, cut.state)
    if cut.error is not None:
        found.training, found.logs = _judge_error(plain, cut, cut.error, may_be_late), "none"
        found.message, found.difference = f"{type(cut.error).__name__}: {cut.error}", 0.0
    elif case.wanted == "accepted":
        is_well = cut.steps == plain.steps and all(bool(value.isfinite().all()) for value in cut.state.values())
        found.training, found.logs, found.difference = "accepted" if is_well else "WRONG", "none", 0.0
    else:
        if not found.difference <= TOLERANCE or cut.steps != plain.steps:
            found.training, found.message = "WRONG", f"{name} differs by {found.difference:.1e}"
        if case.reference is None:
            found.logs, found.logs_differ = _judge_logs(plain, cut, case.logs_tolerance)
    return found


def _judge_error(plain: Run, cut: Run, error: Exception, may_be_late: bool) -> str:
    if cut.weights and not largest_difference(plain.weights[cut.steps], cut.weights[-1])[1] <= TOLERANCE:
        return "WRONG"
    is_in_time = not cut.steps or (may_be_late and cut.steps == FAILING_STEP - 1)
    return "crashed" if not is_refusal(error) else "refused" if is_in_time else "refused later"


def is_refusal(error: BaseException) -> bool:
    """Whether our code raised the error on purpose."""
    if isinstance(error, MisconfigurationException) or type(error).__module__.startswith("lightning_memfit"):
        return not isinstance(error, torch.OutOfMemoryError)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, torch.OutOfMemoryError) or not frames or not frames[-1].filename.startswith(_OURS):
        return False
    return linecache.getline(frames[-1].filename, frames[-1].lineno or 0).lstrip().startswith("raise")


def _judge_logs(plain: Run, cut: Run, tolerance: float) -> tuple[str, dict[str, float]]:
    missing = float("inf")  # a value that only one of them has
    differing: dict[str, float] = {}
    for key in plain.logged.keys() | cut.logged.keys():
        a, b = (torch.tensor(run.logged.get(key, missing), dtype=torch.float64) for run in (plain, cut))
        difference = float(_relative(a, b))
        if not difference <= tolerance:
            name = key[1].split(": ")[-1]
            differing[name] = max(difference, differing.get(name, 0.0))
    texts = cut.warned - plain.warned
    are_named = all(any(_is_named(name, text) for text in texts) for name in differing)
    return "equal" if not differing else "warned" if are_named else "WRONG", differing


def _is_named(name: str, text: str) -> bool:
    stems = {name, name.removesuffix("_step"), name.removesuffix("_epoch")}
    return any(f"{quote}{stem}{quote}" in text for stem in stems for quote in "`'\"")


def largest_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[str, float]:
    """The name and the size of the largest relative difference; infinite where one of them has no such tensor."""
    worst = ("", 0.0)
    for name in expected.keys() | found.keys():
        if name not in expected or name not in found or expected[name].shape != found[name].shape:
            return name, float("inf")
        difference = float(_relative(expected[name], found[name]))
        if not difference <= worst[1]:  # NaN counts
            worst = (name, difference if difference == difference else float("inf"))
    return worst


def _relative(expected: Tensor, found: Tensor) -> Tensor:
    if not expected.numel() or torch.equal(expected.nan_to_num(), found.nan_to_num()):
        return torch.zeros(())
    return (expected - found).abs().max() / expected.abs().max().clamp(min=_SMALLEST)


# --- all of them ----------------------------------------------------------------------------------------------------


def examine(case: Case, theme: str = "") -> dict[str, Any]:
    """Run one case whole and in every way of cutting it, and judge each."""
    plain = train(case, None)
    if plain.error is not None:
        raise RuntimeError(f"`{case.name}` doesn't run without micro-batches.") from plain.error
    make = partial(MicroBatching, **case.micro_batching)
    judged = {str(size): judge(case, plain, train(case, make(micro_batch_size=size))) for size in SIZES}
    failing = train(case, make(), fails=True)
    judged[SHRINK] = judge(case, plain, failing, may_be_late=True)
    if failing.error is None and not failing.failures:
        raise RuntimeError(f"Memory didn't run out in `{case.name}`: its `samples_in` is wrong.")
    verdicts = [one.logs for one in judged.values()]
    return {
        "case": case.name,
        "theme": theme,
        "title": case.title,
        "wanted": case.wanted,
        "training": min((one.training for one in judged.values()), key=TRAINING.index),
        "logs": min(verdicts, key=LOGS.index),
        "runs": {name: one.training for name, one in judged.items()},
        "difference": max((one.difference for one in judged.values()), default=0.0),
        "messages": _distinct({name: one.message for name, one in judged.items() if one.message}),
        "logs_differ": {
            k: max(one.logs_differ.get(k, 0.0) for one in judged.values())
            for k in sorted({k for one in judged.values() for k in one.logs_differ})
        },
    }


def _distinct(messages: dict[str, str]) -> dict[str, str]:
    """Each message once, under the first run that had it."""
    return {name: text for name, text in messages.items() if next(n for n in messages if messages[n] == text) == name}


def write_page(rows: list[dict[str, Any]], path: Path = RESULT) -> None:
    """Write the record that the docs' page of exactness is made of."""
    write(path, {"steps": STEPS, "tolerance": TOLERANCE, "rows": [_recorded(row) for row in rows]})


def _recorded(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is written: differences with one digit, the beginnings of messages."""
    return row | {
        "difference": _rounded(row["difference"]),
        "logs_differ": {name: _rounded(difference) for name, difference in row["logs_differ"].items()},
        "messages": {name: text[:MESSAGE] for name, text in row["messages"].items()},
    }


def _rounded(difference: float) -> float | str:
    """One digit; "inf" where only one run has a value or one isn't a number."""
    return float(f"{difference:.0e}") if math.isfinite(difference) else "inf"

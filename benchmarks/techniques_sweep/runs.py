"""A short run with or without techniques, and the comparison of two of them."""

import linecache
import logging
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_memfit
from benchmarks.training import trainer_of

STEPS = 3
_OURS = str(Path(lightning_memfit.__file__).parent)
_CONVERTED = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Error of a weight, relative to it, that rounding a few updates makes."""


@dataclass
class Trained:
    """What a run left behind.

    Attributes:
        losses: The loss of every step.
        before: Parameters and buffers before the run.
        after: The same afterwards.
        moved: The weights when an error ended the run.
        steps: Optimizer steps taken.
        error: What ended the run.
        dtype: What Lightning itself converts weights to before anything else can be refused; None for nothing.
    """

    losses: list[float] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    error: BaseException | None = None
    dtype: torch.dtype | None = None

    @property
    def words(self) -> str:
        """The error in one line."""
        error = self.error
        return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())


class _Watch(pl.Callback):
    """Keeps losses, and seeds what a step draws so that techniques which draw earlier change nothing."""

    def __init__(self, run: Trained) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        torch.manual_seed(index)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.run.losses.append(float(loss))


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items() if torch.is_tensor(value)}


def train(
    module: pl.LightningModule, loader: Any, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> tuple[Trained, pl.Trainer | None]:
    """Train for a few steps on the CPU; an error is kept and not raised."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "transformers", "lightning_memfit"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = Trained(before=values(module), dtype=_CONVERTED.get(options.get("precision", "")))
    trainer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = trainer_of(*callbacks, _Watch(run), **{"max_steps": STEPS, **options})
            trainer.fit(module, loader)
        except Exception as error:
            run.error = error
    run.steps = trainer.global_step if trainer is not None else 0
    run.after = values(module)
    return run, trainer


def is_refusal(error: BaseException | None) -> bool:
    """Whether our code raised an error on purpose."""
    if isinstance(error, MisconfigurationException):
        return True
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if not frames or not frames[-1].filename.startswith(_OURS):
            return False
        line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).lstrip()
        return line.startswith("raise")
    return False


def was_refused(run: Trained) -> bool:
    """Whether a run ended in words, before anything changed but what a plain run's precision converts."""
    if run.steps or not is_refusal(run.error):
        return False
    converted = {n: v.to(run.dtype or v.dtype) if v.is_floating_point() else v for n, v in run.before.items()}
    return any(unchanged(before, run.after) for before in (run.before, converted))


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Whether weights and buffers are what they were, bit for bit."""
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


# --- comparison -----------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """How far two runs are apart."""

    losses: float
    weights: float
    name: str = ""
    """The tensor that differs most."""


def difference(expected: Trained, found: Trained) -> Difference:
    """Losses relative to the expected ones; weights relative to how far they moved, apart from their own rounding."""
    losses = of_losses(expected.losses, found.losses)
    moves = {n: (expected.after[n].double() - w.double()).abs().max() if w.numel() else torch.zeros(())
             for n, w in expected.before.items() if w.is_floating_point() and n in expected.after}  # fmt: skip
    largest = max((float(move) for move in moves.values()), default=0.0)
    worst = ("", 0.0)
    if expected.after.keys() != found.after.keys():
        return Difference(losses, float("inf"), sorted(expected.after.keys() ^ found.after.keys())[0])
    for name, wanted in expected.after.items():
        got = found.after[name]
        if wanted.shape != got.shape:
            return Difference(losses, float("inf"), name)
        if not wanted.numel() or torch.equal(wanted, got):
            continue
        scale = max(float(moves.get(name, 0.0)), 0.01 * largest, 1e-12)
        rounding = _ROUNDING * wanted.double().abs()
        apart = float(((wanted.double() - got.double()).abs() - rounding).clamp(min=0).max()) / scale
        if not apart <= worst[1]:  # NaN counts
            worst = (name, apart if apart == apart else float("inf"))
    return Difference(losses, worst[1], worst[0])


def of_losses(expected: list[float], found: list[float]) -> float:
    """The largest relative difference; infinite if there are more of one kind."""
    if len(expected) != len(found):
        return float("inf")
    pairs = zip(expected, found, strict=True)
    apart = max((abs(a - b) / max(abs(a), 1e-6) for a, b in pairs), default=0.0)
    return apart if apart == apart else float("inf")

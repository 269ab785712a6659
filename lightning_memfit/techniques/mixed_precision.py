"""Lightning's own half precisions, and `HalfPrecision`, which sees to it that a run computes in the one asked for."""

from typing import Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_memfit.techniques.core.callback import ReversibleCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

_PAGE = "mixed_precision"
Precision = Literal["bf16-mixed", "16-mixed", "bf16-true"]


class HalfPrecision(ReversibleCallback):
    """Refuse a run that would compute in another precision than was asked for, or by emulation.

    On the CPU, Lightning computes in bfloat16 where `Trainer(precision="16-mixed")` asks for float16. On devices
    without bfloat16, torch emulates it.

    Args:
        precision: What `Trainer(precision=...)` was given.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.precision = precision

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change nothing: Lightning's own plugin does the work."""


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the run can have its half precision."""
    asked = options.get("precision", run.precision)
    if asked == "16-mixed":
        return _needs_scaling(run)
    return _needs_bfloat16(run) or _needs_precision(run, asked)


def _needs_precision(run: Run, asked: str) -> str | None:
    if run.precision != asked:
        return f"`precision={run.precision!r}`, but {asked!r} was asked for. Give the Trainer `precision={asked!r}`."
    return None


def _needs_bfloat16(run: Run) -> str | None:
    capability = run.facts.capability
    if run.facts.device_kind.has_compute_capability and capability is not None and capability < (8, 0):
        return (
            f"compute capability {capability[0]}.{capability[1]} has no bfloat16 tensor cores. "
            "Use fp16_mixed, or a device from 8.0 (Ampere) on."
        )
    return None


def _needs_scaling(run: Run) -> str | None:
    if run.facts.device == "cpu":
        return "Lightning computes bfloat16 instead of float16 on the CPU. Use bf16_mixed."
    if run.has("GradientRelease"):
        return "loss scaling needs all gradients to look for overflow, and GradientRelease frees them. Use bf16_mixed."
    return _needs_precision(run, "16-mixed")


def _spec(precision: Precision) -> CallbackSpec:
    return CallbackSpec("lightning_memfit.techniques.mixed_precision.HalfPrecision", {"precision": precision})


BF16_MIXED = Technique(
    name="bf16_mixed",
    kind="precision",
    summary="computes in bfloat16 where that is safe; weights, gradients and states stay float32",
    numerics=frozenset({"bf16"}),
    callbacks=(_spec("bf16-mixed"),),
    trainer={"precision": "bf16-mixed"},
    unsupported=lambda run, options: unsupported(run, {"precision": "bf16-mixed", **options}),
    changes_step=False,
    page=_PAGE,
)
FP16_MIXED = Technique(
    name="fp16_mixed",
    kind="precision",
    summary="computes in float16 with loss scaling, for devices without bfloat16",
    numerics=frozenset({"fp16"}),
    callbacks=(_spec("16-mixed"),),
    trainer={"precision": "16-mixed"},
    unsupported=lambda run, options: unsupported(run, {"precision": "16-mixed", **options}),
    changes_step=False,
    page=_PAGE,
)
BF16_TRUE = Technique(
    name="bf16_true",
    kind="precision",
    summary="holds weights, gradients and states in bfloat16; small updates get lost",
    numerics=frozenset({"bf16"}),
    callbacks=(_spec("bf16-true"),),
    trainer={"precision": "bf16-true"},
    unsupported=lambda run, options: unsupported(run, {"precision": "bf16-true", **options}),
    proposed=False,
    changes_step=False,
    page=_PAGE,
)


def technique_for(precision: str) -> Technique:
    """The record of one of Lightning's precisions.

    Raises:
        ValueError: If it is not one of the half precisions.
    """
    records = {record.trainer["precision"]: record for record in (BF16_MIXED, FP16_MIXED, BF16_TRUE)}
    if precision not in records:
        raise ValueError(f"`precision={precision!r}` must be one of {', '.join(records)}.")
    return records[precision]

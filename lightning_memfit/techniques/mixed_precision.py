"""Lightning's own half precisions, which `Trainer(precision=...)` takes.

Nothing but rules is added: a plan has no precision in which a device computes otherwise than asked for.
"""

from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import Options, Technique

_PAGE = "mixed_precision"


def _needs_bfloat16(run: Run, options: Options) -> str | None:
    capability = run.facts.capability
    if run.facts.device_kind.has_compute_capability and capability is not None and capability < (8, 0):
        return (
            f"compute capability {capability[0]}.{capability[1]} has no bfloat16 tensor cores. "
            "Use fp16_mixed, or a device from 8.0 (Ampere) on."
        )
    return None


def _needs_scaling(run: Run, options: Options) -> str | None:
    if run.facts.device == "cpu":
        return "Lightning computes bfloat16 instead of float16 on the CPU. Use bf16_mixed."
    if run.has("GradientRelease"):
        return "loss scaling needs all gradients to look for overflow, and GradientRelease frees them. Use bf16_mixed."
    return None


BF16_MIXED = Technique(
    name="bf16_mixed",
    kind="precision",
    summary="computes in bfloat16 where that is safe; weights, gradients and states stay float32",
    numerics=frozenset({"bf16"}),
    trainer={"precision": "bf16-mixed"},
    unsupported=_needs_bfloat16,
    changes_step=False,
    page=_PAGE,
)
FP16_MIXED = Technique(
    name="fp16_mixed",
    kind="precision",
    summary="computes in float16 with loss scaling, for devices without bfloat16",
    numerics=frozenset({"fp16"}),
    trainer={"precision": "16-mixed"},
    unsupported=_needs_scaling,
    changes_step=False,
    page=_PAGE,
)
BF16_TRUE = Technique(
    name="bf16_true",
    kind="precision",
    summary="holds weights, gradients and states in bfloat16; small updates get lost",
    numerics=frozenset({"bf16"}),
    trainer={"precision": "bf16-true"},
    unsupported=_needs_bfloat16,
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

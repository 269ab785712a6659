"""`TF32`: float32 matrix products at the speed of tensor cores, for one run."""

from typing import TYPE_CHECKING, Literal

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_memfit.memory.float32_products import products_kept
from lightning_memfit.techniques.core.callback import ReversibleCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile
    from lightning_memfit.techniques.core.cost import Cost


class TF32(ReversibleCallback):
    """Round the inputs of float32 matrix products to 10 bits of mantissa while a run trains, then switch back.

    Memory is unchanged. Weights, activations and sums stay float32.

    Args:
        precision: `high` for TensorFloat-32, `medium` for products of bfloat16 parts
            (`torch.set_float32_matmul_precision`).

    Raises:
        ValueError: If `precision` is neither.
    """

    def __init__(self, precision: Literal["high", "medium"] = "high") -> None:
        super().__init__()
        if precision not in ("high", "medium"):
            raise ValueError(f"`precision={precision!r}` must be high or medium.")
        self.precision = precision

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the precision of matrix products until `restore`."""
        self.on_restore(products_kept())
        torch.set_float32_matmul_precision(self.precision)
        self.announce(f"float32 matrix products in precision {self.precision!r}, and as before after the run")


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if products can be in TF32."""
    capability = run.facts.capability
    if not run.facts.device_kind.has_compute_capability or capability is None:
        return f"TF32 is computed by CUDA devices only, and this is {run.facts.device}. Leave it out."
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} has no TF32; it begins with 8.0. Use fp16_mixed."
    if run.precision.endswith("-true") and run.precision != "32-true":
        return f"with precision={run.precision!r} no matrix product is in float32. Leave it out."
    return None


def _cost(profile: "ModelProfile", options: Options) -> "Cost":
    from lightning_memfit.techniques.core.cost import Cost  # which plans alone need

    return Cost(matmul_rate="bfloat16" if options.get("precision") == "medium" else "tf32")


TECHNIQUE = Technique(
    name="tf32",
    kind="matmul",
    summary="float32 matrix products with 10 bits of mantissa, at several times the speed",
    numerics=frozenset({"tf32"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.tf32.TF32"),),
    unsupported=unsupported,
    cost=_cost,
    traced=False,
    changes_step=False,
)

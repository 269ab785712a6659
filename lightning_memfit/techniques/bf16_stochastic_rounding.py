"""`StochasticRounding`: bfloat16 weights only, stepped in float32 and rounded so that small updates count."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.optim.float32_step import Float32Step
from lightning_memfit.optim.replace import convert_configured
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.precision import TechniquePrecision
from lightning_memfit.techniques.core.step_cost import ROUNDING_CPU_SECONDS, num_trained
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile


class StochasticRounding(TechniquePrecision):
    """`bf16-true` that learns from updates smaller than half a unit in last place, without a float32 copy.

    The Trainer takes it in place of a `precision`: `Trainer(plugins=[StochasticRounding()])`. Weights and gradients
    take 2 bytes each; optimizer states stay float32 (or 8-bit, with `Optimizer8bit`). A step makes float32 copies of a
    few weights at a time (`optim.float32_step`). Works with accumulation, clipping, schedulers, `GradientRelease` and
    DDP. A checkpoint of such a run resumes bitwise.

    Args:
        chunk_elements: Largest number of weights that have float32 copies at a time, of 9 to 16 bytes each. None takes
            a sixteenth of the model, but no less than 1,048,576 and no more than 16,777,216.
        seed: Seed of the random bits; the global random state is left alone.

    Raises:
        ValueError: If `chunk_elements` is too small.
    """

    rules_traces = True
    depends_on_depth = True  # a chunk may hold weights of several blocks

    def __init__(self, chunk_elements: int | None = None, seed: int = 0) -> None:
        super().__init__()
        if chunk_elements is not None and chunk_elements < 4096:
            raise ValueError(f"`chunk_elements={chunk_elements}` must be at least 4096.")
        self.chunk_elements = chunk_elements
        self.seed = seed

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_optimizers`."""
        self.on_restore(convert_configured(pl_module, self._convert))

    def _convert(self, optimizer: Optimizer) -> Optimizer:
        if all(
            p.dtype is torch.float32 for group in optimizer.param_groups for p in group["params"]
        ):  # adapters beside frozen bfloat16 weights
            self.announce(f"{type(optimizer).__name__} trains float32 weights alone, which need no other rounding")
            return optimizer
        self.announce(f"{type(optimizer).__name__} steps bfloat16 weights in float32, stochastic rounding")
        return Float32Step(optimizer, self.chunk_elements, self.seed)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if weights can be rounded."""
    if run.strategy not in ("SingleDeviceStrategy", "DDPStrategy"):
        return (
            f"{run.strategy} shards weights or keeps float32 ones itself. Use one device or DDP, or "
            "leave StochasticRounding out."
        )
    return None


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    """Weights and gradients are widened, stepped and rounded back: 24 bytes per weight on top of the step itself."""
    count = num_trained(profile)
    if profile.device == "cpu":
        return Cost(step=Work(host_seconds=ROUNDING_CPU_SECONDS * count))
    return Cost(step=Work(device_bytes=24.0 * count))


TECHNIQUE = Technique(
    name="bf16_stochastic_rounding",
    kind="precision",
    summary="bfloat16 weights alone, rounded at random so that small updates count",
    numerics=frozenset({"bf16", "stochastic"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.bf16_stochastic_rounding.StochasticRounding"),),
    trainer={"precision": "bf16-true"},
    unsupported=unsupported,
    cost=_cost,
)

"""`Optimizer8bit`: the module's own optimizer with 8-bit states."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.extras import require
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.eight_bit import convertible, embedding_parameters, repage_states, to_bitsandbytes
from lightning_memfit.optim.optimizers import find_optimizer
from lightning_memfit.optim.replace import convert_configured
from lightning_memfit.optim.states import Resume
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile
    from lightning_memfit.techniques.core.cost import Cost


class Optimizer8bit(TechniqueCallback):
    """Turn what `configure_optimizers` returns into its bitsandbytes form: 2 instead of 8 bytes of state per parameter.

    AdamW, Adam and SGD with momentum of torch and bitsandbytes, and bitsandbytes' Lion, are converted with their
    parameter groups, hyper-parameters and schedulers; what bitsandbytes cannot compute the same way is refused
    (see `lightning_memfit.optim.eight_bit`), also if a hyper-parameter is set later. The module's optimizer becomes the
    new one: a reference to it, its groups and its hooks stay valid.

    A checkpoint of such a run resumes bitwise, and paged states stay paged. One of another run goes on if its optimizer
    is of the same family: 32-bit states are rounded to 8 bits, and 8-bit states of other settings to the width they
    have here.

    Args:
        paged: Keep states in CUDA unified memory, which moves to the host under pressure.
        keep_32bit_embeddings: Keep 32-bit states for embeddings and heads tied to them, whose gradients are too uneven
            for 8 bits (Dettmers et al., 2022, arXiv 2110.02861, section 2.3).
        min_8bit_size: Parameters with fewer elements keep 32-bit states.
        bits: 8, or 32 for 32-bit states in paged memory.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
        ValueError: If `bits` is neither 8 nor 32, or is 32 without `paged`.
    """

    def __init__(
        self, paged: bool = False, keep_32bit_embeddings: bool = True, min_8bit_size: int = 4096, bits: int = 8
    ) -> None:
        super().__init__()
        require("bitsandbytes", "Optimizer8bit")
        if bits not in (8, 32) or (bits == 32 and not paged):
            raise ValueError(f"`bits={bits}` with `paged={paged}`: choose bits=8, or bits=32 with paged=True.")
        if min_8bit_size < 0:
            raise ValueError(f"`min_8bit_size={min_8bit_size}` must not be negative.")
        self.paged = paged
        self.keep_32bit_embeddings = keep_32bit_embeddings
        self.min_8bit_size = min_8bit_size
        self.bits = bits

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap `configure_optimizers`."""

        def load(inner: Callable[..., Any], checkpoint: Any) -> None:
            # Lightning would move paged states to the device, which may lack the room.
            for optimizer, states in zip(trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(states)

        self.on_restore(convert_configured(pl_module, partial(self._convert, pl_module)))
        if self.paged and type(trainer.strategy).load_optimizer_state_dict is Strategy.load_optimizer_state_dict:
            self.on_restore(wrap_method(trainer.strategy, "load_optimizer_state_dict", load))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Page states again: Lightning has moved those of an earlier run to the device."""
        for optimizer in trainer.optimizers:
            repage_states(optimizer)

    def _convert(self, pl_module: pl.LightningModule, optimizer: Optimizer) -> Optimizer:
        if Resume.was_made_by(optimizer, self._technique):
            return optimizer
        converted: Optimizer = to_bitsandbytes(
            optimizer,
            bits=self.bits,
            paged=self.paged,
            keep_32bit=embedding_parameters(pl_module) if self.keep_32bit_embeddings else [],
            min_8bit_size=self.min_8bit_size,
            technique=self._technique,
        )
        self.announce(f"{type(optimizer).__name__} -> {type(converted).__name__}, {_summary(converted)}")
        return converted

    @property
    def _technique(self) -> str:
        usual = {"paged": False, "keep_32bit_embeddings": True, "min_8bit_size": 4096, "bits": 8}
        given = {key: getattr(self, key) for key, value in usual.items() if getattr(self, key) != value}
        return f"Optimizer8bit({', '.join(f'{key}={value}' for key, value in given.items())})"


def _summary(optimizer: Any) -> str:
    numbers = {8: 0, 32: 0}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers[optimizer.bits_of(parameter)] += parameter.numel()
    return f"{numbers[8]:,} parameters with 8-bit states, {numbers[32]:,} with 32-bit states"


def unsupported(run: Run, options: Options) -> str | None:
    """Reason and fix, or None if the module's optimizer can be converted."""
    accepted = convertible(paged=bool(options.get("paged")))
    other = next((name for name in run.facts.optimizers if name not in accepted), None)
    if other is not None and not run.has("ReplaceOptimizer"):
        return f"{other} has no such form in bitsandbytes; {', '.join(accepted)} have. Use one, or leave it out."
    if run.strategy not in ("SingleDeviceStrategy", "DDPStrategy") and not run.strategy.startswith("DeepSpeed"):
        return f"bitsandbytes can't step what {run.strategy} shards. Use one device, DDP or DeepSpeed."
    if run.strategy.startswith("DeepSpeed") and options.get("keep_32bit_embeddings", True):
        return (
            "`keep_32bit_embeddings=True` has no effect under DeepSpeed, whose ZeRO steps on flat partitions in which "
            "embeddings can't be told apart. Set `keep_32bit_embeddings: false`."
        )
    return None


def _unsupported_paged(run: Run, options: Options) -> str | None:
    return unsupported(run, {**options, "paged": True})


def _cost_of_8bit(profile: "ModelProfile", options: Options) -> "Cost":
    from lightning_memfit.techniques.core.cost import Cost  # which plans alone need
    from lightning_memfit.techniques.core.step_cost import other_states, state_bytes

    paged = _paging(state_bytes(profile) / 4) if options.get("paged") else Cost()
    return Cost(step=other_states(profile, "adamw_8bit")) + paged


def _cost_of_paging(profile: "ModelProfile", options: Options) -> "Cost":
    from lightning_memfit.techniques.core.step_cost import state_bytes

    return _paging(state_bytes(profile) if profile.device_kind.has_own_memory else 0)


def _paging(size_bytes: float) -> "Cost":
    """All states come and go in every step, as they do if the device has no room for any, at the rate of pinned memory.

    That is the least: pages move as kernels ask for them, 2 MiB at a time (bitsandbytes' issue 962). Hence `yields_to`.
    """
    from lightning_memfit.techniques.core.cost import Cost, Work

    return Cost(step=Work(host_link_bytes=2.0 * size_bytes))


_CLASS_PATH = "lightning_memfit.techniques.optimizer_8bit.Optimizer8bit"

OPTIMIZER_8BIT = Technique(
    name="optimizer_8bit",
    kind="optimizer",
    summary="the module's own AdamW, Adam, SGD or Lion with 8-bit states",
    numerics=frozenset({"8bit"}),
    callbacks=(CallbackSpec(_CLASS_PATH),),
    presets=({}, {"keep_32bit_embeddings": False}),
    unsupported=unsupported,
    cost=_cost_of_8bit,
    package="bitsandbytes",
    states=find_optimizer("adamw_8bit").states,
)
PAGED_OPTIMIZER_8BIT = Technique(
    name="paged_optimizer_8bit",
    kind="optimizer",
    summary="8-bit states in memory that moves to the host under pressure",
    numerics=frozenset({"8bit"}),
    callbacks=(CallbackSpec(_CLASS_PATH, {"paged": True}),),
    unsupported=_unsupported_paged,
    cost=lambda profile, options: _cost_of_8bit(profile, {"paged": profile.device_kind.has_own_memory}),
    package="bitsandbytes",
    page="optimizer_8bit",
    states=find_optimizer("paged_adamw_8bit").states,
    same_step_as="optimizer_8bit",
    yields_to="optimizer_8bit",
)
PAGED_OPTIMIZER = Technique(
    name="paged_optimizer",
    kind="optimizer",
    summary="32-bit states in memory that moves to the host under pressure",
    numerics=frozenset({"exact"}),
    callbacks=(CallbackSpec(_CLASS_PATH, {"paged": True, "bits": 32}),),
    unsupported=_unsupported_paged,
    cost=_cost_of_paging,
    package="bitsandbytes",
    page="optimizer_8bit",
    states=find_optimizer("paged_adamw").states,
)

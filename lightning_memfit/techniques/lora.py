"""`Lora`: train low-rank adapters next to frozen weights, in any module."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.adapters import lora
from lightning_memfit.adapters.checkpoint import KEY, describe, without_frozen
from lightning_memfit.adapters.linears import AUTO, linear_layers
from lightning_memfit.optim.replace import replace_optimizers
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.core.wrapping import wrap_method

_AFTER = ("ReplaceOptimizer", "Optimizer8bit", "StochasticRounding")
_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class Lora(TechniqueCallback):
    """Freeze the module and train peft adapters on its linear layers, with gradients and states for the adapters only.

    The module's code stays as it is. Its optimizers keep their groups and schedules but step trainable parameters only.
    Checkpoints hold the adapters (and everything else that is trained, buffers included), know to which frozen weights
    they belong, and resume bitwise. When the run ends, the adapters are merged into the weights: the module has its
    original form again, with what was learned.

    Args:
        rank: Inner width of the adapters.
        alpha: The adapters' outputs are scaled by `alpha / rank`.
        dropout: Dropout of the adapters' inputs.
        target_modules: Ends of the dotted names of the layers that get an adapter, such as `q_proj`; `auto` takes every
            linear layer (`nn.Linear`, `Conv1D`, quantized ones) except output heads.
        train: Dotted names of modules that are also trained as a whole, such as a new head.

    Raises:
        ModuleNotFoundError: If peft is not installed.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        target_modules: str | Sequence[str] = AUTO,
        train: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if find_spec("peft") is None:
            raise ModuleNotFoundError("Lora needs peft: pip install lightning-memfit[lora]")
        if rank < 1:
            raise ValueError(f"`rank={rank}` must be at least 1.")
        if alpha <= 0:
            raise ValueError(f"`alpha={alpha}` must be positive.")
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout={dropout}` must be at least 0 and below 1.")
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.target_modules = target_modules
        self.train = tuple(train)
        self._kept: frozenset[str] = frozenset()
        self._record: dict[str, Any] | None = None
        self._learned: dict[str, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lora":
        """Return an unused callback with the same arguments, without what a run has left."""
        return Lora(self.rank, self.alpha, self.dropout, self.target_modules, self.train)

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and wrap the methods that configure, save and load."""
        reason = unsupported(run_of(trainer, pl_module))
        if reason is not None:
            raise ValueError(f"Lora: {reason}")
        self._record, self._learned = None, {}

        def configure(inner: Callable[[], Any]) -> None:
            inner()
            self._inject(pl_module, trainer.precision)

        def optimizers(inner: Callable[[], Any]) -> Any:
            seen: list[Optimizer] = []
            configured = replace_optimizers(inner(), lambda optimizer: _trainable_only(optimizer, seen))
            _refuse_forgotten(pl_module, seen)
            return configured

        def save(inner: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
            return self._without_frozen(inner())

        def mark(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            checkpoint[KEY] = self._record

        def load(inner: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(self._completed(pl_module, checkpoint), *args, **kwargs)

        self.on_restore(wrap_method(pl_module, "configure_model", configure))
        self.on_restore(wrap_method(pl_module, "configure_optimizers", optimizers))
        self.on_restore(wrap_method(pl_module, "on_save_checkpoint", mark))
        self.on_restore(wrap_method(trainer.strategy, "lightning_module_state_dict", save))
        self.on_restore(wrap_method(trainer.strategy, "load_model_state_dict", load))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """After the run the module holds merged weights; a checkpoint to resume from still holds the adapters."""
        checkpoint.update(self._learned)

    def _inject(self, module: nn.Module, precision: str) -> None:
        targets = linear_layers(module, self.target_modules)
        wholly_trained = [module.get_submodule(name) for name in self.train]
        flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        lora.inject(module, targets, self.rank, self.alpha, self.dropout, _TRUE_DTYPES.get(precision, torch.float32))
        for child in wholly_trained:
            child.requires_grad_(True)
        self.on_restore(lambda: _set_flags(flags))
        self.on_restore(lambda: self._take_out(module))
        self._kept = frozenset(without_frozen(module, module.state_dict()))
        if not lora.is_fake(module):
            # This runs before a precision plugin converts the weights, because checkpoints are loaded before that too.
            self._record = describe(module, self.rank, self.alpha)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.announce(f"{len(targets)} layers, {trained:,} parameters to train")

    def _take_out(self, module: nn.Module) -> None:
        if self._record is not None:
            self._learned = {"state_dict": self._without_frozen(module.state_dict()), KEY: self._record}
        lora.remove(module)

    def _without_frozen(self, entries: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entries.items() if name in self._kept}

    def _completed(self, module: nn.Module, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of adapters completed with the module's own frozen weights.

        Raises:
            ValueError: If it holds no adapters, different adapters, or adapters for other weights.
        """
        ours = self._record
        assert ours is not None
        theirs = checkpoint.get(KEY)
        if theirs is None:
            raise ValueError(
                "`ckpt_path` was not written by a run with Lora. Load its weights into the module first "
                "(load_from_checkpoint), and train adapters from there."
            )
        for key in ("rank", "alpha", "layers"):
            if theirs[key] != ours[key]:
                detail = "" if key == "layers" else f" ({theirs[key]} there, {ours[key]} here)"
                raise ValueError(f"`ckpt_path` has adapters of other {key}{detail}. Resume with the same arguments.")
        if theirs["base"] != ours["base"]:
            raise ValueError(
                "`ckpt_path` has adapters for other frozen weights than the module's. Start from the same weights, in "
                "the same precision and quantization (random ones need the same seed)."
            )
        frozen = {name: value for name, value in module.state_dict().items() if name not in self._kept}
        return {**checkpoint, "state_dict": {**frozen, **checkpoint["state_dict"]}}


def _trainable_only(optimizer: Optimizer, seen: list[Optimizer]) -> Optimizer:
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    seen.append(optimizer)
    return optimizer


def _refuse_forgotten(module: nn.Module, optimizers: list[Optimizer]) -> None:
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(id(parameter) not in stepped for parameter in lora.adapter_parameters(module)):
        raise ValueError(
            f"Lora: the optimizers that {type(module).__name__}.configure_optimizers returns lack adapters, which "
            "would not be trained. Give them `self.parameters()`, or limit `target_modules` to what they step."
        )


def _set_flags(flags: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if adapters can be trained."""
    if run.strategy not in _STRATEGIES:
        return f"{run.strategy} shards weights, for which adapters are not injected. Use one device or DDP."
    if run.has("HostMasterWeights"):
        return "adapters are small, and there is nothing to keep on the host. Leave HostMasterWeights out."
    early = [name for name in run.callbacks[: run.callbacks.index("Lora") if run.has("Lora") else 0] if name in _AFTER]
    if early:
        return f"{early[0]} stands before it and would convert an optimizer of frozen weights. List Lora first."
    return None


_LORA = CallbackSpec("lightning_memfit.techniques.lora.Lora")
_QUANTIZED = "lightning_memfit.techniques.quantized_weights.QuantizedWeights"


def _cost(profile: ModelProfile, options: Options) -> Cost:
    """Two thin products per weight; no gradients of the weights themselves."""
    linear = [p for p in profile.parameters if p.dims == 2 and not p.shared_with]
    forward = profile.flops.get("forward", 0)
    elements = sum(p.numel for p in linear)
    if not elements:
        return Cost()
    thin = int(options.get("rank", 8)) * sum(sum(p.shape) for p in linear) / elements
    return Cost(micro_batch=Work(flops=(3 * thin - 1) * forward))


def _quantized_cost(profile: ModelProfile, options: Options) -> Cost:
    """Every weight is read in few bits and written and read in half precision, in forward and in backward."""
    elements = sum(p.numel for p in profile.parameters if p.dims == 2 and not p.shared_with)
    bits = int(options.get("bits", 4))
    return _cost(profile, options) + Cost(micro_batch=Work(device_bytes=2 * elements * (bits / 8 + 2 + 2)))


LORA = Technique(
    name="lora",
    kind="adapter",
    summary="trains low-rank adapters beside frozen weights",
    numerics=frozenset({"lora"}),
    callbacks=(_LORA,),
    unsupported=unsupported,
    cost=_cost,
    package="peft",
    extra="lightning-memfit[lora]",
)

QLORA = replace(
    LORA,
    name="qlora",
    summary="adapters beside frozen weights in 4 bits",
    numerics=frozenset({"lora", "4bit"}),
    callbacks=(CallbackSpec(_QUANTIZED, {"bits": 4}), _LORA),
    cost=_quantized_cost,
    page="lora",
)

LORA_8BIT = replace(
    QLORA,
    name="lora_8bit",
    summary="adapters beside frozen weights in 8 bits",
    numerics=frozenset({"lora", "8bit"}),
    callbacks=(CallbackSpec(_QUANTIZED, {"bits": 8}), _LORA),
    cost=lambda profile, options: _quantized_cost(profile, {"bits": 8, **options}),
)

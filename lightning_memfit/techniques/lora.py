"""`Lora`: train low-rank adapters of peft next to frozen weights, in any module."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.adapters.checkpoint import KEY
from lightning_memfit.adapters.linears import AUTO, UNFIT, linear_layers
from lightning_memfit.extras import require
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.replace import replace_optimizers, take_out
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.quantized_weights import QuantizedWeights, callbacks_of

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_CONFLICTS = {
    "HostMasterWeights": "adapters are small, and there is nothing to keep on the host.",
    "StochasticWeightAveraging": "it copies the module before it has adapters; EMAWeightAveraging, listed last, works.",
    "ModelPruning": "it replaces the weights of layers, which are frozen below adapters.",
}
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class Lora(TechniqueCallback):
    """Freeze the module and train adapters on its linear layers, with gradients and states for the adapters only.

    The adapters are peft's, and stay in the module when the run ends, as in peft: another run trains them further, and
    `Lora.merge` puts what was learned into the weights. Optimizers keep their groups and schedules but step trainable
    parameters only. Checkpoints hold the adapters (and everything else that is trained, buffers included) and resume
    bitwise beside the same frozen weights; `validate`, `test` and `predict` load them.

    Args:
        rank: Inner width of the adapters.
        alpha: The adapters' outputs are scaled by `alpha / rank`.
        dropout: Dropout of the adapters' inputs.
        target_modules: Ends of the dotted names of the layers that get an adapter, such as `q_proj`; `auto` takes every
            linear layer (`nn.Linear`, `Conv1D`, quantized ones) except output heads and those whose weight something
            else shares.
        train: Dotted names of modules that are also trained as a whole, such as a new head.

    Raises:
        ModuleNotFoundError: If peft is not installed.
        ValueError: If `alpha` is not positive.
    """

    rules_traces = True

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        target_modules: str | Sequence[str] = AUTO,
        train: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if rank < 1:  # before a trace, whose error would name peft's code
            raise ValueError(f"`rank={rank}` must be at least 1.")
        if alpha <= 0:
            raise ValueError(f"`alpha={alpha}` must be positive.")
        require("peft", "Lora")
        # Not first within a trace: an error that this import catches and logs leads to the frames around it, and who
        # keeps the log keeps their tensors.
        import peft  # noqa: F401

        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.target_modules = target_modules
        self.train = tuple(train)

    @staticmethod
    def merge(module: nn.Module) -> None:
        """Give a module its own layers back, with what was learned in their weights. What was frozen stays so.

        Raises:
            ValueError: If a frozen weight has 4 or 8 bits.
        """
        from lightning_memfit.adapters import lora

        lora.merge(module)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the technique to a run that trains; in others, to a module that loads a checkpoint of adapters."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            self._follow_checkpoints(trainer, pl_module)
            if trainer.strategy.restore_checkpoint_after_setup:
                self.when_complete(pl_module, lambda: self._inject(trainer, pl_module))

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and wrap the methods that configure, save and load."""
        kinds = {kind.__name__ for kind in type(trainer.precision_plugin).__mro__}
        for name in sorted(kinds & {"BitsandbytesPrecision", "TransformerEnginePrecision"}):
            raise ValueError(
                f"Lora: {name} replaces linear layers by its own when the run begins. Leave the plugin out "
                "(QuantizedWeights beside Lora stores frozen weights in 4 or 8 bits)."
            )
        if getattr(trainer.strategy, "tensor_parallel_size", 1) != 1:
            raise ValueError("Lora: `tensor_parallel_size` divides layers, which adapters don't follow. Set it to 1.")
        callbacks = callbacks_of(trainer)
        for other in callbacks[: callbacks.index(self)]:
            if isinstance(other, WeightAveraging):
                name = type(other).__name__
                raise ValueError(f"Lora: {name} before it has copied the module without adapters. List {name} last.")

        def optimizers(inner: Callable[[], Any]) -> Any:
            stepped: set[Any] = set()

            def trainable_only(optimizer: Optimizer) -> Optimizer:
                take_out(optimizer, lambda p: not p.requires_grad)
                stepped.update(p for group in optimizer.param_groups for p in group["params"])
                return optimizer

            configured = replace_optimizers(inner(), trainable_only)
            if not stepped.issuperset(lora.adapter_parameters(pl_module)):
                raise ValueError(
                    f"Lora: the optimizers that {type(pl_module).__name__}.configure_optimizers returns lack adapters. "
                    "Give them `self.parameters()`, or limit `target_modules` to what they step."
                )
            return configured

        from lightning_memfit.adapters import lora

        self.when_complete(pl_module, lambda: self._inject(trainer, pl_module))
        self.on_restore(wrap_method(pl_module, "configure_optimizers", optimizers, innermost=True))
        self._follow_checkpoints(trainer, pl_module)

    def _follow_checkpoints(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def save(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            _leave_out_frozen(trainer, pl_module, checkpoint)

        def load(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            if KEY in checkpoint:
                self._inject(trainer, pl_module)
                _complete(pl_module, checkpoint)
            elif adapted_layers(pl_module):
                raise ValueError(
                    "Lora: `ckpt_path` was not written by a run with Lora. To begin on its weights, load them before "
                    "(`load_from_checkpoint`, or in `configure_model`), and give no `ckpt_path`."
                )

        from lightning_memfit.adapters.lora import adapted_layers

        self.on_restore(wrap_method(pl_module, "on_save_checkpoint", save))
        self.on_restore(wrap_method(pl_module, "on_load_checkpoint", load))
        if trainer.strategy.restore_checkpoint_after_setup:  # weights are loaded by the names that a checkpoint has
            strict, pl_module.strict_loading = pl_module.strict_loading, False
            self.on_restore(lambda: setattr(pl_module, "strict_loading", strict))
            trainer.strategy.exclude_frozen_parameters = True  # type: ignore[attr-defined]  # of DeepSpeed's

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave frozen weights out of a checkpoint that is saved after the run, too."""
        if not self._undo:
            _leave_out_frozen(trainer, pl_module, checkpoint)

    def _inject(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from lightning_memfit.adapters import lora

        whole = [module.get_submodule(name) for name in self.train]
        if lora.adapted_layers(module):  # of an earlier run, or the module's own
            record = lora.describe(module)
            for key in ("rank", "alpha"):
                if record[key] != getattr(self, key):
                    raise ValueError(
                        f"Lora: the module has adapters of {key}={record[key]}, and `{key}={getattr(self, key)}` was "
                        "asked for. Train these further, or merge them before the run (`Lora.merge(module)`)."
                    )
            for child in whole:
                child.requires_grad_(True)
            return
        layers, left_out = linear_layers(module, self.target_modules)
        inside = {id(part) for child in whole for part in child.modules()}
        names = [one for one, layer in layers.items() if self.target_modules != AUTO or id(layer) not in inside]
        del layers  # of which quantized ones take the place, one by one
        for callback in callbacks_of(trainer):
            if isinstance(callback, QuantizedWeights):
                callback.quantize(module, inside)
        # DeepSpeed takes weights of one dtype, and has masters of its own.
        stay_float32 = trainer.precision_plugin.__class__.__name__ != "DeepSpeedPrecision"
        lora.inject(module, names, self.rank, self.alpha, self.dropout, stay_float32)
        for child in whole:
            child.requires_grad_(True)
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.announce(f"{len(names)} layers, {count:,} parameters to train")
        if left_out:
            self.announce(f"no adapter in {', '.join(left_out)}: {UNFIT}")


def _leave_out_frozen(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Leave the parameters that nothing trains out of a checkpoint, in place, and say whose adapters it holds.

    Adapters and what an optimizer has are kept, frozen or not.
    """
    from lightning_memfit.adapters.lora import adapted_layers, describe

    if KEY in checkpoint or not adapted_layers(module):
        return
    kept = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and id(parameter) not in kept and ".lora_" not in name:
            for key in ("state_dict", "current_model_state"):  # the second has the latest of averaged weights
                checkpoint.get(key, {}).pop(name, None)
    checkpoint[KEY] = describe(module)


def _complete(module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Complete a checkpoint of adapters, in place, with the module's own frozen weights.

    Raises:
        ValueError: If it holds other adapters than those of the module.
    """
    from lightning_memfit.adapters.lora import describe

    theirs, ours = checkpoint[KEY], describe(module)
    for key in ("rank", "alpha", "layers", "bits"):
        if theirs[key] != ours[key]:
            raise ValueError(
                f"`ckpt_path` has adapters of other {key} ({theirs[key]}, not {ours[key]}). Resume with the same "
                "arguments, or train new adapters on what `lightning_memfit.merged_state_dict` returns."
            )
    own, adapters = module.state_dict(), (".lora_A.", ".lora_B.")
    for key in ("state_dict", "current_model_state"):
        for name, value in own.items() if key in checkpoint else ():
            if not any(part in name for part in adapters):
                checkpoint[key].setdefault(name, value)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if adapters can be trained."""
    if run.strategy not in _STRATEGIES:
        return f"{run.strategy} can't divide weights that have adapters. Use `memfit_fsdp2`, ZeRO or DDP."
    if run.has("QuantizedWeights") and run.strategy not in _STRATEGIES[:2]:
        return f"{run.strategy} can't divide weights in 4 or 8 bits. Leave QuantizedWeights out, or use DDP."
    if run.callbacks.count("Lora") > 1:
        return "there are two of it. Give one all `target_modules`."
    return run.beside(_CONFLICTS)


_LORA = CallbackSpec("lightning_memfit.techniques.lora.Lora")


def _quantized(bits: int) -> CallbackSpec:
    """Every linear layer is quantized, whichever get adapters, as in the QLoRA paper (arXiv 2305.14314) and by peft."""
    path = "lightning_memfit.techniques.quantized_weights.QuantizedWeights"
    return CallbackSpec(path, {"bits": bits}, kept=("target_modules",))


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    """Two thin products per weight; no gradients of the weights themselves."""
    linear = [p for p in profile.parameters if p.dims == 2 and not p.shared_with]
    forward = profile.flops.get("forward", 0)
    elements = sum(p.numel for p in linear)
    if not elements:
        return Cost()
    thin = int(options.get("rank", 8)) * sum(sum(p.shape) for p in linear) / elements
    return Cost(micro_batch=Work(flops=(3 * thin - 1) * forward))


def _quantized_cost(profile: "ModelProfile", options: Options) -> Cost:
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
)

QLORA = replace(
    LORA,
    name="qlora",
    summary="adapters beside frozen weights in 4 bits",
    numerics=frozenset({"lora", "4bit"}),
    callbacks=(_quantized(4), _LORA),
    cost=_quantized_cost,
    page="lora",
)

LORA_8BIT = replace(
    QLORA,
    name="lora_8bit",
    summary="adapters beside frozen weights in 8 bits",
    numerics=frozenset({"lora", "8bit"}),
    callbacks=(_quantized(8), _LORA),
    cost=lambda profile, options: _quantized_cost(profile, {"bits": 8, **options}),
)

"""`Lora`: train low-rank adapters of peft next to frozen weights, in any module."""

import difflib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.adapters.checkpoint import (
    KEY,
    base_checksum,
    merged_entries,
    merged_state_dict,
    refuse_incomplete,
    refuse_others,
)
from lightning_memfit.adapters.linears import AUTO, is_conv1d, is_quantized, linear_layers
from lightning_memfit.extras import require
from lightning_memfit.memory import Category
from lightning_memfit.memory.collectives import is_divided
from lightning_memfit.memory.host import copy_to_host
from lightning_memfit.memory.state_dicts import joined_versions, versioned, versions_of
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.replace import replace_optimizers, take_out
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.quantized_weights import QuantizedWeights, callbacks_of, replaces_layers

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_CONFLICTS = {
    "HostMasterWeights": "adapters are small, and there is nothing to keep on the host.",
    "StochasticWeightAveraging": "it copies the module before it has adapters; EMAWeightAveraging, listed last, works.",
    "ModelPruning": "it replaces the weights of layers, which are frozen below adapters.",
}
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")

_merged: "weakref.WeakKeyDictionary[nn.Module, _Merged]" = weakref.WeakKeyDictionary()
_kept: "weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]" = weakref.WeakKeyDictionary()
"""Records of modules that a run has left with their adapters."""


@dataclass(frozen=True)
class _Merged:
    """Weights from before adapters were merged into them, so that checkpoints of these can still be loaded."""

    checksum: int
    """Of the module with merged weights."""
    base: int
    """Of what was frozen, as checkpoints have it."""
    weights: dict[str, Tensor]
    """Copies in host memory, by name."""


def _restore_originals(module: nn.Module) -> None:
    """Give a module the weights again that it had before adapters were merged, unless it has changed since."""
    before = _merged.get(module)
    if before is not None and base_checksum(module) == before.checksum:
        with torch.no_grad():
            for name, weight in before.weights.items():
                module.get_parameter(name).copy_(weight)


def _keeps_adapters(module: nn.Module) -> bool:
    """Whether adapters can't be merged: ranks divide the weights, or they were loaded in 4 or 8 bits."""
    return is_divided(module) or any(is_quantized(child) for child in module.modules())


def _adapted(checkpoint: Mapping[str, Any]) -> list[str]:
    return [f"{name}.weight" for name in checkpoint[KEY]["layers"]]


class Lora(TechniqueCallback):
    """Freeze the module and train adapters on its linear layers, with gradients and states for the adapters only.

    The adapters are peft's. Optimizers keep their groups and schedules but step trainable parameters only. Checkpoints
    hold the adapters (and everything else that is trained, buffers included), know to which frozen weights they
    belong, and resume bitwise; `validate`, `test` and `predict` load them. When the run ends, the adapters are merged
    into the weights: the module has its original form again, with what was learned. It keeps its adapters where they
    can't be merged: under strategies that divide weights, and on weights that were loaded in 4 or 8 bits.

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
        ValueError: If a number is out of range.
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
        if rank < 1:
            raise ValueError(f"`rank={rank}` must be at least 1.")
        if alpha <= 0:
            raise ValueError(f"`alpha={alpha}` must be positive.")
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout={dropout}` must be at least 0 and below 1.")
        require("peft", "Lora")
        # Not first within a trace: an error that this import catches and logs leads to the frames around it, and who
        # keeps the log keeps their tensors.
        import peft  # noqa: F401

        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.target_modules = target_modules
        self.train = tuple(train)
        self._forget()

    def _forget(self) -> None:
        self._record: dict[str, Any] | None = None
        self._learned: dict[str, Any] = {}
        self._checksum: int | None = None
        self._was_saved = False
        self._quantizers: list[QuantizedWeights] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lora":
        """Return an unused callback with the same arguments, without what a run has left."""
        return Lora(self.rank, self.alpha, self.dropout, self.target_modules, self.train)

    # --- beginning and end of a run ---------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the technique to a run that trains; in others, to a module that loads a checkpoint of adapters."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            return
        self._quantizers = []  # adapters are evaluated on the weights that they are merged into
        self._follow_checkpoints(trainer, pl_module)
        if trainer.strategy.restore_checkpoint_after_setup:
            self.when_complete(pl_module, lambda: self._inject(trainer, pl_module))

        def load(inner: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            if KEY not in checkpoint or self._record is not None:
                return inner(checkpoint, *args, **kwargs)
            self._learned = {}  # what is saved from now on is what is loaded here
            _restore_originals(pl_module)
            originals = {n: copy_to_host(pl_module.get_parameter(n), Category.PARAMETER) for n in _adapted(checkpoint)}
            # In place: averaging of weights loads from the same dictionary, into a model that has no adapters by now.
            checkpoint["state_dict"] = merged_state_dict(pl_module, checkpoint)
            for key in ("current_model_state", "averaging_state"):
                checkpoint.pop(key, None)
            result = inner(checkpoint, *args, **kwargs)
            _merged[pl_module] = _Merged(base_checksum(pl_module), checkpoint[KEY]["base"], originals)
            return result

        self.on_restore(wrap_method(trainer.strategy, "load_model_state_dict", load))

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and wrap the methods that configure, save and load."""
        reason = replaces_layers(trainer) or _refused_beside(self, trainer)
        if reason is not None:
            raise ValueError(f"Lora: {reason}")
        self._forget()
        self._quantizers = [callback for callback in callbacks_of(trainer) if isinstance(callback, QuantizedWeights)]

        def optimizers(inner: Callable[[], Any]) -> Any:
            seen: list[Optimizer] = []
            configured = replace_optimizers(inner(), lambda optimizer: _trainable_only(optimizer, seen))
            _refuse_forgotten(pl_module, seen)
            return configured

        self.when_complete(pl_module, lambda: self._inject(trainer, pl_module))
        self.on_restore(wrap_method(pl_module, "configure_optimizers", optimizers, innermost=True))
        self._follow_checkpoints(trainer, pl_module)

    def _follow_checkpoints(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loads_late = trainer.strategy.restore_checkpoint_after_setup

        def save(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            if self._record is not None:
                self._mark(trainer, pl_module, checkpoint, self._record)

        def load(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            if KEY in checkpoint:
                if _keeps_adapters(pl_module):
                    self._inject(trainer, pl_module)
                if self._record is not None:
                    self._complete(pl_module, checkpoint)
            elif adapted_layers(pl_module):
                raise ValueError(
                    "Lora: `ckpt_path` was not written by a run with Lora. To begin on its weights, load them before "
                    "(`load_from_checkpoint`, or in `configure_model`), and give no `ckpt_path`."
                )

        from lightning_memfit.adapters.lora import adapted_layers

        self.on_restore(wrap_method(pl_module, "on_save_checkpoint", save))
        self.on_restore(wrap_method(pl_module, "on_load_checkpoint", load))
        if loads_late:  # weights are loaded by the names that a checkpoint has, which are those of adapters
            strict, pl_module.strict_loading = pl_module.strict_loading, False
            self.on_restore(lambda: setattr(pl_module, "strict_loading", strict))
            trainer.strategy.exclude_frozen_parameters = True  # type: ignore[attr-defined]  # of DeepSpeed's

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """After the run the module holds merged weights; a checkpoint to resume from still holds the adapters."""
        checkpoint.update(self._learned)
        if self._record is None and pl_module in _kept:
            self._mark(trainer, pl_module, checkpoint, _kept[pl_module])

    # --- adapters in and out ----------------------------------------------------------------------------------------

    def _inject(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        from lightning_memfit.adapters import lora

        if lora.adapted_layers(module):
            if self._record is None:
                self._record = _kept.get(module)
            if self._record is None:
                raise ValueError(
                    f"Lora: {next(iter(lora.adapted_layers(module)))} has adapters of peft already. Leave Lora "
                    "out, or merge them first (merge_and_unload)."
                )
            return
        layers, left_out = linear_layers(module, self.target_modules)
        whole = [_named(module, name) for name in self.train]
        inside = {id(part) for child in whole for part in child.modules()}
        if self.target_modules == AUTO:
            layers = {name: layer for name, layer in layers.items() if id(layer) not in inside}
        trained = {id(parameter) for child in whole for parameter in child.parameters()}
        names = [name for name, parameter in module.named_parameters() if id(parameter) in trained]
        is_whole = not lora.is_fake(module) and not any(p.is_meta for p in module.parameters())
        self._record = {
            "rank": self.rank,
            "alpha": self.alpha,
            "layers": {name: is_conv1d(layer) for name, layer in layers.items()},
            "bits": self._quantizers[0].bits if self._quantizers else None,
            "trained": names,
            "base": base_checksum(module, names) if is_whole and not is_divided(module) else None,
        }
        self._checksum = base_checksum(module) if module in _merged and self._record["base"] is not None else None
        for quantizer in self._quantizers:
            self.on_restore(lambda one=quantizer: one.put_back(module, self.has_failed))  # type: ignore[misc]
            quantizer.quantize(module, inside)
        frozen = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # DeepSpeed takes weights of one dtype, and has masters of its own.
        stay_float32 = trainer.precision_plugin.__class__.__name__ != "DeepSpeedPrecision"
        lora.inject(module, layers, self.rank, self.alpha, self.dropout, stay_float32)
        for child in whole:
            child.requires_grad_(True)
        reads_weights = any(isinstance(child, nn.TransformerEncoderLayer) for child in module.modules())
        if reads_weights and torch.backends.mha.get_fastpath_enabled():  # of its layers, in evaluation
            torch.backends.mha.set_fastpath_enabled(False)
            self.on_restore(lambda: torch.backends.mha.set_fastpath_enabled(True))
        for child in module.modules():
            if any(kind.__name__ in ("PreTrainedModel", "ModelMixin") for kind in type(child).__mro__):
                self.on_restore(wrap_method(child, "save_pretrained", partial(self._save_merged, child)))
        self.on_restore(lambda: self._take_out(trainer, module, frozen))
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.announce(f"{len(layers)} layers, {count:,} parameters to train")
        for name, reason in left_out.items():
            self.announce(f"{name} gets no adapter: {reason}")

    def _save_merged(self, network: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write a folder with what was learned in the weights, for `from_pretrained` without adapters."""
        from lightning_memfit.adapters.lora import adapted_layers

        entries = kwargs.pop("state_dict", None) or network.state_dict()
        return inner(*args, state_dict=merged_entries(entries, adapted_layers(network), self._plain), **kwargs)

    def _take_out(self, trainer: pl.Trainer, module: pl.LightningModule, frozen: list[nn.Parameter]) -> None:
        from lightning_memfit.adapters import lora

        record, self._record = self._record, None
        layers = lora.adapted_layers(module)
        if record is None or not layers:
            return
        originals, entries = None, self._trained_only(trainer, module, module.state_dict())
        for quantizer in self._quantizers:  # adapters are merged into the weights as the run's precision has them
            quantizer.put_back(module, self.has_failed)
        if _keeps_adapters(module):
            _kept[module] = record
            return
        if not lora.is_fake(module):
            learned = {name: one.clone() if isinstance(one, Tensor) else one for name, one in entries.items()}
            self._learned = {"state_dict": versioned(learned, versions_of(entries)), KEY: record}
            if (
                self._was_saved
                and record["base"] is not None
                and not any(".base_layer.weight" in name for name in entries)
            ):
                originals = {
                    f"{name}.weight": copy_to_host(layer.get_base_layer().weight, Category.PARAMETER)
                    for name, layer in layers.items()
                }
        lora.take_out(module)
        for parameter in frozen:
            parameter.requires_grad_(True)
        if originals is not None:
            _merged[module] = _Merged(base_checksum(module), record["base"], originals)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _mark(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any], record: dict[str, Any]
    ) -> None:
        """Leave frozen weights out of a checkpoint, in place, and say whose adapters it holds."""
        for key in ("state_dict", "current_model_state"):  # the second is where averaging of weights has the latest
            if key in checkpoint:
                checkpoint[key] = self._trained_only(trainer, module, checkpoint[key])
        checkpoint[KEY] = record
        self._was_saved = True

    def _trained_only(self, trainer: pl.Trainer, module: pl.LightningModule, entries: dict[str, Any]) -> dict[str, Any]:
        """Leave out the parameters that nothing trains: adapters and what an optimizer has are kept, frozen or not."""
        kept = {id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        own = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in own if not p.requires_grad and id(p) not in kept and ".lora_" not in name}
        return versioned({n: one for n, one in entries.items() if n not in frozen}, versions_of(entries))

    def _complete(self, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint of adapters, in place, with the module's own frozen weights.

        Raises:
            ValueError: If it holds different adapters, or adapters for other weights.
        """
        from lightning_memfit.adapters.lora import adapted_layers

        ours, theirs = self._record, checkpoint[KEY]
        assert ours is not None
        before = _merged.get(module)
        if before is not None and before.checksum == self._checksum and before.base == theirs["base"] != ours["base"]:
            with torch.no_grad():  # the module holds merged weights of an earlier run
                for name, layer in adapted_layers(module).items():
                    self._plain(layer).weight.copy_(before.weights[f"{name}.weight"])
            for quantizer in self._quantizers:
                quantizer.renew(module)
            ours["base"] = before.base
        if module.trainer.state.fn != TrainerFn.FITTING:
            ours["bits"] = theirs["bits"]
        refuse_others(theirs, ours)
        if "state_dict" not in checkpoint:  # loaded already
            return
        refuse_incomplete(theirs, checkpoint["state_dict"])
        own = module.state_dict()
        for key in ("state_dict", "current_model_state"):
            if key in checkpoint:
                checkpoint[key] = versioned({**own, **checkpoint[key]}, joined_versions(own, checkpoint[key]))
        self._was_saved = True

    def _plain(self, layer: Any) -> Any:
        """The layer below an adapter, or the one that waits for it while it is quantized."""
        base = layer.get_base_layer()
        return next((q.waiting[base] for q in self._quantizers if base in q.waiting), base)


def _named(module: nn.Module, name: str) -> nn.Module:
    names = [full for full, _ in module.named_modules(remove_duplicate=False) if full]
    if name not in names:
        closest = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3] or ["none"])
        raise ValueError(f"Lora: `train` names {name!r}, no module of {type(module).__name__}. Closest: {closest}.")
    return module.get_submodule(name)


def _refused_beside(callback: pl.Callback, trainer: pl.Trainer) -> str | None:
    """Reason and fix if something else has copied the module without adapters, or replaces or divides its layers."""
    if getattr(trainer.strategy, "tensor_parallel_size", 1) != 1:
        return "`tensor_parallel_size` divides linear layers, which adapters don't follow. Set it to 1."
    callbacks = callbacks_of(trainer)
    for place, other in enumerate(callbacks):
        name = type(other).__name__
        if isinstance(other, WeightAveraging) and place < callbacks.index(callback):
            return f"{name} stands before it and has copied the module without adapters. List {name} last."
    return None


def _trainable_only(optimizer: Optimizer, seen: list[Optimizer]) -> Optimizer:
    take_out(optimizer, lambda p: not p.requires_grad)
    seen.append(optimizer)
    return optimizer


def _refuse_forgotten(module: nn.Module, optimizers: list[Optimizer]) -> None:
    from lightning_memfit.adapters.lora import adapter_parameters

    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(id(parameter) not in stepped for parameter in adapter_parameters(module)):
        raise ValueError(
            f"Lora: the optimizers that {type(module).__name__}.configure_optimizers returns lack adapters, which "
            "would not be trained. Give them `self.parameters()`, or limit `target_modules` to what they step."
        )


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
_QUANTIZED = "lightning_memfit.techniques.quantized_weights.QuantizedWeights"


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

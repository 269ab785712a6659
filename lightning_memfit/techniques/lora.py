"""`Lora`: train low-rank adapters next to frozen weights, in any module."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.adapters import lora
from lightning_memfit.adapters.checkpoint import (
    KEY,
    Originals,
    base_weights,
    bits_by_layer,
    copy_originals,
    describe,
    keep_originals,
    merged_state_dict,
    originals_of,
    refuse_incomplete,
    refuse_others,
    sum_of_words,
)
from lightning_memfit.adapters.layer import FrozenLinear, StandingWeight
from lightning_memfit.adapters.linears import AUTO, linear_layers
from lightning_memfit.adapters.watch import Watch
from lightning_memfit.memory import Category
from lightning_memfit.memory.host import copy_to_host
from lightning_memfit.memory.state_dicts import joined_versions, versioned, versions_of
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.replace import replace_optimizers, take_out
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run, is_compiled
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.quantized_weights import QuantizedWeights, callbacks_of, copied_before, replaces_layers

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class Lora(TechniqueCallback):
    """Freeze the module and train adapters on its linear layers, with gradients and states for the adapters only.

    The module's code stays as it is, and so do its layers: whoever reads the weight of one gets it with the adapter.
    Optimizers keep their groups and schedules but step trainable parameters only. Checkpoints hold the adapters (and
    everything else that is trained, buffers included), know to which frozen weights they belong, and resume bitwise;
    `validate`, `test` and `predict` load them merged. When the run ends, the adapters are merged into the weights: the
    module has its original form again, with what was learned.

    Args:
        rank: Inner width of the adapters.
        alpha: The adapters' outputs are scaled by `alpha / rank`.
        dropout: Dropout of the adapters' inputs.
        target_modules: Ends of the dotted names of the layers that get an adapter, such as `q_proj`; `auto` takes every
            linear layer (`nn.Linear`, `Conv1D`, quantized ones) except output heads and those whose weight something
            other than a linear layer shares.
        train: Dotted names of modules that are also trained as a whole, such as a new head.

    Raises:
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
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.target_modules = target_modules
        self.train = tuple(train)
        self._forget()

    def _forget(self) -> None:
        self._record: dict[str, Any] | None = None
        self._learned: dict[str, Any] = {}
        self._base: frozenset[str] = frozenset()
        """Names of the parameters that adapters stand in for: frozen, and in no checkpoint unless they change."""
        self._frozen: dict[str, int] = {}
        """Checksums of these when training began."""
        self._followed: dict[str, nn.Parameter] = {}
        """Those that nothing has unfrozen so far."""
        self._originals: dict[str, Tensor] = {}
        """Copies, in host memory, of those that something else has unfrozen, from before they changed."""
        self._steps = 0
        self._epoch = -1
        self._loaded: frozenset[str] = frozenset()
        self._before: Originals | None = None
        self._watch: Watch | None = None
        self._is_in_watched_step = False
        self._was_saved = False
        self._quantizers: list[QuantizedWeights] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lora":
        """Return an unused callback with the same arguments, without what a run has left."""
        return Lora(self.rank, self.alpha, self.dropout, self.target_modules, self.train)

    # --- beginning and end of a run ---------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Apply the technique to a run that trains; in others load checkpoints of adapters merged."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            return

        def load(inner: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            if KEY not in checkpoint:
                return inner(checkpoint, *args, **kwargs)
            self._learned = {}  # what is saved from now on is what is loaded here
            merged, originals = merged_state_dict(pl_module, checkpoint)
            # In place: averaging of weights loads from the same dictionary, into a model that has no adapters by now.
            checkpoint["state_dict"] = merged
            for key in ("current_model_state", "averaging_state"):
                checkpoint.pop(key, None)
            result = inner(checkpoint, *args, **kwargs)
            keep_originals(pl_module, checkpoint[KEY], originals)
            return result

        self.on_restore(wrap_method(trainer.strategy, "load_model_state_dict", load))

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and wrap the methods that configure, save and load."""
        reason = copied_before(self, trainer) or replaces_layers(trainer) or _refused_beside(trainer)
        if reason is not None:
            raise ValueError(f"Lora: {reason}")
        self._forget()
        self._quantizers = [callback for callback in callbacks_of(trainer) if isinstance(callback, QuantizedWeights)]

        def complete() -> None:
            if not lora.adapted_layers(pl_module):
                self._inject(pl_module)

        def optimizers(inner: Callable[[], Any]) -> Any:
            seen: list[Optimizer] = []
            configured = replace_optimizers(inner(), lambda optimizer: _trainable_only(optimizer, seen))
            _refuse_forgotten(pl_module, seen)
            return configured

        def save(inner: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
            return self._without_frozen(pl_module, inner())

        def mark(inner: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
            inner(checkpoint)
            # A callback may have put another state dictionary there, such as that of averaged weights.
            checkpoint["state_dict"] = self._without_frozen(pl_module, checkpoint["state_dict"])
            checkpoint[KEY] = self._described(pl_module)
            self._was_saved = True

        def load(inner: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            if KEY not in checkpoint:
                self._start_from(pl_module, checkpoint)
                result = inner(checkpoint, *args, **kwargs)
                self._record = describe(pl_module, self.rank, self.alpha)
                return result
            self._complete(pl_module, checkpoint)
            return inner(checkpoint, *args, **kwargs)

        def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            is_first_of_epoch, self._epoch = trainer.current_epoch != self._epoch, trainer.current_epoch
            # A penalty may begin after a warm-up. To look for it takes time, so not in every step.
            if is_first_of_epoch or self._steps & (self._steps - 1) == 0:
                return self._watch_step(pl_module, inner, *args, **kwargs)
            return inner(*args, **kwargs)

        self.when_complete(pl_module, complete)
        self.on_restore(wrap_method(pl_module, "configure_optimizers", optimizers, innermost=True))
        self.on_restore(wrap_method(pl_module, "on_save_checkpoint", mark))
        self.on_restore(wrap_method(trainer.strategy, "lightning_module_state_dict", save))
        self.on_restore(wrap_method(trainer.strategy, "load_model_state_dict", load))
        self.on_restore(wrap_method(trainer.strategy, "training_step", step))
        self.on_restore(self._stop_watching)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what is frozen, now that precision and device are those of training."""
        if not lora.is_fake(pl_module):
            own = pl_module.named_parameters(remove_duplicate=False)
            self._followed = {name: parameter for name, parameter in own if name in self._base}
            self._frozen = {n: sum_of_words(p) for n, p in self._followed.items() if n not in self._loaded}

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Notice weights that something has unfrozen, and refuse what a step read that runs `backward` itself."""
        self._refuse_reads_outside()
        self._follow_unfrozen(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Do the same where the module calls `loss.backward()`."""
        self._refuse_reads_outside()
        self._follow_unfrozen(trainer)

    def _follow_unfrozen(self, trainer: pl.Trainer) -> None:
        """Copy weights that something has unfrozen before they change, and refuse those that nothing would step.

        Raises:
            ValueError: If no optimizer has them.
        """
        unfrozen = {name: p for name, p in self._followed.items() if p.requires_grad}
        if not unfrozen:
            return
        stepped = {
            id(p) for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        forgotten = [name for name, parameter in unfrozen.items() if id(parameter) not in stepped]
        if forgotten:
            raise ValueError(
                f"Lora: {_some(forgotten)} got `requires_grad=True` in the run, but no optimizer has what Lora has "
                "frozen: it would not be trained. Leave it frozen, name its module in `train`, or give it to an "
                "optimizer as well, as `BaseFinetuning.unfreeze_and_add_param_group` does."
            )
        for name, parameter in unfrozen.items():
            if name not in self._originals:
                self._originals[name] = copy_to_host(parameter, Category.PARAMETER)
            del self._followed[name]

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the backward pass of a step that was watched, refuse adapters that it can't reach.

        Raises:
            ValueError: If a reentrant checkpoint kept gradients from them.
        """
        watch = self._watch
        if not self._is_in_watched_step:  # with manual optimization the step may go on, and run layers again
            self._stop_watching()
        if watch is not None and watch.without_gradient:
            raise ValueError(
                f"Lora: {_some(watch.without_gradient)} ran in a reentrant checkpoint (torch.utils.checkpoint) whose "
                "inputs need no gradient, so that no gradient would reach the adapters. Checkpoint with "
                "`use_reentrant=False`, or with ActivationCheckpointing."
            )

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of adapters that nothing was learned for."""
        if trainer.global_step and not lora.is_fake(pl_module):
            layers = lora.adapted_layers(pl_module)
            idle = [name for name, layer in layers.items() if not bool(layer.factors()[1].any())]
            if idle:
                rank_zero_warn(
                    f"Lora: {_some(idle)} learned nothing: no gradient reached the adapters, as the loss doesn't "
                    "depend on these layers. Leave them out of `target_modules`."
                )

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """After the run the module holds merged weights; a checkpoint to resume from still holds the adapters."""
        checkpoint.update(self._learned)

    # --- adapters in and out ----------------------------------------------------------------------------------------

    def _inject(self, module: nn.Module) -> None:
        _refuse_unready(module)
        targets, left_out = linear_layers(module, self.target_modules)
        wholly_trained = [_named(module, name) for name in self.train]
        if self.target_modules == AUTO:
            inside = {id(layer) for child in wholly_trained for layer in child.modules()}
            targets = {name: layer for name, layer in targets.items() if id(layer) not in inside}
        _refuse_quantized(self.train, wholly_trained)
        self._before = None if lora.is_fake(module) else originals_of(module)
        # This runs before a precision plugin converts the weights, because checkpoints are loaded before that too.
        flags = [parameter for parameter in base_weights(module).values() if parameter.requires_grad]
        lora.inject(module, targets.values(), self.rank, self.alpha, self.dropout)
        for child in wholly_trained:
            child.requires_grad_(True)
        adapters = {id(parameter) for parameter in lora.adapter_parameters(module)}
        own = module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in own if not p.requires_grad and id(p) not in adapters}
        layers = module.named_modules(remove_duplicate=False)
        waiting = {f"{name}.weight" for name, layer in layers if isinstance(layer, FrozenLinear) and layer.codes}
        self._base = frozenset(frozen | waiting)
        self.on_restore(lambda: _thaw(flags))
        self.on_restore(lambda: self._take_out(module))
        if not lora.is_fake(module):
            self._record = describe(module, self.rank, self.alpha)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.announce(f"{len(targets)} layers, {trained:,} parameters to train")
        for name, reason in left_out.items():
            self.announce(f"{name} gets no adapter: {reason}")

    def _take_out(self, module: nn.Module) -> None:
        if not lora.adapted_layers(module):
            return
        originals, record = None, self._described(module)
        for quantizer in self._quantizers:  # adapters are merged into the weights as the run's precision has them
            quantizer.put_back(self.has_failed)
        if record is not None:
            entries = self._without_frozen(module, module.state_dict())
            # Weights that a callback trained besides are about to get the adapters added.
            merged = {f"{name}.weight" for name in lora.adapted_layers(module)} & entries.keys()
            learned = {**entries, **{name: entries[name].clone() for name in merged}}
            self._learned = {"state_dict": versioned(learned, versions_of(entries)), KEY: record}
            if self._was_saved and not self._has_lost_originals(module):
                originals = {**copy_originals(module), **self._originals}
        lora.remove(module)
        if record is not None and originals is not None:
            keep_originals(module, record, originals)

    def _described(self, module: nn.Module) -> dict[str, Any] | None:
        # Layers may have been quantized after adapters were injected, and may have been put back before these end.
        if self._record is not None:
            self._record["bits"] = bits_by_layer(module) or self._record["bits"]
        return self._record

    def _watch_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and refuse it if adapters don't reach where weights are used."""
        if lora.is_fake(module) or is_compiled(module):
            return step(*args, **kwargs)  # the tracer has its own modes; compiled code runs under none
        self._stop_watching()  # the step before may have had no backward pass
        self._watch = watch = Watch(lora.frozen_layers(module))
        watch.attach()
        self._is_in_watched_step = True
        try:
            with watch:
                result = step(*args, **kwargs)
        finally:
            self._is_in_watched_step = False
        self._refuse_reads_outside()
        if not module.automatic_optimization:  # its backward passes are over
            self._stop_watching()
        return result

    def _refuse_reads_outside(self) -> None:
        """Raise a `ValueError` if the step that is watched has used a weight beside its adapter."""
        if self._watch is None or not self._watch.outside:
            return
        outside = self._watch.outside
        name, operator = next(iter(outside.items()))
        raise ValueError(
            f"Lora: {_some(outside)}: the step reads the frozen weight itself (in {operator} for {name}), "
            "not through its layer, and would compute without the adapter. Read `layer.weight` when it is used "
            "instead of keeping the tensor, log it under torch.no_grad(), or leave the layer out of "
            "`target_modules`."
        )

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _without_frozen(self, module: nn.Module, entries: dict[str, Any]) -> dict[str, Any]:
        """Leave out the parameters that adapters stand in for and that are what they were when training began.

        Adapters and what is trained as a whole are kept whether they are frozen at this moment or not.
        """
        own = dict(module.named_parameters(remove_duplicate=False))
        kept = {name: value for name, value in entries.items() if not self._is_frozen(name, own.get(name))}
        return versioned(kept, versions_of(entries))

    def _is_frozen(self, name: str, parameter: nn.Parameter | None) -> bool:
        if parameter is None or name not in self._base or parameter.requires_grad or name in self._loaded:
            return False
        # A callback may have trained it for a while and frozen it again.
        return name not in self._frozen or sum_of_words(parameter) == self._frozen[name]

    def _has_lost_originals(self, module: nn.Module) -> bool:
        """Whether frozen weights have changed of which there is no copy, as nothing has unfrozen them."""
        own = dict(module.named_parameters(remove_duplicate=False))
        unknown = self._frozen.keys() - self._originals.keys()
        return any(sum_of_words(own[name]) != self._frozen[name] for name in unknown)

    def _complete(self, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Complete a checkpoint of adapters, in place, with the module's own frozen weights.

        Raises:
            ValueError: If it holds different adapters, or adapters for other weights.
        """
        ours, theirs, before = self._described(module), checkpoint[KEY], self._before
        assert ours is not None
        if theirs["base"] != ours["base"] and before is not None and before.record["base"] == theirs["base"]:
            before.restore(module)  # the module holds merged weights of an earlier run
            self._record = ours = describe(module, self.rank, self.alpha)
        refuse_others(theirs, ours)
        own = module.state_dict()
        entries = checkpoint["state_dict"]
        refuse_incomplete(theirs, entries)
        self._loaded = self._base & entries.keys()
        self._originals = {name: copy_to_host(own[name], Category.PARAMETER) for name in self._loaded & own.keys()}
        for key in ("state_dict", "current_model_state"):  # the second is where averaging of weights has the latest
            if key in checkpoint:
                checkpoint[key] = versioned({**own, **checkpoint[key]}, joined_versions(own, checkpoint[key]))

    def _start_from(self, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Make of a checkpoint without adapters, in place, one that training begins from with new adapters."""
        entries = versioned(checkpoint["state_dict"], versions_of(checkpoint["state_dict"]))
        for name, layer in lora.frozen_layers(module).items():
            if layer.codes is not None and f"{name}.weight" in entries:
                layer.put(entries.pop(f"{name}.weight"))
        own = module.state_dict()
        adapters = {id(parameter) for parameter in lora.adapter_parameters(module)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in adapters:
                entries[name] = own[name]
        for key in ("loops", "callbacks", "current_model_state", "averaging_state"):
            checkpoint.pop(key, None)
        checkpoint.update(state_dict=entries, optimizer_states=[], lr_schedulers=[])
        self.announce(
            "`ckpt_path` was not written by a run with Lora. Adapters begin on its weights, with new optimizer states "
            "and counters."
        )


def _named(module: nn.Module, name: str) -> nn.Module:
    names = [full for full, _ in module.named_modules(remove_duplicate=False) if full]
    if name not in names:
        closest = ", ".join(difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3])
        raise ValueError(
            f"Lora: `train` names {name!r}, which is no module of {type(module).__name__}. "
            f"Closest: {closest or 'none'}."
        )
    return module.get_submodule(name)


def _refused_beside(trainer: pl.Trainer) -> str | None:
    """Reason and fix if another callback has copied the module without adapters, or replaces weights."""
    for other in callbacks_of(trainer):
        name = type(other).__name__
        if isinstance(other, StochasticWeightAveraging):
            return f"{name} copies the module before it has adapters. Use EMAWeightAveraging, listed last."
        if isinstance(other, ModelPruning):
            return f"{name} replaces the weights of layers, which are frozen below adapters. Leave one of them out."
    return None


def _some(names: Any) -> str:
    """The first names of several."""
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _refuse_unready(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Lora: {name} has no shape before a first batch. Run one through the module before training, or give "
                "its layer's size."
            )
    for name, child in module.named_modules():
        if any(cls.__name__ == "BaseTunerLayer" for cls in type(child).__mro__):
            raise ValueError(
                f"Lora: {name} has adapters of peft already. Leave Lora out, or merge them first (merge_and_unload)."
            )


def _refuse_quantized(names: Sequence[str], children: Sequence[nn.Module]) -> None:
    for name, child in zip(names, children, strict=True):
        if bits_by_layer(child):
            raise ValueError(
                f"Lora: `train` names {name}, whose weights QuantizedWeights has quantized: they can't be trained. "
                "Leave it out of `train`, or give QuantizedWeights `target_modules` without it."
            )


def _trainable_only(optimizer: Optimizer, seen: list[Optimizer]) -> Optimizer:
    take_out(optimizer, lambda p: not p.requires_grad or isinstance(p, StandingWeight))
    seen.append(optimizer)
    return optimizer


def _refuse_forgotten(module: nn.Module, optimizers: list[Optimizer]) -> None:
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(id(parameter) not in stepped for parameter in lora.adapter_parameters(module)):
        raise ValueError(
            f"Lora: the optimizers that {type(module).__name__}.configure_optimizers returns lack adapters, which "
            "would not be trained. Give them `self.parameters()`, or limit `target_modules` to what they step."
        )


def _thaw(frozen: list[Tensor]) -> None:
    for parameter in frozen:
        parameter.requires_grad_(True)


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if adapters can be trained."""
    if run.strategy not in _STRATEGIES:
        return f"{run.strategy} shards weights, for which adapters are not injected. Use one device or DDP."
    if run.has("HostMasterWeights"):
        return "adapters are small, and there is nothing to keep on the host. Leave HostMasterWeights out."
    if run.callbacks.count("Lora") > 1:
        return "there are two of it. Give one all `target_modules`."
    return None


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
)

QLORA = replace(
    LORA,
    name="qlora",
    summary="adapters beside frozen weights in 4 bits",
    numerics=frozenset({"lora", "4bit"}),
    callbacks=(CallbackSpec(_QUANTIZED, {"bits": 4}), _LORA),
    cost=_quantized_cost,
    package="bitsandbytes",
    page="lora",
)

LORA_8BIT = replace(
    QLORA,
    name="lora_8bit",
    summary="adapters beside frozen weights in 8 bits",
    numerics=frozenset({"lora", "8bit"}),
    callbacks=(CallbackSpec(_QUANTIZED, {"bits": 8}), _LORA),
    cost=lambda profile, options: _quantized_cost(profile, {"bits": 8, **options}),
    package="",
)

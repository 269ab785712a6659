"""`HostMasterWeights`: half-precision weights on the device, float32 masters and the optimizer on the host."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.memory import Category
from lightning_memfit.memory.host import keep_on_host, return_to_device
from lightning_memfit.memory.wrapping import wrap_method
from lightning_memfit.optim.host_master import HostMaster, with_changes
from lightning_memfit.optim.replace import optimizers_in
from lightning_memfit.techniques.core.cost import Cost, Work
from lightning_memfit.techniques.core.facts import Run
from lightning_memfit.techniques.core.precision import TechniquePrecision
from lightning_memfit.techniques.core.step_cost import FOREACH_PASSES, HOST_STEP_BYTES, cpu_seconds, num_trained
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique

if TYPE_CHECKING:
    from lightning_memfit.profile.record import ModelProfile

_SEARCHES = (
    "it loads a checkpoint from before the search into bfloat16 weights, whose float32 values are lost. Search in a "
    "run without HostMasterWeights."
)
_CONFLICTS = {
    "GradientRelease": "both take gradients away during backward.",
    "Optimizer8bit": "8-bit states save memory of the device, and here they are on the host, where 8 bits are slow.",
    "LearningRateFinder": _SEARCHES,
    "BatchSizeFinder": _SEARCHES,
}
_WIDE = (torch.float32, torch.float64)
_AVERAGING = (WeightAveraging, StochasticWeightAveraging)
_AVERAGES = (
    "on_train_epoch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_train_end",
)
"""Hooks in which Lightning's callbacks read and write all weights."""


class HostMasterWeights(TechniquePrecision):
    """`bf16-true` on the device, with float32 weights and optimizer states on the host.

    The Trainer takes it in place of a `precision`: `Trainer(plugins=[HostMasterWeights()])`. The device holds 2 bytes a
    parameter plus activations. A gradient is sent to the host and freed as soon as backward has completed it, and is
    accumulated there in float32. The numbers are those of a float32 optimizer over a bfloat16 forward and backward
    pass. Clipping, accumulation and schedulers work as usual, on the host.

    In `on_before_optimizer_step`, in the module's own clipping, and while Lightning's callbacks average weights, the
    module's parameters are the float32 ones, with float32 gradients. Elsewhere they are in bfloat16 and have no
    gradients: hooks that would look there are refused, and so is code that writes to them, at the next step.

    Checkpoints hold the float32 weights, resume bitwise, and load without this plugin. When the run ends, trained
    weights become their float32 masters, and everything else that was float32 before is float32 again, with its old
    value if nothing has changed it: a checkpoint saved then also resumes bitwise. The same holds after `validate`,
    `test` and `predict`.
    """

    rules_traces = True

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[Tensor, Tensor] = {}
        self._names: dict[Tensor, str] = {}
        self._host: HostMaster | None = None

    def float32_weights(self) -> AbstractContextManager[None]:
        """Let the module's parameters be their float32 masters for a while, to read or to write them in a hook."""
        return nullcontext() if self._host is None else self._host.shown()

    @override
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this run holds."""
        return {"technique": "host_master_weights", "weights": "float32", "optimizer_states": "float32"}

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the methods that configure and load, and those that average weights."""

        def configure(inner: Callable[[], Any]) -> Any:
            configured = inner()
            self._move(optimizers_in(configured))
            return configured

        def load_states(inner: Callable[..., Any], checkpoint: Any) -> None:
            # Lightning's own method would move the states to the device, which may have no room for them.
            for optimizer, states in zip(trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(states)

        self.on_restore(wrap_method(pl_module, "configure_optimizers", configure))
        self.on_restore(wrap_method(trainer.strategy, "load_optimizer_state_dict", load_states))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _AVERAGING):
                for hook in _AVERAGES:
                    self.on_restore(wrap_method(callback, hook, self._with_float32_weights))

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Follow what others have done to the optimizer since the last pass, in passes that come before a step."""
        if self._host is not None and not self._host.depth:
            self._host.refresh()
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Show masters from the end of the backward pass on, also to hooks and clipping, which come before the step."""
        self._move([optimizer])

        def shown() -> Any:
            loss = closure()
            if self._host is not None:
                self._host.show()
            return loss

        return super().optimizer_step(optimizer, model, shown, **kwargs)

    def _with_float32_weights(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.float32_weights():
            return inner(*args, **kwargs)

    def _move(self, optimizers: list[Optimizer]) -> None:
        """Let the run's optimizer step masters."""
        if len(optimizers) > 1:
            raise ValueError(
                f"HostMasterWeights: `configure_optimizers` returned {len(optimizers)} optimizers, of which one is "
                "supported. Return one with several parameter groups."
            )
        if not optimizers or not optimizers[0].param_groups:
            return
        [optimizer] = optimizers
        if self._host is not None:
            self._host.attach(optimizer)
            self._host.refresh()
            return
        self._host = HostMaster(optimizer, self._values)
        self._host.names = self._names
        self._values = {}
        kernel = ", fused" if optimizer.param_groups[0].get("fused") else ""
        self.announce(
            f"{type(optimizer).__name__}{kernel} steps {self._host.num_parameters} float32 parameters on the host"
        )

    # --- values around the conversion to bfloat16 -------------------------------------------------------------------

    @override
    def convert(self, module: Any) -> Any:
        """Keep what the conversion rounds, save it in checkpoints, and put it back when the run ends."""
        if not isinstance(module, pl.LightningModule):
            return super().convert(module)
        trainer = module.trainer
        self.on_restore(self._forget)
        loaded = trainer._checkpoint_connector._loaded_checkpoint or {}
        buffers = self._keep_values(module, loaded.get("state_dict", {}))
        converted = super().convert(module)
        for child, name, value in buffers:
            keep_on_host(value, Category.BUFFER, getattr(child, name))

        def save(inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            return self._with_masters(inner(), module)

        self.on_restore(wrap_method(trainer.strategy, "lightning_module_state_dict", save))
        return converted

    def _keep_values(self, module: nn.Module, loaded: Mapping[str, Tensor]) -> list[tuple[nn.Module, str, Tensor]]:
        """Remember the values that the conversion is about to round, and return those of buffers by module and name."""
        for name, parameter in module.named_parameters():
            self._names[parameter] = name
            exact = self._exact_value(parameter, loaded.get(name))
            if exact is not None:
                self._values[parameter] = exact
        buffers = [
            (child, name, buffer.detach().to("cpu"))
            for child in module.modules()
            for name, buffer in child.named_buffers(recurse=False)
            if buffer.dtype in _WIDE
        ]
        dtypes = [(child, child._dtype) for child in module.modules() if isinstance(child, _DeviceDtypeModuleMixin)]
        self.on_restore(lambda: self._widen(dict(self._values), buffers, dtypes))
        return buffers

    def _exact_value(self, parameter: nn.Parameter, loaded: Tensor | None) -> Tensor | None:
        """The value before it is rounded, on the host; None if the parameter itself holds all there is."""
        if parameter.dtype in _WIDE:
            return parameter.detach().to("cpu")
        # A model that `configure_model` made in bfloat16 was loaded from a checkpoint in float32.
        if loaded is None or loaded.dtype not in _WIDE or not parameter.is_floating_point():
            return None
        if not torch.equal(loaded.to(parameter.device, parameter.dtype), parameter):
            return None
        return loaded.detach().to("cpu")

    def _widen(
        self,
        values: dict[Tensor, Tensor],
        buffers: list[tuple[nn.Module, str, Tensor]],
        dtypes: list[tuple[_DeviceDtypeModuleMixin, Any]],
    ) -> None:
        """Replace weights with their masters, and make everything else that was float32 before float32 again."""
        if self._host is not None:
            self._host.remove()
        for parameter, value in values.items():  # of a run that does not train
            parameter.data = with_changes(value, parameter.data)
        for child, name, value in buffers:
            return_to_device(value)
            current = getattr(child, name, None)
            if isinstance(current, Tensor):
                setattr(child, name, with_changes(value, current).to(value.dtype))
        for child, dtype in dtypes:
            child._dtype = dtype

    def _with_masters(self, state_dict: dict[str, Any], pl_module: pl.LightningModule) -> dict[str, Any]:
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            master = self._values.get(parameter) if self._host is None else self._host.master_of(parameter)
            if master is not None and name in state_dict:
                state_dict[name] = master
        return state_dict

    def _forget(self) -> None:
        self._values, self._names, self._host = {}, {}, None


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if masters can be kept on the host."""
    facts = run.facts
    if run.strategy != "SingleDeviceStrategy":
        return f"{run.strategy} reduces gradients on the device, which are gone. Use one device."
    if not facts.automatic_optimization:
        return "with manual optimization gradients may be read before they have arrived. Use automatic optimization."
    if len(facts.optimizers) > 1:
        return f"it moves one optimizer, and the module has {len(facts.optimizers)}. Return one with several groups."
    who = facts.who_looks("on_after_backward", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad")
    if who is not None:
        return (
            f"{who} finds weights without gradients, which are on the host. Use `on_before_optimizer_step` or "
            "`configure_gradient_clipping`, or leave it out."
        )
    return run.beside(_CONFLICTS) or facts.why_not_own_backward("HostMasterWeights")


def _cost(profile: "ModelProfile", options: Options) -> Cost:
    """Gradients leave during backward; weights come back after the host has stepped, when nothing else runs."""
    count = num_trained(profile)
    if profile.device == "cpu":
        return Cost(step=Work(host_seconds=(cpu_seconds("adamw_fused") - cpu_seconds("adamw")) * count))
    step = Work(
        device_bytes=-4.0 * FOREACH_PASSES * count,
        host_link_bytes=2.0 * count,
        host_seconds=cpu_seconds("adamw_fused") * count,
        host_bytes=HOST_STEP_BYTES * count,
    )
    return Cost(Work(host_link_bytes=2.0 * count), step, overlap=False)


TECHNIQUE = Technique(
    name="host_master_weights",
    kind="precision",
    summary="bfloat16 weights on the device, float32 weights and optimizer in host memory",
    numerics=frozenset({"bf16"}),
    callbacks=(CallbackSpec("lightning_memfit.techniques.host_master_weights.HostMasterWeights"),),
    trainer={"precision": "bf16-true"},
    unsupported=unsupported,
    cost=_cost,
    frees_gradients=True,
    masters_on_host=True,
)

"""`HostMasterWeights`: half-precision weights on the device, float32 masters and the optimizer on the host."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memfit.optim.host_master import HostMaster
from lightning_memfit.optim.replace import replace_optimizers
from lightning_memfit.profile.record import ModelProfile
from lightning_memfit.techniques.core.callback import TechniqueCallback
from lightning_memfit.techniques.core.cost import FOREACH_PASSES, Cost, Work, cpu_seconds, num_trained
from lightning_memfit.techniques.core.facts import Run, run_of
from lightning_memfit.techniques.core.sharding import HOST_STEP_BYTES
from lightning_memfit.techniques.core.technique import CallbackSpec, Options, Technique
from lightning_memfit.techniques.core.wrapping import wrap_method

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_CONFLICTS = {
    "GradientRelease": "both take gradients away during backward",
    "Optimizer8bit": "8-bit states save memory of the device, and here they are on the host, where 8 bits are slow",
    "StochasticRounding": "with masters in float32 nothing is left for it to do",
}


class HostMasterWeights(TechniqueCallback):
    """Train with `precision="bf16-true"` on the device and with float32 weights and optimizer states on the host.

    The device holds 2 bytes per parameter plus activations. A gradient is sent to the host and freed as soon as
    backward has completed it, and is accumulated there in float32. The numbers are those of a float32 optimizer over a
    bfloat16 forward and backward pass. Clipping, accumulation and schedulers work as usual, on the host. Checkpoints
    hold the float32 weights, resume bitwise, and load without this callback.

    When the run ends, trained weights become their float32 masters, and everything else that was float32 before is
    float32 again: a checkpoint saved then also resumes bitwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[Tensor, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}
        self._hosts: list[HostMaster] = []

    @override
    def apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot work, and wrap the methods that convert, configure, load and save."""
        reason = unsupported(run_of(trainer, pl_module))
        if reason is not None:
            raise ValueError(f"HostMasterWeights: {reason}")
        self.on_restore(self._forget)

        def convert(inner: Callable[[Any], Any], module: Any) -> Any:
            self._keep_values(module)
            return inner(module)

        def configure(inner: Callable[[], Any]) -> Any:
            configured = replace_optimizers(inner(), self._move)
            self._values = {}
            return configured

        def load(inner: Callable[..., Any], checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            self._loaded = checkpoint["state_dict"]
            return inner(checkpoint, *args, **kwargs)

        def save(inner: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            return self._with_masters(inner(), pl_module)

        def load_states(inner: Callable[..., Any], checkpoint: Any) -> None:
            # Lightning's own method would move the states to the device, which may have no room for them.
            for optimizer, states in zip(trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(states)

        self.on_restore(wrap_method(trainer.precision_plugin, "convert_module", convert))
        self.on_restore(wrap_method(pl_module, "configure_optimizers", configure))
        self.on_restore(wrap_method(trainer.strategy, "load_model_state_dict", load))
        self.on_restore(wrap_method(trainer.strategy, "load_optimizer_state_dict", load_states))
        self.on_restore(wrap_method(trainer.strategy, "lightning_module_state_dict", save))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse loops that run a backward pass again."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        if type(loop) is not _AutomaticOptimization:
            raise ValueError(
                f"HostMasterWeights: {type(loop).__name__} may repeat a backward pass that ran out of memory, of which "
                "the host has some gradients already. Leave one of the two out."
            )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring all gradients in, so that later hooks, such as clipping, find them."""
        for host in self._hosts:
            host.wait()

    def _keep_values(self, module: nn.Module) -> None:
        """Remember the values that the conversion to bfloat16 is about to round, without copying those on the host."""
        for name, parameter in module.named_parameters():
            loaded = self._loaded.get(name)
            if parameter.requires_grad:
                exact = parameter if parameter.dtype is torch.float32 or loaded is None else loaded
                self._values[parameter] = exact.detach().to("cpu", torch.float32)
        self._loaded = {}
        frozen = [p for p in module.parameters() if p.dtype is torch.float32 and not p.requires_grad]
        buffers = [
            (child, name)
            for child in module.modules()
            for name, buffer in child.named_buffers(recurse=False)
            if buffer.dtype is torch.float32
        ]
        self.on_restore(lambda: self._widen(frozen, buffers))

    def _widen(self, frozen: list[nn.Parameter], buffers: list[tuple[nn.Module, str]]) -> None:
        """Replace weights with their masters, and make everything else that was float32 before float32 again."""
        for host in self._hosts:
            host.remove(keep_masters=True)
        for parameter in frozen:
            parameter.data = parameter.data.float()
        for child, name in buffers:
            setattr(child, name, getattr(child, name).float())

    def _move(self, optimizer: Optimizer) -> Optimizer:
        if self._hosts:
            raise ValueError(
                "HostMasterWeights: `configure_optimizers` returned several optimizers, of which one is supported. "
                "Return one with several parameter groups."
            )
        self._hosts.append(HostMaster(optimizer, self._values))
        kernel = ", fused" if optimizer.param_groups[0].get("fused") else ""
        self.announce(
            f"{type(optimizer).__name__}{kernel} steps {self._hosts[0].num_parameters} float32 parameters on the host"
        )
        return optimizer

    def _with_masters(self, state_dict: dict[str, Any], pl_module: pl.LightningModule) -> dict[str, Any]:
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            for host in self._hosts:
                master = host.master_of(parameter)
                if master is not None and name in state_dict:
                    state_dict[name] = master
        return state_dict

    def _forget(self) -> None:
        self._values, self._loaded = {}, {}
        self._hosts.clear()


def unsupported(run: Run, options: Options | None = None) -> str | None:
    """Reason and fix, or None if masters can be kept on the host."""
    facts = run.facts
    if run.precision != "bf16-true":
        return (
            f"`precision={run.precision!r}`: the device is to hold bfloat16 weights alone, whose gradients need no "
            "loss scaling. Set precision='bf16-true'."
        )
    if run.strategy != "SingleDeviceStrategy":
        return f"{run.strategy} reduces gradients on the device, which are gone. Use one device."
    if not facts.automatic_optimization:
        return "with manual optimization gradients may be read before they have arrived. Use automatic optimization."
    if len(facts.optimizers) > 1:
        return f"it moves one optimizer, and the module has {len(facts.optimizers)}. Return one with several groups."
    for name, reason in _CONFLICTS.items():
        if run.has(name):
            return f"{reason}. Leave {name} out."
    for hook in _SEES_GRADIENTS:
        if hook in facts.overridden:
            return f"the module's `{hook}` would find no gradients on its parameters. Remove it, or leave this out."
    return None


def _cost(profile: ModelProfile, options: Options) -> Cost:
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

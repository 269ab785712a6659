"""Kinds of optimizers that a module's own can be exchanged for, and what each of their hyper-parameters means."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Family:
    """One kind of optimizer.

    A hyper-parameter carries over to another family where it has the same meaning there, whatever it is called here.
    """

    path: str
    """Module and class."""
    meanings: Mapping[str, str]
    """Meaning of every hyper-parameter but `lr`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the family keeps the learning rate of the groups."""
    settings: frozenset[str] = frozenset()
    """Arguments of the constructor that are no hyper-parameters of groups: kernels, block sizes."""
    note: str = ""
    """What else changes."""

    @property
    def package(self) -> str:
        """Top-level package that must be installed."""
        return self.path.partition(".")[0]

    def load(self) -> type:
        """Import the class, outside of any mode that would make what the import creates fake."""
        module, _, name = self.path.rpartition(".")
        with _disable_current_modes():
            found: type = getattr(import_module(module), name)
        return found


KERNELS = frozenset({"foreach", "fused"})
_ADAM = {"betas": "Adam's moments", "eps": "Adam's epsilon", "amsgrad": "AMSGrad"}
_MAXIMIZE = {"maximize": "maximize"}
_DECOUPLED, _L2 = {"weight_decay": "decoupled decay"}, {"weight_decay": "L2 penalty"}
_SGD = {"momentum": "momentum", "dampening": "dampening", "nesterov": "Nesterov", "maximize": "maximize"}
_RMSPROP = {"alpha": "RMSprop's decay", "eps": "RMSprop's epsilon", "centered": "centered"}
_TORCHAO = {**_ADAM, **_DECOUPLED}
_TORCHAO_SETTINGS = frozenset({"block_size", "bf16_stochastic_round"})
_RELATIVE = "the learning rate counts relative to each weight's root mean square"

FAMILIES = {
    "torch.AdamW": Family("torch.optim.adamw.AdamW", {**_ADAM, **_DECOUPLED, **_MAXIMIZE}, settings=KERNELS),
    "torch.Adam": Family("torch.optim.adam.Adam", {**_ADAM, **_L2, **_MAXIMIZE}, settings=KERNELS),
    "torch.SGD": Family("torch.optim.sgd.SGD", {**_SGD, **_L2}, settings=KERNELS),
    "torch.RMSprop": Family(
        "torch.optim.rmsprop.RMSprop",
        {**_RMSPROP, **_L2, "momentum": "momentum", "maximize": "maximize"},
        settings=frozenset({"foreach"}),
    ),
    "torch.Adafactor": Family(
        "torch.optim.Adafactor",
        {
            **_DECOUPLED,
            "beta2_decay": "Adafactor's decay",
            "eps": "Adafactor's epsilons",
            "d": "update clipping",
            "maximize": "maximize",
        },
        settings=frozenset({"foreach"}),
        note=_RELATIVE,
    ),
    "transformers.Adafactor": Family(
        "transformers.optimization.Adafactor",
        {
            **_DECOUPLED,
            "decay_rate": "Adafactor's decay",
            "eps": "Adafactor's epsilons",
            "clip_threshold": "update clipping",
            "beta1": "Adafactor's first moment",
            "scale_parameter": "relative learning rate",
        },
        # With its own default it would follow a schedule of its own instead of the groups' learning rates.
        fixed={"relative_step": False, "warmup_init": False},
        note=f"{_RELATIVE} unless scale_parameter=False",
    ),
    "bitsandbytes.Lion": Family("bitsandbytes.optim.lion.Lion", {**_DECOUPLED, "betas": "Lion's momenta"}),
    "bitsandbytes.AdEMAMix": Family(
        "bitsandbytes.optim.ademamix.AdEMAMix",
        {
            **_DECOUPLED,
            "betas": "AdEMAMix' three moments",
            "eps": "Adam's epsilon",
            "alpha": "slow moment's weight",
            "t_alpha": "slow moment's warm-up",
            "t_beta3": "slow moment's decay warm-up",
        },
    ),
    "torchao.AdamW8bit": Family("torchao.optim.AdamW8bit", _TORCHAO, settings=_TORCHAO_SETTINGS),
    "torchao.AdamW4bit": Family("torchao.optim.AdamW4bit", _TORCHAO, settings=_TORCHAO_SETTINGS),
    "torchao.AdamWFp8": Family("torchao.optim.AdamWFp8", _TORCHAO, settings=_TORCHAO_SETTINGS),
}


def family_named(name: str) -> Family:
    """Look a family up.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in FAMILIES:
        raise ValueError(f"`name={name!r}` is not known. Choose from {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def family_of(optimizer: Any) -> Family:
    """Return the family an optimizer belongs to. A subclass may compute something else and belongs to none.

    Raises:
        ValueError: If its class is in no family.
    """
    cls = type(optimizer)
    for family in FAMILIES.values():
        if cls.__name__ == family.path.rpartition(".")[2] and cls.__module__.startswith(f"{family.package}."):
            return family
    raise ValueError(
        f"`{cls.__module__}.{cls.__name__}` has hyper-parameters of unknown meaning. Return one of "
        f"{', '.join(FAMILIES)} from `configure_optimizers`, or set the optimizer there."
    )

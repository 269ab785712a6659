"""`to_bitsandbytes`: an optimizer a user built becomes its 8-bit or paged form, with everything it was told kept.

bitsandbytes' formulas are those of torch for AdamW, Lion, SGD with momentum and RMSprop without momentum. Where a flag
of the original has no counterpart there, bitsandbytes would silently ignore it; here it is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.optim.bitsandbytes_states import StateWidths, make_maps_fake

_TORCH_SWITCHES = {"maximize": False, "capturable": False, "differentiable": False}


@dataclass(frozen=True)
class _Family:
    """How one kind of optimizer is told to bitsandbytes."""

    stem: str
    """Class name in `bitsandbytes.optim` without `Paged` and `8bit`."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters that must have this value, because bitsandbytes knows no other."""
    betas: tuple[str, ...] = ()
    """Hyper-parameters that bitsandbytes stores together as `betas`."""
    has_paged: bool = True

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """Reason why this group's hyper-parameters cannot be kept."""
        for name, value in self.required.items():
            if name in group and group[name] != value:
                return f"bitsandbytes ignores `{name}={group[name]!r}`; it computes what {name}={value!r} means"
        if self.stem == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            return (
                f"`weight_decay={group['weight_decay']}` is added to the gradient by torch's Adam but decoupled by "
                "bitsandbytes; use AdamW or weight_decay=0"
            )
        if self.stem == "SGD" and not group.get("momentum", True):
            return "SGD with `momentum=0` has no states that could be made smaller"
        if isinstance(group["lr"], torch.Tensor):
            return "bitsandbytes takes no tensor as `lr`; pass a float"
        return None

    def translate(self, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Hyper-parameters in the names that bitsandbytes' groups use."""
        gone = {*self.required, *self.betas, "foreach", "fused", "decoupled_weight_decay"}
        kept = {name: value for name, value in hyper_parameters.items() if name not in gone}
        if self.betas:
            kept["betas"] = tuple(hyper_parameters[name] for name in self.betas)
        return kept


_ADAM = _Family("Adam", {**_TORCH_SWITCHES, "amsgrad": False})
_FAMILIES: dict[type, _Family] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _Family("AdamW", {**_ADAM.required, "decoupled_weight_decay": True}),
    torch.optim.SGD: _Family(
        "SGD", {**_TORCH_SWITCHES, "nesterov": False, "dampening": 0}, ("momentum", "dampening"), has_paged=False
    ),
    torch.optim.RMSprop: _Family(
        "RMSprop", {**_TORCH_SWITCHES, "centered": False, "momentum": 0}, ("alpha", "momentum"), has_paged=False
    ),
}
_LION = _Family("Lion", {**_TORCH_SWITCHES, "caution": False, "cautious": False, "decoupled_weight_decay": False})
_BITSANDBYTES_STEMS = ("AdamW", "Adam", "Lion", "SGD", "RMSprop", "AdEMAMix")
_KNOWN = {
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "alpha",
    "t_alpha",
    "t_beta3",
    "momentum",
    "dampening",
    "foreach",
    "fused",
}


def to_bitsandbytes(
    optimizer: torch.optim.Optimizer,
    *,
    bits: int = 8,
    paged: bool = False,
    keep_32bit: Iterable[torch.Tensor] = (),
    min_8bit_size: int = 4096,
) -> Any:
    """Build the bitsandbytes form of an optimizer over the same parameters.

    Accepted are `torch.optim` AdamW, Adam, SGD and RMSprop, any class called Lion, and the 32-bit optimizers of
    bitsandbytes. Groups keep their order, hyper-parameters (a learning rate that a schedule has changed already, too)
    and extra keys. `foreach` and `fused` choose a kernel, not a formula, and are dropped. The original is left as it
    is.

    Args:
        optimizer: Must not have stepped.
        bits: 8, or 32 for 32-bit states (worth it only with `paged`).
        paged: States in CUDA unified memory, which moves to the host under pressure. bitsandbytes warns on the CPU,
            where this does nothing.
        keep_32bit: Parameters whose states stay 32-bit, typically `embedding_parameters(module)`.
        min_8bit_size: Parameters with fewer elements keep 32-bit states.

    Returns:
        A `bitsandbytes.optim` optimizer without states.

    Raises:
        ValueError: If the class, a hyper-parameter, a parameter's dtype or an existing state cannot be carried over.
    """
    if bits not in (8, 32):
        raise ValueError(f"`bits={bits}` must be 8 or 32.")
    family = _family_of(optimizer)
    _refuse_what_would_change(optimizer, family)
    if paged and not family.has_paged:
        raise ValueError(
            f"`paged=True`: bitsandbytes has no paged {family.stem}. Use paged=False or AdamW, Adam or Lion."
        )
    groups = [family.translate(group) for group in optimizer.param_groups]
    defaults = family.translate({**optimizer.param_groups[0], **optimizer.defaults, "params": None})
    # The quantization maps, and what bitsandbytes makes when it is imported, are real tensors with values.
    with _disable_current_modes():
        import bitsandbytes

        cls = getattr(bitsandbytes.optim, f"{'Paged' if paged else ''}{family.stem}{bits}bit")
        converted = cls(groups, min_8bit_size=min_8bit_size, **_constructor_arguments(family, optimizer))
    converted.defaults.update({name: defaults[name] for name in converted.defaults if name in defaults})
    make_maps_fake(converted)
    StateWidths(converted, keep_32bit)
    return converted


def _constructor_arguments(family: _Family, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the constructor insists on; the groups carry the real values."""
    if family.stem == "SGD":
        group = optimizer.param_groups[0]
        return {"lr": float(group["lr"]), "momentum": group.get("momentum") or group["betas"][0]}
    return {}


def _family_of(optimizer: torch.optim.Optimizer) -> _Family:
    cls = type(optimizer)
    if cls in _FAMILIES:
        return _FAMILIES[cls]
    if cls.__module__.startswith("bitsandbytes."):
        return _bitsandbytes_family(optimizer)
    if cls.__name__ == "Lion":
        return _LION
    raise ValueError(
        f"`{cls.__module__}.{cls.__name__}` has no 8-bit form. Use torch.optim.AdamW, Adam, SGD (with momentum) or "
        "RMSprop, a class called Lion, or a 32-bit optimizer of bitsandbytes; subclasses may compute something else "
        "and are refused."
    )


def _bitsandbytes_family(optimizer: Any) -> _Family:
    name = type(optimizer).__name__
    stem = name.removeprefix("Paged").removesuffix("32bit")
    if optimizer.args.optim_bits == 8:
        raise ValueError(f"`{name}` has 8-bit states already; nothing is to be converted. Remove the conversion.")
    if stem not in _BITSANDBYTES_STEMS or optimizer.args.max_unorm or optimizer.args.skip_zeros:
        raise ValueError(
            f"`{name}` has no 8-bit form with the same formula. Choose from {', '.join(_BITSANDBYTES_STEMS)}."
        )
    # Its own Adam decouples weight decay as well, so that nothing changes.
    return _Family("AdamW" if stem == "Adam" else stem, has_paged=stem not in ("SGD", "RMSprop"))


def _refuse_what_would_change(optimizer: torch.optim.Optimizer, family: _Family) -> None:
    name = type(optimizer).__name__
    if optimizer.state:
        raise ValueError(
            f"`optimizer` ({name}) has stepped or was loaded already; its 32-bit states are not converted. Convert it "
            "before the first step and before loading a checkpoint."
        )
    unknown = set(optimizer.defaults) - _KNOWN - set(family.required) - {"decoupled_weight_decay"}
    unknown = {key for key in unknown if optimizer.defaults[key]}
    if unknown:
        raise ValueError(
            f"{name}: bitsandbytes has no counterpart of {', '.join(f'`{key}`' for key in sorted(unknown))}."
        )
    for index, group in enumerate(optimizer.param_groups):
        reason = family.refusal(group)
        if reason:
            raise ValueError(f"{name}, parameter group {index}: {reason}.")
        for parameter in group["params"]:
            _refuse_parameter(parameter, index)


def _refuse_parameter(parameter: torch.Tensor, index: int) -> None:
    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"Parameter group {index} holds a {parameter.dtype} parameter of shape {tuple(parameter.shape)}; "
            "bitsandbytes steps float32, float16 and bfloat16 only."
        )
    if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
        raise ValueError(
            f"Parameter group {index} is sharded (DTensor, FSDP2), which bitsandbytes cannot step. Use DDP, DeepSpeed "
            "or an unconverted optimizer."
        )

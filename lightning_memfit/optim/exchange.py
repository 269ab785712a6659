"""`exchange`: another kind of optimizer over the same groups. Hyper-parameters are carried over, given or refused."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_memfit.optim.families import KERNELS, Family, family_named, family_of
from lightning_memfit.optim.torchao_step import outside_modes

_MUST_BE_OFF = ("capturable", "differentiable")


def exchange(
    optimizer: Optimizer, name: str, options: Mapping[str, Any] | None = None, drop: Collection[str] = ()
) -> Optimizer:
    """Build an optimizer of another family over the same parameters and groups.

    Groups keep their order, learning rates and extra keys. A hyper-parameter carries over where it means the same in
    both families. One that means something else there (Lion's `betas`, Adafactor's `eps`) must be given in `options`.
    One that the new family does not know, and that differs from its default, must be listed in `drop`.
    What only the new family knows has its default.

    Args:
        optimizer: Must not have stepped.
        name: Name in `FAMILIES`.
        options: Hyper-parameters and kernel choices of the new optimizer, for every group.
        drop: Hyper-parameters of the old one to give up.

    Returns:
        The new optimizer, without states.

    Raises:
        ValueError: If a hyper-parameter is neither carried over nor given nor dropped, or is not known.
    """
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()}
    source, target = family_of(optimizer), family_named(name)
    if optimizer.state:
        raise ValueError(f"`optimizer` ({type(optimizer).__name__}) has states already. Exchange it before it steps.")
    cls = outside_modes(target.load()) if target.package == "torchao" else target.load()
    known = set(target.meanings) | target.settings
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"`options.{unknown[0]}` is not known to {name}. Known are {', '.join(sorted(known))}.")
    defaults = _defaults(type(optimizer))
    groups = [_translated(group, source, target, name, options, drop, defaults) for group in optimizer.param_groups]
    settings = {key: value for key, value in options.items() if key in target.settings}
    built: Optimizer = cls(groups, **target.fixed, **settings)
    return built


def _translated(
    group: Mapping[str, Any],
    source: Family,
    target: Family,
    name: str,
    options: Mapping[str, Any],
    drop: Collection[str],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    for switch in _MUST_BE_OFF:
        if group.get(switch):
            raise ValueError(f"`{switch}=True` cannot be carried over to {name}. Leave it off.")
    meanings = dict(source.meanings)
    if group.get("decoupled_weight_decay"):
        meanings["weight_decay"] = "decoupled decay"
    of_meaning = {meaning: key for key, meaning in meanings.items() if key in group}
    translated: dict[str, Any] = {}
    carried = set()
    for key, meaning in target.meanings.items():
        if key in options:
            translated[key] = options[key]
        elif meaning in of_meaning:
            carried.add(of_meaning[meaning])
            translated[key] = group[of_meaning[meaning]]
        elif key == "weight_decay" and not group.get(key, 0):
            translated[key] = 0.0  # no decay is no decay of either kind
        elif key in group and key in meanings:
            raise ValueError(
                f"`{key}={group[key]!r}` is {meanings[key]} now, but {meaning} in {name}. Give `options.{key}`."
            )
    for key in meanings.keys() & group.keys() - carried - set(options) - set(drop):
        if group[key] != defaults.get(key) and not (key == "weight_decay" and not group[key]):
            raise ValueError(
                f"`{key}={group[key]!r}` ({meanings[key]}) has no counterpart in {name}. List it in `drop` to give it "
                "up, or keep the optimizer."
            )
    old = {*source.meanings, *source.fixed, *target.meanings, *KERNELS, *_MUST_BE_OFF, "decoupled_weight_decay"}
    extra = {key: value for key, value in group.items() if key not in old}
    return {**extra, **translated}


def _defaults(cls: type) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()}

"""Laying one configuration over another, by the rules of recipes and their fragments."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

Settings = dict[str, Any]


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Settings:
    """Return `base` with `top` laid over it; neither is changed.

    Mappings are merged key by key, everything else is replaced. `name+` appends to the list `name`. Where `class_path`
    changes, the arguments of the class before go with it.

    Raises:
        ValueError: If `name+` does not add a list to a list.
    """
    result = deepcopy(dict(base))
    if "class_path" in top and top["class_path"] != base.get("class_path"):
        result.pop("init_args", None)
    for key, value in top.items():
        if key.endswith("+"):
            result[key[:-1]] = _appended(key, result.get(key[:-1]), value)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = overlay(result[key], value)
        elif isinstance(value, Mapping):
            result[key] = overlay({}, value)  # a fragment's `name+` without a list below it
        else:
            result[key] = deepcopy(value)
    return result


def _appended(key: str, before: Any, value: Any) -> list[Any]:
    before = [] if before is None else before
    if not isinstance(before, list) or not isinstance(value, list):
        raise ValueError(f"`{key}` appends to a list, but found {type(value).__name__} on {type(before).__name__}.")
    return [*deepcopy(before), *deepcopy(value)]
